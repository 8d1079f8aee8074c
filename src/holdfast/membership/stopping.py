"""Whether the scripts of all members want no further steps: so that all workers stop before the same one. Pure.

A script that calls `run.stop` wants to stop before the first step that it has not been given. Its worker says so to all
members of its view (Over), and in its Report in every view that follows, until that step is committed. The run stops
before the step if every member of one view wants that, with no exception for those that are lost: a member that cannot
be heard may have gone on. Then a view without it, or with it, comes to the same question.

That all who decide decide the same:
- a wish is not taken back, but by a member that has seen another one's shards of that step: then not all want to stop;
- so once a view was of one mind, all of its members that are left want to stop in every view that follows;
- whoever is given the state of the step takes the wish over with it, if all members that have this state want to stop.

A member that finds that others go on computes the step too, and says in its Ready that only one more is to follow
(`Ready.over`): then all who take part in that one know it, whoever has finished and is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.core.words import View
from holdfast.membership.messages import Broadcast, Compute, Effect, Halt, Over, StepRefused, StopAsked
from holdfast.membership.phases import Phase
from holdfast.membership.view_rules import Plan, Report

NO_WISH = (-1, "")


@dataclass
class StopWishes:
    """A member's own wish, and those that it has heard of in its view. Owned by its machine."""

    own: tuple[int, str] = NO_WISH  # the step before which its script wants to stop, and why
    _said: dict[int, dict[str, str]] = field(default_factory=dict)  # step -> member -> why

    def for_step(self, step: int | None) -> str:
        """Why this worker's script wants to stop before this step; empty: it does not."""
        return self.own[1] if step == self.own[0] else ""

    def heard(self, member: str, step: int, reason: str) -> None:
        self._said.setdefault(step, {})[member] = reason

    def unheard(self, step: int, members: Sequence[str]) -> tuple[str, ...]:
        return tuple(member for member in members if member not in self._said.get(step, ()))

    def agreed(self, step: int, members: Sequence[str]) -> str:
        """Why all of these want to stop before this step; empty: not all do, or not all were heard."""
        return self._said[step][members[0]] if members and not self.unheard(step, members) else ""

    def forget_view(self) -> None:
        self._said = {}

    def planned(self, me: str, plan: Plan, members: Sequence[str], reports: Mapping[str, Report]) -> None:
        """A view's members have said where they stand, and what they want. All of them come to the same here."""
        level = [member for member in members if reports[member].next == plan.step]
        for member in level:
            if reports[member].over:
                self.heard(member, plan.step, reports[member].over)
        reason = self.agreed(plan.step, level)
        if me in plan.fetches:
            self.own = (plan.step, reason) if reason else NO_WISH
        for member in plan.fetches if reason else ():
            self.heard(member, plan.step, reason)


class Member(Protocol):
    """The machine, as far as this part of it needs it."""

    me: str
    phase: Phase
    view: View | None
    next: int | None
    reason: str

    def to_compute(self, step: int) -> Compute: ...

    def is_ready(self, step: int) -> bool:
        """Whether any member's shards of this step are done."""

    def _go(self, phase: Phase) -> None: ...


class Stopping:
    """The part of a worker's machine that asks, before a step, whether all want to stop there."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.wishes = StopWishes()
        self.handlers: dict[type, Callable[..., list[Effect]]] = {StopAsked: self._asked, StepRefused: self._refused}

    def forget_view(self) -> None:
        self.wishes.forget_view()

    def _asked(self, event: StopAsked, now: float) -> list[Effect]:
        if event.step < (self._member.next or 0) or self.wishes.for_step(event.step):
            return []
        self.wishes.own = (event.step, event.reason)
        return self._say(event.step, event.reason)

    def _say(self, step: int, reason: str) -> list[Effect]:
        self.wishes.heard(self._member.me, step, reason)
        return [Broadcast(Over(step, reason))]

    def _refused(self, event: StepRefused, now: float) -> list[Effect]:
        member, reason = self._member, self.wishes.for_step(event.step)
        assert member.phase is Phase.COMPUTING and event.step == member.next and reason
        member._go(Phase.STOPPING)
        member.reason = "asking whether all want to stop"
        said = self._say(event.step, reason) if self.wishes.unheard(event.step, [member.me]) else []
        return [*said, *self.resolve()]

    def resolve(self) -> list[Effect]:
        """All of this view want to stop; or somebody has gone on, and so all take this step."""
        member = self._member
        if member.phase is not Phase.STOPPING:
            return []
        assert member.view is not None and member.next is not None
        reason, goes_on = self.wishes.agreed(member.next, member.view.members), member.is_ready(member.next)
        if not reason and not goes_on:
            return []
        member._go(Phase.COMPUTING)
        member.reason = ""
        if goes_on:
            self.wishes.own = NO_WISH
            return [member.to_compute(member.next)]
        return [Halt(member.next, reason)]
