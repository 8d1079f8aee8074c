"""What a primary knows and does in its epoch: how far the others are, who waits for what, whether its lease holds.

It lasts for one epoch: the machine makes one when the ledger shows it as the primary, and drops it with the epoch.

Invariants: an update is acknowledged when a majority of the configuration has it as durably as promised, and with it an
entry of this very epoch; a new update enters the log only once the epoch's first entry is committed, when everything
before it is known here; nothing is sent before that entry is stored here, so that a primary that starts again knows
that it has led in this epoch, and does not do so twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.log import changing
from holdfast.log.changing import Change, Renew
from holdfast.log.configuration import Configuration, LogEnd, reached_by_majority
from holdfast.log.log_copy import LogCopy
from holdfast.log.messages import (
    Acknowledge,
    AddReplica,
    Append,
    Effect,
    Entry,
    Forgotten,
    Offer,
    Opened,
    Propose,
    Pushed,
    Refuse,
    RemoveReplica,
    Send,
    Tell,
    Update,
    Wish,
)
from holdfast.log.rules import Rules
from holdfast.log.tail import payload_bytes, within


@dataclass(slots=True)
class UnderWay:
    """The payloads that one replica was sent and has not confirmed: counted here, as the log may be cut meanwhile."""

    nbytes: int = 0
    _sent: deque[tuple[int, int]] = field(default_factory=deque)  # up to which index, and how many bytes

    def add(self, entries: Sequence[Entry]) -> None:
        if entries:
            sent = sum(map(payload_bytes, entries))
            self._sent.append((entries[-1].index, sent))
            self.nbytes += sent

    def confirmed(self, index: int) -> None:
        while self._sent and self._sent[0][0] <= index:
            self.nbytes -= self._sent.popleft()[1]

    def forget(self) -> None:
        """It is found to lack what was sent: that is sent again, and counted then."""
        self._sent.clear()
        self.nbytes = 0


@dataclass(slots=True)
class Progress:
    """How far another replica is. `confirmed_at`: when what it last confirmed was sent, by the primary's clock."""

    next: int
    floor: int  # what is sent beyond here is limited until it is confirmed
    matched: int = 0
    told: int = 0  # it was told that everything up to here is committed
    confirmed_at: float = -math.inf
    sent_at: float = -math.inf
    offered_at: float = -math.inf
    stepped_back_at: float = -math.inf  # when it was last found to lack what was sent before
    is_probed: bool = False  # since then nothing was confirmed: one message at a time
    under_way: UnderWay = field(default_factory=UnderWay)


class Leading:
    def __init__(
        self, me: str, start: int, configuration: Configuration, copy: LogCopy, rules: Rules, *, now: float
    ) -> None:
        self._me = me
        self._start = start
        self.configuration = configuration
        self._copy = copy
        self._rules = rules
        self._began_at = now
        self.opened_at = copy.end.index + 1
        self._peers = {one: Progress(self.opened_at, self.opened_at - 1) for one in configuration.replicas if one != me}
        self._ahead = copy.table.copy()  # the table as it will be when all that is in the log is committed
        for entry in copy.tail.after(max(copy.committed, copy.tail.base.index)):
            self._foresee(entry)
        self._waiting: dict[int, dict[str, Update]] = {}  # index -> client -> what it waits for
        self.change: Change | None = None

    # -- standing

    @property
    def is_established(self) -> bool:
        """A majority has this epoch's first entry: everything before is committed, and is known here."""
        return self._copy.committed >= self.opened_at

    @property
    def is_frozen(self) -> bool:
        return self.change is not None and self.change.freezes

    def confirmed_at(self, now: float) -> float:
        """A majority has confirmed this epoch by what was sent at this time or later."""
        confirmed = [now, *(self._peers[one].confirmed_at for one in self.configuration.replicas if one != self._me)]
        return reached_by_majority(confirmed, self.configuration.majority)

    def holds_lease(self, now: float) -> bool:
        return now - self.confirmed_at(now) < self._rules.lease_held_s

    def is_abandoned(self, now: float) -> bool:
        return now - max(self.confirmed_at(now), self._began_at) > self._rules.abandon_s

    def why_not_fresh(self, now: float) -> str:
        """Why a read of what is applied here might be an old one; empty: it cannot be."""
        if self.is_frozen:
            return "the primary is being handed over"
        if not self.is_established:
            return f"epoch {self.configuration.epoch} is not established yet"
        if not self.holds_lease(now):
            return "no majority has confirmed the epoch within the lease"
        return ""

    # -- the log

    def open(self) -> list[Effect]:
        return self._add(Opened(self._me))

    def push(self, event: Pushed) -> list[Effect]:
        update, client = event.update, event.client
        if self.is_frozen:
            return [Refuse(client, update, "the primary is being handed over", "")]
        applied = self._copy.table.judge(update)
        if applied.index is not None and not self.is_established:
            # It was committed in another epoch: whether a majority of these very replicas has it is not known yet.
            return [Refuse(client, update, f"epoch {self.configuration.epoch} is not established yet", self._me)]
        if applied.index is not None:
            return [Acknowledge(client, update, applied.index)]
        verdict = self._ahead.judge(update)
        if verdict.refusal:
            return [Refuse(client, update, verdict.refusal, self._me, final=verdict.gone)]
        if verdict.index == 0:
            # The table ahead has forgotten where it is. It is not committed: only the other table could say so.
            return [Refuse(client, update, "it waits for a majority", self._me)]
        if verdict.index is not None:
            self._waiting.setdefault(verdict.index, {})[client] = update
            return []
        if not self.is_established:
            # Whether it can be applied is checked against the state, which may lack what the last epoch left.
            return [Refuse(client, update, f"epoch {self.configuration.epoch} is not established yet", self._me)]
        if self._copy.end.index - self._copy.committed >= self._rules.uncommitted_max:
            reason = f"{self._rules.uncommitted_max} updates wait for a majority"
            return [Refuse(client, update, reason, self._me)]
        self._waiting[self._copy.end.index + 1] = {client: update}
        return self._add(update)

    def newest_sequences(self) -> dict[tuple[str, int], int]:
        """Of each worker and its incarnation the newest update that is in the log, committed or not."""
        return self._ahead.newest()

    def forget(self, worker: str, incarnation: int) -> list[Effect]:
        if self.is_frozen or not self._ahead.knows(worker, incarnation):
            return []
        return self._add(Forgotten(worker, incarnation))

    def _add(self, content: Update | Opened | Forgotten) -> list[Effect]:
        entry = Entry(self.configuration.epoch, self._copy.end.index + 1, content)
        self._foresee(entry)
        return self._copy.write([entry])

    def _foresee(self, entry: Entry) -> None:
        if isinstance(entry.content, Update):
            self._ahead.record(entry.content, entry.index)
        elif isinstance(entry.content, Forgotten):
            self._ahead.forget(entry.content.worker, entry.content.incarnation)

    def commit(self) -> list[Effect]:
        """Commit what a majority has, if it is of this epoch: with it comes everything before."""
        matched = [self._copy.persisted, *(self._peers[one].matched for one in self._others())]
        index = int(reached_by_majority(matched, self.configuration.majority))
        if index <= self._copy.committed or self._copy.tail.epoch_at(index) != self.configuration.epoch:
            return []
        before = self._copy.committed
        effects = self._copy.commit_to(index)
        for done in range(before + 1, index + 1):
            waiting = self._waiting.pop(done, {})
            effects += [Acknowledge(client, update, done) for client, update in waiting.items()]
        if before < self.opened_at <= index:
            reason = f"a majority of {', '.join(self.configuration.replicas)} has entry {self.opened_at}"
            effects.append(Tell(f"epoch {self.configuration.epoch} is established", reason))
        return effects

    def take_over_waiting(self, before: Leading) -> None:
        """The same primary in the next epoch: its log is the same, and so is who waits for what."""
        self._waiting = before._waiting

    def let_go(self, reason: str, primary: str) -> list[Effect]:
        """Whoever waits is told to ask elsewhere."""
        waiting = [one for index in sorted(self._waiting) for one in self._waiting[index].items()]
        self._waiting.clear()
        return [Refuse(client, update, reason, primary) for client, update in waiting]

    # -- the others

    def _others(self) -> list[str]:
        return [one for one in self.configuration.replicas if one != self._me]

    def appended(self, peer: str, sent_at: float, matched: int, now: float) -> list[Effect]:
        progress = self._peers.get(peer)
        if progress is None:
            return []
        progress.confirmed_at = max(progress.confirmed_at, sent_at)
        progress.matched = max(progress.matched, matched)
        progress.floor = max(progress.floor, matched)
        progress.next = max(progress.next, progress.matched + 1)
        progress.is_probed = False
        progress.under_way.confirmed(progress.matched)
        return self._send_to(peer, now, beat=False)

    def mismatched(self, peer: str, sent_at: float, try_after: int, now: float) -> list[Effect]:
        progress = self._peers.get(peer)
        if progress is None:
            return []
        progress.confirmed_at = max(progress.confirmed_at, sent_at)
        back = max(progress.matched, try_after) + 1
        if back >= progress.next or sent_at < progress.stepped_back_at:
            return []  # what was sent since may follow on
        progress.next, progress.floor = back, back - 1
        progress.stepped_back_at, progress.is_probed = now, True
        progress.under_way.forget()
        return self._send_to(peer, now, beat=False)

    def send(self, now: float) -> list[Effect]:
        """New entries at once; to those that have heard nothing for a while, that this epoch goes on."""
        effects: list[Effect] = []
        for peer, progress in self._peers.items():
            beat = now - progress.sent_at >= self._rules.beat_s or self._holds_much(progress)
            effects += self._send_to(peer, now, beat=beat)
        return effects

    def _holds_much(self, progress: Progress) -> bool:
        """It holds payloads that it could apply and drop, if it knew that they are committed."""
        known = min(progress.matched, self._copy.committed)
        return known > progress.told and self._copy.tail.nbytes(progress.told + 1, known) >= self._rules.tell_bytes

    def _send_to(self, peer: str, now: float, *, beat: bool) -> list[Effect]:
        if self._copy.persisted < self.opened_at:
            return []
        rules, tail, progress = self._rules, self._copy.tail, self._peers[peer]
        if progress.next <= tail.base.index:
            if now - progress.offered_at >= rules.offer_again_s:
                progress.offered_at = progress.sent_at = now
                return [Send(peer, Offer(self.configuration.epoch, self._start, now, self._copy.snapshot))]
            return [self._append(peer, tail.base, (), now)] if beat else []
        room = max(0, progress.floor + 1 + 4 * rules.entries_per_append_max - progress.next)
        if progress.is_probed and progress.next > progress.floor + 1:
            room = 0  # one that cannot store would else be sent the same again and again
        entries = tail.after(progress.next - 1, min(room, rules.entries_per_append_max))
        under_way_bytes = progress.under_way.nbytes
        entries = within(entries, rules.under_way_bytes_max - under_way_bytes, at_least=not under_way_bytes)
        if not entries and not beat:
            return []
        epoch = tail.epoch_at(progress.next - 1)
        assert epoch is not None
        previous = LogEnd(epoch, progress.next - 1)
        progress.next += len(entries)
        progress.under_way.add(entries)
        return [self._append(peer, previous, entries, now)]

    def _append(self, peer: str, previous: LogEnd, entries: tuple[Entry, ...], now: float) -> Send:
        progress = self._peers[peer]
        progress.sent_at, progress.told = now, self._copy.committed
        return Send(peer, Append(self.configuration.epoch, self._start, now, previous, entries, self._copy.committed))

    # -- changes of the configuration

    def wish(self, wish: Wish | Renew, now: float) -> list[Effect]:
        decision = f"{type(wish).__name__} {wish.server}"
        objection = changing.objection(wish, self._me, self.configuration)
        if not self.is_established:
            objection = f"epoch {self.configuration.epoch} is not established yet"
        effects: list[Effect] = []
        if isinstance(wish, Renew) and not objection and self.change and isinstance(self.change.wish, AddReplica):
            effects = self._give_up(self.change, f"{wish.server} has to be won back first")
        if self.change is not None:
            objection = f"{type(self.change.wish).__name__} {self.change.wish.server} is under way"
        if objection:
            return [] if isinstance(wish, Renew) else [Tell(f"no: {decision}", objection)]
        self.change = changing.begin(wish, now, self._rules)
        if isinstance(wish, AddReplica):
            self._peers[wish.server] = Progress(self._copy.end.index + 1, self._copy.end.index)
        return [*effects, Tell(decision, f"begun in epoch {self.configuration.epoch}")]

    def advance_change(self, revision: int, now: float) -> list[Effect]:
        change = self.change
        if change is None or not self.is_established:
            return []
        if not change.freezes and now > change.deadline:
            # Also once it was proposed: the server may have ended since, and another change must be possible. If the
            # ledger takes the proposal after all, that is the next epoch, whatever else is proposed.
            return self._give_up(change, "it was not level in time" if change.proposed_at is None else "nobody took it")
        if change.proposed_at is not None and now - change.proposed_at < self._rules.propose_again_s:
            return []
        if isinstance(change.wish, RemoveReplica) and not self._can_do_without(change.wish.server, now):
            return []
        progress = self._peers[change.wish.server]
        proposal = changing.proposal(change, self.configuration, progress.matched, self._copy.end, self._copy.committed)
        if change.freezes and now > change.deadline:
            # Frozen until the ledger decides: whichever of the two it takes, nothing is lost.
            proposal = self.configuration.next(f"{change.wish.server} did not take over in time")
        if proposal is None:
            return []
        change.proposed_at = now
        return [Tell(f"propose epoch {proposal.epoch}", proposal.reason), Propose(proposal, revision)]

    def held_by_all(self, now: float) -> int:
        """Every replica that is heard of has the log up to here."""
        heard = [one.matched for one in self._peers.values() if now - one.confirmed_at < self._rules.lease_s]
        return min([self._copy.committed, *heard])

    def _can_do_without(self, server: str, now: float) -> bool:
        """A majority of the replicas that would be left is heard of."""
        rest = [one for one in self._others() if one != server]
        heard = 1 + sum(now - self._peers[one].confirmed_at < self._rules.lease_s for one in rest)
        return heard >= (len(rest) + 1) // 2 + 1

    def stop_adding(self, server: str) -> list[Effect]:
        """It is not there any more."""
        if self.change is None or self.change.wish != AddReplica(server):
            return []
        return self._give_up(self.change, f"{server} is gone")

    def _give_up(self, change: Change, reason: str) -> list[Effect]:
        self.change = None
        server = change.wish.server
        if isinstance(change.wish, AddReplica):
            del self._peers[server]
        return [Tell(f"given up: {type(change.wish).__name__} {server}", reason)]
