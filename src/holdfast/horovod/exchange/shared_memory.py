"""The carrier between ranks of one host: records and data lie in memory that all of them have mapped.

Nobody is called: a rank reads the others' rings. Whoever has nothing to do for a moment says that it sleeps, and is
woken by a byte over its connection, which also tells when a rank is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from holdfast.core.words import View
from holdfast.horovod.exchange.arena import HEAP_BYTES, Arena
from holdfast.horovod.exchange.blocks import Blocks
from holdfast.horovod.exchange.carrier import LOST_S, Gone, Serials
from holdfast.horovod.exchange.packing import Ranges
from holdfast.horovod.exchange.records import Record, What
from holdfast.net.framing import frame
from holdfast.net.groups import Gone as PeerGone
from holdfast.net.groups import Group

INLINE_BYTES = 8 * 1024
SPIN_S = (0.00001, 0.0002)  # look again and again for so long before going to sleep: more where that pays
LOOK_S = 0.05  # a sleeper looks by itself this often, should a wake-up have crossed it
DOORBELL = frame(b"!")


class SharedMemory:
    """carrier.Carrier over the arenas of a view's members, in rank order; mine among them."""

    inline_max = INLINE_BYTES
    in_place = True

    def __init__(
        self,
        view: View,
        me: str,
        arena: Arena,
        group: Group,
        *,
        wake: Callable[[], None],
        sort_mail: Callable[[], None],
    ) -> None:
        """`wake` ends a poll of the group; `sort_mail` sees to whatever else has woken it."""
        self._members = view.members
        self._me = view.rank(me)
        self._group = group
        self.wake = wake
        self._sort_mail = sort_mail
        self._mine = arena.begin(view.number)
        self._others = {
            rank: group.connections[member].memory.region(view.number)
            for rank, member in enumerate(view.members)
            if rank != self._me
        }
        self._begun: set[int] = set()  # ranks whose regions are this view's
        self._read = dict.fromkeys(self._others, 0)
        self._blocks = Blocks(HEAP_BYTES)
        self._parts: set[tuple[int, int]] = set()  # (rank, serial) whose slice of a result is there
        self._gone = Gone()
        self._spin_s = SPIN_S[1]

    def stage(self, length: int) -> tuple[int, torch.Tensor] | None:
        offset = self._blocks.take(length)
        return None if offset is None else (offset, self._mine.block(offset, length))

    def free(self, offset: int) -> None:
        self._blocks.give_back(offset)

    def publish(self, record: Record, *, urgent: bool = True) -> bool:
        readers = min(
            (
                region.read_up_to(self._me) if region.is_current else 0
                for rank, region in self._others.items()
                if rank not in self._gone
            ),
            default=self._mine.head,
        )
        if not self._mine.write(record.encode(), readers):
            return False
        if urgent:
            self._ring()
        return True

    def _ring(self) -> None:
        for rank, region in self._others.items():
            if region.asleep and rank not in self._gone:
                self._group.ring(self._members[rank], DOORBELL)

    @property
    def unsent(self) -> bool:
        return False

    def _is_there(self) -> bool:
        read = self._read
        return any(region.words[1] != read[rank] and self._has_begun(rank) for rank, region in self._others.items())

    def _has_begun(self, rank: int) -> bool:
        """Until a peer has begun this view, its region is that of an old one."""
        if rank not in self._begun:
            if not self._others[rank].is_current:
                return False
            self._begun.add(rank)
        return True

    def take(self) -> list[tuple[int, Record]]:
        found: list[tuple[int, Record]] = []
        for rank, region in self._others.items():
            at, head = self._read[rank], region.head
            if at == head or not self._has_begun(rank):
                continue
            head = region.head
            while at < head:
                record, at = region.read(at)
                if record is None:
                    continue
                if record.what is What.PART:
                    self._parts.add((rank, record.serial))
                if record.what is What.BYE:
                    self._gone.left.add(rank)
                found.append((rank, record))
            self._read[rank] = at
            self._mine.note_read(rank, at)
        if not found:
            self._gone.check()
        return found

    def wait(self, at_most_s: float) -> None:
        until = time.perf_counter() + min(self._spin_s, at_most_s)
        while True:
            if self._is_there():
                self._spin_s = min(SPIN_S[1], self._spin_s * 2)
                return
            if time.perf_counter() >= until:
                break
            os.sched_yield()
        self._spin_s = max(SPIN_S[0], self._spin_s / 2)
        self._mine.asleep = True
        try:
            if self._is_there() or at_most_s <= 0:
                self._hear(0.0)
                return
            self._hear(min(at_most_s, LOOK_S))
        finally:
            self._mine.asleep = False

    def _hear(self, at_most_s: float) -> None:
        heard = self._group.poll(at_most_s)
        for news in heard:
            if isinstance(news, PeerGone):
                self._gone.ended(self._members.index(news.peer), news.reason)
        if not heard:  # what else has woken us keeps the poll awake until it is seen to
            self._sort_mail()

    def lose(self, rank: int, reason: str) -> None:
        self._gone.ended(rank, reason, after_s=LOST_S)

    def give(self, serial: int, phase: int, data: torch.Tensor, ranges: Mapping[int, Ranges]) -> None:
        """The first phase's data was there when it was announced; of the second's they are told."""

    def ready(self, serials: Serials, phase: int, wanted: Mapping[int, Ranges]) -> bool:
        return phase == 1 or all((rank, serials[rank]) in self._parts for rank in wanted)

    def pieces(self, rank: int, serial: int, phase: int, block: tuple[int, int], ranges: Ranges) -> list[torch.Tensor]:
        offset, length = block
        memory = self._others[rank].block(offset, length)
        return [memory[start:stop] for start, stop in ranges]

    def forget(self, serials: Serials) -> None:
        for rank, serial in serials.items():
            self._parts.discard((rank, serial))

    def intact(self, ranks: Sequence[int]) -> bool:
        return all(self._others[rank].is_current for rank in ranks if rank != self._me)

    def leave(self) -> None:
        self._ring()
        self.close()

    def close(self) -> None:
        self._group.close()
