"""The carrier over connections alone: between hosts, with --path network, and where memory cannot be shared.

Records and pieces of data are frames. A rank sends a peer its pieces of a collective only when all ranks have announced
it, so nobody is sent what it has no use for. Frames wait here, and are handed to the connection one at a time.

The connections are used by one thread at a time, which holds `_sockets`: who drives, also while it waits in their poll,
or who publishes. Who publishes never waits for it: where somebody drives, its record is left in the queue, and the
driver is woken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from holdfast.core.errors import ProtocolError
from holdfast.core.words import View
from holdfast.horovod.exchange.carrier import LOST_S, Gone, Serials
from holdfast.horovod.exchange.packing import Ranges
from holdfast.horovod.exchange.records import Record, What
from holdfast.net.framing import frame
from holdfast.net.groups import Gone as PeerGone
from holdfast.net.groups import Group

INLINE_BYTES = 32 * 1024
PIECE_BYTES = 1024 * 1024
FLUSH_S = 2.0


class Network:
    """carrier.Carrier over a group's connections."""

    inline_max = INLINE_BYTES
    in_place = False

    def __init__(
        self, view: View, me: str, group: Group, *, wake: Callable[[], None], sort_mail: Callable[[], None]
    ) -> None:
        self._members = view.members
        self._me = view.rank(me)
        self._group = group
        self.wake = wake
        self._sort_mail = sort_mail
        self._waiting: dict[str, deque[bytes | tuple[int, int, memoryview]]] = {
            member: deque() for member in view.members if member != me
        }
        self._heard: list[tuple[int, Record]] = []
        self._pieces: dict[tuple[int, int, int], bytearray] = {}  # (rank, serial, phase) -> what has come of it
        self._gone = Gone()
        self._sockets = threading.Lock()

    def stage(self, length: int) -> tuple[int, torch.Tensor] | None:
        return 0, torch.empty(length, dtype=torch.uint8)

    def free(self, offset: int) -> None:
        pass

    def publish(self, record: Record, *, urgent: bool = True) -> bool:
        data = frame(record.encode())
        for queue in self._waiting.values():
            queue.append(data)
        if self._sockets.acquire(blocking=False):
            try:
                self._feed()
            finally:
                self._sockets.release()
        else:
            self.wake()
        return True

    @property
    def unsent(self) -> bool:
        connections = list(self._group.connections.values())
        return any(self._waiting.values()) or any(one.outbox and not one.lost for one in connections)

    def _feed(self) -> None:
        """Hand on what waits, to those whose connection has room. The caller holds `_sockets`."""
        for member, queue in self._waiting.items():
            connection = self._group.connections.get(member)
            if connection is None or connection.lost:
                queue.clear()
                continue
            while queue and not connection.outbox:
                one = queue.popleft()
                if isinstance(one, tuple):
                    serial, phase, data = one
                    one = frame(Record(What.DATA, serial, phase, data=bytes(data)).encode())
                if (gone := self._group.send(member, one)) is not None:
                    self._lose(gone)
                    queue.clear()

    def _lose(self, gone: PeerGone) -> None:
        self._gone.ended(self._members.index(gone.peer), gone.reason)

    def lose(self, rank: int, reason: str) -> None:
        self._gone.ended(rank, reason, after_s=LOST_S)

    def take(self) -> list[tuple[int, Record]]:
        found, self._heard = self._heard, []
        for rank, record in found:
            if record.what is What.BYE:
                self._gone.left.add(rank)
        if not found:
            self._gone.check()
        return found

    def wait(self, at_most_s: float) -> None:
        with self._sockets:
            self._feed()
            self._listen(0.0 if self._heard else at_most_s)
            self._feed()
        self._sort_mail()

    def _listen(self, at_most_s: float) -> None:
        for news in self._group.poll(at_most_s):
            if isinstance(news, PeerGone):
                self._lose(news)
                continue
            rank, record = self._members.index(news.peer), news.message
            if record.what is What.DATA:
                self._pieces.setdefault((rank, record.serial, record.count), bytearray()).extend(record.data)
            if record.what is not What.SKIP:
                self._heard.append((rank, record))

    def give(self, serial: int, phase: int, data: torch.Tensor, ranges: Mapping[int, Ranges]) -> None:
        whole = memoryview(data.numpy())  # type: ignore[arg-type]
        for rank, wanted in ranges.items():
            queue = self._waiting[self._members[rank]]
            for start, stop in wanted:
                for low in range(start, stop, PIECE_BYTES):
                    queue.append((serial, phase, whole[low : min(low + PIECE_BYTES, stop)]))
        with self._sockets:
            self._feed()

    def ready(self, serials: Serials, phase: int, wanted: Mapping[int, Ranges]) -> bool:
        for rank, ranges in wanted.items():
            come = len(self._pieces.get((rank, serials[rank], phase), b""))
            size = sum(stop - start for start, stop in ranges)
            if come > size:
                raise ProtocolError(f"rank {rank} sent more than it said")
            if come < size:
                return False
        return True

    def pieces(self, rank: int, serial: int, phase: int, block: tuple[int, int], ranges: Ranges) -> list[torch.Tensor]:
        come = self._pieces.get((rank, serial, phase), bytearray())
        found, at = [], 0
        for start, stop in ranges:
            length = stop - start
            aligned = torch.empty(length, dtype=torch.uint8)
            aligned.numpy()[:] = memoryview(come)[at : at + length]
            found.append(aligned)
            at += length
        return found

    def forget(self, serials: Serials) -> None:
        for rank, serial in serials.items():
            for phase in (1, 2):
                self._pieces.pop((rank, serial, phase), None)

    def intact(self, ranks: Sequence[int]) -> bool:
        return True

    def leave(self) -> None:
        kernel = self._group.kernel
        until = kernel.now() + FLUSH_S
        while any(self._waiting.values()) and kernel.now() < until:
            self.wait(0.01)
        with self._sockets:
            self._group.flush(max(0.0, until - kernel.now()))
        self.close()

    def close(self) -> None:
        with self._sockets:
            self._group.close()
