"""Parameter servers of an agent that are lost together, that hang, and that are slow: with real processes."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.words import KEY_DEAD_SERVERS, KEY_SLICE, decode_json
from holdfast.log.configuration import Configuration
from holdfast.servers.log_codec import decode_configuration
from tests.agent.agent_harness import Run, a_run, holdfast, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
SCRIPT = str(Path(__file__).with_name("asynchronous_training.py"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_run(tmp_path / "home") as run:
        yield run


def slices(run: Run) -> dict[str, Configuration]:
    ledger = run.ledger()
    try:
        entries = ledger.read(KEY_SLICE).entries
        return {entry.key[len(KEY_SLICE) :]: decode_configuration(decode_json(entry.value)) for entry in entries}
    finally:
        ledger.close()


def step_of(run: Run) -> int:
    return max((event["step"] for event in run.events("progress")), default=0)


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """The process gets a moment now and then: it does everything, late.

    The moments are short: most of a primary's work falls into them, and what it is asked then is soon confirmed.
    """
    ended = threading.Event()

    def alternate() -> None:
        with suppress(ProcessLookupError):
            while not ended.wait(0.02):
                os.kill(pid, signal.SIGSTOP)
                ended.wait(0.35)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=alternate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=10.0)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def lose(run: Run, servers: int) -> dict[str, Any]:
    """kill -9 of so many servers at once, some steps after a checkpoint; the event that tells of the loss."""
    known = len(run.events("checkpoint"))
    saved = wait_for(lambda: run.events("checkpoint")[known:], "a checkpoint", 90.0)[0]["step"]
    wait_for(lambda: step_of(run) > saved + 5, "steps after it", 60.0)
    before = len(run.events("slices_lost"))
    for pid in list(run.servers().values())[:servers]:
        os.kill(pid, signal.SIGKILL)
    lost = wait_for(lambda: run.events("slices_lost")[before:], "the loss to be noticed", 30.0)[0]
    assert lost["step"] >= saved
    resumed = wait_for(lambda: run.events("resumed")[before:], "training to go on from the checkpoint", 90.0)[0]
    assert resumed["step"] == lost["step"]
    return lost


def test_when_too_few_servers_are_left_all_go_on_from_the_checkpoint(run: Run, tmp_path: Path) -> None:
    """All replicas at once; then a majority: the third has the state, and nobody could say that it is the newest."""
    hurry = tmp_path / "hurry"
    script = (SCRIPT, "--steps", "600", "--shard-s", "0.03", "--hurry", str(hurry))
    agent = run.agent("--workers", "1", "--servers", "3", "--save-every", "30", script=script)
    lose(run, 3)
    old = set(run.servers())
    lost = lose(run, 2)
    wait_for(lambda: not old & run.servers().keys(), "the server that was left to end, too")
    hurry.touch()
    assert agent.wait(timeout=120) == 0, run.output
    assert f"all begin anew from the checkpoint of step {lost['step']}" in run.output
    assert len(run.events("slices_lost")) == 2, "each time once"
    captured = run.events("captured")
    saved = next(one["t"] for one in run.events("checkpoint") if one["step"] == lost["step"])
    kept = max((one for one in captured if one["t"] <= saved), key=lambda one: one["t"])
    last = captured[-1]
    assert last["next"] == 600 and not last["left"], "every step was made"
    assert len(set(last["versions"])) == 1, "every update is in all slices"
    before = kept["next"] - kept["left"]
    assert last["versions"][0] in (600, 600 - before), "the steps of the checkpoint, and each other one once"


def test_without_a_checkpoint_the_loss_of_all_servers_ends_the_run_with_a_sentence(run: Run) -> None:
    script = (SCRIPT, "--steps", "100000", "--shard-s", "0.01")
    agent = run.agent("--workers", "1", "--servers", "3", "--checkpoint", "none", script=script)
    wait_for(lambda: run.stepping("w0.1"), "steps", 60.0)
    for pid in run.servers().values():
        os.kill(pid, signal.SIGKILL)
    assert agent.wait(timeout=60) == 1
    assert "and there is no checkpoint" in run.output
    assert not run.events("resumed") and not run.events("finished"), "nothing is pretended"
    wait_for(lambda: not run.servers() and not run.living(), "nobody to be left behind")


@pytest.mark.timeout(400)
def test_servers_whose_disks_are_gone_come_back_as_others(run: Run) -> None:
    """One: the others make up for it. A majority: nobody could say what was acknowledged, and the checkpoint counts."""
    disks, script = run.directory.path / "servers", (SCRIPT, "--steps", "100000", "--shard-s", "0.05")
    options = ("--workers", "1", "--servers", "3", "--durable", "disk", "--save-every", "15")
    agent = run.agent(*options, script=script)
    wait_for(lambda: run.stepping("w0.1"), "steps", 90.0)
    assert set(run.servers()) == {path.name for path in disks.iterdir()} == {"s0", "s1", "s2"}
    kept = run.servers()["s1"]
    os.kill(kept, signal.SIGKILL)
    wait_for(lambda: run.servers().get("s1", kept) != kept, "one with its disk under its name", 60.0)
    shutil.rmtree(disks / "s0")
    os.kill(run.servers()["s0"], signal.SIGKILL)
    wait_for(lambda: "s0.2" in run.servers(), "one without to come back under another", 60.0)
    expected = {"s0.2", "s1", "s2"}
    wait_for(lambda: all(set(one.replicas) == expected for one in slices(run).values()), "it to be added", 90.0)
    assert not run.events("slices_lost")
    known = len(run.events("checkpoint"))
    wait_for(lambda: run.events("checkpoint")[known:], "a checkpoint", 90.0)
    for name in ("s0.2", "s1"):
        shutil.rmtree(disks / name)
        os.kill(run.servers()[name], signal.SIGKILL)
    lost = wait_for(lambda: run.events("slices_lost"), "the loss to be noticed", 60.0)[0]
    wait_for(lambda: run.events("resumed"), "training to go on from the checkpoint", 90.0)
    assert run.events("resumed")[0]["step"] == lost["step"]
    went_on = time.time()
    wait_for(lambda: len(slices(run)) > 1, "slices to be there again", 60.0)
    assert not expected & {path.name for path in disks.iterdir()}, "what was on disk is not gone on with"
    later = lambda: [one for one in run.events("progress") if one["t"] > went_on and one["step"] > lost["step"]]  # noqa: E731
    wait_for(lambda: len(later()) > 1, "steps after it", 60.0)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=60) == 143, run.output


def test_a_slow_server_leads_nothing_and_a_hung_one_is_replaced(run: Run) -> None:
    script = (SCRIPT, "--steps", "100000", "--shard-s", "0.01")
    agent = run.agent("--workers", "1", "--servers", "3", "--checkpoint", "none", script=script)
    wait_for(lambda: run.stepping("w0.1"), "steps", 60.0)
    slow = slices(run)["parameters/0"].primary
    with slowed(run.servers()[slow]):
        told = wait_for(lambda: run.events("server_slow"), "the slow server to be noticed", 90.0)[0]
        assert told["server"] == slow
        assert "times as long as the others'" in told["reason"]
        wait_for(lambda: all(one.primary != slow for one in slices(run).values()), "others to lead", 30.0)
        assert f"the parameter server {slow} is slow" in run.output
        before = step_of(run)
        wait_for(lambda: step_of(run) > before + 10, "training to go on", 60.0)
        status = holdfast("status", "r", home=run.home).stdout
        line = next(line for line in status.splitlines() if line.strip().startswith(slow))
        assert "leads 0 of" in line and line.endswith("slow"), status
        assert all(one.primary != slow for one in slices(run).values()), "it stays so"
    assert not run.events("server_hung"), "slow is not hung"
    hung = slices(run)["parameters/0"].primary
    stopped_at = time.time()
    os.kill(run.servers()[hung], signal.SIGSTOP)
    told = wait_for(lambda: run.events("server_hung"), "the hung server to be noticed", 30.0)[0]
    assert told["server"] == hung and "no heartbeat for" in told["reason"]
    failover = next(one for one in run.events("failover") if one["was"] == hung and one["t"] > stopped_at)
    assert failover["t"] < told["t"], "its slices did not wait for that"
    gone = wait_for(lambda: [one for one in run.events("server_exited") if one["server"] == hung], "its end")[0]
    assert gone["reason"] == "hung"
    new = wait_for(
        lambda: next((name for name in run.servers() if name.startswith(hung[:2]) and name != hung), ""), "another"
    )
    wait_for(lambda: all(new in one.replicas for one in slices(run).values()), "it to have all slices", 60.0)
    ledger = run.ledger()
    assert ledger.get(KEY_DEAD_SERVERS + hung) is not None, "the old one is fenced"
    ledger.close()
    before = step_of(run)
    wait_for(lambda: step_of(run) > before, "training to go on", 60.0)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(timeout=60) == 143, run.output
