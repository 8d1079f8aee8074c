"""A seeded simulator of server agreement that runs the machine that ships.

Everything that can go wrong is drawn from one seed: messages that are late, lost, doubled and overtake each other;
servers that lie, of every kind in `holdfast.byzantine.agreement.misbehaving`; servers that are killed between any two
effects and start again with what is on their disk, stand still and wake, are slow; cuts; clients that sign two updates,
that send theirs to some servers only, and strangers. The same seed gives the same run, event for event.

    python -m tests.harness.agreement_simulator --schedules 10000
    python -m tests.harness.agreement_simulator --seed 163 --trace

    schedule.py   what a run consists of, drawn from its seed
    world.py      time, and how everything is put together
    keys.py       signatures that only their owner can make, without the arithmetic
    servers.py    a process: the shipped machine, its disk, and what its effects do
    clients.py    who sends updates and waits for models
    faults.py     what goes wrong
    books.py      what really happened, and the promises
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.byzantine.agreement.machine import ServerMachine
from tests.harness.agreement_simulator.schedule import Schedule, SimulationFailed, Violation
from tests.harness.agreement_simulator.world import World

__all__ = ["Schedule", "SimulationFailed", "Violation", "World", "simulate"]


def simulate(
    seed: int, *, machine_class: type[ServerMachine] = ServerMachine, keep_trace: bool = False, **changes: Any
) -> World:
    """Run one schedule. Raises Violation with the seed, and how to replay it, in its text.

    An assertion of the machine's that fails is a broken promise, too. Anything else that is raised, there or here, is
    a mistake in a program (SimulationFailed), and shows of no promise whether it is kept.
    """
    schedule = replace(Schedule.draw(seed), **changes)
    world = World(schedule, machine_class=machine_class, keep_trace=keep_trace)
    try:
        world.run()
    except Exception as error:
        trace = "\n".join(world.lines or [])
        said = str(error) if isinstance(error, Violation) else repr(error)
        replay = f"python -m tests.harness.agreement_simulator --seed {seed} --trace"
        kind = Violation if isinstance(error, AssertionError) else SimulationFailed
        raise kind(f"seed {seed}: {said}\nreplay: {replay} {changes or ''}\n{trace}") from error
    return world
