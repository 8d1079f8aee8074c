"""An exchange: the collectives of one view, submitted by name in any order, carried out when every rank has submitted.

    handle = exchange.submit(request, tensors, outputs)     # returns at once; the tensors may change from here on
    exchange.synchronize(handle)                            # waits; raises what failed, on every rank alike

Threads: one thread at a time drives the exchange, by holding its wheel (wheel.py): it reads what others wrote, and
carries out what is complete. `_lock` guards the tables, and is never held while tensors are added. Any thread may
submit.

A rank that is lost ends the exchange: everything outstanding raises HorovodInternalError, on all ranks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.horovod.common.exceptions import CollectiveMismatch, CollectiveStall, HorovodInternalError
from holdfast.horovod.exchange.carrier import Carrier, RankLost
from holdfast.horovod.exchange.departed import Departed, farewell
from holdfast.horovod.exchange.handle import Handle
from holdfast.horovod.exchange.lending import Lending
from holdfast.horovod.exchange.matching import Announced, Ident, Matched, Matching
from holdfast.horovod.exchange.outgoing import Outgoing
from holdfast.horovod.exchange.packing import brought_bytes, packing_of, put
from holdfast.horovod.exchange.records import KnownRequests, Record, What
from holdfast.horovod.exchange.standstill import CollectiveStandstill
from holdfast.horovod.exchange.timeline import Timeline
from holdfast.horovod.exchange.wheel import WAIT_S, Wheel
from holdfast.horovod.exchange.words import Request
from holdfast.horovod.exchange.work import Submission, Work

ROOM_S = 120.0  # for others to read what is written, or to be done with what is shared
SAY_WAIT_S = 1.0  # a script that has waited for so long says so


class Exchange:
    """See the module. `waits(True)` is called when a script begins to wait for long, `waits(False)` when it goes on."""

    def __init__(
        self,
        carrier: Carrier,
        rank: int,
        size: int,
        *,
        waits: Callable[[bool], None] = lambda _: None,
        report: Callable[[str], None] = lambda text: print(f"holdfast: {text}", file=sys.stderr, flush=True),
        stall_s: float = 60.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.lost_rank: int | None = None  # whose loss has ended it
        self.timeline: Timeline | None = None
        self._carrier = carrier
        self._waits = waits
        self._report = report
        self._stall_s = stall_s
        self._matching = Matching(rank, size)
        self._known = KnownRequests()
        self._lock = threading.RLock()
        self._wheel = Wheel(
            drive=self._drive, wait=carrier.wait, wake=carrier.wake, outstanding=lambda: self._is_outstanding
        )
        self._serial = 0
        self._outgoing = Outgoing(carrier)
        self._handles: dict[Ident, Handle] = {}  # not done
        self._ready: list[Matched] = []  # complete, and not begun
        self._works: dict[int, Work] = {}  # begun, by my serial
        self._lending = Lending(carrier, rank)
        self._standstill = CollectiveStandstill(self._matching)
        self._broken: HorovodInternalError | None = None
        self.departed = Departed()
        self._closed = False

    # ---- what scripts ask

    def members(self, number: int) -> tuple[int, ...]:
        return self._matching.sets[number]

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def submit(
        self,
        request: Request,
        tensors: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] | None = None,
        *,
        soon: bool = False,
    ) -> Handle:
        """Announce a collective. `soon`: the caller waits for it at once, and drives.

        ValueError if one of this name is under way or it is too long; HorovodInternalError if the exchange has ended.
        """
        with self._lock:
            self._check_submit(request)
            self._outgoing.text_of(request)
        offset, memory = self._staged(request, tensors)
        with self._lock:
            try:
                self._check_submit(request)
            except (ValueError, HorovodInternalError):  # since then
                if offset is not None:
                    self._carrier.free(offset)
                raise
            handle = self._announce(request, offset, memory, outputs)
            if self.timeline is not None:
                self.timeline.began(handle.row, f"NEGOTIATE_{request.kind.name}")
            self._ready += self._matching.heard(self.rank, self._announced(handle))
        if not soon:
            self._wake_thread()
        return handle

    def poll(self, handle: Handle) -> bool:
        if not handle.done and self._wheel.take_if_free():
            try:
                self._carrier.wait(0.0)
                self._drive()
            finally:
                self._wheel.let_go()
        if not handle.done and handle.polled(time.monotonic()):
            self._look_at_wait(handle)
        return handle.done

    def synchronize(self, handle: Handle) -> Handle:
        if not handle.done:
            self._wait_for(handle)
        if handle.error is not None:
            raise handle.error
        return handle

    def add_set(self, number: int, ranks: Sequence[int]) -> None:
        with self._lock:
            self._ready += self._matching.add_set(number, ranks)

    def remove_set(self, number: int) -> None:
        """Called when all ranks are at this line. What is under way in it fails."""
        with self._lock:
            for ident in self._matching.remove_set(number):
                self._fail(ident, HorovodInternalError("its process set was removed"))

    def lose(self, rank: int, reason: str) -> None:
        """By the ledger, this rank is gone: what it wrote last still counts. From any thread."""
        if rank not in self.departed:
            self._carrier.lose(rank, reason)

    @property
    def last_joined(self) -> int:
        return self._matching.last_joined

    def close(self, reason: str = "this rank has shut down", *, last_words: str = "") -> None:
        """Leave in order. What is outstanding here fails; the others are told, and why: `last_words`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wheel.stop()
        self._wheel.take()
        try:
            with self._lock:
                broken = self._broken is not None
                self._fail_all(HorovodInternalError(reason))
            if not broken:
                try:
                    self._carrier.publish(farewell(last_words))
                    self._carrier.leave()
                except (PeerError, OSError):
                    pass
            self._carrier.close()
        finally:
            self._wheel.let_go()
        self._wheel.join(2.0)
        if self.timeline is not None:
            self.timeline.close()

    # ---- submitting

    def _check_submit(self, request: Request) -> None:
        if self._broken is not None:
            raise HorovodInternalError(str(self._broken))
        if self._closed:
            raise HorovodInternalError("this rank has shut down")
        if request.members not in self._matching.sets:
            raise ValueError("the process set is not known: add it with add_process_set")
        if self.rank not in self._matching.sets[request.members]:
            raise ValueError(f"rank {self.rank} is not in the process set {self._matching.sets[request.members]}")
        if request.key and any(ident[:2] == (request.members, request.key) for ident in self._handles):
            raise ValueError(
                f"{request.words} is under way already on this rank: wait for it, or give this one another name"
            )
        if gone := self.departed.ranks & set(self._matching.sets[request.members]):
            raise HorovodInternalError(f"{self.departed.sentence(gone)}; so {request.words} cannot be done")

    def _staged(self, request: Request, tensors: Sequence[torch.Tensor]) -> tuple[int | None, torch.Tensor]:
        """A copy of what this rank brings, where others can have it; its place, if that is shared."""
        length = brought_bytes(request, self.rank)
        offset: int | None = None
        if length <= self._carrier.inline_max:
            memory = torch.empty(length, dtype=torch.uint8)
        else:
            offset, memory = self._room(length)
        if length:
            put(memory, packing_of(request), request, tensors)
        return offset, memory

    def _announce(
        self, request: Request, offset: int | None, memory: torch.Tensor, outputs: Sequence[torch.Tensor] | None
    ) -> Handle:
        self._serial += 1
        serial, count = self._serial, self._matching.next_count(request.members, request.key)
        data, length = (memory.numpy().tobytes(), 0) if offset is None else (b"", memory.numel())
        text = self._outgoing.text_of(request)
        self._known.remember(text, request)
        self._outgoing.publish(Record(What.ANNOUNCE, serial, count, offset or 0, length, text, data))
        submission = Submission(request, serial, memory, outputs, offset)
        handle = Handle((request.members, request.key, count), submission, began=time.monotonic())
        self._handles[handle.ident] = handle
        return handle

    def _announced(self, handle: Handle) -> Announced:
        mine = handle.submission
        inline = b"" if mine.offset is None else None
        return Announced(mine.request, mine.serial, handle.ident[2], inline, mine.offset or 0, mine.memory.numel())

    def _room(self, length: int) -> tuple[int, torch.Tensor]:
        """Shared memory for data; waits until others are done with what was there before."""
        until = time.monotonic() + ROOM_S
        while True:
            with self._lock:
                found = self._carrier.stage(length)
            if found is not None:
                return found
            if time.monotonic() > until or not (self._lending or self._works or self._handles):
                raise HorovodInternalError(f"there is no room for {length} bytes to be exchanged")
            if self._wheel.take_if_free(0.01):
                try:
                    self._drive()
                    self._carrier.wait(0.001)
                finally:
                    self._wheel.let_go()
            if self._broken is not None:
                raise HorovodInternalError(str(self._broken))

    # ---- driving

    def _wait_for(self, handle: Handle) -> None:
        if not self._wheel.take(unless=lambda: handle.done):
            return
        slept = False
        try:
            self._drive(handle)
            while not handle.done:
                if not slept and time.monotonic() - handle.began > 0.01:
                    slept = True
                    self._waits(True)
                self._carrier.wait(WAIT_S)
                self._drive(handle)
                if not handle.done:
                    self._look_at_wait(handle)
        finally:
            self._wheel.let_go()
            if slept:
                self._waits(False)
        if self._is_outstanding:
            self._wake_thread()

    @property
    def _is_outstanding(self) -> bool:
        """Whether somebody must drive: for a result of this rank, or for what others have not been given yet."""
        return self._broken is None and bool(self._handles or self._outgoing or self._carrier.unsent)

    def _wake_thread(self) -> None:
        if self.size > 1:
            self._wheel.leave_to_thread()
            return
        self._wheel.take()
        try:
            self._drive()
        finally:
            self._wheel.let_go()

    def _drive(self, until: Handle | None = None) -> None:
        """Hear what there is, and carry out what is complete. The caller has the wheel."""
        while until is None or not until.done:
            self._hear()
            if not self._ready and not (self._works and self._advance()):
                return
            self._begin()

    def _hear(self) -> None:
        try:
            if self._outgoing:
                with self._lock:
                    self._outgoing.flush()
            for rank, record in self._carrier.take():
                with self._lock:
                    self._heard(rank, record)
        except RankLost as lost:
            self.lost_rank = lost.rank
            self._break(lost.message)
        except PeerError as error:
            self._break(error.message)

    def _heard(self, rank: int, record: Record) -> None:
        what = record.what
        if what is What.ANNOUNCE:
            self._ready += self._matching.heard(rank, self._known.announced(record))
        elif what is What.DONE:
            self._lending.done(rank, record.serial)
            self._lending.give_back(self.departed.ranks)
        elif what is What.WAIT:
            self._matching.waits(rank, record.serial)
        elif what is What.BYE:
            self._has_left(rank, record)
        elif what is What.STALL:
            self._give_up(*self._standstill.heard(record))

    def _has_left(self, rank: int, record: Record) -> None:
        self.departed.heard(rank, record)
        for ident in self._matching.needing(rank):
            self._matching.drop(ident)
            self._fail(ident, HorovodInternalError(self.departed.sentence([rank])))
        self._lending.give_back(self.departed.ranks)

    def _begin(self) -> None:
        """What has become complete: it fails everywhere, or its first phase begins."""
        with self._lock:
            ready, self._ready = self._ready, []
        for matched in ready:
            handle = self._handles.get(matched.ident)
            if handle is None:
                continue  # done without me, who has joined
            if self.timeline is not None:
                self.timeline.ended(handle.row)
            if matched.trouble:
                with self._lock:
                    if handle.submission.offset is not None:
                        self._carrier.free(handle.submission.offset)  # nobody reads it
                    self._fail(matched.ident, CollectiveMismatch(matched.trouble))
                continue
            work = Work(matched, handle.submission, self.rank, self._matching.sets[matched.ident[0]])
            if self.timeline is not None:
                self.timeline.began(handle.row, handle.submission.request.kind.name, ranks=work.ranks)
            with self._lock:
                self._works[handle.submission.serial] = work
            self._carrier.give(handle.submission.serial, 1, handle.submission.memory, work.given())
        self._advance()

    def _is_ready(self, work: Work) -> bool:
        return self._carrier.ready(work.serials, work.phase, work.wanted())

    def _advance(self) -> bool:
        """Whether a collective got on."""
        moved = False
        for serial, work in list(self._works.items()):
            try:
                while self._is_ready(work):
                    moved = True
                    if work.perform(self._carrier):
                        self._finish(serial, work)
                        break
                    self._carrier.give(serial, 2, work.mine.memory, work.given())
                    if self._carrier.in_place:
                        with self._lock:
                            self._outgoing.publish(Record(What.PART, serial))
                if self.departed and serial in self._works:
                    self._miss_left(serial, work)
            except ProtocolError as error:
                self._break(error.message)
                return False
            except RuntimeError as error:
                with self._lock:
                    self._works.pop(serial, None)
                    self._fail(work.matched.ident, HorovodInternalError(str(error)))
        return moved

    def _miss_left(self, serial: int, work: Work) -> None:
        """A rank that has left brought less than is needed: it will not come any more."""
        left = {rank: ranges for rank, ranges in work.wanted().items() if rank in self.departed}
        if left and not self._carrier.ready(work.serials, work.phase, left):
            with self._lock:
                del self._works[serial]
                self._fail(work.matched.ident, HorovodInternalError(self.departed.sentence(left)))

    def _finish(self, serial: int, work: Work) -> None:
        if not self._carrier.intact(work.ranks):
            self._break("the others went on while this rank was away")
            return
        with self._lock:
            self._works.pop(serial, None)
            handle = self._handles.pop(work.matched.ident, None)
            shared = self._carrier.in_place and any(one.inline is None for one in work.matched.parts.values())
            if shared:
                self._outgoing.publish(Record(What.DONE, serial), urgent=False)
            self._carrier.forget(work.serials)
            if shared:
                self._lending.finished(serial, work, self.departed.ranks)
        if handle is not None:
            if self.timeline is not None:
                self.timeline.ended(handle.row)
            handle.results, handle.splits = work.results, work.splits
            handle.done = True

    # ---- what goes wrong

    def _fail(self, ident: Ident, error: HorovodInternalError) -> None:
        handle = self._handles.pop(ident, None)
        if handle is not None:
            handle.error = error
            handle.done = True

    def _fail_all(self, error: HorovodInternalError) -> None:
        self._works.clear()
        self._ready.clear()
        for ident in list(self._handles):
            self._fail(ident, error)

    def _break(self, reason: str) -> None:
        """A rank is lost: the exchange is over. Closing the connections tells the others."""
        with self._lock:
            if self._broken is None:
                self._broken = HorovodInternalError(reason)
            self._fail_all(self._broken)
            self._carrier.close()

    def _look_at_wait(self, handle: Handle) -> None:
        """A script waits, and nothing comes: say so, report it, and find out whether anything ever will."""
        now = time.monotonic()
        waited_s = now - handle.began
        with self._lock:
            if waited_s > SAY_WAIT_S and not self._matching.is_waiting(self.rank):
                self._outgoing.publish(Record(What.WAIT, handle.submission.serial))
                self._matching.waits(self.rank, handle.submission.serial)
        if waited_s > self._stall_s and not handle.reported and handle.ident[0] in self._matching.sets:
            handle.reported = True
            missing = ", ".join(map(str, self._matching.missing(handle.ident)))
            self._report(f"{handle.submission.request.words} waits for rank {missing} since {waited_s:.0f} s")
        with self._lock:
            found = self._standstill.look(now, self.departed.ranks)
            if found is not None:
                self._outgoing.publish(found[0])
                self._give_up(*found[1])

    def _give_up(self, why: str, idents: Sequence[Ident]) -> None:
        """These were not complete here."""
        for ident in idents:
            handle = self._handles.get(ident)
            if handle is not None and handle.submission.offset is not None:
                self._carrier.free(handle.submission.offset)  # nobody reads it
            self._fail(ident, CollectiveStall(f"no rank gets on: {why}"))
