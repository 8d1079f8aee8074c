"""One replica of one slice at work: the machine that decides (log/machine.py), the state, and the payloads of its log.

It turns what happens into events of the machine, and performs the effects that come back. Sockets and the ledger are
behind `Surroundings`, memory or disk behind `LogStorage`. One thread of the server owns it.

Invariants: the state has exactly the updates up to what the machine has committed. A payload is held for as long as its
entry is in the log. What is being read from live state is made independent of it before the state changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.core.errors import DivergedError, HoldfastError, ProtocolError
from holdfast.log import messages as m
from holdfast.log.leading import Leading
from holdfast.log.machine import ReplicaMachine
from holdfast.log.rules import Rules
from holdfast.servers.buffers import Buffer, BufferPool, KeptPayload
from holdfast.servers.frames import Outgoing
from holdfast.servers.holding import Capturing
from holdfast.servers.log_codec import decode_message, encode_message, encode_snapshot
from holdfast.servers.placing import Target, next_wish
from holdfast.servers.replicated import Answer, Author, Head, Payload, ReplicatedState
from holdfast.servers.storing import LogStorage

READS_WAITING_MAX = 1024


class Surroundings(Protocol):
    """What a replica needs of its server. Nothing here waits."""

    copies: BufferPool  # memory for what is still being read when it changes

    def send(self, peer: str, head: dict[str, Any], payloads: Sequence[KeptPayload]) -> None:
        """To another server. It may be lost."""

    def answer(self, client: str, head: dict[str, Any], answer: Answer | None = None) -> Outgoing | None:
        """To whoever asked. The frame, while it is on its way; None: it is gone already."""

    def propose(self, name: str, effect: m.Propose) -> None: ...

    def fetch(self, name: str, peer: str, snapshot: m.Snapshot) -> None:
        """Answered by `Replica.fetched` or `fetch_failed`."""

    def retired(self, name: str, reason: str) -> None: ...

    def confirmed(self, peer: str, after_s: float) -> None:
        """Another replica has confirmed what was sent to it so long ago."""

    def tell(self, name: str, decision: str, reason: str) -> None: ...


@dataclass(frozen=True)
class _Read:
    client: str
    fresh: bool
    query: Head
    deadline: float


class Replica:
    def __init__(
        self,
        name: str,
        me: str,
        state: ReplicatedState,
        surroundings: Surroundings,
        storage: LogStorage,
        rules: Rules,
        *,
        now: float,
        start: int = 1,
        stored: m.Stored | None = None,
    ) -> None:
        self.name = name
        self.state = state
        self.machine = ReplicaMachine(me, rules, now=now, start=start, stored=stored)
        self._around = surroundings
        self._storage = storage
        self._kept: dict[int, KeptPayload] = {}  # by the reference that stands in the log
        self._by_index: dict[int, int] = {}  # which reference the entry at an index has
        self._next_reference = 0
        self._events: deque[m.Event] = deque()
        self._busy = False
        self._live: list[Outgoing] = []
        self._reads: list[_Read] = []
        self._goodbyes: list[tuple[str, str, int]] = []  # client, worker, incarnation: who waits for a worker to go
        self.capturing = Capturing(self.machine, state, surroundings, self._answer_live)
        self.target: Target | None = None
        self.acknowledged = 0  # updates, those that were sent again included
        self.now = now

    @property
    def leads(self) -> bool:
        return self.machine.leading is not None

    @property
    def copies(self) -> int:
        """How many replicas the slice has."""
        return len(self.machine.configuration.replicas) if self.machine.configuration is not None else 1

    @property
    def is_established(self) -> bool:
        return self.machine.leading is not None and self.machine.leading.is_established

    @property
    def to_come_bytes(self) -> int:
        """Of memory that the state has not taken yet, and is going to."""
        return int(getattr(self.state, "to_come_bytes", 0))

    # ---- what happens

    def happens(self, event: m.Event, now: float) -> None:
        self.now = now
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                for effect in self.machine.handle(self._events.popleft(), now):
                    _PERFORM[type(effect)](self, effect)
        except (HoldfastError, OSError, ValueError) as error:
            # Not for whoever has sent what is being heard: effects are left that the machine takes for done. A replica
            # that may lack an update must not go on, and its process ends.
            raise AssertionError(f"{self.name}: what was decided could not be done") from error
        finally:
            self._busy = False

    def heard(self, peer: str, fields: Any, body: Buffer | None, now: float) -> None:
        """A message of another replica; the payloads of its entries are in `body`, one after the other."""
        position, references = 0, list[int]()

        def keep(head: Head, nbytes: int) -> m.Payload:
            nonlocal position
            part = None
            if nbytes:
                if body is None or position + nbytes > body.view.nbytes:
                    raise ProtocolError("entries that are longer than their body")
                part = body.part(position, nbytes)
                position += nbytes
            references.append(self._keep(KeptPayload(head, part)))
            return references[-1]

        try:
            message = decode_message(fields, keep)
            if isinstance(message, m.Appended) and self.leads:
                self._around.confirmed(peer, now - message.sent_at)
            self.happens(m.Heard(peer, message), now)
        finally:
            self._let_go_of_unused(references)
            if body is not None:
                body.release()

    def push(self, client: str, author: Author, kept: KeptPayload, now: float) -> None:
        """An update of a worker. `kept` is the replica's from now on."""
        if not self.capturing.holds_back(author, lambda: self._push(client, author, kept, self.now)):
            self._push(client, author, kept, now)

    def _push(self, client: str, author: Author, kept: KeptPayload, now: float) -> None:
        leading = self.machine.leading
        if leading is not None and leading.is_established:
            try:
                self.state.check(author, kept.payload)
            except (DivergedError, ProtocolError) as error:
                kind = "diverged" if isinstance(error, DivergedError) else "wrong"
                self._around.answer(client, {"refused": error.message, "kind": kind})
                kept.release()
                return
        reference = self._keep(kept)
        update = m.Update(author.worker, author.incarnation, author.sequence, reference, kept.payload.nbytes)
        self.happens(m.Pushed(client, update), now)
        self._let_go_of_unused([reference])

    def read(self, client: str, *, fresh: bool, query: Head, deadline: float, now: float) -> None:
        if len(self._reads) >= READS_WAITING_MAX:
            self._around.answer(client, {"refused": "too many reads wait here", "kind": "later"})
            return
        self._reads.append(_Read(client, fresh, query, deadline))
        self._try_reads(now)

    def goodbye(self, client: str, worker: str, incarnation: int, now: float) -> None:
        """This worker is gone: answered once that is in the log."""
        self._goodbyes.append((client, worker, incarnation))
        self.happens(m.WorkerGone(worker, incarnation), now)
        self._answer_goodbyes()

    def note_gone(self, gone: Iterable[tuple[str, int]], now: float) -> None:
        """Workers that the ledger knows to be gone.

        Not while the slice is held: an update that waits here may be in other slices, and belongs into all or none.
        """
        if self.is_established and not self.capturing.holds:
            for worker, incarnation in gone:
                if self.machine.copy.table.knows(worker, incarnation):
                    self.happens(m.WorkerGone(worker, incarnation), now)

    def snapshot_asked(self, client: str) -> None:
        """Another replica wants the state as it is now."""
        snapshot = self.machine.copy.newest_snapshot()
        captured = self.state.capture()
        head = {"snapshot": encode_snapshot(snapshot), "state": captured.head}
        self._answer_live(client, head, captured)

    def fetched(self, snapshot: m.Snapshot, asked: m.Snapshot, payload: Payload, now: float) -> None:
        """What `fetch` asked for is here."""
        self._fetched = payload
        self.happens(m.SnapshotFetched(snapshot, asked), now)
        self._fetched = None

    _fetched: Payload | None = None

    def tick(self, now: float, alive: Sequence[str]) -> None:
        self.happens(m.Tick(), now)
        leading = self.machine.leading
        if leading is not None and leading.is_established:
            self._come_to_target(leading, now, alive)
        self.capturing.tick(now)
        self._try_reads(now)
        self._answer_goodbyes()

    def _come_to_target(self, leading: Leading, now: float, alive: Sequence[str]) -> None:
        change = leading.change
        if change is not None and isinstance(change.wish, m.AddReplica):
            wanted = self.target is None or change.wish.server in self.target.replicas
            if change.wish.server not in alive or not wanted:
                self.happens(m.StopAdding(change.wish.server), now)
        if leading.change is None and self.target is not None:
            wish = next_wish(leading.configuration, self.target, alive)
            if wish is not None:
                self.happens(wish, now)

    def close(self) -> None:
        """It replicates the slice no more."""
        for kept in self._kept.values():
            kept.release()
        self._kept.clear()
        self._by_index.clear()

    # ---- payloads

    def _keep(self, kept: KeptPayload) -> int:
        self._next_reference += 1
        self._kept[self._next_reference] = kept
        return self._next_reference

    def _let_go_of_unused(self, references: Sequence[int]) -> None:
        for reference in set(references).difference(self._by_index.values()):
            kept = self._kept.pop(reference, None)
            if kept is not None:  # else it was in the log, and is dropped already
                kept.release()

    def _let_go_at(self, index: int) -> None:
        reference = self._by_index.pop(index, None)
        if reference is not None:
            self._kept.pop(reference).release()

    def payload_of(self, update: m.Update) -> Payload:
        return self._kept[int(update.payload)].payload

    def give_stored(self, entries: Sequence[m.Entry], payloads: Sequence[KeptPayload | None]) -> None:
        """At the start: the payloads of what an earlier process stored, whose references are counted from 1."""
        for entry, kept in zip(entries, payloads, strict=True):
            if kept is not None:
                assert isinstance(entry.content, m.Update)
                self._next_reference += 1
                assert entry.content.payload == self._next_reference
                self._kept[self._next_reference] = kept
                self._by_index[entry.index] = self._next_reference

    # ---- effects

    def _send(self, effect: m.Send) -> None:
        head_of: Callable[[m.Update], Any] = lambda update: self._kept[int(update.payload)].head  # noqa: E731
        head = {"op": "log", "slice": self.name, "message": encode_message(effect.message, head_of)}
        entries = effect.message.entries if isinstance(effect.message, m.Append) else ()
        updates = [entry.content for entry in entries if isinstance(entry.content, m.Update)]
        self._around.send(effect.peer, head, [self._kept[int(one.payload)] for one in updates])

    def _store(self, effect: m.Store) -> None:
        operation = effect.operation
        if isinstance(operation, m.Write):
            last = operation.entries[-1].index
            for index in [one for one in self._by_index if one > last]:
                self._let_go_at(index)
            for entry in operation.entries:
                if isinstance(entry.content, m.Update):
                    reference = int(entry.content.payload)
                    if self._by_index.get(entry.index) != reference:
                        self._let_go_at(entry.index)
                        self._by_index[entry.index] = reference
                else:
                    self._let_go_at(entry.index)
        elif isinstance(operation, m.Rebase):
            for index in list(self._by_index):
                self._let_go_at(index)
        if self._storage.store(self.name, effect, lambda update: self._kept[int(update.payload)]):
            self._events.append(m.Persisted(effect.ticket))

    def _protect_readers(self) -> None:
        for frame in self._live:
            frame.detach(self._around.copies)
        self._live.clear()
        self.capturing.detach()

    def _apply(self, effect: m.Apply) -> None:
        self._protect_readers()
        update = effect.update
        self.state.apply(Author(update.worker, update.incarnation, update.sequence), self.payload_of(update))
        self._changed = True

    _changed = False

    def _forget(self, effect: m.Forget) -> None:
        self.state.forget(effect.worker, effect.incarnation)
        self._changed = True

    def _acknowledge(self, effect: m.Acknowledge) -> None:
        self.acknowledged += 1
        self._around.answer(effect.client, {"index": effect.index, "version": self.state.version})

    def _refuse(self, effect: m.Refuse) -> None:
        kind = "gone" if effect.final else "later"
        head = {"refused": effect.reason, "kind": kind, "primary": effect.primary, "epoch": self.machine.epoch}
        self._around.answer(effect.client, head)

    def _propose(self, effect: m.Propose) -> None:
        self._around.propose(self.name, effect)

    def _take_snapshot(self, effect: m.TakeSnapshot) -> None:
        if self._storage.hold_snapshot(self.name, effect.snapshot, self.state.capture):
            self._events.append(m.SnapshotTaken(effect.snapshot))

    def _fetch(self, effect: m.FetchSnapshot) -> None:
        self._around.fetch(self.name, effect.peer, effect.snapshot)

    def _restore(self, effect: m.Restore) -> None:
        assert self._fetched is not None, "a snapshot is restored when it was fetched"
        self._protect_readers()
        self.state.restore(self._fetched)
        self._changed = True

    def _drop(self, effect: m.DropPrefix) -> None:
        for index in [one for one in self._by_index if one <= effect.through]:
            self._let_go_at(index)
        self._storage.drop_prefix(self.name, effect.through)

    def _retire(self, effect: m.Retire) -> None:
        self._around.retired(self.name, effect.reason)

    def _tell(self, effect: m.Tell) -> None:
        self._around.tell(self.name, effect.decision, effect.reason)

    # ---- reads

    def after_changes(self, now: float) -> None:
        """Whoever waited for an update may be answered now. Called by the server when a turn is done."""
        if self._changed:
            self._changed = False
            self.capturing.capture_if_reached(now)
            self._try_reads(now)
            self._answer_goodbyes()

    def _try_reads(self, now: float) -> None:
        reads, self._reads = self._reads, []
        for read in reads:
            self._serving = read
            self.happens(m.ReadAsked(read.client, fresh=read.fresh), now)
        self._serving = None

    _serving: _Read | None = None

    def _serve(self, effect: m.Serve) -> None:
        read = self._serving
        assert read is not None and read.client == effect.client
        try:
            answer = self.state.read(read.query)
        except ProtocolError as error:
            self._around.answer(read.client, {"refused": error.message, "kind": "wrong"})
            return
        if answer is None and self.now >= read.deadline:
            self._around.answer(read.client, {"refused": self._why_not(read), "kind": "not yet"})
        elif answer is None:
            self._reads.append(read)
        else:
            self._answer_live(read.client, {"fresh": effect.fresh, "answer": answer.head}, answer)

    def _why_not(self, read: _Read) -> str:
        waits_for = getattr(self.state, "waits_for", None)
        return str(waits_for(read.query)) if waits_for is not None else "it is not there yet"

    def _refuse_read(self, effect: m.RefuseRead) -> None:
        head = {"refused": effect.reason, "kind": "later", "primary": effect.primary, "epoch": self.machine.epoch}
        self._around.answer(effect.client, head)

    def _answer_live(self, client: str, head: dict[str, Any], answer: Answer) -> None:
        frame = self._around.answer(client, head, answer)
        if frame is not None and frame.views:
            frame.is_live = True
            self._live = [one for one in self._live if one.views]
            self._live.append(frame)

    def _answer_goodbyes(self) -> None:
        waiting, self._goodbyes = self._goodbyes, []
        for client, worker, incarnation in waiting:
            if not self.is_established:
                head = {"refused": f"{self.machine.me} is not the primary", "kind": "later", "primary": ""}
                self._around.answer(client, head)
            elif self.machine.copy.table.knows(worker, incarnation):
                self._goodbyes.append((client, worker, incarnation))
            else:
                self._around.answer(client, {"index": self.machine.copy.committed})


_PERFORM: dict[type, Callable[[Replica, Any], None]] = {
    m.Send: Replica._send,
    m.Store: Replica._store,
    m.Apply: Replica._apply,
    m.Forget: Replica._forget,
    m.Acknowledge: Replica._acknowledge,
    m.Refuse: Replica._refuse,
    m.Serve: Replica._serve,
    m.RefuseRead: Replica._refuse_read,
    m.Propose: Replica._propose,
    m.TakeSnapshot: Replica._take_snapshot,
    m.FetchSnapshot: Replica._fetch,
    m.Restore: Replica._restore,
    m.DropPrefix: Replica._drop,
    m.Retire: Replica._retire,
    m.Tell: Replica._tell,
}
