"""Process sets: some of the ranks, which run collectives by themselves. Framework-neutral.

Sets are made by all ranks together, in the same order, so that they have the same numbers everywhere. A world that
forms anew forgets them: make them again after it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.horovod.exchange.words import Kind, Request
from holdfast.horovod.world.runtime import runtime


class ProcessSet:
    """The ranks that belong together. Known to the world when `process_set_id` is not None."""

    process_set_id: int | None = None
    mpi_comm: object | None = None

    def __init__(self, ranks_or_comm: Iterable[int] = ()) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError("a ProcessSet is made of a list of ranks; there are no MPI communicators here")
        ranks = sorted(ranks_or_comm)
        if any(type(rank) is not int for rank in ranks):
            raise ValueError("a ProcessSet is made of a list of ranks, which are whole numbers")
        self.ranks: list[int] = ranks

    def size(self) -> int | None:
        return None if self.process_set_id is None else len(ranks_of(self))

    def rank(self) -> int | None:
        """Of this process within the set; None if it is not known or does not include this process."""
        if self.process_set_id is None or not self.included():
            return None
        return list(ranks_of(self)).index(runtime().world.rank)

    def included(self) -> bool:
        return runtime().world.rank in ranks_of(self)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


global_process_set = ProcessSet()
global_process_set.process_set_id = 0


def number_of(process_set: ProcessSet) -> int:
    """Its number in this world. ValueError if it is not part of it."""
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not known: add it with add_process_set")
    return process_set.process_set_id


def ranks_of(process_set: ProcessSet) -> Sequence[int]:
    """Its ranks, of this world."""
    world = runtime().world
    if process_set.process_set_id == 0:
        return range(world.size)
    return process_set.ranks


def setup(process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """At init: the sets that are there from the beginning."""
    global_process_set.ranks = list(range(runtime().world.size))
    for one in process_sets:
        process_set = one if isinstance(one, ProcessSet) else ProcessSet(one)
        if process_set.ranks != global_process_set.ranks:
            process_set.process_set_id = None
            add_process_set(process_set)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Called by all ranks, with the same ranks."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    world = runtime().world
    if not process_set.ranks or not set(process_set.ranks) <= set(range(world.size)):
        raise ValueError(f"{process_set.ranks} are not ranks of a world of {world.size}")
    ranks = tuple(process_set.ranks)
    if ranks in world.sets.values() or len(ranks) == world.size:
        raise ValueError(f"there is a process set of the ranks {list(ranks)} already")
    _agree(f"add_process_set {list(ranks)}")
    world.sets_made = number = world.sets_made + 1  # never one that was used: its collectives were counted
    world.sets[number] = ranks
    world.exchange.add_set(number, ranks)
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Called by all ranks. False: it is the set of all ranks, or not known."""
    world = runtime().world
    number = process_set.process_set_id
    if number is None or number == 0 or number not in world.sets:
        return False
    _agree(f"remove_process_set {process_set.ranks}")
    del world.sets[number]
    world.exchange.remove_set(number)
    process_set.process_set_id = None
    return True


def _agree(name: str) -> None:
    """All ranks are at this line; who means another set is told by the name that it waits for."""
    exchange = runtime().world.exchange
    exchange.synchronize(exchange.submit(Request(kind=Kind.BARRIER, name=name), soon=True))
