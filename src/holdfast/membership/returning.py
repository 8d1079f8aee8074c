"""The part of a worker's machine that is about being late: leaving one behind, and coming back after one was.

The rules are in late.py. Between machine.py, which has views and the ledger, and stepping.py, which has the step.

    left behind in the middle of a step      broken, behind (asks for the step's mean), applying, waiting
    left behind while it applied a step      applying, broken, waiting

In *waiting* it has given up its state, knocks, and says in its roll that it was left behind. From there on it is a
joiner. Only its digest says that it did not just start: what is in its memory is no state to begin a run with.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from holdfast.core.words import View
from holdfast.membership.balance import expected_s, fill_in
from holdfast.membership.late import (
    AGAIN_S,
    CATCH_UP_S,
    KEEP_S,
    KEEP_TIMES,
    KEEPERS,
    SPENT,
    STEPS_MIN,
    patience_s,
    who_is_late,
)
from holdfast.membership.messages import Catch, Caught, CaughtUp, Deregister, Effect, Keep, LeftBehind
from holdfast.membership.phases import Phase
from holdfast.membership.reach import Roll
from holdfast.membership.stepping import Stepping
from holdfast.membership.stopping import NO_WISH
from holdfast.membership.view_rules import Plan, Report, Timing, propose_without


class Returning(Stepping):
    """See the module. `_began_at`, when the last step was committed, and `_quiet_since` are kept by Machine."""

    timing: Timing
    _quiet_since: float
    _began_at: float
    _gathered_at: float
    _found_late: LeftBehind | None
    _since: float | None

    def _not_late(self) -> None:
        """To begin with, and when I am level again."""
        self._left_at = 0  # the view that I saw when I noticed that I was left behind
        self._noticed_at = 0.0
        self._asked_at: float | None = None  # for the mean; None: an answer is there, and was no
        self._applied_here = 0  # steps that I had applied when I gave up my state

    @abstractmethod
    def _propose(self, view: View | None, now: float) -> list[Effect]: ...

    @abstractmethod
    def _publish(self, roll: Roll, now: float) -> list[Effect]: ...

    @abstractmethod
    def _knock_at_the_door(self, now: float) -> list[Effect] | None: ...

    # ---- those who wait

    def wait_s(self, now: float, tick_s: float) -> float:
        """How long to wait for peers before the next Tick is due: not much longer than for those who are late."""
        patience = self._patience_s()
        left_s = self._quiet_since + patience - now if patience is not None else 0.0
        return min(tick_s, left_s + 0.001) if left_s > 0 else tick_s

    def _patience_s(self) -> float | None:
        """How long I wait for those whose shards are missing. None: until they come."""
        if self.phase is not Phase.GATHERING or not self.timing.late_s or self._steps_here < STEPS_MIN:
            return None
        own_s = self._gathered_at - self._began_at
        return patience_s(self.timing.late_s, expected_s=self.expected_s(), own_s=own_s)

    def expected_s(self) -> float:
        """What a step's shards take the slowest by its pace."""
        return expected_s(self.shares, fill_in({member: self.paces.get(member, 0.0) for member in self.shares}))

    def _leave_behind(self, now: float) -> list[Effect]:
        """Only when a wait has ended without a word: what came while I was away myself must be heard first."""
        patience = self._patience_s()
        waited_s = now - self._quiet_since
        if patience is None or waited_s < patience or self.me not in self.ledger.ids:
            return []
        assert self.view is not None and self.next is not None
        if self.ledger.view is None or self.ledger.view.number != self.view.number:
            return []
        late = who_is_late(self.view, self._ready.get(self.next, {}), self.paces, self.shares)
        if not late:
            return []
        view = propose_without(self.me, self.ledger, late).view
        if view is not None:
            self._found_late = LeftBehind(late, self.next, round(waited_s, 3), round(self.expected_s(), 3))
        return self._propose(view, now)

    def _tell_of_late(self, view: View) -> list[Effect]:
        """I enter a view. Was it I who proposed to leave somebody behind?"""
        found, self._found_late = self._found_late, None
        left = dict(view.late)
        named = found is not None and all(left.get(worker) == view.number for worker in found.workers)
        return [found] if found is not None and named else []

    def _somebody_is_left_behind(self) -> bool:
        """By the newest view, of those that I am in a view with."""
        newest, view = self.ledger.view, self.view
        assert newest is not None and view is not None
        return any(number > view.number and worker in view.members for worker, number in newest.late)

    def _keep_for_the_late(self, view: View, plan: Plan, before: int) -> list[Effect]:
        """Somebody was left behind since the last view that formed: in this step, or in the one before or after it."""
        level = [member for member in view.members if member not in plan.fetches and member not in plan.evicted]
        if self.me not in level[:KEEPERS] or not any(number > before for _, number in view.late):
            return []
        self._keeps = frozenset({plan.step, plan.step + 1})
        self._keep_s = max(KEEP_S, KEEP_TIMES * self.expected_s())
        return [Keep(plan.step - 1, self._keep_s)] if self.kept is not None and self.kept == plan.step - 1 else []

    # ---- the one who was late

    def _is_left_behind(self, newest: View) -> bool:
        return self.me in dict(newest.late) and self.me not in newest.members

    def _fall_behind(self, newest: View, now: float) -> list[Effect]:
        """The others went on without me, and expect me back."""
        reason = f"view {newest.number} went on without it: {newest.reason}"
        effects = self._break(reason, now) if self.phase is not Phase.BROKEN else []
        self._left_at, self._noticed_at, self._asked_at = newest.number, now, None
        if not self._inside:
            return effects + self._come_back(now)
        self._go(Phase.BEHIND)
        self.reason = f"asking for the mean of step {self.next}"
        return effects + self._catch_up(now)

    def _catch_up(self, now: float) -> list[Effect]:
        newest = self.ledger.view
        assert newest is not None and self.next is not None
        if self.ledger.done or self.ledger.stop:
            return [Deregister(), self._end("done" if self.ledger.done else "stopped", "the run has ended")]
        if self.leave_asked:
            return [Deregister(), self._end("left", "asked to leave")]
        if not self._is_left_behind(newest):
            return self._be_evicted(f"view {newest.number} does not expect it back: {newest.reason}")
        if now - self._noticed_at >= CATCH_UP_S:
            return self._be_evicted(f"nobody has the mean of step {self.next} any more, in which it was left behind")
        if self._asked_at is not None and now - self._asked_at < AGAIN_S:
            return []
        self._asked_at = now
        return [Catch(self.next, newest.members)]

    def _caught(self, event: Caught, now: float) -> list[Effect]:
        if self.phase is not Phase.BEHIND or event.step != self.next or not event.found:
            return []
        return self._commit(event.step, received=True)

    def _come_back(self, now: float) -> list[Effect]:
        """At the end of a step: my state is of no more use, and I wait to be taken in."""
        self._applied_here = self.next or 0
        self._go(Phase.WAITING)
        self.view, self.next, self.kept, self.held, self.assigned = None, None, None, frozenset(), ()
        self.digest = SPENT
        self.stopping.wishes.own = NO_WISH
        self._formed, self._formed_members = 0, frozenset()
        self._since = None
        self._forget_view()
        if self.leave_asked:
            return [Deregister(), self._end("left", "asked to leave")]
        return self._consider(now)

    def _say_that_i_am_back(self, now: float) -> list[Effect]:
        """In the ledger, since that is where the proposer looks. My state is gone, so it says that I have none."""
        if not self._left_at or self.me not in self.ledger.ids:
            return []
        knock = self._knock_at_the_door(now)
        return self._publish(Roll(self._left_at), now) if knock is None else knock

    def _has_passed(self, reports: Iterable[Report]) -> str:
        """Why I cannot be level with the others after all: my script has been through steps that they have not.

        They went back, since all who had the state are lost; or I was one ahead when they left me behind. A new process
        can begin where they are.
        """
        if not self._left_at:
            return ""
        step = max((report.next or 0 for report in reports), default=0)
        return (
            f"it has been through step {self._applied_here - 1}, and the others have not"
            if step < self._applied_here
            else ""
        )

    def _is_level_again(self, step: int, now: float) -> list[Effect]:
        if not self._left_at:
            return []
        effect = CaughtUp(step, step - self._applied_here, round(now - self._noticed_at, 3))
        self._not_late()
        return [effect]
