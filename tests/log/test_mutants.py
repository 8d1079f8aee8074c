"""The simulator earns its keep only if it notices: break one rule of the replication at a time, and it must say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from holdfast.log import candidacy, leading
from holdfast.log.changing import Change
from holdfast.log.configuration import Configuration, LogEnd
from holdfast.log.deduplication import Deduplication, Verdict
from holdfast.log.leading import Leading
from holdfast.log.log_copy import LogCopy
from holdfast.log.machine import ReplicaMachine
from holdfast.log.messages import (
    Append,
    Appended,
    Effect,
    ReadAsked,
    Send,
    Serve,
    Snapshot,
    Store,
    TakeSnapshot,
)
from holdfast.log.rules import Rules
from holdfast.log.tail import Tail
from tests.harness.log_simulator import Violation, simulate

SEEDS = 3000
Patch = pytest.MonkeyPatch
THREE = {"replicas": 3, "servers": 4}
STORMY = {"faults": 12, "pushes": 20, "only": ("isolate_primary", "stop_primary", "crash_primary")}
FIGURE_8 = {
    "replicas": 3,
    "servers": 3,
    "durable": True,
    "slices": 1,
    "clients": 2,
    "pushes": 12,
    "reads": 0,
    "faults": 14,
    "entries_per_append": 1,
    "agent_tells": True,
    "loss": 0.2,
    "doubling": 0.0,
    "snapshot_every": 100,
    "drift": 0.1,
    "only": ("last_words_primary", "crash_opening", "crash_opening"),
}
BUSY = {"faults": 12, "pushes": 20, "reads": 60, "clients": 3, "slices": 1}


class ListensAfterSealing(ReplicaMachine):
    """Takes what a primary sends in an epoch whose end it has promised."""

    def _takes(self, epoch: int) -> bool:
        return epoch >= self.epoch


class ListensToOldEpochs(ReplicaMachine):
    """Takes what a deposed primary sends for the new one's."""

    def _append(self, peer: str, message: Append, now: float) -> list[Effect]:
        if self.leading is not None or peer == self.me:
            return super()._append(peer, message, now)
        return super()._append(peer, replace(message, epoch=max(message.epoch, self.epoch)), now)


class ReadsAnywhereAreFresh(ReplicaMachine):
    """A replica that follows serves what it has as if it were the newest."""

    def _read(self, event: ReadAsked, now: float) -> list[Effect]:
        return [Serve(event.client, self.copy.committed, fresh=True)]


class LeadsWithoutALease(ReplicaMachine):
    """A primary takes itself for the primary until it hears otherwise."""

    def _read(self, event: ReadAsked, now: float) -> list[Effect]:
        if self.leading is not None and self.leading.is_established:
            return [Serve(event.client, self.copy.committed, fresh=True)]
        return super()._read(event, now)


class ReadsBeforeItsEpochIsEstablished(ReplicaMachine):
    """A new primary serves what it knows to be committed, which may be less than what is."""

    def _read(self, event: ReadAsked, now: float) -> list[Effect]:
        if self.leading is not None and self.leading.holds_lease(now):
            return [Serve(event.client, self.copy.committed, fresh=True)]
        return super()._read(event, now)


class LeadsTwiceInAnEpoch(ReplicaMachine):
    """Goes on as the primary after a restart."""

    def _learn(self, configuration: Configuration, revision: int, now: float) -> list[Effect]:
        known = self.configuration
        effects = super()._learn(configuration, revision, now)
        if known is None and self.candidacy is not None and configuration.primary == self.me:
            self.candidacy, self.copy.promised = None, configuration.epoch - 1
            return self._open(configuration, now)
        return effects


class ConfirmsBeforeItIsStored(ReplicaMachine):
    """Says that it has what is not on its disk yet."""

    def _confirmation(self) -> Send:
        return Send(self._primary, Appended(self.epoch, self._sent_at, self._verified))

    def _append(self, peer: str, message: Append, now: float) -> list[Effect]:
        effects = super()._append(peer, message, now)
        took = any(isinstance(effect, Store) for effect in effects)
        return [*effects, self._confirmation()] if took else effects


MUTANT_MACHINES: dict[type[ReplicaMachine], dict[str, Any]] = {
    ListensAfterSealing: {**THREE},
    ListensToOldEpochs: {**THREE, **STORMY},
    ReadsAnywhereAreFresh: {},
    LeadsWithoutALease: {**THREE, "only": ("isolate_primary",)},
    ReadsBeforeItsEpochIsEstablished: {**THREE, "only": ("crash_primary",)},
    LeadsTwiceInAnEpoch: {"durable": True, **THREE},
    ConfirmsBeforeItIsStored: {"durable": True, **THREE},
}


def acknowledge_before_the_majority(patch: Patch) -> None:
    """One copy is enough."""
    commit, real = Leading.commit, leading.reached_by_majority

    def hasty(self: Leading) -> list[Effect]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(leading, "reached_by_majority", lambda values, majority: real(values, 1))
            return commit(self)

    patch.setattr(Leading, "commit", hasty)


def commit_what_is_of_older_epochs(patch: Patch) -> None:
    """A majority has it, so it counts; but a log whose end is of a newer epoch may replace it: Raft's figure 8."""
    commit = Leading.commit

    def hasty(self: Leading) -> list[Effect]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Tail, "epoch_at", lambda tail, index: self.configuration.epoch)
            return commit(self)

    patch.setattr(Leading, "commit", hasty)


def do_not_deduplicate(patch: Patch) -> None:
    """Every push is a new one."""
    patch.setattr(Deduplication, "judge", lambda self, update: Verdict())


def do_not_replicate_the_table(patch: Patch) -> None:
    """What is in the log already is known to the primary that put it there, and to nobody else."""
    real = Leading.__init__

    def begin(
        self: Leading, me: str, start: int, configuration: Configuration, copy: LogCopy, *rest: Any, **kw: Any
    ) -> None:
        copy.table = Deduplication(copy._rules.sequence_window)
        real(self, me, start, configuration, copy, *rest, **kw)

    patch.setattr(Leading, "__init__", begin)


def leave_the_table_out_of_snapshots(patch: Patch) -> None:
    """Whoever begins with a snapshot takes a retry for a new update."""
    real = LogCopy._snapshot_if_due

    def without(self: LogCopy) -> list[Effect]:
        return [
            TakeSnapshot(Snapshot(effect.snapshot.end)) if isinstance(effect, TakeSnapshot) else effect
            for effect in real(self)
        ]

    patch.setattr(LogCopy, "_snapshot_if_due", without)


def forget_workers_without_a_trace(patch: Patch) -> None:
    """A message of a dead worker that was long on its way is taken for a new worker's."""

    def forget(self: Deduplication, worker: str, incarnation: int) -> None:
        if self.knows(worker, incarnation):
            del self._workers[worker]

    patch.setattr(Deduplication, "forget", forget)


def truncate_too_early(patch: Patch) -> None:
    """The log is cut when the snapshot is asked for, not when it is held."""
    real = LogCopy._snapshot_if_due

    def hasty(self: LogCopy) -> list[Effect]:
        effects = real(self)
        taken = [effect.snapshot for effect in effects if isinstance(effect, TakeSnapshot)]
        return effects + [cut for snapshot in taken for cut in self.snapshot_taken(snapshot)]

    patch.setattr(LogCopy, "_snapshot_if_due", hasty)


def let_the_shorter_log_win(patch: Patch) -> None:
    """Whoever reports first or least is as good as any."""

    def shortest(ends: Mapping[str, LogEnd], preferred: str) -> str:
        return min(ends, key=lambda name: ends[name])

    patch.setattr(candidacy, "newest", shortest)


def let_the_longer_log_win(patch: Patch) -> None:
    """Entries are counted, whatever epoch they are of."""

    def longest(ends: Mapping[str, LogEnd], preferred: str) -> str:
        return max(ends, key=lambda name: (ends[name].index, name))

    patch.setattr(candidacy, "newest", longest)


def lease_without_a_margin(patch: Patch) -> None:
    """Everybody's clock is taken for right."""
    patch.setattr(Rules, "lease_held_s", property(lambda self: self.lease_s))


def hand_over_without_freezing(patch: Patch) -> None:
    """The primary goes on taking updates while it is replaced by one that does not have them."""
    patch.setattr(Change, "freezes", property(lambda self: False))


def set_without_compare(patch: Patch) -> None:
    """Whoever proposes last decides."""
    from tests.harness.log_simulator.ledger import Ledger

    def carry_out(self: Ledger, request: Any) -> None:
        self.under_way.remove(request)
        if self.up:
            self.begin(request[0], request[1].configuration)
            for server in self._world.servers.values():
                self._world.after(0.05, server.read_ledger)

    patch.setattr(Ledger, "_carry_out", carry_out)


def propose_without_a_majority(patch: Patch) -> None:
    """One's own log is enough to go on with."""
    patch.setattr(candidacy.Candidacy, "missing", property(lambda self: 0 if self._reports else 1))


PATCHES: dict[Callable[[Patch], None], dict[str, Any]] = {
    acknowledge_before_the_majority: {**THREE},
    commit_what_is_of_older_epochs: FIGURE_8,
    do_not_deduplicate: {},
    do_not_replicate_the_table: {**THREE, "only": ("crash_primary",)},
    leave_the_table_out_of_snapshots: {**THREE},
    forget_workers_without_a_trace: {"only": ("worker",), "doubling": 0.5, "faults": 6},
    truncate_too_early: {"durable": True},
    let_the_shorter_log_win: {**THREE},
    let_the_longer_log_win: {**THREE, **STORMY},
    lease_without_a_margin: {
        "replicas": 3,
        "servers": 3,
        "rates": (0.8, 1.2, 1.2),
        "drift": 0.2,
        **BUSY,
        "only": ("isolate_primary",),
    },
    hand_over_without_freezing: {**THREE, "only": ("hand_over",)},
    set_without_compare: {**THREE},
    propose_without_a_majority: {**THREE},
}


def first_violation(machine_class: type[ReplicaMachine] = ReplicaMachine, **changes: Any) -> str:
    for seed in range(SEEDS):
        try:
            simulate(seed, machine_class=machine_class, **changes)
        except Violation as violation:
            return str(violation).splitlines()[0]
    return ""


@pytest.mark.parametrize("mutant", MUTANT_MACHINES, ids=lambda mutant: mutant.__name__)
def test_a_broken_machine_is_caught(mutant: type[ReplicaMachine]) -> None:
    assert first_violation(mutant, **MUTANT_MACHINES[mutant]), f"{mutant.__name__} passed {SEEDS} schedules"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_a_broken_rule_is_caught(patch: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    assert first_violation(**PATCHES[patch]), f"{patch.__name__} passed {SEEDS} schedules"


def test_the_shipped_machine_passes_the_same_schedules() -> None:
    """What catches a mutant is not the schedule alone."""
    for changes in [*MUTANT_MACHINES.values(), *PATCHES.values()]:
        for seed in range(40):
            simulate(seed, **changes)
