"""A rank of a group that is not its first: its machine handles what rank 0's handles, and it does its own part of it.

It has no line to the ledger, and in other groups only to the ranks of its number: it reads their memory, fetches their
state, and they fetch its. It reads what rank 0 tells it only where rank 0 waits too, so both give the user's loop the
same word. Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, SupportsFloat

from holdfast.core.errors import Evicted
from holdfast.core.words import Registration, View
from holdfast.engine.ranks.forming import of_rank
from holdfast.engine.ranks.given_means import MEAN, SETTLED, WAIT_S, PartOfMean
from holdfast.engine.ranks.link import Link, Message
from holdfast.engine.ranks.whole_state import FollowingCheckpoints, join_capture, join_restore
from holdfast.engine.worker import TICK_S, Worker
from holdfast.membership import messages as m
from holdfast.membership.planes import Reduction
from holdfast.net.groups import BrokenGroup
from holdfast.placement.ranks import ranks_here
from holdfast.reduce.arena import Arena


@dataclass(frozen=True)
class Neighbour:
    """The same rank of another group."""

    memory: Arena | None


@dataclass
class Plane:
    """The same ranks of all groups of a view. In place of a group's connections, where rank 0 alone has them."""

    view: View
    me: str
    connections: dict[str, Neighbour] = field(default_factory=dict)

    def close(self) -> None:
        for neighbour in self.connections.values():
            if neighbour.memory is not None:
                neighbour.memory.close()

    def flush(self, timeout_s: float) -> None:
        """Nothing is said here."""


class FollowingWorker(Worker):
    """See the module."""

    def follow(self, checkpoints: FollowingCheckpoints) -> FollowingWorker:
        checkpoints.heed_until_through = self._until_through
        self.ranks, self.rank = ranks_here().count, ranks_here().rank
        self._first = Link(ranks_here().links[0])
        self._part_of_mean = PartOfMean(self._first, self.gradients, self._fetch_mean)
        self._given = False  # rank 0's loop has the word
        return self

    def advance(self) -> m.Compute | m.Commit | m.Halt:
        self.leaving.raise_if_over()
        while True:
            if self._ended is not None:
                self.leaving.leave(self._ended)
            if self._given:
                self._given, directive, self._directive = False, self._directive, None
                assert directive is not None
                self.spending.go_on(broken=False)
                if not isinstance(directive, m.Halt):
                    self.attendance.given(directive)
                return directive
            self._heed(self._first.receive())

    def listen(self, at_most_s: float = TICK_S, *, save: bool = False) -> None:
        self.leaving.raise_if_over()
        if not self._given:
            self._heed(self._first.receive(max(at_most_s, 0.001)))
        if self._ended is not None:
            self.leaving.leave(self._ended)

    def drain(self) -> None:
        """What rank 0 has drained comes when it waits."""

    def computed(self, step: int, durations_s: Sequence[SupportsFloat], *, over: str = "") -> None:
        found = self.gradients
        metrics = {name: {at: float(one) for at, one in values.items()} for name, values in found.metrics.items()}
        self._first.send("computed", step, metrics, dict(found.gathered), tuple(found.sums.present))

    def tell(self, event: m.Event) -> None:
        """Rank 0 tells its machine the same, and mine hears of it from there."""

    def share(self, place: m.ScriptPlace, items: Mapping[str, object]) -> None:
        raise AssertionError("ranks share nothing outside their steps yet")

    def _heed(self, message: Message | None) -> None:
        if message is None:
            return
        kind, *about = message
        self._HEEDED[kind](self, *about)

    def _hear_event(self, event: m.Event, now: float) -> None:
        for effect in self.machine.handle(event, now):
            handler = self._PERFORMED.get(type(effect))
            if handler is not None:
                handler(self, effect)

    def _join_capture(self, step: int) -> None:
        join_capture(self._transfer.holder, step)

    def _join_restore(self, *message: Any) -> None:
        join_restore(self._transfer.holder, message)
        self._transfer.capture.buffers.rebase()

    def _until_through(self) -> None:
        """Do what rank 0 says, in the line of the script where both are, until it has done with it."""
        while (message := self._first.receive()) != ("through",):
            self._heed(message)

    def _hear_memory(self, view: int, peer: str, slots: int, slot_bytes: int, fd: int) -> None:
        own, plane = self.gradients.shared_arena, self._plane
        assert own is not None and plane is not None and plane.view.number == view
        plane.connections[peer] = Neighbour(own.of_peer(fd, slots, slot_bytes))

    def _hear_registrations(self, registrations: Mapping[str, Registration]) -> None:
        self._registrations = {name: of_rank(one, self.rank) for name, one in registrations.items()}

    def _hear_given(self) -> None:
        self._given = True

    def _hear_note(self, step: int, member: str, note: Any) -> None:
        self.gradients.heard_note(step, member, note)

    def _fetch_mean(self, step: int, peer: str) -> bool:
        return self._catching.fetch_into(step, (peer,), self._registrations)

    @property
    def _plane(self) -> Plane | None:
        plane: Any = self._group
        return plane  # type: ignore[no-any-return]

    def _enter(self, effect: m.Open) -> None:
        self._drop()
        self._transfer.desk.expect(effect.view.number)
        self._group = Plane(effect.view, self.machine.me)  # type: ignore[assignment]

    def _reduce_plane(self, effect: m.Reduce) -> None:
        assert self._group is not None
        try:
            self.gradients.reduce(self._group, effect, lambda: "")
        except BrokenGroup as error:
            self._first.send("reduced", Reduction(effect.step, error.peer, error.reason or "it is gone"))
            return
        self._first.send("reduced", Reduction(effect.step))

    def _put_mean(self, effect: m.Give) -> None:
        kept = self.gradients.kept
        if kept is None or kept.step != effect.step or not self._catching.desk.put(kept, 2 * WAIT_S):
            raise Evicted(f"the mean of step {effect.step}, which others lack, is no longer whole here")

    def _fetch_part(self, effect: m.Fetch) -> None:
        assert self.machine.view is not None
        self._first.send("fetched", self._transfer.fetch(self.machine.view, effect, self._registrations))

    _HEEDED: ClassVar[dict[str, Any]] = {
        "event": _hear_event,
        "memory": _hear_memory,
        "registrations": _hear_registrations,
        "note": _hear_note,
        MEAN: lambda worker, step, giver: worker._part_of_mean.look(step, giver),
        SETTLED: lambda worker, taken: worker._part_of_mean.settle(taken),
        "given": _hear_given,
        "capture": _join_capture,
        "restore": _join_restore,
        "through": lambda worker: None,  # rank 0 leaves in a line to which this one has not come
    }
    # What is said to the ledger or to other groups, rank 0 says.
    _PERFORMED: ClassVar[dict[type, Any]] = {
        m.Open: _enter,
        m.Drop: lambda worker, effect: worker._drop(),
        m.Reduce: _reduce_plane,
        m.Give: _put_mean,
        m.Serve: Worker._serve,
        m.Fetch: _fetch_part,
        m.Compute: Worker._compute,
        m.Commit: Worker._commit,
        m.Halt: Worker.put_back,
        m.End: Worker._end,
    }
