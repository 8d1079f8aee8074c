"""A seeded simulator of replicated logs that runs the machine that ships.

Everything that can go wrong is drawn from one seed: messages that are late, lost, doubled and overtake each other;
servers that crash with and without what they stored, stand still and wake, are slow, have a full disk; cuts between
servers, also one-way, and between servers and ledger; proposals that are carried out late; clocks that run apart, also
by more than is promised; workers that die; replicas that are added, removed and handed over. The same seed gives the
same run, event for event.

    python -m tests.harness.log_simulator --schedules 10000
    python -m tests.harness.log_simulator --seed 16335 --trace

    schedule.py   what a run consists of, drawn from its seed
    world.py      time, and how everything is put together
    servers.py    a process: the shipped machine of each slice, and what its effects do
    disk.py       what a replica has stored
    ledger.py     the ledger
    network.py    messages, and cuts
    clients.py    workers that push, read and retry
    operator.py   who decides where slices are
    faults.py     what goes wrong
    books.py      what really happened, and the promises
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.log.machine import ReplicaMachine
from tests.harness.log_simulator.schedule import Schedule, Violation
from tests.harness.log_simulator.world import World

__all__ = ["Schedule", "Violation", "World", "simulate"]


def simulate(
    seed: int, *, machine_class: type[ReplicaMachine] = ReplicaMachine, keep_trace: bool = False, **changes: Any
) -> World:
    """Run one schedule. Raises Violation with the seed, and how to replay it, in its text."""
    schedule = replace(Schedule.draw(seed), **changes)
    world = World(schedule, machine_class=machine_class, keep_trace=keep_trace)
    try:
        world.run()
    except Exception as error:  # a machine that raises has broken its promise too
        trace = "\n".join(world.lines or [])
        said = str(error) if isinstance(error, Violation) else repr(error)
        replay = f"python -m tests.harness.log_simulator --seed {seed} --trace"
        raise Violation(f"seed {seed}: {said}\nreplay: {replay} {changes or ''}\n{trace}") from error
    return world
