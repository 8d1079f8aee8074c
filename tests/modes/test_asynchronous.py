"""The asynchronous mode: alone, and with real servers and workers that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.status import _lines, gather
from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_SERVERS, KEY_SLICE, Registration, decode_json
from holdfast.data.shards import ShardPlan
from holdfast.modes.asynchronous import Async
from holdfast.servers.log_codec import decode_configuration
from tests.agent.agent_harness import Run, a_run, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
SCRIPT = str(Path(__file__).with_name("asynchronous_training.py"))
PLAN = ShardPlan(length=256, batch_size=16, shards=2, seed=0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_run(tmp_path / "home") as run:
        yield run


def alone(*options: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def notes(directory: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.stem: list(map(json.loads, path.read_text().splitlines())) for path in directory.glob("*.jsonl")}


def primary_pid(run: Run) -> int:
    """Of the first slice."""
    ledger = run.ledger()
    try:
        slice_ = ledger.get(KEY_SLICE + "parameters/0")
        assert slice_ is not None
        primary = decode_configuration(decode_json(slice_.value)).primary
        entry = ledger.get(KEY_SERVERS + primary)
        return Registration.decode(entry.value).pid if entry is not None else 0
    finally:
        ledger.close()


@pytest.mark.parametrize(
    "mode", [{"staleness": -1}, {"staleness": 1.5}, {"adaptive": 1}, {"compress": "zip"}, {"compress": "top-k:2"}]
)
def test_what_a_mode_cannot_be_is_said(mode: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Async(**mode)


def test_alone_in_lock_step_it_has_the_bits_of_the_exact_mode() -> None:
    assert alone("--staleness", "0")["digest"] == alone("--exact")["digest"]


def test_servers_and_a_worker_are_killed_and_no_update_is_lost_or_twice(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    script = (SCRIPT, "--steps", "150", "--shard-s", "0.02", "--notes", str(tmp_path / "notes"), "--compress", "int8")
    agent = run.agent("--workers", "2", "--servers", "3", "--save-every", "1000", script=script)

    def made() -> int:
        return sum(map(len, notes(tmp_path / "notes").values()))

    wait_for(lambda: made() > 20, "20 steps", 60.0)
    pid = wait_for(lambda: primary_pid(run), "a primary")
    os.kill(pid, signal.SIGKILL)
    before = made()
    wait_for(lambda: made() > before + 20, "20 more steps", 60.0)
    os.kill(run.living()["w1.1"], signal.SIGKILL)
    assert agent.wait(timeout=120) == 0, run.output
    assert run.events("server_exited")[0]["signal"] == 9
    assert "has another primary" in run.output
    written = notes(tmp_path / "notes")
    used = Counter(index for lines in written.values() for line in lines for index in line["indices"])
    epochs, rest = divmod(150, PLAN.steps_per_epoch)
    expected = Counter(index for step in range(150) for shard in range(2) for index in PLAN.indices(step, shard))
    assert epochs == 9 and rest == 6
    more = used - expected
    assert not expected - used, "samples were left out"
    assert sum(more.values()) <= 16 * 2, "more than what the killed worker had under way was used again"
    finished = [event["digest"] for event in run.events("finished")]
    assert len(finished) == 2
    assert len(set(finished)) == 1, "all have the last parameters"
    last = run.events("captured")[-1]
    acknowledged = sum(sum(event["updates"].values()) for event in run.events("staleness"))
    assert set(last["versions"]) <= set(range(150, 150 + 3)), last  # an update of the killed worker may be in twice
    assert acknowledged <= min(last["versions"]), "an acknowledged update is lost"
    assert all(event["ahead"] <= event["bound"] == 4 and not event["missing"] for event in run.events("staleness"))
    ends = {who: lines[-1]["lr"] for who, lines in written.items() if lines[-1]["step"] > 120}
    assert len(set(ends.values())) == 1, "the scheduler of a worker that came later is where the others' are"


def test_a_stopped_run_goes_on_from_its_checkpoint_with_another_number_of_servers(run: Run) -> None:
    script = (SCRIPT, "--steps", "400", "--shard-s", "0.01")
    agent = run.agent("--workers", "2", "--servers", "3", script=script)
    wait_for(lambda: any(event["step"] > 30 for event in run.events("progress")), "30 steps", 60.0)
    wait_for(lambda: len({event["who"] for event in run.events("staleness")}) == 2, "updates of both", 60.0)
    status = gather(run.directory)
    assert status["members"] == ["w0.1", "w1.1"], "each is in a view of its own, and both train"
    assert [worker["state"] for worker in status["workers"]] == ["member", "member"]
    assert "2 workers" in _lines(status)[0]
    assert status["time"]["workers"].keys() == {"w0.1", "w1.1"}, "servers are no workers"
    assert status["time"]["seconds"]["recovering"] == 0, "nobody was lost"
    agent.send_signal(signal.SIGTERM)
    agent.wait(timeout=60)
    [left] = {event["step"] for event in run.events("checkpoint")}
    assert 30 < left < 400, run.output
    again = run.agent("--workers", "1", "--servers", "1", script=(SCRIPT, "--steps", str(left + 20)))
    assert again.wait(timeout=90) == 0, run.output
    assert run.events("resumed")[0]["step"] == left
    captured = run.events("captured")[0]
    assert set(captured["versions"]) == {captured["next"] - captured["left"]}, "what is not in the state is known"


@pytest.mark.parametrize(
    ("options", "script", "said"),
    [
        (("--workers", "1"), (SCRIPT,), "trains on parameter servers, and this run has none"),
        (("--workers", "1", "--servers", "1"), (SCRIPT, "--exact"), "does not use them"),
        (("--workers", "1", "--servers", "2", "--replicas", "3"), (SCRIPT,), "--replicas 3 needs as many servers"),
        (("--workers", "1", "--servers", "1"), (SCRIPT, "--lbfgs"), "the optimizer is LBFGS, which computes gradients"),
    ],
)
def test_bad_input_is_one_sentence(run: Run, options: tuple[str, ...], script: tuple[str, ...], said: str) -> None:
    agent = run.agent(*options, script=script)
    assert agent.wait(timeout=60) == 2
    assert said in run.output
    assert "hint:" in run.output
