"""A seeded simulator of workers, hosts, ledger and network that runs the machine that ships.

Everything that can go wrong is drawn from one seed: delays, reordering between connections, connections that
break, workers that crash, stop and wake, leave and join, agents that go away, hosts that lose power or their network,
hosts cut off from each other, clocks that run apart; a ledger that changes its leader or is away for long, answers
that are lost, requests that are carried out late or twice, watches with gaps or far behind, leases that end; workers
that pause, are left behind and come back. The same seed gives the same run, event for event.

    python -m tests.harness.simulator --schedules 10000
    python -m tests.harness.simulator --seed 16335 --trace

The world keeps its own books and compares: it knows which shards each worker really computed and which steps it
really applied, and raises Violation when the machines' decisions break a promise.

    schedule.py   what a run consists of, drawn from its seed
    world.py      time, and how everything is put together
    faults.py     what goes wrong
    books.py      what really happened, and the promises
    ledger.py     the ledger and its leases
    feed.py       a worker's line to the ledger
    network.py    connections that belong to a view, keep order, and break as a whole; cuts
    worker.py     one process: the shipped machine, the user's loop around it, what it really holds
    script.py     its script: loops over steps, `break`, and lines between them
    lying.py      processors that compute a shard wrongly
    drifting.py   states that go apart, and a joiner that is offered two
    standing_in.py  a late worker, and what takes its place
    weights.py    what a worker's weights came from, and what it has seen of the data
    hanging.py    workers that live and do not get on, and the judge that ends them
    rewinds.py    steps that are bad: the run goes back and passes them
    pacing.py     workers that become slow, and whether the shards follow
    hosts.py      agents, which start, bury and replace workers
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.membership.machine import Machine
from tests.harness.simulator.feed import Feed
from tests.harness.simulator.schedule import Schedule, Violation
from tests.harness.simulator.script import draw_loops
from tests.harness.simulator.world import World

__all__ = ["Schedule", "Violation", "World", "simulate"]


def simulate(
    seed: int,
    *,
    machine_class: type[Machine] = Machine,
    feed_class: type[Feed] = Feed,
    keep_trace: bool = False,
    **changes: Any,
) -> World:
    """Run one schedule. Raises Violation with the seed, and how to replay it, in its text."""
    schedule = replace(Schedule.draw(seed), **changes)
    if schedule.steps != Schedule.draw(seed).steps and "loops" not in changes:
        schedule = replace(schedule, loops=draw_loops(seed, schedule.steps))
    world = World(schedule, machine_class=machine_class, feed_class=feed_class, keep_trace=keep_trace)
    try:
        world.run()
    except Exception as error:  # a machine that raises has broken its promise too
        trace = "\n".join(world.lines or [])
        replay = f"python -m tests.harness.simulator --seed {seed} --trace"
        said = str(error) if isinstance(error, AssertionError) else repr(error)
        raise Violation(f"seed {seed}: {said}\nreplay: {replay} {changes or ''}\n{trace}") from error
    return world
