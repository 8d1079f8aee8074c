"""The replication of one slice's log as a machine: events in, effects out. No IO, no clock, no threads.

One machine is one replica. The ledger holds the configuration (epoch, primary, replicas); the primary orders updates,
the replicas append, and an update is acknowledged when a majority has it. The runtime and the simulator
(tests/harness/log_simulator) drive this same class: they turn what happens into events, and perform what comes back.

Invariants, checked here with `assert` and in the simulator from outside:
- there is one primary in an epoch, and it leads in it once: one that starts again looks for the next epoch;
- nothing of an epoch is taken after it is sealed, nor after a newer one is known;
- what is acknowledged is in the log of every later primary, and is applied once, in log order;
- a replica that has confirmed a primary helps nobody to depose it for the time of the lease, by its own clock.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.log.candidacy import Candidacy
from holdfast.log.changing import Renew
from holdfast.log.configuration import Configuration
from holdfast.log.leading import Leading
from holdfast.log.log_copy import LogCopy
from holdfast.log.messages import (
    STORES_NO_MORE,
    AddReplica,
    Append,
    Appended,
    Configured,
    CutLog,
    Effect,
    Event,
    Exited,
    Fenced,
    FetchSnapshot,
    HandOver,
    Heard,
    LedgerReached,
    LedgerSaw,
    Mismatch,
    Offer,
    Persisted,
    Pushed,
    ReadAsked,
    Refuse,
    RefuseRead,
    RemoveReplica,
    Resigned,
    Retire,
    Seal,
    Sealed,
    Send,
    Serve,
    Snapshot,
    SnapshotFailed,
    SnapshotFetched,
    SnapshotTaken,
    StopAdding,
    Stored,
    StoreFailed,
    Tell,
    Tick,
    Wish,
    WorkerGone,
)
from holdfast.log.rules import Rules


class ReplicaMachine:
    """One replica of one slice. `handle` takes an event and returns the effects to perform, in order.

    `start` counts the processes under this name. With `stored` it goes on with what an earlier one left.
    """

    def __init__(self, me: str, rules: Rules, *, now: float, start: int = 1, stored: Stored | None = None) -> None:
        self.me = me
        self.start = start
        self.rules = rules
        self.copy = LogCopy(rules, stored or Stored())
        self.configuration: Configuration | None = None
        self._revision = 0
        self.epoch = 0  # the newest that was heard of; the ledger may not have been read yet
        self.leading: Leading | None = None
        self.candidacy: Candidacy | None = None
        self._primary = ""  # of this epoch, where it is known
        self._heard_primary = False
        self._primary_start = 0
        self._heard_at = now  # a promise may have been given just before the start
        self._released_at: float | None = None  # when the primary was found to lead no more
        self._ended: dict[str, int] = {}  # server -> the newest of its processes that has ended
        self._verified = self.copy.committed  # up to here the log is known to be the primary's
        self._sent_at = 0.0  # the newest time, by its own clock, that was heard of the primary in this epoch
        self._confirm_when_stored = False
        self._sealing: set[str] = set()  # who is told where the log ends, once the promise is stored
        self._fetching: tuple[str, Snapshot] | None = None
        self._relayed_at = now
        self._ledger_answers = True
        self._messages: dict[type, Callable[..., list[Effect]]] = {
            Append: self._append,
            Appended: self._appended,
            Mismatch: self._mismatched,
            Offer: self._offered,
            Seal: self._seal,
            Sealed: self._sealed,
            Fenced: self._fenced,
            Resigned: self._resigned,
            Configured: self._configured,
        }
        self._handlers: dict[type, Callable[..., list[Effect]]] = {
            LedgerSaw: lambda event, now: self._learn(event.configuration, event.revision, now),
            Heard: lambda event, now: self._messages[type(event.message)](event.peer, event.message, now),
            Pushed: self._pushed,
            ReadAsked: self._read,
            Persisted: self._persisted,
            StoreFailed: self._store_failed,
            SnapshotTaken: lambda event, now: self.copy.snapshot_taken(event.snapshot),
            SnapshotFetched: self._fetched,
            SnapshotFailed: self._snapshot_failed,
            Exited: self._exited,
            LedgerReached: self._ledger_reached,
            WorkerGone: self._worker_gone,
            AddReplica: self._wished,
            RemoveReplica: self._wished,
            HandOver: self._wished,
            StopAdding: self._stop_adding,
            CutLog: self._cut_log,
            Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._handlers[type(event)](event, now)
        if self.leading is not None:
            effects += self.leading.commit()
            effects += self.leading.advance_change(self._revision, now)
            effects += self.leading.send(now)
        return effects

    @property
    def hears_primary(self) -> bool:
        """It has heard the primary of the newest epoch, and may have confirmed something to it."""
        return self._heard_primary

    @property
    def is_member(self) -> bool:
        return self.configuration is not None and self.me in self.configuration.replicas

    def is_left_over(self, now: float) -> bool:
        """It is no replica by the newest epoch that it has heard of, and nobody has been adding it for a long time.

        What it has counts for nothing: an epoch counts anew what its replicas confirm.
        """
        known = self.configuration
        newest = max(self.epoch, self.copy.promised, self.copy.end.epoch)
        if known is None or self.me in known.replicas or newest > known.epoch:
            return False
        return now - self._heard_at > self.rules.change_timeout_s

    def waits_for(self, now: float) -> str:
        """What this replica waits for, if for anything."""
        if self.candidacy is not None:
            missing = self.candidacy.missing
            what = f"the reports of {missing} more replicas" if missing else "the ledger to take its proposal"
            return f"epoch {self.epoch + 1} ({self.candidacy.reason}): {what}"
        if self.leading is not None and not self.leading.is_established:
            return f"a majority to have the first entry of epoch {self.epoch}"
        if self.leading is None and self.is_member and not self._heard_primary:
            return f"{self._primary or 'a primary'}, to lead in epoch {self.epoch}"
        return ""

    # ---- epochs

    def _learn(self, configuration: Configuration, revision: int, now: float) -> list[Effect]:
        """The ledger has this configuration, whoever says so."""
        known = self.configuration
        if known is not None and configuration.epoch <= known.epoch:
            assert configuration.epoch < known.epoch or configuration == known, (known, configuration)
            return []
        self.configuration, self._revision = configuration, revision
        effects: list[Effect] = []
        if known is not None and self.me in known.replicas and self.me not in configuration.replicas:
            effects.append(Retire(configuration.reason))
        if configuration.epoch < self.epoch:
            return effects
        if configuration.epoch > self.epoch:
            effects += self._enter(configuration.epoch, configuration.primary, now)
        self._primary = configuration.primary
        self._ended = {one: start for one, start in self._ended.items() if one in configuration.replicas}
        if configuration.primary != self.me:
            return effects
        if configuration.epoch > self.copy.promised and self.copy.end.epoch < configuration.epoch:
            return effects + self._open(configuration, now)
        return effects + self._stand(now, "the primary starts again, or has sealed its own epoch", released=True)

    def _enter(self, epoch: int, primary: str, now: float) -> list[Effect]:
        """A newer epoch than any heard of: whatever was going on in the old one is over."""
        assert epoch > self.epoch
        effects = self._step_down(f"epoch {epoch} has begun", primary) if primary != self.me else []
        self.epoch, self._primary = epoch, primary
        self.candidacy = None
        self._heard_primary, self._heard_at, self._released_at = False, now, None
        self._verified, self._confirm_when_stored = self.copy.committed, False
        self._sealing.clear()
        return effects

    def _open(self, configuration: Configuration, now: float) -> list[Effect]:
        before = self.leading
        self.leading = Leading(self.me, self.start, configuration, self.copy, self.rules, now=now)
        if before is not None:
            self.leading.take_over_waiting(before)
        reason = configuration.reason or "the slice is new"
        return [Tell(f"lead in epoch {configuration.epoch}", reason), *self.leading.open()]

    def _step_down(self, reason: str, primary: str = "") -> list[Effect]:
        if self.leading is None:
            return []
        effects: list[Effect] = [Tell(f"lead no more in epoch {self.epoch}", reason)]
        effects += self.leading.let_go(reason, primary)
        self.leading = None
        return effects

    # ---- as a replica that follows

    def _takes(self, epoch: int) -> bool:
        return epoch >= self.epoch and epoch > self.copy.promised

    def _turn_away(self, peer: str, epoch: int) -> list[Effect]:
        """Tell whoever speaks in an epoch that is over what is known here."""
        if self.configuration is not None and self.configuration.epoch > epoch:
            return [Send(peer, Configured(self.configuration, self._revision))]
        return [Send(peer, Fenced(epoch))]

    def _hear_primary(self, peer: str, message: Append | Offer, now: float) -> list[Effect]:
        effects = self._enter(message.epoch, peer, now) if message.epoch > self.epoch else []
        assert self.leading is None, "there is one primary in an epoch"
        self._sent_at = max(self._sent_at, message.sent_at) if self._heard_primary else message.sent_at
        self._primary, self._heard_primary, self._heard_at = peer, True, now
        self._primary_start = message.start
        self._release_if_exited(now)
        return effects

    def _release_if_exited(self, now: float) -> None:
        """The process that leads in this epoch has ended, and no other one does: its lease binds nobody."""
        exited = self._heard_primary and self._ended.get(self._primary, 0) >= self._primary_start
        if exited and self._released_at is None:
            self._released_at = now

    def _append(self, peer: str, message: Append, now: float) -> list[Effect]:
        if not self._takes(message.epoch):
            return self._turn_away(peer, message.epoch)
        effects = self._hear_primary(peer, message, now)
        tail, previous = self.copy.tail, message.previous
        if previous.index > self.copy.committed and tail.epoch_at(previous.index) != previous.epoch:
            try_after = max(self.copy.committed, min(self.copy.end.index, previous.index - 1))
            return [*effects, Send(peer, Mismatch(message.epoch, message.sent_at, try_after))]
        # What is committed is the same everywhere, so it need not be compared.
        fresh = [
            entry
            for entry in message.entries
            if entry.index > self.copy.committed and tail.epoch_at(entry.index) != entry.epoch
        ]
        if fresh:
            effects += self.copy.write([entry for entry in message.entries if entry.index >= fresh[0].index])
        self._verified = max(self._verified, previous.index + len(message.entries), self.copy.committed)
        if message.committed > self.copy.committed:
            effects += self.copy.commit_to(max(self.copy.committed, min(message.committed, self._verified)))
        self._confirm_when_stored = self.copy.persisted < self._verified
        return effects if fresh else [*effects, self._confirmation()]

    def _confirmation(self) -> Send:
        """So much is stored here; and since the primary was heard, nobody is helped to depose it."""
        return Send(self._primary, Appended(self.epoch, self._sent_at, min(self._verified, self.copy.persisted)))

    def _offered(self, peer: str, message: Offer, now: float) -> list[Effect]:
        if not self._takes(message.epoch):
            return self._turn_away(peer, message.epoch)
        effects = self._hear_primary(peer, message, now)
        if message.snapshot.end.index <= self.copy.committed:
            self._verified = max(self._verified, self.copy.committed)
            return [*effects, self._confirmation()]
        if self._fetching is None or self._fetching[0] != peer:
            self._fetching = (peer, message.snapshot)
            effects.append(FetchSnapshot(peer, message.snapshot))
        return effects

    def _fetched(self, event: SnapshotFetched, now: float) -> list[Effect]:
        if self._fetching is None or self._fetching[1] != event.asked:
            return []
        self._fetching = None
        if self.leading is not None or self.copy.promised >= self.epoch:
            return []  # a log whose end was reported stays as it is
        if event.snapshot.end.index <= self.copy.committed:
            return []
        effects = self.copy.install(event.snapshot)
        self._verified = min(max(self._verified, self.copy.committed), self.copy.end.index)
        return [*effects, self._confirmation()] if self._heard_primary else effects

    def _snapshot_failed(self, event: SnapshotFailed, now: float) -> list[Effect]:
        if self._fetching is not None and self._fetching[1] == event.snapshot:
            self._fetching = None
        else:
            self.copy.snapshot_not_taken()
        return [Tell(f"no snapshot up to entry {event.snapshot.end.index}", event.reason)]

    # ---- storing

    def _persisted(self, event: Persisted, now: float) -> list[Effect]:
        self.copy.stored(event.ticket)
        effects: list[Effect] = []
        if self._confirm_when_stored and self._heard_primary and self.copy.promised < self.epoch:
            effects.append(self._confirmation())
            self._confirm_when_stored = self.copy.persisted < self._verified
        return effects + self._report(now)

    def _store_failed(self, event: StoreFailed, now: float) -> list[Effect]:
        effects: list[Effect] = [Tell(STORES_NO_MORE, event.reason)]
        self.copy.not_stored(now)
        self._verified = min(self._verified, self.copy.end.index)
        self._confirm_when_stored = False
        if self.leading is not None:
            effects += self._resign(f"it cannot store: {event.reason}", now)
        return effects

    def _resign(self, reason: str, now: float) -> list[Effect]:
        assert self.leading is not None and self.configuration is not None
        others = [one for one in self.configuration.replicas if one != self.me]
        effects = self._step_down(reason)
        effects += [Send(one, Resigned(self.epoch, reason)) for one in others]
        return effects + self._stand(now, reason, released=True)

    # ---- finding the next primary

    def _promise_holds(self, now: float) -> bool:
        return self._released_at is None and now - self._heard_at < self.rules.lease_s

    def _stand(self, now: float, reason: str, *, released: bool) -> list[Effect]:
        """Seal the epoch here, and ask the others to."""
        assert self.configuration is not None and self.configuration.epoch == self.epoch and self.leading is None
        self.candidacy = Candidacy(self.me, self.configuration, self.rules, released=released, reason=reason)
        effects: list[Effect] = [Tell(f"seek epoch {self.epoch + 1}", reason)]
        if self.copy.promise_persisted < self.epoch:
            effects += self.copy.promise(self.epoch)
        return [*effects, *self._report(now), *self.candidacy.ask(now)]

    def _seal(self, peer: str, message: Seal, now: float) -> list[Effect]:
        if message.epoch < self.epoch:
            return self._turn_away(peer, message.epoch) if self.configuration else []
        if self.leading is not None and self.epoch == message.epoch and self.leading.holds_lease(now):
            return []
        if message.released and message.epoch == self.epoch and self._released_at is None:
            self._released_at = now
        if self._promise_holds(now) and not message.released and self.copy.promised < message.epoch:
            return []
        effects = self._enter(message.epoch, "", now) if message.epoch > self.epoch else []
        effects += self._step_down(f"{peer} seeks the next epoch")
        self._sealing.add(peer)
        if self.copy.promise_persisted < self.epoch:
            effects += self.copy.promise(self.epoch)
        return effects + self._report(now)

    def _report(self, now: float) -> list[Effect]:
        """Once the promise is stored, and with it everything before it, say where the log ends."""
        if self.copy.promise_persisted < self.epoch:
            return []
        end = self.copy.persisted_end
        effects: list[Effect] = [Send(peer, Sealed(self.epoch, end)) for peer in sorted(self._sealing)]
        self._sealing.clear()
        if self.candidacy is not None:
            self.candidacy.report(self.me, end)
            effects += self.candidacy.propose(self._revision, now)
        return effects

    def _sealed(self, peer: str, message: Sealed, now: float) -> list[Effect]:
        if self.candidacy is None or message.epoch != self.epoch:
            return []
        self.candidacy.report(peer, message.end)
        return self.candidacy.propose(self._revision, now)

    # ---- as the primary

    def _is_mine(self, epoch: int) -> bool:
        return self.leading is not None and epoch == self.epoch

    def _appended(self, peer: str, message: Appended, now: float) -> list[Effect]:
        if self.leading is None or not self._is_mine(message.epoch):
            return []
        return self.leading.appended(peer, message.sent_at, message.matched, now)

    def _mismatched(self, peer: str, message: Mismatch, now: float) -> list[Effect]:
        if self.leading is None or not self._is_mine(message.epoch):
            return []
        return self.leading.mismatched(peer, message.sent_at, message.try_after, now)

    def _fenced(self, peer: str, message: Fenced, now: float) -> list[Effect]:
        if self.leading is None or not self._is_mine(message.epoch) or not self.leading.is_established:
            return []
        return self.leading.wish(Renew(peer), now)

    def _resigned(self, peer: str, message: Resigned, now: float) -> list[Effect]:
        if message.epoch == self.epoch and peer == self._primary and self._released_at is None:
            self._released_at = now
        return []

    def _configured(self, peer: str, message: Configured, now: float) -> list[Effect]:
        return self._learn(message.configuration, message.revision, now)

    def _pushed(self, event: Pushed, now: float) -> list[Effect]:
        if self.leading is not None:
            return self.leading.push(event)
        return [Refuse(event.client, event.update, f"{self.me} is not the primary", self._primary)]

    def _read(self, event: ReadAsked, now: float) -> list[Effect]:
        stale = f"{self.me} is not the primary" if self.leading is None else self.leading.why_not_fresh(now)
        if stale and event.fresh:
            return [RefuseRead(event.client, stale, self._primary)]
        return [Serve(event.client, self.copy.committed, fresh=not stale)]

    def _worker_gone(self, event: WorkerGone, now: float) -> list[Effect]:
        return self.leading.forget(event.worker, event.incarnation) if self.leading is not None else []

    def _wished(self, wish: Wish, now: float) -> list[Effect]:
        if self.leading is None:
            return [Tell(f"no: {type(wish).__name__} {wish.server}", f"{self.me} is not the primary")]
        return self.leading.wish(wish, now)

    def _cut_log(self, event: CutLog, now: float) -> list[Effect]:
        through = self.copy.committed if self.leading is None else self.leading.held_by_all(now)
        return self.copy.cut_through(through)

    def _stop_adding(self, event: StopAdding, now: float) -> list[Effect]:
        return self.leading.stop_adding(event.server) if self.leading is not None else []

    # ---- time

    def _exited(self, event: Exited, now: float) -> list[Effect]:
        self._ended[event.server] = max(event.start, self._ended.get(event.server, 0))
        self._release_if_exited(now)
        return self._tick(Tick(), now)

    def _ledger_reached(self, event: LedgerReached, now: float) -> list[Effect]:
        """The next epoch needs the ledger. Who sealed this one without would stop a primary that may be back soon."""
        self._ledger_answers = event.answers
        return []

    def _tick(self, event: Tick, now: float) -> list[Effect]:
        effects: list[Effect] = []
        failed_at = self.copy.store_failed_at
        if failed_at is not None and now - failed_at >= self.rules.lease_s:
            effects += self.copy.store_again()
        if self.configuration is None or self.configuration.epoch != self.epoch or not self.is_member:
            return effects
        if self.leading is not None:
            if self._ledger_answers and self.leading.is_abandoned(now):
                reason = f"no majority has confirmed epoch {self.epoch} for {self.rules.abandon_s:g} s"
                return effects + self._step_down(reason) + self._stand(now, reason, released=True)
            return effects
        if self.candidacy is not None:
            if self.copy.promise_persisted < self.epoch:
                effects += self.copy.promise(self.epoch)
            return effects + self.candidacy.ask(now) + self.candidacy.propose(self._revision, now)
        return effects + self._relay(now) + self._suspect(now)

    def _relay(self, now: float) -> list[Effect]:
        """A primary that does not lead may not know that it should: it may be cut off from the ledger."""
        assert self.configuration is not None
        if self._heard_primary or self._primary == self.me or now - self._relayed_at < self.rules.beat_s:
            return []
        self._relayed_at = now
        return [Send(self.configuration.primary, Configured(self.configuration, self._revision))]

    def _suspect(self, now: float) -> list[Effect]:
        assert self.configuration is not None
        primary = self.configuration.primary
        if primary == self.me:
            return self._stand(now, "the primary has sealed its own epoch", released=True)
        rank = [one for one in self.configuration.replicas if one != primary].index(self.me)
        if self._released_at is not None and now - self._released_at >= rank * self.rules.stagger_s:
            return self._stand(now, f"{primary} has ended or resigned", released=True)
        silent_s = now - self._heard_at
        if silent_s < self.rules.suspect_after_s(rank) or not self._ledger_answers:
            return []
        return self._stand(now, f"{primary} was not heard for {silent_s:.2f} s", released=False)
