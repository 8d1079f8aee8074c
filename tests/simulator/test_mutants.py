"""The simulator earns its keep only if it notices: break one rule of the protocol at a time, and it must say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.words import KEY_VIEW, KEY_WORKERS, View
from holdfast.membership import balance, step_rules, stepping, view_rules
from holdfast.membership import machine as machine_module
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.view_rules import Decision, LedgerState, Plan, Standing, Timing
from tests.harness.simulator import Violation, simulate
from tests.harness.simulator.books import Books
from tests.harness.simulator.feed import Command, Feed
from tests.harness.simulator.ledger import Ledger
from tests.harness.simulator.network import Network
from tests.harness.simulator.worker import Worker

SEEDS = 2500
Patch = pytest.MonkeyPatch


class NoFence(Machine):
    """Listens to what is said in any view."""

    def _listens_to(self, view: int) -> bool:
        return self.view is not None and self.phase is not Phase.BROKEN


class AppliesTwice(Machine):
    """A gradient that a peer sends is handed to the user's loop again."""

    def _commit(self, step: int, *, received: bool) -> list[m.Effect]:
        effects = super()._commit(step, received=received)
        return [*effects, *effects] if received else effects


class SkipsReconciliation(Machine):
    """Starts where it stands, whatever the others report."""

    def _reconcile_if_complete(self, now: float) -> list[m.Effect]:
        if self.phase is Phase.FORMING and self.view and len(self._reports) == len(self.view.members):
            self._reports = {member: replace(self._reports[self.me]) for member in self.view.members}
        return super()._reconcile_if_complete(now)


class CommitsWithoutTheOthersSlices(Machine):
    """Takes its own Done for everybody's."""

    def _commit_if_done(self) -> list[m.Effect]:
        if self.phase is Phase.REDUCING and self.two_rounds and self.me in self._done.get(self.next or 0, ()):
            return self._commit(self.next or 0, received=False)
        return []


class DoesNotWaitForJoiners(Machine):
    """Reduces without those that still load the snapshot."""

    def _reduce_if_ready(self, now: float) -> list[m.Effect]:
        late: set[str] = set()
        if self.plan is not None and self.plan.step == self.next:
            ready = self._ready.setdefault(self.next, {})
            late = {member for member in self.plan.fetches if member not in ready}
            ready.update({member: m.Ready(self.next, ()) for member in late})
        effects = super()._reduce_if_ready(now)
        return [
            m.Reduce(effect.step, tuple(part for part in effect.shards if part[0] not in late))
            if isinstance(effect, m.Reduce)
            else effect
            for effect in effects
        ]


class GoesOnAfterEviction(Machine):
    """Does not believe that the others went on without it."""

    def _be_evicted(self, reason: str) -> list[m.Effect]:
        return []


class DropsTheResultThatCameEarly(Machine):
    """Takes a peer's gradient only when it already waits for it."""

    def _receive_if_sent(self) -> list[m.Effect]:
        if self.phase is not Phase.RECEIVING:
            self._results.clear()
        return super()._receive_if_sent()


class ForgetsLostConnections(Machine):
    """Does not notice that a peer is gone unless the ledger says so, and ignores the ledger."""

    def _break_if_lost(self, now: float) -> list[m.Effect]:
        return []


class GivesUpTheGroupFirst(Machine):
    """Drops a group that works before the next view is agreed on: without the ledger, nobody trains."""

    def _turn(self, now: float) -> list[m.Effect]:
        return self._break("a change of membership is due", now) + self._consider(now)


class WaitsForTheViewThatIsDue(Machine):
    """Does not go on when the ledger does not show the view that is due."""

    def _turn_or_go_on(self, now: float) -> list[m.Effect]:
        return self._propose_planned(now)


class LeavesOutWithoutAsking(Machine):
    """Who cannot be reached is left out without a compare-and-set."""

    def _propose(self, view: View | None, now: float) -> list[m.Effect]:
        if view is not None and "not everyone reaches" in view.reason and self.me in view.members:
            return self._enter(view, now)
        return super()._propose(view, now)


class ComesBackUnderItsOldName(Machine):
    """Once left out it registers again, rather than end."""

    def _be_evicted(self, reason: str) -> list[m.Effect]:
        assert self.view is not None
        dropped = [m.Drop(self.view.number, reason)] if self.phase is not Phase.BROKEN else []
        self.phase, self.view, self.next, self.held = Phase.WAITING, None, None, frozenset()
        return [*dropped, m.Register()]


class DoesNotReadRolls(Machine):
    """Goes on waiting for a member that has given up the view and cannot say so directly."""

    def _break_if_lost(self, now: float) -> list[m.Effect]:
        ledger, self.ledger = self.ledger, replace(self.ledger, rolls={})
        effects = super()._break_if_lost(now)
        self.ledger = ledger
        return effects


class TakesTheBusyForCutOff(Machine):
    """Does not wait for an answer to its knock."""

    def _knocked(self, event: m.Knocked, now: float) -> list[m.Effect]:
        return super()._knocked(replace(event, reached=(), missed=event.reached + event.missed), now)


class DoesNotKnockAtTheDoor(Machine):
    """Registers though it cannot reach the members, and takes in those that could not be reached before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._resting.among = lambda ledger, now: frozenset()  # type: ignore[method-assign]

    def _knock_at_the_door(self, now: float) -> list[m.Effect] | None:
        return None


class StartsOverWithoutASearch(Machine):
    """Where nobody has state, training begins anew, whatever is in storage."""

    def _search(self, view: View) -> list[m.Effect]:
        self._reports[view.members[0]] = replace(self._reports[view.members[0]], searched=True)
        return self._reconcile_if_complete(0.0)


class SavesBeforeItApplies(Machine):
    """Takes its snapshot when the step commits, not when it is applied."""

    def _commit(self, step: int, *, received: bool) -> list[m.Effect]:
        effects = super()._commit(step, received=received)
        assert self.view is not None
        return [m.Save(step + 1, self.view.members), *effects] if self._save_due else effects


SAVING_MACHINES = [StartsOverWithoutASearch, SavesBeforeItApplies]
MUTANT_MACHINES = [
    NoFence,
    AppliesTwice,
    SkipsReconciliation,
    CommitsWithoutTheOthersSlices,
    DoesNotWaitForJoiners,
    GoesOnAfterEviction,
    DropsTheResultThatCameEarly,
    ForgetsLostConnections,
    GivesUpTheGroupFirst,
    WaitsForTheViewThatIsDue,
    LeavesOutWithoutAsking,
    ComesBackUnderItsOldName,
    DoesNotReadRolls,
    TakesTheBusyForCutOff,
    DoesNotKnockAtTheDoor,
]


class TakesUnknownForDone(Feed):
    """A proposal of which nothing is known is taken for the view that holds."""

    def failed(self, command: Command) -> None:
        super().failed(command)
        proposed = getattr(self, "proposed", None)
        if proposed is not None:
            self.worker.take(m.LedgerSaw(replace(self._state(), view=proposed)))

    def propose(self, view: View, expected: int) -> None:
        self.proposed = view
        super().propose(view, expected)


class TakesUnknownForNotDone(Feed):
    """A proposal of which nothing is known is taken for not done, and its number is used again for another view."""

    def failed(self, command: Command) -> None:
        super().failed(command)
        self.sure = True  # that nobody has written since

    def _propose(self, view: View, expected: int) -> Command:
        if getattr(self, "sure", False):
            yield lambda: self.world.ledger.put(KEY_VIEW, view)
        else:
            yield from super()._propose(view, expected)


class IgnoresGaps(Feed):
    """Goes on with what it knows when its watch has missed something."""

    def read_anew(self) -> None:
        if self._revision < 0:
            super().read_anew()
        self._revision = self.world.ledger.revision


class LosesTheLease(Feed):
    """Remembers a lease only when the registration under it is known to be done."""

    def _register(self, while_view: int | None) -> Command:
        ledger, key = self.world.ledger, KEY_WORKERS + self.worker.id
        lease = yield ledger.grant
        if (yield lambda: ledger.compare_and_set(key, self.worker.id, 0, lease)) is not None:
            self.lease = lease


MUTANT_FEEDS = [TakesUnknownForDone, TakesUnknownForNotDone, IgnoresGaps, LosesTheLease]


def forget_a_shard(patch: Patch) -> None:
    real = balance.divide

    def divide(shards: int, members: Sequence[str], paces: Mapping[str, float]) -> dict[str, tuple[int, ...]]:
        found = real(shards, members, paces)
        last = members[-1]
        return {**found, last: found[last][:-1]} if shards > 1 else found

    patch.setattr(step_rules, "divide", divide)
    _do_not_count(patch)


def double_a_shard(patch: Patch) -> None:
    """What the others hold is computed again."""
    real = view_rules.assign

    def assign(shards: int, able: Sequence[str], held: Mapping[str, frozenset[int]] | None = None) -> Any:
        fresh = real(shards, able)
        return {member: tuple(sorted({*fresh[member], *(held or {}).get(member, ())})) for member in able}

    patch.setattr(view_rules, "assign", assign)
    _do_not_count(patch)


def _do_not_count(patch: Patch) -> None:
    """Without the machine's own check that a step is covered exactly once."""

    def reduce_if_ready(self: Machine, now: float) -> list[m.Effect]:
        if self.phase is not Phase.GATHERING:
            return []
        assert self.view is not None and self.next is not None
        ready = self._ready.get(self.next, {})
        if len(ready) < len(self.view.members):
            return []
        self._go(Phase.REDUCING)
        return [m.Reduce(self.next, tuple((member, ready[member].shards) for member in self.view.members))]

    patch.setattr(Machine, "_reduce_if_ready", reduce_if_ready)


def ignore_leases(patch: Patch) -> None:
    """A worker that was ever a member counts as registered."""

    def ids(self: LedgerState) -> frozenset[str]:
        members = self.view.members if self.view else ()
        return frozenset([*members, *(worker.id for worker in self.registered)])

    patch.setattr(LedgerState, "ids", property(ids))


def set_without_compare(patch: Patch) -> None:
    """The ledger takes any view that is proposed."""
    real = Ledger.compare_and_set

    def put(self: Ledger, key: str, value: Any, expected: int, *others: Any) -> int | None:
        return self.put(key, value) if key == KEY_VIEW else real(self, key, value, expected, *others)

    patch.setattr(Ledger, "compare_and_set", put)


def start_over_too_early(patch: Patch) -> None:
    """A worker without state does not wait for one that hangs and may have it."""

    def propose_next(me: str, ledger: LedgerState, standing: Standing, timing: Timing) -> Decision:
        return view_rules.propose_next(me, ledger, replace(standing, has_state=True), timing)

    patch.setattr(machine_module, "propose_next", propose_next)


def give_up_the_silent(patch: Patch) -> None:
    """New workers take a silent worker for a dead one."""

    def propose_first(me: str, ledger: LedgerState, **rest: Any) -> Decision:
        members = ledger.view.members if ledger.view else ()
        return view_rules.propose_first(me, replace(ledger, dead=ledger.dead | set(members)), **rest)

    patch.setattr(machine_module, "propose_first", propose_first)


def join_without_state(patch: Patch) -> None:
    """A joiner computes at once, with the weights its script began with."""
    real = view_rules.reconcile

    def reconcile(view: View, reports: Any, shards: int) -> Plan:
        plan = real(view, reports, shards)
        assignment = {**dict.fromkeys(plan.fetches, ()), **plan.assignment}
        return replace(plan, fetches={}, assignment=assignment)

    patch.setattr(stepping, "reconcile", reconcile)


def ignore_stamps(patch: Patch) -> None:
    """A worker that slept does not look whether the sums that it read were still those of its step."""
    patch.setattr(Books, "moved_on", lambda self, number, effect: "")


def never_leave_out(patch: Patch) -> None:
    """The same members are tried again, whoever cannot reach whom."""
    patch.setattr(view_rules, "severed", lambda members, rolls: frozenset())


def leave_oneself_out_with_the_state(patch: Patch) -> None:
    """A proposer that is cut off lets the others go on, whether or not they have the state."""

    def left_out(me: str, live: Sequence[str], cut: Any, standing: Standing, timing: Timing) -> tuple[str, ...]:
        return tuple(member for member in live if any(me in pair and member == me for pair in cut))

    patch.setattr(view_rules, "_left_out", left_out)


def stop_without_the_ledger(patch: Patch) -> None:
    """A step waits until the ledger answers."""
    real = Worker._compute

    def compute(self: Worker, effect: m.Compute) -> None:
        if self.world.ledger.up:
            real(self, effect)
        else:
            self.work(0.5, lambda: compute(self, effect), blocked=True)

    patch.setattr(Worker, "_compute", compute)


def listen_to_an_old_view_after_a_heal(patch: Patch) -> None:
    """What waited in a cut network is heard as if it were said in the view of now."""

    def hand_over(self: Network, worker: Worker, event: m.Event) -> None:
        if isinstance(event, m.Heard) and worker.machine.view is not None:
            event = replace(event, view=worker.machine.view.number)
        worker.take(event)

    patch.setattr(Network, "hand_over", hand_over)


PATCHES: list[Callable[[Patch], None]] = [
    forget_a_shard,
    double_a_shard,
    ignore_leases,
    set_without_compare,
    start_over_too_early,
    give_up_the_silent,
    join_without_state,
    ignore_stamps,
    never_leave_out,
    leave_oneself_out_with_the_state,
    stop_without_the_ledger,
    listen_to_an_old_view_after_a_heal,
]


def first_violation(
    machine_class: type[Machine] = Machine, feed_class: type[Feed] = Feed, *, saves: bool = False
) -> str:
    """Without checkpoints, unless they are what is broken: a run that has some starts over less often."""
    changes = {} if saves else {"save_every": 0}
    for seed in range(SEEDS):
        try:
            simulate(seed, machine_class=machine_class, feed_class=feed_class, **changes)
        except Violation as violation:
            return str(violation).splitlines()[0]
    return ""


@pytest.mark.parametrize("mutant", MUTANT_MACHINES, ids=lambda mutant: mutant.__name__)
def test_a_broken_machine_is_caught(mutant: type[Machine]) -> None:
    assert first_violation(mutant), f"{mutant.__name__} passed {SEEDS} schedules"


@pytest.mark.parametrize("mutant", SAVING_MACHINES, ids=lambda mutant: mutant.__name__)
def test_a_machine_that_saves_or_resumes_wrongly_is_caught(mutant: type[Machine]) -> None:
    assert first_violation(mutant, saves=True), f"{mutant.__name__} passed {SEEDS} schedules"


@pytest.mark.parametrize("mutant", MUTANT_FEEDS, ids=lambda mutant: mutant.__name__)
def test_a_broken_line_to_the_ledger_is_caught(mutant: type[Feed]) -> None:
    assert first_violation(feed_class=mutant), f"{mutant.__name__} passed {SEEDS} schedules"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_a_broken_rule_is_caught(patch: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    assert first_violation(), f"{patch.__name__} passed {SEEDS} schedules"
