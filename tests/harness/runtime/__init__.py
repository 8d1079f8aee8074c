"""A seeded simulator of runs in virtual time that runs what ships, from the user's loops to the ledger's machine.

Every worker is the runtime of `src/holdfast/engine` as it is: the two loops of `Run`, the step engine, the worker with
its protocol machine, the feed to the ledger with its threads, meetings, groups, knocks, and the way a state and a mean
are served and fetched. Its ports are virtual (net/kernel.py, net/wires.py, ledger/port.py, checkpoints). On top is a
script with several loops, breaks, evaluations, records and stops, which trains a small model for real. The same seed
gives the same run.

    python -m tests.harness.runtime --schedules 20000
    python -m tests.harness.runtime --seed 163 --trace

    schedule.py   what a run consists of, drawn from its seed
    scripts.py    the user's script
    process.py    one worker process
    timeline.py   virtual time, and tasks that take turns
    kernel.py     threads, events, conditions and polls of a process
    network.py    streams that are slow, break and are cut
    ledger.py     the ledger's machine that ships, behind lossy lines
    storage.py    checkpoints
    agent.py      starts, buries and replaces workers
    faults.py     what goes wrong
    steadiness.py while the ledger is away, steps go on
    books.py      the promises: the same bits whatever fails, and nobody waits for ever
    scenario.py   runs that a person has written down as text
    world.py      all of it
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.harness.runtime.schedule import Schedule, Violation
from tests.harness.runtime.scripts import Loop, Script
from tests.harness.runtime.world import World, quiet_outcome

__all__ = ["Loop", "Schedule", "Script", "Violation", "World", "simulate"]


def simulate(seed: int, *, keep_trace: bool = False, **changes: Any) -> World:
    """Run one schedule. Raises Violation with the seed, and how to replay it, in its text."""
    schedule = replace(Schedule.draw(seed), **changes)
    expected = quiet_outcome(schedule.script) if schedule.script.is_exact else None
    world = World(schedule, expected, keep_trace=keep_trace)
    try:
        world.run()
    except Exception as error:
        trace = "\n".join(world.lines or [])
        replay = f"python -m tests.harness.runtime --seed {seed} --trace"
        said = str(error) if isinstance(error, AssertionError) else repr(error)
        raise Violation(f"seed {seed}: {said}\nreplay: {replay} {changes or ''}\n{trace}") from error
    return world
