"""Which worker computes which unit of data: a table that all its replicas keep alike. Pure.

A unit is the data of one step of the run, known by its number. Each is given to one worker, which tells when its update
is acknowledged. What a worker that is gone had not told of is given out again, before anything new. So every unit is
used once where nobody dies, and none is left out.

A worker asks for a unit, and the table answers when it can: with a unit, or with the news that all are used. With each
unit goes the worker's clock, the number of updates it had pushed before. So it can be told which units are in a state
of the parameters whose clocks are known: `left_at`.

The bound on staleness counts by position in the data (`may_begin`). With W workers, W units are a round: the units from
r·W on are round r. A unit may begin when its round is at most so many after that of the first unit whose update is not
acknowledged. So within a bound of k rounds fast workers take more units than slow ones, and whoever reads the
parameters after it was given unit u has all updates of the units before (u // W - k)·W. W is the number of workers that
the table knows when it hands the unit out. The first unit that is not finished may always begin, so nobody waits for
ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

HELD_MAX = 8  # by one worker: one that it computes, one that it will, and some room
USED_KEPT = 256  # of each worker, the newest


@dataclass(frozen=True)
class Ask:
    """`sequence`: the asking worker's, which the answer names. `until`: units from there on are not wanted.

    `seen`: the last sequence whose answer the worker has. `staleness`: the bound, in rounds; None: there is none.
    """

    sequence: int
    until: int
    clock: int
    seen: int = 0
    staleness: int | None = None


@dataclass(frozen=True)
class Given:
    """Exactly one of the two: a unit to compute, or nothing is left to do."""

    unit: int | None = None
    wish: int = 0  # a worker that came asks for extras, and this is the newest such wish that nobody has met
    ahead: int = 0  # so many rounds after that of the first unit that was not finished
    finished: int = 0  # so many units were, of those that this table has given out

    @property
    def is_over(self) -> bool:
        return self.unit is None


@dataclass(frozen=True)
class Extras:
    """What scripts keep beside the parameters (schedulers, say), after so many steps of somebody's loop."""

    wish: int  # that they meet, and all before it
    step: int
    text: str


def rounds_ahead(unit: int, first: int, workers: int) -> int:
    """`first`: the first unit that is not finished."""
    return unit // workers - first // workers


def may_begin(unit: int, first: int, workers: int, staleness: int | None) -> bool:
    return staleness is None or rounds_ahead(unit, first, workers) <= staleness


@dataclass
class Row:
    """What the table knows of a worker."""

    incarnation: int
    present: bool = False  # it has asked, and is not known to be gone
    held: dict[int, int] = field(default_factory=dict)  # unit -> clock
    used: list[tuple[int, int]] = field(default_factory=list)  # (unit, clock), the newest last
    ask: Ask | None = None
    answer: tuple[int, Given] | None = None  # to the ask with this sequence


class UnitTable:
    """`order` of asking is the order of answering. A worker is known by its name, without its incarnation."""

    def __init__(self) -> None:
        self.next = 0  # the first unit that was never given out
        self.begun = False  # somebody has said where the run begins
        self.finished = 0  # units that were given out here and used
        self.returned: list[int] = []  # in order
        self.rows: dict[str, Row] = {}
        self.wishes = 0  # for extras, so far
        self.extras = Extras(0, 0, "")
        self.waiting: list[str] = []  # workers whose ask has no answer, in order

    def begin(self, unit: int, left: Collection[int] = ()) -> None:
        """The run begins with this unit, and with those before it that are left. The first to say so is heard."""
        if not self.begun:
            self.begun, self.next, self.returned = True, unit, sorted(set(left))
            self._answer()

    def wish(self) -> None:
        self.wishes += 1

    def bring(self, extras: Extras) -> None:
        """Somebody's extras, for whoever has wished for them. Of several, those of the one who is furthest."""
        if (extras.wish, extras.step) > (self.extras.wish, self.extras.step) and extras.wish <= self.wishes:
            self.extras = extras

    def used(self, worker: str, incarnation: int, unit: int) -> None:
        """Its update is acknowledged."""
        row = self._row(worker, incarnation)
        if row is None or unit not in row.held:
            return
        row.used = [*row.used, (unit, row.held.pop(unit))][-USED_KEPT:]
        self.finished += 1
        self._answer()

    def ask(self, worker: str, incarnation: int, ask: Ask) -> None:
        """An ask replaces the worker's last one. Where that was answered meanwhile, the answer is to this one."""
        row = self._row(worker, incarnation)
        if row is None or len(row.held) >= HELD_MAX:
            return
        row.present = True
        if row.answer is not None and row.answer[0] > ask.seen:
            given = row.answer[1]
            if given.unit is not None:
                row.held[given.unit] = ask.clock
                row.answer = (ask.sequence, given)
                return
        row.ask, row.answer = ask, None
        self.waiting = [one for one in self.waiting if one != worker] + [worker]
        self._answer()

    def give_back(self, worker: str, incarnation: int) -> None:
        """It will not use what it holds."""
        row = self.rows.get(worker)
        if row is not None and row.incarnation <= incarnation:
            self._take_back(worker, row)
            self._answer()

    def forget(self, worker: str, incarnation: int) -> None:
        """This incarnation is gone."""
        row = self.rows.get(worker)
        if row is not None and row.incarnation == incarnation:
            self._take_back(worker, row)
            row.present = False  # what it used stays: a state may be captured that does not have all of it yet
            self._answer()

    def answer(self, worker: str, sequence: int) -> Given | None:
        """None: not yet."""
        row = self.rows.get(worker)
        known = row.answer if row is not None else None
        if known is None or known[0] != sequence:
            return None
        return replace(known[1], wish=self.wishes if self.extras.wish < self.wishes else 0)

    @property
    def workers(self) -> int:
        """How many take units."""
        return max(1, sum(row.present for row in self.rows.values()))

    @property
    def first(self) -> int:
        """The first unit that is not finished, whether somebody computes it or not."""
        held = (unit for row in self.rows.values() for unit in row.held)
        return min((*held, *self.returned[:1], self.next))

    def waits_for(self, worker: str) -> str:
        """Why this one has no answer: the unit that has to be finished first, and who has it."""
        if not self.begun:
            return "the worker that begins the run"
        if worker not in self.waiting:
            return ""
        first = self.first
        holder = next((name for name, row in self.rows.items() if first in row.held), "")
        return f"step {first}, which {holder} has" if holder else f"step {first}"

    def left_at(self, clocks: Mapping[str, int]) -> list[int] | None:
        """The units before `next` that are not in the parameters at these clocks; None: nobody knows any more.

        What was used since then is left, too. A worker that is not among the clocks has nothing under way.
        """
        left = set(self.returned)
        for worker, row in self.rows.items():
            at = clocks.get(worker)
            if at is None:
                left |= row.held.keys()
                continue
            if len(row.used) == USED_KEPT and row.used[0][1] >= at:
                return None
            left |= {unit for unit, clock in (*row.used, *row.held.items()) if clock >= at}
        return sorted(left)

    def _row(self, worker: str, incarnation: int) -> Row | None:
        """None: it is an earlier incarnation's, which is over."""
        row = self.rows.get(worker)
        if row is not None and row.incarnation > incarnation:
            return None
        if row is None or row.incarnation < incarnation:
            if row is not None:
                self._take_back(worker, row)
            row = self.rows[worker] = Row(incarnation)
        return row

    def _take_back(self, worker: str, row: Row) -> None:
        self.returned = sorted({*self.returned, *row.held})
        row.held, row.ask, row.answer = {}, None, None
        self.waiting = [one for one in self.waiting if one != worker]

    def _answer(self) -> None:
        """Everybody who can be answered, in the order of asking."""
        for worker in list(self.waiting):
            row = self.rows[worker]
            assert row.ask is not None
            given = self._given(row.ask)
            if given is None:
                continue
            if given.unit is not None:
                row.held[given.unit] = row.ask.clock
            row.answer, row.ask = (row.ask.sequence, given), None
            self.waiting.remove(worker)

    def _given(self, ask: Ask) -> Given | None:
        if not self.begun:
            return None
        unit = self.returned[0] if self.returned else self.next
        if unit < ask.until:
            first, workers = self.first, self.workers
            if not may_begin(unit, first, workers, ask.staleness):
                return None
            if self.returned:
                self.returned.pop(0)
            else:
                self.next += 1
            return Given(unit, ahead=rounds_ahead(unit, first, workers), finished=self.finished)
        held = any(unit < ask.until for row in self.rows.values() for unit in row.held)
        return None if held else Given(finished=self.finished)
