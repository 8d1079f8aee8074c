"""One fault after another in a run of a trainer's script: what every trainer must come through with the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.end_to_end.harness import Training, training

DEADLINE_S = 400.0
LEASE = ["--lease", "30"]  # a trainer takes its time to begin, and the machine may be busy


def histories(log: str) -> set[str]:
    return {line.partition("history ")[2] for line in log.splitlines() if "history " in line}


def let_join(run: Training, held: int, steps: int, stride: int) -> int:
    """Kill the first worker, hold the survivors until a new one is there, let them step until it is a member."""
    before = set(run.pids)
    run.kill(run.members[0])  # the one that prints and writes
    run.let_go(held)
    run.wait(lambda: bool(set(run.living_registered()) - before), "a new worker", DEADLINE_S)

    def joined() -> bool:
        nonlocal held
        if run.at(held, workers=2) and held < steps - 6 * stride:
            held += stride
            run.let_go(held)
        return len(run.living_members()) == 3

    run.wait(joined, "the new worker to be a member", DEADLINE_S)
    return held


def same_through_faults(home: Path, script: list[str], *, steps: int, stride: int = 1) -> tuple[str, str]:
    """Digest and history of one worker, after three have had them through a kill, a join, a stop and a resume.

    `stride`: the script is at its gate before every so many steps.
    """
    first = 3 * stride
    (home / "alone").mkdir()
    with training(home / "alone", "--workers", "1", *LEASE, script=script) as alone:
        digest = alone.finish(DEADLINE_S)
        expected = histories(alone.log())
        assert len(expected) == 1 and f"digest {digest}" in alone.log(), alone.log()[-3000:]
    place = str(home / "checkpoints")
    with training(home, "--workers", "3", *LEASE, "--checkpoint", place, script=script, held_at=first) as run:
        run.wait(lambda: run.at(first, workers=3), "three workers at the gate", DEADLINE_S)
        held = let_join(run, first + 2 * stride, steps, stride) + 2 * stride
        run.let_go(held)
        run.wait(lambda: run.at(held, workers=3), "two of them and the new one", DEADLINE_S)
        assert run.agent is not None
        run.agent.send_signal(signal.SIGTERM)
        run.let_go(held + 2 * stride)
        assert run.agent.wait(DEADLINE_S) == 128 + signal.SIGTERM
    with training(home, "--workers", "2", *LEASE, "--checkpoint", place, script=script) as run:
        assert run.finish(DEADLINE_S) == digest
        assert histories(run.log()) == expected
        assert any(event["step"] >= held for event in run.events if event["kind"] == "resumed")
    return digest, expected.pop()
