"""Samples that ruin a step: it is left out, or the run goes back and passes it, and the weights are those of a run
whose script left it out itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import poisoned
import pytest
import torch
from harness import DEADLINE_S, Training, holdfast, training

from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.events import read_events
from holdfast.placement.environment import RUN_DIR
from holdfast.testing.observed_run import send
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
SCRIPT = poisoned.__file__

torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # imports torch._dynamo: once, not in every fork


@cache
def without(*steps: int, width: int = 32) -> str:
    """The digest of a run on clean samples whose script leaves out these steps."""
    given = ["--without", *map(str, steps), "--width", str(width)]
    return str(agreed(forked(lambda: poisoned.main(given), workers=1)))


def happened(run: Training, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.directory.events) if event["kind"] == kind]


def saved(run: Training) -> list[int]:
    return [event["step"] for event in happened(run, "checkpoint")]


def dying_at(step: int, given: list[str]) -> Callable[[], str]:
    def body() -> str:
        poisoned.wait_at = lambda gate, worker, at: os.kill(os.getpid(), signal.SIGKILL) if at == step else None
        return poisoned.main(given)

    return body


@pytest.mark.parametrize(
    ("workers", "path", "width"),
    [(1, "auto", 32), (2, "auto", 8192), (4, "auto", 32), (4, "network", 8192)],
    ids=["alone", "two rounds", "one round", "network"],
)
def test_a_skipped_step_leaves_no_trace(workers: int, path: str, width: int) -> None:
    """Whoever dies between two of them, and in one of them."""
    given = ["--non-finite", "skip", "--poisoned", "3", "20", "--width", str(width)]
    bodies = {f"w{slot}.1": lambda: poisoned.main(given) for slot in range(workers)}
    bodies |= {f"w{slot}.1": dying_at(step, given) for slot, step in ((1, 12), (3, 20)) if slot < workers}
    assert agreed(forked(bodies, path=path)) == without(3, 20, width=width)


def test_who_joins_late_knows_what_losses_were_usual() -> None:
    """A spare takes the place of the dead at step 16, and must find the same spike at step 20."""
    given = ["--non-finite", "skip", "--spike", "8", "--record", "--value", "80"]

    def first() -> str:
        poisoned.wait_at = lambda gate, worker, at: wait_until("w2.1", "registered") if at == 5 else None
        return poisoned.main(given)

    def spare() -> str:
        wait_until("w1.1", "view")
        return poisoned.main(given)

    assert agreed(forked({"w0.1": first, "w1.1": dying_at(16, given), "w2.1": spare}, size=2)) == without(20)


def wait_until(worker: str, kind: str) -> None:
    """Until this worker has written such an event."""
    events = Path(os.environ[RUN_DIR]) / "events" / f"{worker}.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    while not (events.exists() and f'"kind":"{kind}"' in events.read_text().replace(" ", "")):
        assert time.monotonic() < deadline, f"{worker} has written no {kind}"
        time.sleep(0.005)


def test_a_run_goes_back_and_passes_the_step_whoever_is_killed_meanwhile(tmp_path: Path) -> None:
    """One worker before, one when the run goes back, one after."""
    options = ["--workers", "3", "--checkpoint", str(tmp_path / "checkpoints"), "--save-every", "8"]
    with training(tmp_path, *options, script=[SCRIPT, "--non-finite", "rewind"], held_at=12) as run:
        run.wait(lambda: run.at(12, workers=3) and saved(run) == [8], "step 12", DEADLINE_S)
        run.kill(run.members[1])
        run.let_go(25)
        run.wait(lambda: bool(happened(run, "rewound")), "a rewind", DEADLINE_S)
        for pid in list(run.pids.values())[:1]:  # one that ends or one that begins, whichever there is
            send(pid, signal.SIGKILL)
        run.wait(lambda: run.at(25, workers=3), "step 25", DEADLINE_S)
        run.kill(run.living_members()[0])
        run.let_go()
        assert run.finish(DEADLINE_S) == without(20)
        assert {(event["number"], event["step"]) for event in happened(run, "rewound")} == {(1, 20)}
        (resumed,) = happened(run, "resumed")
        assert 8 <= resumed["step"] <= 20
        assert {event["step"] for event in happened(run, "skipped")} == {20}
        assert "the run goes back to step 20 or before and passes step 20: the gradient of '0.weight'" in run.log()
        assert "1 rewind, 1 step skipped" in run.log()
        done = holdfast("status", "r", home=tmp_path)
        assert "rewinds: 1\nskipped: step 20\n" in done.stdout, done.stdout + done.stderr


def test_a_spike_is_undone_with_the_steps_that_led_to_it_and_the_checkpoint_after_them(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    options = ["--workers", "1", "--checkpoint", str(place), "--save-every", "10", "--keep", "20"]
    script = [SCRIPT, "--non-finite", "rewind", "--spike", "8", "--record", "--value", "80"]
    with training(tmp_path, *options, script=script, held_at=12) as run:
        run.wait(lambda: saved(run) == [10], "the checkpoint of step 10", DEADLINE_S)
        run.let_go(20)
        run.wait(lambda: saved(run) == [10, 20], "the checkpoint of step 20", DEADLINE_S)
        run.let_go()
        assert run.finish(DEADLINE_S) == without(18, 19, 20)
        (rewound,) = happened(run, "rewound")
        assert (rewound["step"], rewound["passed"]) == (18, [18, 19, 20])
        assert "times the median" in rewound["reason"]
        assert [event["step"] for event in happened(run, "resumed")] == [10]
        assert saved(run) == [10, 20, 20, 30]
    storage = LocalStorage(place)
    known = {one.step: read_manifest(storage, one.step).config.get("rewinds", 0) for one in list_checkpoints(storage)}
    assert known == {10: 0, 20: 1, 30: 1}


def test_without_a_snapshot_a_run_starts_over_and_later_goes_back_to_the_one_in_memory(tmp_path: Path) -> None:
    options = ["--workers", "1", "--checkpoint", "none", "--memory", "plain", "--save-every", "8"]
    script = [SCRIPT, "--non-finite", "rewind", "--poisoned", "3", "20"]
    with training(tmp_path, *options, script=script, held_at=15) as run:
        run.wait(lambda: saved(run) == [8], "the snapshot of step 8", DEADLINE_S)
        assert not happened(run, "resumed")
        run.let_go()
        assert run.finish(DEADLINE_S) == without(3, 20)
        assert {event["number"] for event in happened(run, "rewound")} == {1, 2}
        (resumed,) = happened(run, "resumed")
        assert 8 <= resumed["step"] <= 20 and resumed["uri"] == "memory of this host"


def test_what_to_do_may_change_when_a_run_is_started_again(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    command = ["run", "--run", "r", "--workers", "1", "--checkpoint", place, "--save-every", "8", SCRIPT]
    done = holdfast(*command, home=tmp_path)
    assert done.returncode == 2
    assert "the gradient of '0.weight' is not finite at step 20" in done.stderr
    done = holdfast(*command, "--non-finite", "skip", home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"weights: {without(20)}" in done.stdout + done.stderr
