"""A worker's protocol as a machine: events in, effects out. No IO, no clock, no threads.

The machine owns the worker's phase, its view, its position (which steps it has applied, which shards it holds)
and what it has heard from its peers. The runtime (run/worker.py) and the simulator (testing/simulator) drive
this same class: they turn what happens into events and perform the effects that come back, in order.

Invariants, checked here with `assert` and in the simulator from outside:
- a step is applied once, in order; a step commits only when the members' shards cover it exactly once;
- nothing said in another view is listened to;
- members of a view differ by at most one step, since a reduction is a barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from holdfast.core.words import View
from holdfast.membership.messages import (
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
    Event,
    Fetch,
    Give,
    Heard,
    LeaveAsked,
    LedgerSaw,
    Loaded,
    Open,
    PeerLost,
    Propose,
    Ready,
    Reduce,
    Reduced,
    ReductionFailed,
    Register,
    Serve,
    Tick,
)
from holdfast.membership.view_rules import (
    LedgerState,
    Plan,
    Report,
    Timing,
    assign,
    propose_first,
    propose_next,
    reconcile,
)


class Phase(Enum):
    WAITING = "waiting"  # registered, not in the view: a joiner or a spare
    FORMING = "forming"  # in a view whose members are telling each other where they stand
    LOADING = "loading"  # fetching the snapshot from peers
    RECEIVING = "receiving"  # being sent the reduced gradient of a step that others have applied
    COMPUTING = "computing"  # the user's loop has the shards
    GATHERING = "gathering"  # all own shards are summed; waiting for the others' Ready
    REDUCING = "reducing"  # sums are being added; waiting for the others' Done
    APPLYING = "applying"  # the user's loop has the reduced gradient
    BROKEN = "broken"  # the view's group is gone; a new view is due
    ENDED = "ended"


# Where each phase may lead. The diagram in ARCHITECTURE.md is drawn from this table.
TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.WAITING: frozenset({Phase.FORMING, Phase.ENDED}),
    Phase.FORMING: frozenset({Phase.LOADING, Phase.RECEIVING, Phase.COMPUTING, Phase.BROKEN, Phase.ENDED}),
    Phase.LOADING: frozenset({Phase.COMPUTING, Phase.BROKEN, Phase.ENDED}),
    Phase.RECEIVING: frozenset({Phase.APPLYING, Phase.BROKEN, Phase.ENDED}),
    Phase.COMPUTING: frozenset({Phase.GATHERING, Phase.BROKEN, Phase.ENDED}),
    Phase.GATHERING: frozenset({Phase.REDUCING, Phase.BROKEN, Phase.ENDED}),
    Phase.REDUCING: frozenset({Phase.APPLYING, Phase.BROKEN, Phase.ENDED}),
    Phase.APPLYING: frozenset({Phase.COMPUTING, Phase.BROKEN, Phase.ENDED}),
    Phase.BROKEN: frozenset({Phase.FORMING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
# Phases in which the machine waits for its peers. In COMPUTING and APPLYING the user's loop has the word.
PEER_PHASES: Final = frozenset({Phase.FORMING, Phase.LOADING, Phase.RECEIVING, Phase.GATHERING, Phase.REDUCING})


class Machine:
    """One worker. `handle` takes an event and returns the effects to perform, in order."""

    def __init__(
        self, me: str, *, shards: int, digest: str = "", two_rounds: bool = True, timing: Timing | None = None
    ) -> None:
        self.me = me
        self.shards = shards
        self.digest = digest
        self.two_rounds = two_rounds
        self.timing = timing or Timing()
        self.phase = Phase.WAITING
        self.view: View | None = None  # the newest view that I am a member of
        self.ledger = LedgerState()
        self.next: int | None = None  # the first step I have not applied
        self.held: frozenset[int] = frozenset()
        self.kept: int | None = None  # the step whose reduced gradient I still have
        self.assigned: tuple[int, ...] = ()
        self.leave_asked = False
        self.reason = "starting"  # why I wait, if I do
        self._evenly: dict[str, tuple[int, ...]] = {}  # the assignment of this view's later steps
        self._plan: Plan | None = None
        self._reports: dict[str, Report] = {}
        self._ready: dict[int, dict[str, Ready]] = {}
        self._done: dict[int, set[str]] = {}
        self._results: set[int] = set()  # steps whose reduced gradient a peer has sent me in this view
        self._lost: dict[str, str] = {}  # members of this view whose connection is gone, and why
        self._leaving: frozenset[str] = frozenset()  # who leaves at the end of this step
        self._change_due = False
        self._stop = ""
        self._ledger_known = False
        self._since: float | None = None  # when the present wait began
        self._proposed: tuple[int, float] = (-1, 0.0)
        self._registered_at: float | None = None
        self._handlers: dict[type, Callable[..., list[Effect]]] = {
            LedgerSaw: self._ledger_saw,
            Heard: self._heard,
            PeerLost: self._peer_lost,
            Computed: self._computed,
            Reduced: self._reduced,
            ReductionFailed: self._reduction_failed,
            Applied: self._applied,
            Loaded: self._loaded,
            LeaveAsked: self._leave_asked,
            Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.phase is Phase.ENDED:
            return []
        effects = self._handlers[type(event)](event, now)
        if self._lost and self.phase in PEER_PHASES:
            effects += self._break_if_lost(now)
        return effects

    # ---- the ledger and views

    def _ledger_saw(self, event: LedgerSaw, now: float) -> list[Effect]:
        self.ledger = event.state
        self._ledger_known = True
        return self._consider(now)

    def _tick(self, event: Tick, now: float) -> list[Effect]:
        return self._consider(now)

    def _leave_asked(self, event: LeaveAsked, now: float) -> list[Effect]:
        """Finish the step first; but a step that waits for a view may wait for ever, and the others can redo it."""
        self.leave_asked = True
        if self.phase in (Phase.WAITING, Phase.BROKEN, Phase.FORMING, Phase.LOADING):
            dropped: list[Effect] = [Drop(self.view.number, "leaving")] if self.view else []
            return [*dropped, Deregister(), self._end("left", "asked to leave")]
        return []

    def _consider(self, now: float) -> list[Effect]:
        """Look at the ledger: follow a newer view, register again, propose what is due."""
        if not self._ledger_known:
            return []
        newest = self.ledger.view
        if newest is not None and newest.number > self._number():
            if self.me in newest.members:
                return self._enter(newest, now)
            if self.view is not None:
                return self._be_evicted(f"view {newest.number} was formed without it: {newest.reason}")
        effects = self._register_if_missing(now)
        if self.phase is Phase.WAITING:
            return effects + self._wait_outside(now)
        if self.phase in PEER_PHASES:
            effects += self._break_if_lost(now)
        elif self.phase is Phase.BROKEN:
            effects += self._seek_view(now)
        return effects

    def _number(self) -> int:
        return self.view.number if self.view else 0

    def _register_if_missing(self, now: float) -> list[Effect]:
        if self.me in self.ledger.ids:
            self._registered_at = None
            return []
        if self._registered_at is not None and now - self._registered_at < self.timing.propose_again_s:
            return []  # on its way
        self._registered_at = now
        return [Register()]

    def _break_if_lost(self, now: float) -> list[Effect]:
        """Give the group up if a member that I wait for is gone: by its connection, or by its lease."""
        assert self.view is not None
        ids = self.ledger.ids
        for member in self.view.members:
            if member == self.me or self._has_all_from(member):
                continue
            if member in self._lost:
                return self._break(self._lost[member], now, peer=member) + self._consider(now)
            if self._ledger_known and member not in ids:
                return self._break("its lease is gone", now, peer=member) + self._consider(now)
        return []

    def _has_all_from(self, member: str) -> bool:
        step = self.next
        if step is None or self.phase not in (Phase.GATHERING, Phase.REDUCING):
            return False
        ready = member in self._ready.get(step, {})
        needs_done = self.two_rounds and self.phase is Phase.REDUCING
        return ready and (not needs_done or member in self._done.get(step, set()))

    def _wait_outside(self, now: float) -> list[Effect]:
        if self.ledger.done or self.ledger.stop:
            return [Deregister(), self._end("done" if self.ledger.done else "stopped", "the run has ended")]
        if self._since is None or not self._nobody_left():
            self._since = now
        decision = propose_first(self.me, self.ledger, waited_s=now - self._since, timing=self.timing)
        self.reason = decision.reason
        return self._propose(decision.view, now)

    def _nobody_left(self) -> bool:
        view = self.ledger.view
        return view is None or not any(member in self.ledger.ids for member in view.members)

    def _seek_view(self, now: float) -> list[Effect]:
        """My view's group is gone, and the ledger has no newer one."""
        if self.ledger.view is None or self.view is None or self.ledger.view.number != self.view.number:
            self.reason = "waiting for the ledger"
            return []
        if self.me not in self.ledger.ids:
            self.reason = "registering again"
            return []
        assert self._since is not None
        decision = propose_next(
            self.me,
            self.ledger,
            has_state=self.next is not None,
            planned=self._change_due,
            leaving=self._leaving,
            waited_s=now - self._since,
            timing=self.timing,
        )
        self.reason = decision.reason
        return self._propose(decision.view, now)

    def _propose(self, view: View | None, now: float) -> list[Effect]:
        if view is None:
            return []
        number, when = self._proposed
        if number == self.ledger.view_revision and now - when < self.timing.propose_again_s:
            return []  # the answer is on its way
        self._proposed = (self.ledger.view_revision, now)
        return [Propose(view, self.ledger.view_revision)]

    def _enter(self, view: View, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.view is not None and self.phase not in (Phase.BROKEN, Phase.WAITING):
            if self.phase in (Phase.COMPUTING, Phase.APPLYING):
                return []  # the user's loop has the word; when it returns, this is looked at again
            effects += self._break(f"view {view.number} takes over", now)
        self.view = view
        self._plan = None
        self._reports = {}
        self._ready = {}
        self._done = {}
        self._results = set()
        self._lost = {}
        self._since = now
        self._go(Phase.FORMING)
        self.reason = f"forming view {view.number}"
        mine = self._report()
        self._reports[self.me] = mine
        effects += [Open(view), Broadcast(mine)]
        return effects + self._reconcile_if_complete(now)

    def _report(self) -> Report:
        if self.next is None:
            return Report(None, digest=self.digest)
        return Report(self.next, tuple(sorted(self.held)), self.kept is not None and self.kept == self.next - 1)

    def _break(self, reason: str, now: float, *, peer: str = "") -> list[Effect]:
        assert self.view is not None
        self._go(Phase.BROKEN)
        self.reason = reason
        self._since = now
        self._leaving = frozenset()
        self._change_due = False
        self._stop = ""
        return [Drop(self.view.number, reason, peer)]

    def _be_evicted(self, reason: str) -> list[Effect]:
        effects: list[Effect] = []
        if self.view is not None and self.phase is not Phase.BROKEN:
            effects.append(Drop(self.view.number, reason))
        return [*effects, self._end("evicted", reason)]

    # ---- getting level

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

    def _reconcile_if_complete(self, now: float) -> list[Effect]:
        assert self.view is not None
        if self.phase is not Phase.FORMING or len(self._reports) < len(self.view.members):
            return []
        plan = self._plan = reconcile(self.view, self._reports, self.shards)
        self._evenly = assign(self.shards, self.view.members)
        if self.me in plan.evicted:
            return self._be_evicted(plan.evicted[self.me])
        if self.me in plan.fetches:
            self._go(Phase.LOADING)
            return [Fetch(plan.step, plan.fetches[self.me])]
        effects: list[Effect] = []
        if any(self.me in sources for sources in plan.fetches.values()):
            effects.append(Serve(plan.step, tuple(plan.fetches)))
        effects += [Give(to, plan.step - 1) for to, giver in plan.gives.items() if giver == self.me]
        if self.me in plan.gives:
            self._go(Phase.RECEIVING)
            self.reason = f"waiting for {plan.gives[self.me]} to send the gradient of step {plan.step - 1}"
            return effects + self._receive_if_sent()
        return effects + self._start(plan.step, plan.assignment[self.me])

    def joiners_load(self) -> bool:
        """Whether a member of this view may still be reading the state that I started this step with."""
        plan = self._plan
        if self.phase is not Phase.COMPUTING or plan is None or plan.step != self.next:
            return False
        ready = self._ready.get(plan.step, {})
        gone = self._lost.keys() | (plan.fetches.keys() - self.ledger.ids)
        return any(member not in ready and member not in gone for member in plan.fetches if member != self.me)

    def _loaded(self, event: Loaded, now: float) -> list[Effect]:
        if self.phase is not Phase.LOADING or self._plan is None or event.step != self._plan.step:
            return []
        return self._start(event.step, ())

    def _receive_if_sent(self) -> list[Effect]:
        if self.phase is not Phase.RECEIVING or self.next not in self._results:
            return []
        return self._commit(self.next, received=True)

    # ---- a step

    def _start(self, step: int, shards: tuple[int, ...]) -> list[Effect]:
        assert self.next is None or self.next == step, f"at step {self.next}, told to start {step}"
        self.next = step
        self.assigned = shards
        missing = tuple(shard for shard in shards if shard not in self.held)
        self._go(Phase.COMPUTING)
        self.reason = ""
        return [Compute(step, missing)]

    def _computed(self, event: Computed, now: float) -> list[Effect]:
        if self.phase is not Phase.COMPUTING:
            return []
        assert event.step == self.next
        self.held = frozenset(self.assigned)
        self._go(Phase.GATHERING)
        ready = Ready(event.step, self.assigned, self._change_seen(), self.leave_asked, self.ledger.stop)
        self._ready.setdefault(event.step, {})[self.me] = ready
        self.reason = "waiting for the others' shards"
        return [Broadcast(ready), *self._consider(now), *self._reduce_if_ready(now)]

    def _change_seen(self) -> bool:
        """The ledger shows workers that could be in the view and are not, or members that are gone."""
        assert self.view is not None
        if self.leave_asked:
            return True
        ids = self.ledger.ids
        if any(member not in ids for member in self.view.members) and self.me in ids:
            return True
        count, size = len(self.view.members), self.ledger.size
        return count > size or (count < size and len(ids) > count)

    def _reduce_if_ready(self, now: float) -> list[Effect]:
        if self.phase is not Phase.GATHERING:
            return []
        assert self.view is not None and self.next is not None
        ready = self._ready.get(self.next, {})
        if len(ready) < len(self.view.members):
            return []
        brought = tuple((member, ready[member].shards) for member in self.view.members)
        count = sum(len(shards) for _, shards in brought)
        if count != self.shards or len({shard for _, shards in brought for shard in shards}) != count:
            return [*self._break(f"step {self.next} is not covered exactly once: {brought}", now)]
        self._change_due = any(message.change or message.leaving for message in ready.values())
        self._leaving = frozenset(member for member in self.view.members if ready[member].leaving)
        self._stop = next((ready[member].stop for member in self.view.members if ready[member].stop), "")
        self._go(Phase.REDUCING)
        return [Reduce(self.next, brought)]

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
        self.held = frozenset()
        self._ready.pop(step, None)
        self._done.pop(step, None)
        self._go(Phase.APPLYING)
        self.reason = ""
        return [Commit(step, received)]

    def _applied(self, event: Applied, now: float) -> list[Effect]:
        assert self.phase is Phase.APPLYING and event.step == self.next and self.view is not None
        self.next = event.step + 1
        if self._stop:
            return [Drop(self.view.number, "the run stops"), Deregister(), self._end("stopped", self._stop)]
        if self.me in self._leaving:
            return [Drop(self.view.number, "leaving"), Deregister(), self._end("left", "asked to leave")]
        if self._change_due:
            leaving = self._leaving
            effects = self._break("a change of membership is due", now)
            self._leaving, self._change_due = leaving, True
            return effects + self._consider(now)
        if self.ledger.view is not None and self.ledger.view.number > self.view.number:
            return self._break("a newer view is there", now) + self._consider(now)
        plan = self._plan
        if plan is not None and plan.step == self.next:  # I was sent the step before; now I am level
            return self._start(self.next, plan.assignment[self.me])
        return self._start(self.next, self._evenly[self.me])

    # ---- phases

    def _end(self, kind: str, reason: str) -> End:
        self._go(Phase.ENDED)
        self.reason = reason
        return End(kind, reason)

    def _go(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
