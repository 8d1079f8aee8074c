"""A worker's protocol as a machine: events in, effects out. No IO, no clock, no threads.

The machine owns the worker's phase, its view, its position (which steps it has applied, which shards it holds)
and what it has heard from its peers. The runtime (engine/worker.py) and the simulator (tests/harness/simulator) drive
this same class: they turn what happens into events and perform the effects that come back, in order. What it does
with its peers in a view is in stepping.py; here is how it gets from one view to the next.

Invariants, checked here with `assert` and in the simulator from outside:
- a step is applied once, in order; a step commits only when all members have said what they bring, no shard is there
  twice, and the mode's rules (step_rules.py) take that for a step: the strict ones want every shard;
- nothing said in another view is listened to;
- members of a view differ by at most one step, since a reduction is a barrier;
- a group that works is not given up before the ledger shows the next view: without the ledger, steps go on.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.words import View
from holdfast.membership.auditing import AuditRules
from holdfast.membership.knocking import Knocking
from holdfast.membership.messages import (
    Applied,
    Broadcast,
    Caught,
    Computed,
    Deregister,
    Drop,
    Effect,
    Event,
    Fetch,
    Heard,
    Knocked,
    LeaveAsked,
    LedgerSaw,
    LeftBehind,
    Loaded,
    Open,
    PeerLost,
    Propose,
    Publish,
    Reduced,
    ReductionFailed,
    Register,
    Restored,
    SourcesDiffer,
    Tick,
)
from holdfast.membership.phases import PEER_PHASES, STEP_PHASES, TRANSITIONS, Phase
from holdfast.membership.reach import Roll
from holdfast.membership.resting import Resting
from holdfast.membership.returning import Returning
from holdfast.membership.step_rules import StepRules
from holdfast.membership.view_rules import Patience, Standing, Timing, propose_first, propose_next

__all__ = ["PEER_PHASES", "TRANSITIONS", "Machine", "Phase"]


class Machine(Returning):
    """One worker. `handle` takes an event and returns the effects to perform, in order."""

    def __init__(
        self,
        me: str,
        *,
        shards: int,
        digest: str = "",
        two_rounds: bool = True,
        checkpoints: bool = False,
        timing: Timing | None = None,
        rules: AuditRules | None = None,
        step_rules: StepRules | None = None,
    ) -> None:
        super().__init__(
            me,
            shards=shards,
            digest=digest,
            two_rounds=two_rounds,
            checkpoints=checkpoints,
            rules=rules,
            step_rules=step_rules,
        )
        self.timing = timing or Timing()
        self._knocking = Knocking(self.timing)
        self._resting = Resting(self.timing)
        self.patience: Patience | None = None  # with whom, if that is why I wait
        self._news = 0  # how often the ledger was heard of
        self._turned_in_vain = -1  # the count of news when a view that was due did not come
        self._since: float | None = None  # when the present wait began
        self._quiet_since = 0.0  # when peers were last heard, or the phase changed
        self._began_at = 0.0  # when the last step was committed
        self._gathered_at = 0.0  # when my shards of this one were done
        self._found_late: LeftBehind | None = None
        self._not_late()
        self._successor_since: float | None = None  # when I first saw that my view has one
        self._missed_since: float | None = None  # when I first saw that somebody misses somebody
        self._proposed: tuple[int, float] = (-1, 0.0)
        self._published_at: float | None = None
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
            SourcesDiffer: self._sources_differ,
            Restored: self._restored,
            Knocked: self._knocked,
            Caught: self._caught,
            LeaveAsked: self._leave_asked,
            Tick: self._tick,
            **self.stopping.handlers,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.phase is Phase.ENDED:
            return []
        before = self.phase
        effects = self._handlers[type(event)](event, now)
        if self._lost and self.phase in PEER_PHASES:
            effects += self._break_if_lost(now)
        if self.phase is not before or isinstance(event, Heard):
            self._quiet_since = now
        if self.phase is not before:
            self._phase_began(now)
        return effects

    @property
    def quiet_since(self) -> float:
        """When peers were last heard, or the phase changed."""
        return self._quiet_since

    @property
    def is_knocking(self) -> bool:
        """It is being found out who can be reached, or somebody could not be, just now."""
        return self._knocking.pending or bool(
            self._knocking.missed and self._knocking.answered_since(self._quiet_since)
        )

    def proposer(self) -> str:
        """The member that should propose what follows this view; empty: nobody of it is registered."""
        members = self.view.members if self.view else ()
        return next((one for one in members if one in self.ledger.ids and one not in self._leaving), "")

    def _phase_began(self, now: float) -> None:
        if self.phase is Phase.APPLYING:
            self._began_at = now
        elif self.phase is Phase.GATHERING:
            self._gathered_at = now

    # ---- the ledger and views

    def _ledger_saw(self, event: LedgerSaw, now: float) -> list[Effect]:
        self.ledger = event.state
        self._news += 1
        if self._successor_since is None and self._has_successor():
            self._successor_since = now
        return self._consider(now)

    def _tick(self, event: Tick, now: float) -> list[Effect]:
        return self._consider(now) + self._leave_behind(now)

    def _leave_asked(self, event: LeaveAsked, now: float) -> list[Effect]:
        """Finish the step first; but a step that waits for a view may wait for ever, and the others can redo it."""
        self.leave_asked = True
        if self.phase in (Phase.WAITING, Phase.BROKEN, Phase.FORMING, Phase.LOADING):
            dropped: list[Effect] = [Drop(self.view.number, "leaving")] if self.view else []
            # The others may be leaving too, and who leaves last is not known here.
            save = self.checkpoints and self.next is not None
            return [*dropped, Deregister(), self._end("left", "asked to leave", save=save)]
        return []

    def _consider(self, now: float) -> list[Effect]:
        """Look at the ledger: follow a newer view, register again, propose what is due."""
        if not self._news:
            return []
        newest = self.ledger.view
        if self.phase is Phase.BEHIND:
            return self._register_if_missing(now) + self._catch_up(now)
        if newest is not None and self._has_successor() and not self._lingers(now):
            if self.me in newest.members:
                return self._enter(newest, now)
            if self.view is not None and self._is_left_behind(newest):
                return self._fall_behind(newest, now)
            if self.view is not None:
                return self._be_evicted(f"view {newest.number} was formed without it: {newest.reason}")
        effects = [] if self._is_left_out() else self._register_if_missing(now)
        if self.phase is Phase.WAITING:
            return effects + self._wait_outside(now)
        if self.phase in PEER_PHASES:
            broken = self._break_if_lost(now)
            if broken:
                return effects + broken
            if self.phase is Phase.TURNING:
                return effects + self._turn_or_go_on(now)
            effects += self._knock_if_silent(now)
        elif self.phase is Phase.BROKEN:
            effects += self._seek_view(now)
        return effects

    def _number(self) -> int:
        return self.view.number if self.view else 0

    def _is_left_out(self) -> bool:
        """The newest view was formed without me. I am told when the script returns; until then nobody takes me in."""
        newest = self.ledger.view
        if newest is None or self.view is None or not self._has_successor() or self.me in newest.members:
            return False
        return not self._is_left_behind(newest)

    def _lingers(self, now: float) -> bool:
        """In the middle of a step, while nobody is lost, the next view can wait: all move to it at the step's end."""
        if self.phase not in STEP_PHASES:
            return False
        if self.phase in (Phase.COMPUTING, Phase.APPLYING):
            return True  # the user's loop has the word; when it returns, this is looked at again
        assert self._successor_since is not None
        if self._somebody_is_left_behind():
            return False  # what is missing will not come
        return now - self._successor_since < self.timing.linger_s

    def _register_if_missing(self, now: float) -> list[Effect]:
        if self.me in self.ledger.ids:
            self._registered_at = None
            return []
        if self.phase is Phase.WAITING:
            knock = self._knock_at_the_door(now)
            if knock is not None:
                return knock
        if self._registered_at is not None and now - self._registered_at < self.timing.propose_again_s:
            return []  # on its way
        self._registered_at = now
        newest = self.ledger.view
        inside = self.view is not None and not (newest is not None and self._is_left_behind(newest))
        return [Register(self.ledger.view_revision if inside else None)]

    def _break_if_lost(self, now: float) -> list[Effect]:
        """Give the group up if a member that I wait for is gone: by its connection, by its lease, by its own word."""
        assert self.view is not None
        ids, rolls, number = self.ledger.ids, self.ledger.rolls, self.view.number
        mine = rolls.get(self.me)
        # Between two steps a connection is closed by who has seen the next view first. It is about to come to me too.
        closed = {} if self.phase is Phase.TURNING and not self._has_turned(now) else self._lost
        for member in self.view.members:
            if member == self.me or self._has_all_from(member):
                continue
            if member in closed:
                return self._break(closed[member], now, peer=member) + self._consider(now)
            if self._news and member not in ids:
                return self._break("its lease is gone", now, peer=member) + self._consider(now)
            if member in rolls and rolls[member].view == number:
                return self._break("it has given up this view", now, peer=member) + self._consider(now)
            if mine is not None and mine.view == number and member in mine.missed:
                # Only now that the ledger has my roll: while it is away, a peer that is silent may still come back.
                return self._break("it does not answer", now, peer=member) + self._consider(now)
        return []

    def _wait_outside(self, now: float) -> list[Effect]:
        if self.ledger.done or self.ledger.stop:
            return [Deregister(), self._end("done" if self.ledger.done else "stopped", "the run has ended")]
        if self._since is None or not self._nobody_left():
            self._since = now
        effects = self._say_that_i_am_back(now)
        decision = propose_first(self.me, self.ledger, waited_s=now - self._since, timing=self.timing)
        self.reason, self.patience = decision.reason, decision.patience
        if self._knocking.missed and self.me not in self.ledger.ids:
            self.reason = f"it cannot reach {', '.join(self._knocking.missed)}, and so it cannot be taken in"
        return effects + self._propose(decision.view, now)

    def _nobody_left(self) -> bool:
        view = self.ledger.view
        return view is None or not any(member in self.ledger.ids for member in view.members)

    def _seek_view(self, now: float) -> list[Effect]:
        """My view's group is gone, and the ledger has no newer one."""
        if self.ledger.done and self.next is None:
            # I came as the others finished. They could no more tell me whom they had left out.
            return [Deregister(), self._end("done", "the run has ended")]
        if self.ledger.view is None or self.view is None or self.ledger.view.number != self.view.number:
            self.reason = "waiting for the ledger"
            return []
        if self.me not in self.ledger.ids:
            self.reason = "registering again"
            return []
        assert self._since is not None
        effects = self._find_out(self.view, now)
        rolls = self._rolls(self.view)
        if not any(roll.missed for roll in rolls.values()):
            self._missed_since = None
        elif self._missed_since is None:
            self._missed_since = now
        standing = Standing(
            has_state=self.next is not None,
            leaving=self._leaving,
            waited_s=now - self._since,
            knocked=self._has_found_out(),
            roll_call_s=now - self._missed_since if self._missed_since is not None else 0.0,
            rolls=rolls,
            newcomers=frozenset(self.view.members) - self._formed_members if self._formed_members else frozenset(),
            resting=self._resting.among(self.ledger, now),
        )
        decision = propose_next(self.me, self.ledger, standing, self.timing)
        self.reason, self.patience = decision.reason, decision.patience
        return effects + self._propose(decision.view, now)

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
        if self.view is not None:
            if self.phase is not Phase.BROKEN:
                effects += self._break(f"view {view.number} takes over", now)
            left = {*view.members, *dict(view.late)}
            former = [member for member in self.view.members if member not in left]
            self._resting.left_out(former, self._formed_members, self.ledger, now)
        self._formed = self._formed or view.number  # what was said before I came does not count
        self.view = view
        self._forget_view()
        self._since = now
        self._leaving = frozenset()
        self._successor_since = None
        self._go(Phase.FORMING)
        self.patience = None
        self.reason = f"forming view {view.number}"
        mine = self._report(self._resting.former(self.ledger))
        self._reports[self.me] = mine
        effects += [*self._tell_of_late(view), Open(view), Broadcast(mine)]
        return effects + self._reconcile_if_complete(now)

    def _came_together(self) -> None:
        assert self.view is not None
        self._missed_since = None
        self._resting.formed(self.view.members)
        for report in self._reports.values():
            self._resting.told(report.former)

    def _break(self, reason: str, now: float, *, peer: str = "") -> list[Effect]:
        assert self.view is not None
        self._go(Phase.BROKEN)
        self.reason = reason
        self._since = now
        self._leaving = frozenset()
        self._change_due = self._save_due = False
        self._stop = ""
        return [Drop(self.view.number, reason, peer)]

    def _be_evicted(self, reason: str) -> list[Effect]:
        effects: list[Effect] = []
        if self.view is not None and self.phase is not Phase.BROKEN:
            effects.append(Drop(self.view.number, reason))
        return [*effects, self._end("evicted", reason)]

    def _sources_differ(self, event: SourcesDiffer, now: float) -> list[Effect]:
        """See doubting.py."""
        plan = self.plan
        if self.phase is not Phase.LOADING or plan is None or event.step != plan.step:
            return []
        if not self.audits.rules.every:  # nobody compares states in this run: one member's is as good as another's
            return [Fetch(plan.step, plan.fetches[self.me][:1])]
        if self.doubt.raised:
            return self._be_evicted(
                "it was offered states that differ, though those who have them found none that does"
            )
        self.doubt.stands = self.doubt.raised = True
        return self._break("it was offered states that differ", now) + self._consider(now)

    # ---- planned changes: agreed on while the training goes on, carried out between two steps

    def _planned(self, now: float) -> View | None:
        if self.view is None or self.ledger.view is None or self.ledger.view.number != self.view.number:
            return None
        return self._resting.planned(self.me, self.ledger, now)

    def _change_seen(self, now: float) -> bool:
        """All are told in my Ready that a view is due, or there: so all look for it after the same step.

        Once it did not come, it is only proposed again; nobody waits for it until the ledger has been heard of.
        """
        if self.leave_asked or self._has_successor():
            return True
        return self._turned_in_vain != self._news and self._planned(now) is not None

    def _propose_planned(self, now: float) -> list[Effect]:
        return self._propose(self._planned(now), now)

    def _turn(self, now: float) -> list[Effect]:
        self._go(Phase.TURNING)
        self._since = now
        self.reason = "waiting for the next view"
        return self._consider(now)

    def _has_turned(self, now: float) -> bool:
        """It was waited for the next view as long as it is worth."""
        assert self._since is not None
        return now - self._since >= self.timing.turn_s

    def _turn_or_go_on(self, now: float) -> list[Effect]:
        if not self._has_turned(now):
            return self._propose_planned(now)
        self._turned_in_vain = self._news
        return self._go_on()

    # ---- who can be reached

    def _knocked(self, event: Knocked, now: float) -> list[Effect]:
        return self._consider(now) if self._knocking.answer(event, now) else []

    def _knock_at_the_door(self, now: float) -> list[Effect] | None:
        """Before I register as a joiner: who cannot reach all members would only break their group. None: I can."""
        view = self.ledger.view
        members = [member for member in view.members if member in self.ledger.ids] if view else []
        knocking = self._knocking
        fresh = knocking.answered_since(now - self.timing.knock_again_s_max)
        if not members or (fresh and not knocking.missed):
            return None
        return list(knocking.ask(members, now, every_s=knocking.patience_s))

    def _knock_if_silent(self, now: float) -> list[Effect]:
        """Nothing was heard for a while from those that I wait for. Busy ones answer a knock; those cut off do not."""
        assert self.view is not None
        if self.phase is Phase.LOADING or now - self._quiet_since < self.timing.silent_s:
            return []
        effects: list[Effect] = []
        if self._knocking.answered_since(self._quiet_since) and any(
            not self._has_all_from(member) for member in self._knocking.missed if member in self.view.members
        ):
            effects += self._publish(self._my_roll(self.view), now)
        return effects + list(self._knocking.ask(self._others(), now, every_s=self.timing.knock_again_s))

    def _find_out(self, view: View, now: float) -> list[Effect]:
        """After my group broke for no reason that the ledger knows: whom can I still reach?"""
        assert self._since is not None
        effects: list[Effect] = []
        if self._has_found_out():
            # Even if all have answered: one that I never got connected to would wait in this view for ever.
            effects += self._publish(self._my_roll(view), now)
            every_s = self.timing.knock_again_s
        else:
            every_s = 0.0
        if now - self._since >= self.timing.grace_s:
            effects += self._knocking.ask(self._others(), now, every_s=every_s)
        return effects

    def _has_found_out(self) -> bool:
        """Since the group broke; or just before, if that is why I gave it up."""
        return self._since is not None and self._knocking.answered_since(self._since - self.timing.propose_again_s)

    def _others(self) -> list[str]:
        assert self.view is not None
        return [member for member in self.view.members if member != self.me and member in self.ledger.ids]

    def _my_roll(self, view: View) -> Roll:
        return Roll(view.number, self._knocking.reached, self._knocking.missed, self.next is not None)

    def _rolls(self, view: View) -> dict[str, Roll]:
        """What members found since they were last all together. My own is what I know, told or not."""
        said = {id: roll for id, roll in self.ledger.rolls.items() if id in view.members and roll.view >= self._formed}
        if self._has_found_out():
            said[self.me] = self._my_roll(view)
        return said

    def _publish(self, roll: Roll, now: float) -> list[Effect]:
        if self.ledger.rolls.get(self.me) == roll:
            return []
        if self._published_at is not None and now - self._published_at < self.timing.propose_again_s:
            return []
        self._published_at = now
        return [Publish(roll)]
