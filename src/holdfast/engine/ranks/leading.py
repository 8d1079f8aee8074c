"""Rank 0 of a group: a worker like any other, whose machine speaks for all ranks.

Whatever its machine handles, the machines of the other ranks handle too (following.py). Four things it tells its
machine only when all ranks have done them: that the shards are computed, that the sums are added up, that a mean which
another group gives is here (given_means.py), that the state is here. So a step whose mean one plane lacks is committed
in none. Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from holdfast.engine.ranks.given_means import why_not_in_all
from holdfast.engine.ranks.link import Links
from holdfast.engine.worker import Worker
from holdfast.membership import messages as m
from holdfast.membership.planes import Reduction, loaded_in_all, reduced_in_all
from holdfast.net.groups import Gone, Group, Said
from holdfast.placement.ranks import ranks_here

STEP_S = 30.0  # ranks do the same work, and gather each other's parameters on the way: none is much later
FETCH_S = 600.0


class LeadingWorker(Worker):
    """See the module."""

    def lead(self) -> LeadingWorker:
        self.ranks = ranks_here().count
        self._others = Links(ranks_here().links)
        self.gradients.why_not_in_all = self._why_not_in_all
        self._arenas: tuple[int, set[str]] = (0, set())  # of which members the others have the memory, in which view
        return self

    def advance(self) -> m.Compute | m.Commit | m.Halt:
        directive = super().advance()
        self._others.tell("given")
        return directive

    def computed(self, step: int, durations_s: Sequence[SupportsFloat], *, over: str = "") -> None:
        """Also by the other ranks, whose metrics go along with mine."""
        gradients = self.gradients
        for theirs, metrics, gathered, present in self._others.hear("computed", STEP_S):
            assert theirs == step, f"a rank has computed step {theirs}, and this one {step}"
            for name, values in metrics.items():
                gradients.metrics.setdefault(name, {}).update(values)
            gradients.gathered.update(gathered)
            gradients.sums.present.update(present)
        self._others.tell("note", step, self.machine.me, gradients.note())
        super().computed(step, durations_s, over=over)

    def _decide(self, event: m.Event) -> list[m.Effect]:
        self._tell_arenas()
        now = self._clock()
        self._others.tell("event", event, now)
        return self.machine.handle(event, now)

    def _tell_arenas(self) -> None:
        group = self._group
        if group is None:
            return
        if self._arenas[0] != group.view.number:
            self._arenas = group.view.number, set()
        known = self._arenas[1]
        if len(known) == len(group.connections):
            return
        for peer, connection in group.connections.items():
            if peer not in known and connection.memory is not None:
                memory = connection.memory
                self._others.tell("memory", group.view.number, peer, memory.slots, memory.slot_bytes, fd=memory.fd)
            known.add(peer)

    def _take(self, group: Group, item: Said | Gone) -> None:
        super()._take(group, item)
        if isinstance(item, Gone):
            return
        step = getattr(item.message, "step", -1)
        if isinstance(item.message, m.Ready) and (note := self.gradients.note_of(step, item.peer)) is not None:
            self._others.tell("note", step, item.peer, note)

    def _why_not_in_all(self, step: int, giver: str) -> str:
        def is_gone() -> bool:
            return bool(self._interrupted()) or giver not in self._registrations

        return why_not_in_all(self._others, step, giver, is_gone=is_gone)

    def _read_mail(self) -> None:
        known = self._registrations
        super()._read_mail()
        if self._registrations is not known:
            self._others.tell("registrations", dict(self._registrations))

    def _perform(self, effect: m.Effect) -> None:
        if isinstance(effect, m.Fetch):
            self._fetch_all(effect)
            return
        super()._perform(effect)
        if isinstance(effect, m.Reduce):
            self._await_planes(effect.step)

    def _await_planes(self, step: int) -> None:
        """What the machine is told of this step is what came of all planes."""
        own = self._queue.popleft()
        assert isinstance(own, m.Reduced | m.ReductionFailed) and own.step == step
        mine = Reduction(step, own.peer, own.reason) if isinstance(own, m.ReductionFailed) else Reduction(step)
        theirs = [plane for (plane,) in self._others.hear("reduced", STEP_S)]
        self._queue.appendleft(reduced_in_all([mine, *theirs]))

    def _fetch_all(self, effect: m.Fetch) -> None:
        assert self.machine.view is not None
        self.waiting.say_fetching(effect.sources)
        mine: Any = self._transfer.fetch(self.machine.view, effect, self._registrations)
        found = loaded_in_all([mine, *(theirs for (theirs,) in self._others.hear("fetched", FETCH_S))])
        if isinstance(found, m.End):
            self.leaving.leave(found)
        (self._queue.appendleft if isinstance(found, m.Loaded) else self._queue.append)(found)

    def share(self, place: m.ScriptPlace, items: Mapping[str, object]) -> None:
        raise AssertionError("ranks share nothing outside their steps yet")
