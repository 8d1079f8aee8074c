"""A worker's way to the table of units: a port, and its twin in one process."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.servers.port import ParameterServers
from holdfast.servers.units import Ask, Extras, Given, UnitTable


@dataclass(frozen=True)
class UnitsPosition:
    """How far the run is in its units. `left`: those before `next` that are not used."""

    begun: bool
    next: int
    left: tuple[int, ...]


class Units(Protocol):
    """One worker's. Used by one thread. Each call is acknowledged when it returns; PeerError if no server answers."""

    def begin(self, unit: int, left: Collection[int]) -> None:
        """Where the run begins. The first to say so is heard."""

    def tell(self, *, used: int | None = None) -> None:
        """The update of this unit is acknowledged."""

    def ask(self, until: int, clock: int, staleness: int | None = None) -> None:
        """For a unit before `until`, within this bound. `clock`: how many updates this worker pushes before its."""

    def answer(self) -> Given | None:
        """To the last ask; None: not yet."""

    def waits_for(self) -> str:
        """Why there is no answer to the last ask yet, as far as that is known. From any thread."""

    def standing(self, clocks: Mapping[str, int] | None = None) -> UnitsPosition | None:
        """Now; or what is left in a state of the parameters with these clocks, None where nobody knows any more."""

    def wish(self) -> int:
        """Ask the others for their extras. The number of the wish."""

    def bring(self, extras: Extras) -> None:
        """This worker's extras, for those who wish for them."""

    def extras(self, wish: int) -> Extras | None:
        """That meet this wish; None: not yet."""

    def give_back(self) -> None:
        """Whatever this worker holds: another may have it."""

    def forget(self, worker: str, incarnation: int) -> None:
        """This one is gone."""

    def close(self) -> None: ...


@dataclass
class SharedTable:
    table: UnitTable = field(default_factory=UnitTable)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryUnits:
    """port.Units on a table that the workers of this process share."""

    def __init__(self, shared: SharedTable, worker: str, incarnation: int = 1) -> None:
        self._shared = shared
        self._me = (worker, incarnation)
        self._sequence = 0
        self._seen = 0

    def begin(self, unit: int, left: Collection[int]) -> None:
        with self._shared.lock:
            self._shared.table.begin(unit, left)

    def tell(self, *, used: int | None = None) -> None:
        with self._shared.lock:
            if used is not None:
                self._shared.table.used(*self._me, used)

    def ask(self, until: int, clock: int, staleness: int | None = None) -> None:
        self._sequence += 1
        with self._shared.lock:
            self._shared.table.ask(*self._me, Ask(self._sequence, until, clock, self._seen, staleness))

    def answer(self) -> Given | None:
        with self._shared.lock:
            given = self._shared.table.answer(self._me[0], self._sequence)
        if given is not None:
            self._seen = self._sequence
        return given

    def waits_for(self) -> str:
        with self._shared.lock:
            return self._shared.table.waits_for(self._me[0])

    def standing(self, clocks: Mapping[str, int] | None = None) -> UnitsPosition | None:
        with self._shared.lock:
            table = self._shared.table
            left = table.left_at(clocks if clocks is not None else {})
            return UnitsPosition(table.begun, table.next, tuple(left)) if left is not None else None

    def wish(self) -> int:
        with self._shared.lock:
            self._shared.table.wish()
            return self._shared.table.wishes

    def bring(self, extras: Extras) -> None:
        with self._shared.lock:
            self._shared.table.bring(extras)

    def extras(self, wish: int) -> Extras | None:
        with self._shared.lock:
            found = self._shared.table.extras
        return found if found.wish >= wish else None

    def give_back(self) -> None:
        with self._shared.lock:
            self._shared.table.give_back(*self._me)

    def forget(self, worker: str, incarnation: int) -> None:
        with self._shared.lock:
            self._shared.table.forget(worker, incarnation)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ServerLines:
    """Everything that a worker has of the servers."""

    parameters: ParameterServers
    units: Units

    def close(self) -> None:
        self.units.close()
        self.parameters.close()
