"""The half of a worker's machine that trains: getting level when a view has formed, and a step from shards to commit.

Owns the worker's position (which steps it has applied, which shards it holds) and what it has heard in its view. The
other half, machine.py, owns the ledger, views and phases outside a step; this one calls it only through `_break`,
`_consider`, `_change_seen` and the other methods that are abstract here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from holdfast.core.words import View
from holdfast.membership.auditing import Auditing, Finding, Rules
from holdfast.membership.balance import divide, fill_in, rebalanced
from holdfast.membership.elastic import room, size_of, thinned
from holdfast.membership.messages import (
    MARKS,
    Accuse,
    Applied,
    Broadcast,
    Commit,
    Compute,
    Computed,
    Deregister,
    Done,
    Drop,
    Effect,
    End,
    Fetch,
    Give,
    Heard,
    Keep,
    Loaded,
    PeerLost,
    Ready,
    Reduce,
    Reduced,
    ReductionFailed,
    Restore,
    Restored,
    Save,
    Serve,
)
from holdfast.membership.phases import TRANSITIONS, Phase
from holdfast.membership.view_rules import LedgerState, Plan, Report, must_search, reconcile


class Stepping(ABC):
    """What a member of a view does with its peers. See Machine for the rest."""

    def __init__(
        self, me: str, *, shards: int, digest: str, two_rounds: bool, checkpoints: bool, rules: Rules | None = None
    ) -> None:
        self.me = me
        self.checkpoints = checkpoints  # the run keeps some: who has no state may find it there
        self.shards = shards
        self.elastic = False  # a step takes what its members bring: see elastic.py
        self.even = False  # the shares do not follow the paces: who is late is not waited for
        self.room = shards  # of the shards, so many are spread over this view's members
        self.digest = digest
        self.two_rounds = two_rounds
        self.phase = Phase.WAITING
        self.view: View | None = None  # the newest view that I am a member of
        self.ledger = LedgerState()
        self.next: int | None = None  # the first step I have not applied
        self.held: frozenset[int] = frozenset()
        self.kept: int | None = None  # the step whose reduced gradient I still have
        self.assigned: tuple[int, ...] = ()
        self.leave_asked = False
        self.reason = "starting"  # why I wait, if I do
        self._formed = 0  # the last view that came together: all its members reported
        self._formed_members: frozenset[str] = frozenset()
        self.shares: dict[str, tuple[int, ...]] = {}  # the assignment of this view's later steps
        self.paces: dict[str, float] = {}  # of the last step: seconds for a shard; 0: not known
        self.moved = 0  # how often that was changed because of the workers' paces
        self._pace = 0.0
        self.audits = Auditing(me, shards, rules)
        self._leaving: frozenset[str] = frozenset()  # who leaves at the end of this step
        self._change_due = False
        self._save_due = False
        self._save_mark = 0
        self._stop = ""
        self._inside = (
            False  # a step: the user's loop has been given shards of it and not yet come back from applying it
        )
        self._left_at = 0  # see returning.py
        self._forget_view()

    def _forget_view(self) -> None:
        """What was heard in one view means nothing in the next."""
        self._plan: Plan | None = None
        self._reports: dict[str, Report] = {}
        self._ready: dict[int, dict[str, Ready]] = {}
        self._done: dict[int, set[str]] = {}
        self._results: set[int] = set()  # steps whose reduced gradient a peer has sent me
        self._lost: dict[str, str] = {}  # members whose connection is gone, and why
        self._steps_here = 0  # committed in this view
        self._keeps: frozenset[int] = frozenset()  # steps whose mean I keep for those left behind
        self._keep_s = 0.0
        self.searching = False  # for a checkpoint, on behalf of this view
        self._searched = False  # and there is none; a later view may find what was not there for an earlier one

    @abstractmethod
    def _consider(self, now: float) -> list[Effect]: ...

    @abstractmethod
    def _break(self, reason: str, now: float, *, peer: str = "") -> list[Effect]: ...

    @abstractmethod
    def _be_evicted(self, reason: str) -> list[Effect]: ...

    @abstractmethod
    def _change_seen(self, now: float) -> bool: ...

    @abstractmethod
    def _propose_planned(self, now: float) -> list[Effect]: ...

    @abstractmethod
    def _turn(self, now: float) -> list[Effect]: ...

    @abstractmethod
    def _came_together(self) -> None: ...

    @abstractmethod
    def _come_back(self, now: float) -> list[Effect]: ...

    @abstractmethod
    def _keep_for_the_late(self, view: View, plan: Plan, before: int) -> list[Effect]: ...

    @abstractmethod
    def _has_passed(self, reports: Iterable[Report]) -> str: ...

    @abstractmethod
    def _is_level_again(self, step: int, now: float) -> list[Effect]: ...

    def _has_successor(self) -> bool:
        """The ledger shows a newer view than mine, or one where I have none."""
        newest = self.ledger.view
        return newest is not None and newest.number > (self.view.number if self.view else 0)

    # ---- what peers say

    def _listens_to(self, view: int) -> bool:
        """Fence: what is said in another view, older or newer, is not for the one I am in."""
        return self.view is not None and view == self.view.number and self.phase is not Phase.BROKEN

    def _heard(self, event: Heard, now: float) -> list[Effect]:
        if not self._listens_to(event.view):
            return []
        message = event.message
        if isinstance(message, Ready):
            self._ready.setdefault(message.step, {})[event.peer] = message
            return self._reduce_if_ready(now)
        if isinstance(message, Done):
            self._done.setdefault(message.step, set()).add(event.peer)
            return self._commit_if_done()
        if isinstance(message, Report):
            self._reports[event.peer] = message
            return self._reconcile_if_complete(now)
        self._results.add(message.step)  # it may come before the last report, and so before I know that I lack it
        return self._receive_if_sent()

    def _peer_lost(self, event: PeerLost, now: float) -> list[Effect]:
        if self._listens_to(event.view):
            self._lost[event.peer] = event.reason  # `handle` looks at it whenever I wait for peers
        return []

    def _has_all_from(self, member: str) -> bool:
        step = self.next
        if step is None or self.phase not in (Phase.GATHERING, Phase.REDUCING):
            return False
        ready = member in self._ready.get(step, {})
        needs_done = self.two_rounds and self.phase is Phase.REDUCING
        return ready and (not needs_done or member in self._done.get(step, set()))

    def closes(self, quorum: int) -> bool:
        """So many others have brought shards to the step that my loop still computes, or all of them what they had."""
        if self.phase is not Phase.COMPUTING or self.next is None or self.view is None:
            return False
        ready = self._ready.get(self.next, {})
        brought = sum(bool(message.shards) for message in ready.values())
        return brought >= quorum or (brought > 0 and len(ready) >= max(quorum, len(self.view.members) - 1))

    @property
    def needs_state(self) -> bool:
        """After the step that is being applied comes something that needs this worker's state, or another view."""
        due = self._change_due or (self._save_due and self.checkpoints)
        return bool(due or self._stop or self._leaving or self._lost)

    # ---- getting level

    def _report(self, former: tuple[str, ...]) -> Report:
        size = self.ledger.size if self.elastic else 0
        if self.next is None:
            return Report(None, (), False, self.digest, former, self._searched, self._pace, size)
        kept = self.kept is not None and self.kept == self.next - 1
        return Report(self.next, tuple(sorted(self.held)), kept, former=former, pace=self._pace, size=size)

    def _reconcile_if_complete(self, now: float) -> list[Effect]:
        assert self.view is not None
        if self.phase is not Phase.FORMING or len(self._reports) < len(self.view.members):
            return []
        if passed := self._has_passed(self._reports.values()):
            return self._be_evicted(passed)
        if self.checkpoints and must_search(self.view, self._reports):
            return self._search(self.view)
        before, self._formed, self._formed_members = self._formed, self.view.number, frozenset(self.view.members)
        self._came_together()
        plan = self._plan = reconcile(self.view, self._reports, self.shards)
        if self.elastic:
            plan = self._plan = thinned(plan, self._reports, self.shards)
            self.room = room(self.shards, len(self.view.members), size_of(self._reports))
        paces = fill_in({member: self._reports[member].pace for member in self.view.members})
        self.shares = divide(self.room, self.view.members, paces if not self.even else dict.fromkeys(paces, 1.0))
        if self.me in plan.evicted:
            return self._be_evicted(plan.evicted[self.me])
        if self.me in plan.fetches:
            self._go(Phase.LOADING)
            return [Fetch(plan.step, plan.fetches[self.me])]
        effects: list[Effect] = self._keep_for_the_late(self.view, plan, before)
        if any(self.me in sources for sources in plan.fetches.values()):
            effects.append(Serve(plan.step, tuple(plan.fetches)))
        effects += [Give(to, plan.step - 1) for to, giver in plan.gives.items() if giver == self.me]
        if self.me in plan.gives:
            self._go(Phase.RECEIVING)
            self.reason = f"waiting for {plan.gives[self.me]} to send the gradient of step {plan.step - 1}"
            return effects + self._receive_if_sent()
        return effects + self._start(plan.step, plan.assignment[self.me])

    def _search(self, view: View) -> list[Effect]:
        """One looks for a checkpoint; the others, who are told what it found, get the state from its memory."""
        if self.me != view.members[0]:
            self.reason = f"waiting for {view.members[0]} to look for a checkpoint"
            return []
        if self.searching:
            return []
        self.searching = True
        self.reason = "looking for a checkpoint"
        return [Restore()]

    def _restored(self, event: Restored, now: float) -> list[Effect]:
        """The state is this worker's now, whatever has become of the view meanwhile."""
        assert self.next is None, f"at step {self.next}, restored to {event.step}"
        self.next = event.step
        if not self.searching:
            return []
        self.searching, self._searched = False, event.step is None
        mine = self._reports[self.me] = self._report(self._reports[self.me].former)
        return [Broadcast(mine), *self._reconcile_if_complete(now)]

    def joiners_load(self) -> bool:
        """Whether a member of this view may still be reading the state that I started this step with."""
        plan = self._plan
        if self.phase is not Phase.COMPUTING or plan is None or plan.step != self.next:
            return False
        ready = self._ready.get(plan.step, {})
        gone = self._lost.keys() | (plan.fetches.keys() - self.ledger.ids)
        return any(member not in ready and member not in gone for member in plan.fetches if member != self.me)

    @property
    def has_just_come(self) -> bool:
        """I was given the state of the step that I am at, and have done nothing with it yet."""
        return self._plan is not None and self._plan.step == self.next and self.me in self._plan.fetches

    def _loaded(self, event: Loaded, now: float) -> list[Effect]:
        if self.phase is not Phase.LOADING or self._plan is None or event.step != self._plan.step:
            return []
        return self._is_level_again(event.step, now) + self._start(event.step, ())

    def _receive_if_sent(self) -> list[Effect]:
        if self.phase is not Phase.RECEIVING or self.next not in self._results:
            return []
        return self._commit(self.next, received=True)

    # ---- a step

    def _start(self, step: int, shards: tuple[int, ...]) -> list[Effect]:
        assert self.next is None or self.next == step, f"at step {self.next}, told to start {step}"
        self.next = step
        self.assigned = shards
        self._inside, self._left_at = True, 0
        missing = tuple(shard for shard in shards if shard not in self.held)
        self._go(Phase.COMPUTING)
        self.reason = ""
        plan = self._plan
        assignment = plan.assignment if plan is not None and plan.step == step else self.shares
        return [Compute(step, missing, self.audits.extra(step, assignment))]

    def _computed(self, event: Computed, now: float) -> list[Effect]:
        if self.phase is not Phase.COMPUTING:
            return []
        assert event.step == self.next
        if event.shards is not None:
            self.assigned = event.shards
        self.held = frozenset(self.assigned)
        self._go(Phase.GATHERING)
        self._pace = event.pace or self._pace
        flags = self._change_seen(now), self.leave_asked, self.ledger.stop, event.save, event.saving, self._pace
        ready = Ready(event.step, self.assigned, *flags, said=event.said, mark=event.mark)
        self._ready.setdefault(event.step, {})[self.me] = ready
        self.reason = "waiting for the others' shards"
        effects = [Broadcast(ready), *self._propose_planned(now)]
        return [*effects, *self._consider(now), *self._reduce_if_ready(now)]

    def _reduce_if_ready(self, now: float) -> list[Effect]:
        if self.phase is not Phase.GATHERING:
            return []
        assert self.view is not None and self.next is not None
        ready = self._ready.get(self.next, {})
        if len(ready) < len(self.view.members):
            return []
        brought = tuple((member, ready[member].shards) for member in self.view.members)
        count = sum(len(shards) for _, shards in brought)
        if (count != self.shards and not self.elastic) or len(
            {shard for _, shards in brought for shard in shards}
        ) != count:
            return [*self._break(f"step {self.next} is not covered exactly once: {brought}", now)]
        finding = self.audits.judge(self.next, self.view.members, {one: ready[one].said for one in self.view.members})
        if finding is not None:
            return [Accuse(finding), *self._follow(finding, now)]
        self._change_due = any(message.change or message.leaving for message in ready.values())
        self._leaving = frozenset(member for member in self.view.members if ready[member].leaving)
        self._save_due = any(message.save for message in ready.values())
        self._save_due = self._save_due and not any(message.saving for message in ready.values())
        self._save_mark = sum(message.mark for message in ready.values()) % MARKS
        self._stop = next((ready[member].stop for member in self.view.members if ready[member].stop), "")
        self.paces = {member: ready[member].pace for member in self.view.members}
        better = rebalanced(self.shares, self.room, self.paces) if not self.even else None
        if better is not None:
            self.shares = better
            self.moved += 1
        self._go(Phase.REDUCING)
        return [Reduce(self.next, brought)]

    def _follow(self, finding: Finding, now: float) -> list[Effect]:
        """All members come to the same finding, and nothing of this step is committed.

        Who ends drops nothing: its connections close with its process, when the others have heard all that they need.
        """
        if not finding.liars and not finding.third:
            return [self._end("corrupt", finding.reason)]
        if self.me in finding.liars:
            return [self._end("evicted", finding.reason)]
        if finding.good is not None:
            return [self._end("rewind", finding.reason)]
        effects = self._break(finding.reason, now, peer=finding.liars[0] if finding.liars else "")
        self._leaving = frozenset(finding.liars)  # the next view does without them, whatever the ledger says
        return effects + self._consider(now)

    def _reduced(self, event: Reduced, now: float) -> list[Effect]:
        if self.phase is not Phase.REDUCING or event.step != self.next:
            return []
        if not self.two_rounds:
            return self._commit(event.step, received=False)
        self._done.setdefault(event.step, set()).add(self.me)
        self.reason = "waiting for the others' slices"
        return [Broadcast(Done(event.step)), *self._commit_if_done()]

    def _reduction_failed(self, event: ReductionFailed, now: float) -> list[Effect]:
        if self.phase is not Phase.REDUCING or event.step != self.next:
            return []
        return self._break(event.reason, now, peer=event.peer) + self._consider(now)

    def _commit_if_done(self) -> list[Effect]:
        if self.phase is not Phase.REDUCING or not self.two_rounds:
            return []
        assert self.view is not None and self.next is not None
        if len(self._done.get(self.next, ())) < len(self.view.members):
            return []
        return self._commit(self.next, received=False)

    def _commit(self, step: int, *, received: bool) -> list[Effect]:
        self.kept = step
        self._steps_here += 1
        self.held = frozenset()
        self._ready.pop(step, None)
        self._done.pop(step, None)
        self._go(Phase.APPLYING)
        self.reason = ""
        return [Commit(step, received), *([Keep(step, self._keep_s)] if step in self._keeps else [])]

    def _applied(self, event: Applied, now: float) -> list[Effect]:
        assert self.phase is Phase.APPLYING and event.step == self.next and self.view is not None
        self.next = event.step + 1
        self._inside = False
        if self._stop:
            end = self._end("stopped", self._stop, save=self.checkpoints)
            return [Drop(self.view.number, "the run stops"), Deregister(), end]
        if self.me in self._leaving:
            alone = self._leaving >= set(self.view.members)
            end = self._end("left", "asked to leave", save=self.checkpoints and alone)
            return [Drop(self.view.number, "leaving"), Deregister(), end]
        saves = [Save(self.next, self.view.members, self._save_mark)] if self._save_due and self.checkpoints else []
        self._save_due = False
        return [*saves, *self._after_applied(now)]

    def _after_applied(self, now: float) -> list[Effect]:
        if self._left_at:
            return self._come_back(now)
        if self._leaving:  # the group is over with it, whatever the ledger says
            leaving = self._leaving
            effects = self._break(f"{', '.join(sorted(leaving))} left", now)
            self._leaving = leaving
            return effects + self._consider(now)
        if self._change_due:
            self._change_due = False
            return self._turn(now)
        if self._lost and self._has_successor():
            return self._break("the others went on to a newer view", now) + self._consider(now)
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        """The next step, in the same view."""
        assert self.next is not None
        plan = self._plan
        if plan is not None and plan.step == self.next:  # I was sent the step before; now I am level
            return self._start(self.next, plan.assignment[self.me])
        return self._start(self.next, self.shares[self.me])

    # ---- phases

    def _end(self, kind: str, reason: str, *, save: bool = False) -> End:
        self._go(Phase.ENDED)
        self.reason = reason
        return End(kind, reason, save)

    def _go(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
