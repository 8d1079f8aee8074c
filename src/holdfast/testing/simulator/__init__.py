"""A seeded simulator of workers, agent, ledger and network that runs the machine that ships.

Everything that can go wrong is drawn from one seed: delays, reordering between connections, connections that
break, workers that crash, stop and wake, leave and join, an agent (and with it the ledger) that goes away, a worker
cut off from the ledger, clocks that run apart. The same seed gives the same run, event for event.

    python -m holdfast.testing.simulator --schedules 10000
    python -m holdfast.testing.simulator --seed 16335 --trace

The world keeps its own books and compares: it knows which shards each worker really computed and which steps it
really applied, and raises Violation when the machines' decisions break a promise.

    schedule.py   what a run consists of, drawn from its seed
    ledger.py     the ledger and its leases
    worker.py     one process: the shipped machine, the user's loop around it, what it really holds
    network.py    connections that belong to a view, keep order, and break as a whole
    world.py      time, agent, faults, and the books
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.membership.machine import Machine
from holdfast.testing.simulator.schedule import Schedule, Violation
from holdfast.testing.simulator.world import World

__all__ = ["Schedule", "Violation", "World", "simulate"]


def simulate(seed: int, *, machine_class: type[Machine] = Machine, keep_trace: bool = False, **changes: Any) -> World:
    """Run one schedule. Raises Violation with the seed in its text."""
    schedule = replace(Schedule.draw(seed), **changes)
    world = World(schedule, machine_class=machine_class, keep_trace=keep_trace)
    try:
        world.run()
    except AssertionError as error:
        trace = "\n".join(world.lines or [])
        raise Violation(f"seed {seed}: {error}\n{trace}") from error
    return world
