"""Scripts of several loops: joiners, kills and leaving while the loops end. Everybody gets on, and no bit changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import DEADLINE_S, Training, training

from holdfast.events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
LOOPS = str(Path(__file__).with_name("several_loops.py"))
# The second is left with `break`, the third is empty.
SCRIPT = [LOOPS, "--loops", "20,60,40,200", "--leave", "60:50"]


@pytest.fixture(scope="module")
def quiet() -> str:
    """The digest of a run of one worker."""
    done = subprocess.run([sys.executable, *SCRIPT], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def at(run: Training, step: int, workers: int) -> None:
    run.wait(lambda: run.at(step, workers), f"{workers} workers at step {step}", DEADLINE_S)


def test_several_join_in_one_view_after_loops_that_they_pass(quiet: str, tmp_path: Path) -> None:
    """Twice: two that are new, and five that replace others. Then all but two leave; two more come at the very end."""
    with training(tmp_path, "--workers", "2", script=SCRIPT, held_at=60) as run:
        at(run, 60, 2)
        run.scale(6)
        run.wait(lambda: len(run.living_registered()) == 6, "four joiners", DEADLINE_S)
        run.let_go(100)
        at(run, 100, 6)
        gone = run.living_members()[1:]
        run.kill(*gone)
        run.wait(lambda: len(set(run.living_registered()) - set(gone)) == 6, "five replacements", DEADLINE_S)
        run.let_go(150)
        at(run, 150, 6)
        run.scale(2)
        run.let_go(198)
        run.wait(lambda: len(run.pids) == 2 and run.at(198, 2), "four to leave", DEADLINE_S)
        run.scale(4)
        run.wait(lambda: len(run.living_registered()) == 4, "two who come too late", DEADLINE_S)
        run.let_go()
        assert run.finish(DEADLINE_S) == quiet
        events = read_events(run.directory.events)
        (last,) = {tuple(one["members"]) for one in events if one["kind"] == "view" and one["step"] == 200}
        assert len(last) == 4, "they join after the last step, and have no part in its checkpoint"
        assert any(event["kind"] == "checkpoint" and event["step"] == 200 for event in events)
        assert not [event for event in events if event["kind"] == "warning" and "checkpoint" in event["text"]]
        ends = {event["who"] for event in events if event["kind"] == "reached" and event["step"] < 200}
        assert ends == {"w0.1", "w1.1"}, "only those who were there tell of the first loops' ends"
        assert sum(event["kind"] == "joined" for event in events) >= 9


def test_workers_come_go_and_die_while_the_others_are_between_two_loops(quiet: str, tmp_path: Path) -> None:
    """After the first loop, before the empty one and before the last; and one dies there whom the others wait for."""
    holds = [tmp_path / f"hold-{number}" for number in range(3)]
    for hold in holds:
        hold.touch()

    def between(number: int, workers: int) -> None:
        living = lambda: sum((tmp_path / f"between-{number}-{one}").exists() for one in run.pids)  # noqa: E731
        run.wait(lambda: living() >= workers, f"{workers} workers after loop {number}", DEADLINE_S)

    with training(tmp_path, "--workers", "2", script=[*SCRIPT, "--between", str(tmp_path)]) as run:
        between(0, 2)
        run.scale(4)
        run.wait(lambda: len(run.living_registered()) == 4, "two joiners", DEADLINE_S)
        holds[0].unlink()
        between(1, 4)
        run.kill(*run.living_members()[:2])
        run.wait(lambda: len(run.living_registered()) == 4, "two replacements", DEADLINE_S)
        holds[1].unlink()
        between(2, 2)
        run.scale(3)
        run.kill(run.living_members()[-1])
        holds[2].unlink()
        assert run.finish(DEADLINE_S) == quiet
