"""The runtime that ships, broken one rule at a time: the simulator that runs it must notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import WatchGap
from holdfast.core.words import KEY_VIEW
from holdfast.engine import building
from holdfast.engine.api.outside import Outside
from holdfast.engine.api.records import Records
from holdfast.engine.between_loops import BetweenLoops
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.loops import Loops
from holdfast.engine.pausing import Pauses
from holdfast.engine.sharing import Sharing
from holdfast.engine.transfer.snapshot_desk import SnapshotDesk
from holdfast.ledger.port import Change
from holdfast.membership import messages as m
from holdfast.membership.loop_ends import LoopCount
from holdfast.membership.machine import Machine
from holdfast.membership.stopping import StopWishes
from holdfast.membership.view_rules import Plan
from holdfast.membership.whereabouts import Whereabouts
from holdfast.net.groups import Group
from holdfast.reduce import hosts, shared_memory
from holdfast.state.snapshot import Snapshot
from tests.harness.runtime import Violation, simulate
from tests.harness.runtime.ledger import LedgerWatch
from tests.harness.runtime.scenario import Scenario
from tests.simulator import test_late, test_loops, test_mutants
from tests.simulator.test_runtime import AS_THEN, ASKS_TOO_LATE, stopped

Patch = pytest.MonkeyPatch
SEEDS = 120
SCENARIOS = Path(__file__).parent / "scenarios"


def play(name: str) -> None:
    Scenario.parse((SCENARIOS / f"{name}.txt").read_text()).play()


# ---- rules of the runtime, each with a run that shows it


def joiners_wait_for_each_other(patch: Patch) -> None:
    """The deadlock of two joiners in a script's second loop, as it once shipped."""
    test_loops.joiners_wait_for_each_other(patch)


def nobody_says_that_it_has_read_the_state(patch: Patch) -> None:
    """A wake-up that is lost: at the end of a loop the others wait for a joiner that has long read what it needs."""
    real = Machine._loaded

    def loaded(self: Machine, event: m.Loaded, now: float) -> list[m.Effect]:
        said = real(self, event, now)
        return [one for one in said if not (isinstance(one, m.Broadcast) and isinstance(one.message, m.Fetched))]

    patch.setattr(Machine, "_loaded", loaded)


def the_desk_wakes_nobody(patch: Patch) -> None:
    """A snapshot is offered, and the threads that wait to serve it are not told."""

    def offer(self: SnapshotDesk, view: int, snapshot: Snapshot) -> None:
        self._offered = (view, snapshot)

    patch.setattr(SnapshotDesk, "offer", offer)


def what_was_said_is_not_said_again(patch: Patch) -> None:
    """Who comes to a line in the next view waits for a word that was said in the last one."""
    patch.setattr(Sharing, "say_again", lambda self, group: None)


def early_words_are_lost(patch: Patch) -> None:
    """What a member says before all connections are there is said to those that are."""
    real = Group.add

    def add(self: Group, connection: Any) -> None:
        self._early, kept = [], self._early
        real(self, connection)
        self._early = kept

    patch.setattr(Group, "add", add)


def nobody_says_that_the_loop_is_left(patch: Patch) -> None:
    """A loop's end by `break` is not in the state: a joiner takes it for one that goes on."""
    patch.setattr(Loops, "leave", lambda self, goal: None)
    patch.setattr(LoopCount, "leave", lambda self: setattr(self, "passed", self.passed + 1) or False)


def one_stops_alone(patch: Patch) -> None:
    """A worker that calls run.stop ends by itself, and the others go on."""
    patch.setattr(StopWishes, "agreed", lambda self, step, members: self.for_step(step))


def one_stops_with_whom_it_hears(patch: Patch) -> None:
    """As it once was: a member that is lost is taken for one that wants to stop too."""
    patch.setattr(Outside, "members", lambda self: (self.me(), *self.sharing.others()))


def joiners_do_not_want_to_stop(patch: Patch) -> None:
    """Whoever is given the state goes on, though all who have it want to stop."""
    real = StopWishes.planned

    def planned(self: StopWishes, me: str, plan: Plan, members: Any, reports: Any) -> None:
        real(self, me, replace(plan, fetches={}), members, reports)

    patch.setattr(StopWishes, "planned", planned)


def wishes_are_not_reported(patch: Patch) -> None:
    """In the next view nobody knows who wanted to stop in the last one."""
    real = Machine._report
    patch.setattr(Machine, "_report", lambda self, former: replace(real(self, former), over=""))


def nothing_follows_a_stop_of_some(patch: Patch) -> None:
    """As it once was: who has the mean of the step in which a stop was told finishes, and takes it along."""
    patch.setattr(Records, "stops_before", lambda self, step: self.stop[1] if self.stop is not None else "")


def those_who_have_been_there_are_waited_for(patch: Patch) -> None:
    """One that is given a step's mean waits in its lines for a joiner, which waits to hear whether that one stops."""
    patch.setattr(Whereabouts, "has_applied", lambda self, member, step: False)


def joiners_are_waited_for_at_lines_they_pass(patch: Patch) -> None:
    """As it once was: seed 1093."""
    patch.setattr(Whereabouts, "came_with", lambda self, member, step: False)


def views_are_set_without_compare(patch: Patch) -> None:
    """The feed puts a view into the ledger, whichever is there."""
    patch.setattr(LedgerFeed, "_propose", lambda self, view, expected: self._ledger.put(KEY_VIEW, view.encode()))


def gaps_are_ignored(patch: Patch) -> None:
    """A watch that has missed something goes on with what it knows."""
    real = LedgerWatch.next

    def next_changes(self: LedgerWatch, timeout_s: float) -> tuple[Change, ...]:
        try:
            return real(self, timeout_s)
        except WatchGap:
            self._revision = self._line._service.machine.revision
            return ()

    patch.setattr(LedgerWatch, "next", next_changes)


def nobody_trains_without_the_ledger(patch: Patch) -> None:
    """A step waits until the ledger answers."""
    patch.setattr(Pauses, "ledger_away_too_long", lambda self, step, now: self._feed.down_since is not None)


def stamps_are_not_looked_at(patch: Patch) -> None:
    """One that was stopped does not notice that what it has read belongs to another step."""
    for module in (hosts, shared_memory):
        patch.setattr(module, "check_stamps", lambda arenas, members, right: None)


def a_state_is_offered_beyond_its_loop(patch: Patch) -> None:
    """The lines after a loop change a state that is still on the desk."""

    def let_them_read(self: BetweenLoops) -> None:
        self._wait_while(self._machine.readers)
        self._checkpoints.wait_copied()

    patch.setattr(BetweenLoops, "let_them_read", let_them_read)


def others_read_what_the_lines_change(patch: Patch) -> None:
    """Nobody waits for those that read its state. By itself that costs joiners their place, and nobody a bit."""
    test_loops.change_what_others_read(patch)
    a_state_is_offered_beyond_its_loop(patch)


def with_outages() -> None:
    for seed in range(20):
        simulate(seed, fault="outage", faults=2, in_steps=True)


RUNTIME: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (joiners_wait_for_each_other, lambda: play("two_joiners_in_the_second_loop")),
    (nobody_says_that_it_has_read_the_state, lambda: play("joiners_where_loops_end")),
    (the_desk_wakes_nobody, lambda: play("two_joiners_in_the_second_loop")),
    (what_was_said_is_not_said_again, lambda: simulate(1389, **AS_THEN)),
    (early_words_are_lost, lambda: play("quiet")),
    (nobody_says_that_the_loop_is_left, lambda: play("killed_in_a_loop_that_is_left_early")),
    (one_stops_alone, lambda: stopped(0, "leader")),
    (one_stops_with_whom_it_hears, lambda: stopped(10, "leader", fault="reset")),
    (joiners_do_not_want_to_stop, lambda: stopped(24, "all")),
    (wishes_are_not_reported, lambda: stopped(24, "all")),
    (nothing_follows_a_stop_of_some, lambda: stopped(85, "leader", fault="reset")),
    (those_who_have_been_there_are_waited_for, lambda: stopped(152, "all", fault="reset")),
    (joiners_are_waited_for_at_lines_they_pass, lambda: simulate(1093, **AS_THEN)),
    (views_are_set_without_compare, lambda: simulate(30)),
    (gaps_are_ignored, lambda: simulate(5)),
    (nobody_trains_without_the_ledger, with_outages),
    (stamps_are_not_looked_at, lambda: simulate(121)),
    (a_state_is_offered_beyond_its_loop, lambda: simulate(ASKS_TOO_LATE[0])),
    (others_read_what_the_lines_change, lambda: play("joiners_where_loops_end")),
    (test_loops.keep_what_the_lines_did, lambda: play("two_joiners_in_the_second_loop")),
    (test_loops.forget_what_is_passed, lambda: play("two_joiners_in_the_second_loop")),
]


@pytest.mark.parametrize(("mutate", "run"), RUNTIME, ids=lambda one: one.__name__)
def test_a_broken_runtime_is_caught(
    mutate: Callable[[Patch], None], run: Callable[[], object], monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation):
        run()


# ---- rules of the machine: the others of test_mutants.py are still shown by the simulator of the machine

MACHINES = (
    test_mutants.SkipsReconciliation,
    test_mutants.CommitsWithoutTheOthersSlices,
    test_mutants.DoesNotWaitForJoiners,
    test_mutants.GoesOnAfterEviction,
    test_mutants.ForgetsLostConnections,
)
RULES = (
    test_mutants.forget_a_shard,
    test_mutants.double_a_shard,
    test_mutants.ignore_leases,
    test_mutants.join_without_state,
)


@pytest.mark.parametrize("mutant", MACHINES, ids=lambda mutant: mutant.__name__)
def test_a_broken_machine_is_caught(mutant: type[Machine], monkeypatch: Patch) -> None:
    monkeypatch.setattr(building, "Machine", mutant)
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulate(seed, save_every=0)


@pytest.mark.parametrize(
    ("mutant", "changes"),
    [
        (test_mutants.DropsTheResultThatCameEarly, {"fault": "reset", "network": "slow", "hosts": 1, "path": "hosts"}),
        (test_mutants.LeavesOutWithoutAsking, {"fault": "partition", "hosts": 2, "path": "hosts"}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_broken_machine_is_caught_where_its_rule_matters(
    mutant: type[Machine], changes: dict[str, Any], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(building, "Machine", mutant)
    with pytest.raises(Violation):
        for seed in range(40):
            simulate(seed, **{"workers": 4, "faults": 6, "in_steps": True, "ambushes": 1.0, "save_every": 0, **changes})


@pytest.mark.parametrize("mutant", [test_mutants.GivesUpTheGroupFirst, test_mutants.WaitsForTheViewThatIsDue])
def test_a_machine_that_does_not_go_on_without_the_ledger_is_caught(mutant: type[Machine], monkeypatch: Patch) -> None:
    monkeypatch.setattr(building, "Machine", mutant)
    with pytest.raises(Violation):
        play("the_ledger_goes_when_a_joiner_has_come")


@pytest.mark.parametrize("mutate", RULES, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_is_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulate(seed, save_every=0)


def test_a_machine_that_saves_too_early_is_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(building, "Machine", test_mutants.SavesBeforeItApplies)
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulate(seed)


def test_a_late_worker_that_keeps_its_state_is_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(building, "Machine", test_late.ComesBackWithoutFetching)
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulate(seed, late_s=0.5, fault="stop", **{**AS_THEN, "faults": 4, "in_steps": True, "workers": 4})
