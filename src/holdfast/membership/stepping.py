"""The half of a worker's machine that trains: getting level when a view has formed, and a step from shards to commit.

Owns the worker's position (which steps it has applied, which shards it holds) and what it has heard in its view. The
other half, machine.py, owns the ledger, views and phases outside a step; this one calls it only through `_break`,
`_consider`, `_change_seen` and the other methods that are abstract here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.agreeing import agreed
from holdfast.membership.auditing import Auditing, AuditRules, Finding
from holdfast.membership.balance import fill_in
from holdfast.membership.doubting import Doubt, bringers
from holdfast.membership.phases import TRANSITIONS, Phase
from holdfast.membership.step_rules import StepRules
from holdfast.membership.stopping import Stopping
from holdfast.membership.view_rules import LedgerState, Plan, Report, must_search, reconcile
from holdfast.membership.whereabouts import Whereabouts


class Stepping(ABC):
    """What a member of a view does with its peers. See Machine for the rest."""

    def __init__(
        self,
        me: str,
        *,
        shards: int,
        digest: str,
        two_rounds: bool,
        checkpoints: bool,
        rules: AuditRules | None = None,
        step_rules: StepRules | None = None,
    ) -> None:
        self.me = me
        self.checkpoints = checkpoints  # the run keeps some: who has no state may find it there
        self.shards = shards
        self.step_rules = step_rules or StepRules()  # the mode's
        self.room = shards  # of the shards, so many are spread over this view's members
        self.digest = digest
        self.two_rounds = two_rounds
        self.phase = Phase.WAITING
        self.view: View | None = None  # the newest view that I am a member of
        self.ledger = LedgerState()
        self.next: int | None = None  # the first step I have not applied
        self.given = -1  # the step of the state that I was given
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
        self.doubt = Doubt()
        self.stopping = Stopping(self)
        self._leaving: frozenset[str] = frozenset()  # who leaves at the end of this step
        self._change_due = self._save_due = False
        self._save_mark = 0
        self._stop = ""
        self._inside = False  # a step: the user's loop was given shards of it, and has not come back from applying it
        self._left_at = 0  # see returning.py
        self._forget_view()

    def _forget_view(self) -> None:
        """What was heard in one view means nothing in the next."""
        self.plan: Plan | None = None  # of this view, once its members have reported
        self._reports: dict[str, Report] = {}
        self._ready: dict[int, dict[str, m.Ready]] = {}
        self.stopping.forget_view()
        self._done: dict[int, set[str]] = {}
        self._fetched: set[str] = set()  # who came without state, and has it
        self._results: set[int] = set()  # steps whose reduced gradient a peer has sent me
        self._lost: dict[str, str] = {}  # members whose connection is gone, and why
        self._steps_here = 0  # committed in this view
        self._keeps: frozenset[int] = frozenset()  # steps whose mean I keep for those left behind
        self._keep_s = 0.0
        self.searching = False  # for a checkpoint, on behalf of this view
        self._searched = False  # and there is none; a later view may find what was not there for an earlier one

    @abstractmethod
    def _consider(self, now: float) -> list[m.Effect]: ...

    @abstractmethod
    def _break(self, reason: str, now: float, *, peer: str = "") -> list[m.Effect]: ...

    @abstractmethod
    def _be_evicted(self, reason: str) -> list[m.Effect]: ...

    @abstractmethod
    def _change_seen(self, now: float) -> bool: ...

    @abstractmethod
    def _propose_planned(self, now: float) -> list[m.Effect]: ...

    @abstractmethod
    def _turn(self, now: float) -> list[m.Effect]: ...

    @abstractmethod
    def _came_together(self) -> None: ...

    @abstractmethod
    def _come_back(self, now: float) -> list[m.Effect]: ...

    @abstractmethod
    def _keep_for_the_late(self, view: View, plan: Plan, before: int) -> list[m.Effect]: ...

    @abstractmethod
    def _has_passed(self, reports: Iterable[Report]) -> str: ...

    @abstractmethod
    def _is_level_again(self, step: int, now: float) -> list[m.Effect]: ...

    def _has_successor(self) -> bool:
        """The ledger shows a newer view than mine, or one where I have none."""
        newest = self.ledger.view
        return newest is not None and newest.number > (self.view.number if self.view else 0)

    # ---- what peers say

    def _listens_to(self, view: int) -> bool:
        """Fence: what is said in another view, older or newer, is not for the one I am in."""
        return self.view is not None and view == self.view.number and self.phase is not Phase.BROKEN

    def _heard(self, event: m.Heard, now: float) -> list[m.Effect]:
        if not self._listens_to(event.view):
            return []
        message = event.message
        if isinstance(message, m.Ready):
            self._ready.setdefault(message.step, {})[event.peer] = message
            return self.stopping.resolve() or self._reduce_if_ready(now)
        if isinstance(message, m.Done):
            self._done.setdefault(message.step, set()).add(event.peer)
            return self._commit_if_done()
        if isinstance(message, Report):
            self._reports[event.peer] = message
            return self._reconcile_if_complete(now)
        if isinstance(message, m.Fetched):
            self._fetched.add(event.peer)
            return []
        if isinstance(message, m.Over):
            self.stopping.wishes.heard(event.peer, message.step, message.reason)
            return self.stopping.resolve()
        self._results.add(message.step)  # it may come before the last report, and so before I know that I lack it
        return self._receive_if_sent()

    def _peer_lost(self, event: m.PeerLost, now: float) -> list[m.Effect]:
        if self._listens_to(event.view):
            self._lost[event.peer] = event.reason  # `handle` looks at it whenever I wait for peers
        return []

    def _has_all_from(self, member: str) -> bool:
        if self.phase is Phase.STOPPING:
            return not self.stopping.wishes.unheard(self.step_here, [member])
        if self.view is None or self.phase not in (Phase.GATHERING, Phase.COMPARING, Phase.REDUCING):
            return False
        step = self.step_here
        ready = member in self._ready.get(step, {}) or member not in bringers(self.plan, self.view, step)
        needs_done = self.two_rounds and self.phase is Phase.REDUCING
        return ready and (not needs_done or member in self._done.get(step, set()))

    def closes(self) -> bool:
        """Whether the others need not wait for what my loop still computes."""
        if self.phase is not Phase.COMPUTING or self.next is None or self.view is None:
            return False
        return self.step_rules.closes(self._ready.get(self.next, {}), self.view)

    @property
    def needs_state(self) -> bool:
        """After the step that is being applied comes something that needs this worker's state, or another view."""
        due = self._change_due or (self._save_due and self.checkpoints)
        return bool(due or self._stop or self._leaving or self._lost)

    # ---- getting level

    def _report(self, former: tuple[str, ...]) -> Report:
        size, doubt = 0 if self.step_rules.whole else self.ledger.size, self.doubt.stands
        if self.next is None:
            return Report(None, (), False, self.digest, former, self._searched, self._pace, size, doubt)
        kept = self.kept is not None and self.kept == self.next - 1
        held = tuple(sorted(self.held))
        over = self.stopping.wishes.for_step(self.next)
        return Report(self.next, held, kept, "", former, False, self._pace, size, doubt, over, self.given)

    def _reconcile_if_complete(self, now: float) -> list[m.Effect]:
        assert self.view is not None
        if self.phase is not Phase.FORMING or len(self._reports) < len(self.view.members):
            return []
        if passed := self._has_passed(self._reports.values()):
            return self._be_evicted(passed)
        if self.checkpoints and must_search(self.view, self._reports):
            return self._search(self.view)
        before, self._formed, self._formed_members = self._formed, self.view.number, frozenset(self.view.members)
        self._came_together()
        plan = reconcile(self.view, self._reports, self.shards)
        plan = self.step_rules.settle(plan, self._reports, self.shards)
        plan = self.plan = self.doubt.planned(plan, self.view, self._reports)
        self.audits.doubted = plan.step if plan.compares else -1
        self.stopping.wishes.planned(self.me, plan, self.view.members, self._reports)
        self.room = self.step_rules.room(self.shards, self.view, self._reports)
        paces = fill_in({member: self._reports[member].pace for member in self.view.members})
        self.shares = self.step_rules.shares(self.room, self.view.members, paces)
        if self.me in plan.evicted:
            return self._be_evicted(plan.evicted[self.me])
        if self.me in plan.fetches and plan.compares:
            self._go(Phase.COMPARING)
            return self._reduce_if_ready(now)
        if self.me in plan.fetches:
            self._go(Phase.LOADING)
            return [m.Fetch(plan.step, plan.fetches[self.me])]
        effects: list[m.Effect] = self._keep_for_the_late(self.view, plan, before)
        if any(self.me in sources for sources in plan.fetches.values()) and not plan.compares:
            effects.append(m.Serve(plan.step, tuple(plan.fetches)))
        effects += [m.Give(to, plan.step - 1) for to, giver in plan.gives.items() if giver == self.me]
        if self.me in plan.gives:
            self._go(Phase.RECEIVING)
            self.reason = f"waiting for {plan.gives[self.me]} to send the gradient of step {plan.step - 1}"
            return effects + self._receive_if_sent()
        return effects + self._start(plan.step, plan.assignment[self.me])

    def _search(self, view: View) -> list[m.Effect]:
        """One looks for a checkpoint; the others, who are told what it found, get the state from its memory."""
        if self.me != view.members[0]:
            self.reason = f"waiting for {view.members[0]} to look for a checkpoint"
            return []
        if self.searching:
            return []
        self.searching = True
        self.reason = "looking for a checkpoint"
        return [m.Restore()]

    def _restored(self, event: m.Restored, now: float) -> list[m.Effect]:
        """The state is this worker's now, whatever has become of the view meanwhile."""
        assert self.next is None, f"at step {self.next}, restored to {event.step}"
        self.next = event.step
        if not self.searching:
            return []
        self.searching, self._searched = False, event.step is None
        mine = self._reports[self.me] = self._report(self._reports[self.me].former)
        return [m.Broadcast(mine), *self._reconcile_if_complete(now)]

    def readers(self) -> tuple[str, ...]:
        """The members of this view that may still be reading the state that I started this step with."""
        plan, view = self.plan, self.view
        if self.phase is not Phase.COMPUTING or plan is None or view is None or plan.step != self.next or plan.compares:
            return ()
        through = self._fetched | self._ready.get(plan.step, {}).keys() | self._lost.keys()
        through |= {member for member, roll in self.ledger.rolls.items() if roll.view == view.number}
        here = self.ledger.ids - through
        return tuple(member for member, sources in plan.fetches.items() if self.me in sources and member in here)

    def keepers(self) -> tuple[str, ...]:
        """Those that have the state of the step I am at from before, and save it if that is due. All know the same."""
        if self.view is None:
            return ()
        came = self.plan.fetches if self.plan is not None and self.plan.step == self.next else {}
        return tuple(member for member in self.view.members if member not in came)

    @property
    def step_here(self) -> int:
        """The step that this view is at, whether I have its state or not."""
        return self.next if self.next is not None else self.plan.step if self.plan is not None else 0

    def is_here(self, member: str) -> bool:
        """Whether that one is still with me in my view, as far as I know."""
        return self.is_connected(member) and (not self.ledger.ids or member in self.ledger.ids)

    def is_connected(self, member: str) -> bool:
        """Whether its connection has not ended: what it said before it left may still be on its way."""
        if self.view is None or self.phase in (Phase.BROKEN, Phase.BEHIND, Phase.WAITING, Phase.ENDED):
            return False
        return member in self.view.members and member not in self._lost

    @property
    def others(self) -> Whereabouts:
        return Whereabouts(self._reports, self._ready, self.plan)

    def is_ready(self, step: int) -> bool:
        """Whether any member's shards of this step are done."""
        return bool(self._ready.get(step))

    def _loaded(self, event: m.Loaded, now: float) -> list[m.Effect]:
        if self.phase is not Phase.LOADING or self.plan is None or event.step != self.plan.step:
            return []
        self.given = -1 if self.is_origin else event.step  # of the initial state everybody has been through all
        effects = self._is_level_again(event.step, now)
        return [*effects, m.Broadcast(m.Fetched(event.step)), *self._start(event.step, ())]

    def _receive_if_sent(self) -> list[m.Effect]:
        if self.phase is not Phase.RECEIVING or self.next not in self._results:
            return []
        return self._commit(self.next, received=True)

    @property
    def is_origin(self) -> bool:
        """Nobody in this view had the training's state: it began at step 0, with the first member's initial one."""
        return self.plan is not None and all(report.next is None for report in self._reports.values())

    # ---- a step

    def _start(self, step: int, shards: tuple[int, ...]) -> list[m.Effect]:
        assert self.next is None or self.next == step, f"at step {self.next}, told to start {step}"
        self.next = step
        self.assigned = shards
        self._inside, self._left_at = True, 0
        self._go(Phase.COMPUTING)
        self.reason = ""
        return [self.to_compute(step)]

    def to_compute(self, step: int) -> m.Compute:
        plan = self.plan
        missing = tuple(shard for shard in self.assigned if shard not in self.held)
        assignment = plan.assignment if plan is not None and plan.step == step else self.shares
        return m.Compute(step, missing, self.audits.extra(step, assignment))

    def _computed(self, event: m.Computed, now: float) -> list[m.Effect]:
        if self.phase is not Phase.COMPUTING:
            return []
        assert event.step == self.next
        if event.shards is not None:
            self.assigned = event.shards
        self.held = frozenset(self.assigned)
        self._go(Phase.GATHERING)
        self._pace = event.pace or self._pace
        flags = self._change_seen(now), self.leave_asked, self.ledger.stop, event.save, event.saving, self._pace
        ready = m.Ready(event.step, self.assigned, *flags, said=event.said, mark=event.mark, over=event.over)
        self._ready.setdefault(event.step, {})[self.me] = ready
        self.reason = "waiting for the others' shards"
        effects = [m.Broadcast(ready), *self._propose_planned(now)]
        return [*effects, *self._consider(now), *self._reduce_if_ready(now)]

    def _reduce_if_ready(self, now: float) -> list[m.Effect]:
        if self.phase not in (Phase.GATHERING, Phase.COMPARING):
            return []
        assert self.view is not None
        step = self.step_here
        members = bringers(self.plan, self.view, step)
        ready = self._ready.get(step, {})
        if any(member not in ready for member in members):
            return []
        brought = tuple((member, ready[member].shards) for member in members)
        if not self.step_rules.covers(brought, self.shards):
            return [*self._break(f"step {step} is not covered exactly once: {brought}", now)]
        finding = self.audits.judge(step, members, {one: ready[one].said for one in members})
        if finding is not None:
            return [m.Accuse(finding), *self._follow(finding, now)]
        self.doubt.settled()
        if len(members) < len(self.view.members):
            return self._break("those who have the state agree: others can fetch it", now) + self._consider(now)
        together = agreed(self.view.members, ready)
        self._change_due, self._leaving, self._stop = together.change, together.leaving, together.stop
        self._save_due, self._save_mark, self.paces = together.save, together.mark, together.paces
        better = self.step_rules.rebalanced(self.shares, self.room, self.paces)
        if better is not None:
            self.shares = better
            self.moved += 1
        self._go(Phase.REDUCING)
        return [m.Reduce(step, brought, together.over)]

    def _follow(self, finding: Finding, now: float) -> list[m.Effect]:
        """All members come to the same finding, and nothing of this step is committed.

        Who ends drops nothing: its connections close with its process, when the others have heard all that they need.
        """
        if finding.script:
            return [self._end("script", finding.reason)]
        if finding.narrow:  # in a view of the same members all say more of the same step
            return self._break(finding.reason, now) + self._consider(now)
        if not finding.liars and not finding.third:
            return [self._end("corrupt", finding.reason)]
        if self.me in finding.liars:
            return [self._end("evicted", finding.reason)]
        if finding.good is not None:
            return [self._end("rewind", finding.reason)]
        effects = self._break(finding.reason, now, peer=finding.liars[0] if finding.liars else "")
        self._leaving = frozenset(finding.liars)  # the next view does without them, whatever the ledger says
        return effects + self._consider(now)

    def _reduced(self, event: m.Reduced, now: float) -> list[m.Effect]:
        if self.phase is not Phase.REDUCING or event.step != self.next:
            return []
        if not self.two_rounds:
            return self._commit(event.step, received=False)
        self._done.setdefault(event.step, set()).add(self.me)
        self.reason = "waiting for the others' slices"
        return [m.Broadcast(m.Done(event.step)), *self._commit_if_done()]

    def _reduction_failed(self, event: m.ReductionFailed, now: float) -> list[m.Effect]:
        if self.phase is not Phase.REDUCING or event.step != self.next:
            return []
        return self._break(event.reason, now, peer=event.peer) + self._consider(now)

    def _commit_if_done(self) -> list[m.Effect]:
        if self.phase is not Phase.REDUCING or not self.two_rounds:
            return []
        assert self.view is not None and self.next is not None
        if len(self._done.get(self.next, ())) < len(self.view.members):
            return []
        return self._commit(self.next, received=False)

    def _commit(self, step: int, *, received: bool) -> list[m.Effect]:
        self.kept = step
        self._steps_here += 1
        self.held = frozenset()
        self._ready.pop(step, None)
        self._done.pop(step, None)
        self._go(Phase.APPLYING)
        self.reason = ""
        return [m.Commit(step, received), *([m.Keep(step, self._keep_s)] if step in self._keeps else [])]

    def _applied(self, event: m.Applied, now: float) -> list[m.Effect]:
        assert self.phase is Phase.APPLYING and event.step == self.next and self.view is not None
        self.next = event.step + 1
        self._inside = False
        if self._stop:
            end = self._end("stopped", self._stop, save=self.checkpoints)
            return [m.Drop(self.view.number, "the run stops"), m.Deregister(), end]
        if self.me in self._leaving:
            alone = self._leaving >= set(self.view.members)
            end = self._end("left", "asked to leave", save=self.checkpoints and alone)
            return [m.Drop(self.view.number, "leaving"), m.Deregister(), end]
        saves: list[m.Effect] = []
        if event.save and self.checkpoints:
            # Without a mark: who was sent the mean of this step does not know the one that the others agreed on.
            saves = [m.Save(self.next, self.view.members, wanted=True)]
        elif self._save_due and self.checkpoints:
            saves = [m.Save(self.next, self.view.members, self._save_mark)]
        self._save_due = False
        return [*saves, *self._after_applied(now)]

    def _after_applied(self, now: float) -> list[m.Effect]:
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

    def _go_on(self) -> list[m.Effect]:
        """The next step, in the same view."""
        assert self.next is not None
        plan = self.plan
        if plan is not None and plan.step == self.next:  # I was sent the step before; now I am level
            return self._start(self.next, plan.assignment[self.me])
        return self._start(self.next, self.shares[self.me])

    # ---- phases

    def _end(self, kind: str, reason: str, *, save: bool = False) -> m.End:
        self._go(Phase.ENDED)
        self.reason = reason
        return m.End(kind, reason, save)

    def _go(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
