"""A worker's connection to one server: the requests that it has not answered, and the memory that both share.

Bodies that are under way are bounded, in each direction by itself: a server has little of a worker's in memory at a
time, and what it works on is still in its processor's cache. The two directions do not wait for each other, since a
read may wait on its server for an update that comes behind it. Owned by the thread of `Asking`.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.core.errors import ProtocolError
from holdfast.servers.frames import FrameStream, Head
from holdfast.servers.worker_memory import SHARED_BYTES_MIN, Parts, WorkerMemory

if TYPE_CHECKING:
    from holdfast.servers.asking import Ask

SILENT_S = 5.0  # a server that says nothing for so long is asked again
WINDOW_BYTES = 16 << 20  # under way to one server in one direction; or one body, if that is larger


def shared_memory_bytes(largest_body: int) -> int:
    """How much memory a connection needs, so that a whole window of both directions fits."""
    window = max(WINDOW_BYTES, largest_body)
    return 2 * (window + window // 8 + (1 << 20))


def hinted(refusal: Head, asked: str, known_epoch: int) -> str:
    """Whom the server names that refused, if it knows more than the ledger has told this worker; else nobody.

    A new primary that has not heard of it yet names the one before, which may be standing still for a long time.
    """
    primary, epoch = refusal.get("primary"), refusal.get("epoch")
    if not isinstance(primary, str) or type(epoch) is not int or epoch <= known_epoch or primary == asked:
        return ""
    return primary


class Window:
    """Requests in the order in which they came: so many bytes of them are under way, and the others wait."""

    def __init__(self, bytes_max: int = WINDOW_BYTES) -> None:
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[int, int]] = deque()  # the request's number, its bytes
        self._under_way: dict[int, int] = {}
        self._bytes = 0

    def add(self, number: int, nbytes: int) -> None:
        self._waiting.append((number, nbytes))

    def ready(self) -> Iterator[int]:
        """Those that may be sent now. One that is larger than the window goes alone."""
        while self._waiting and (not self._bytes or self._bytes + self._waiting[0][1] <= self._bytes_max):
            number, nbytes = self._waiting.popleft()
            self._under_way[number] = nbytes
            self._bytes += nbytes
            yield number

    def remove(self, number: int) -> None:
        """It is answered, or not wanted here any more."""
        if number in self._under_way:
            self._bytes -= self._under_way.pop(number)
        else:
            self._waiting = deque(one for one in self._waiting if one[0] != number)


class Wire:
    def __init__(self, server: str, memory: WorkerMemory | None) -> None:
        self.server = server
        self.memory = memory
        self._parts = Parts(memory.slot_bytes) if memory is not None else None
        self.stream: FrameStream | None = None
        self.asks: dict[int, Ask] = {}
        self._small: deque[int] = deque()  # to be sent, without a body to speak of: they wait for nothing
        self._pushes, self._reads = Window(), Window()
        self.filling = 0  # the id of the answer whose body is being read
        self.filled = False  # the answer has a body of its own
        self._moved = (0, 0.0)  # bytes, and since when there were no more

    # ---- which requests are under way

    def add(self, number: int, ask: Ask) -> None:
        self.asks[number] = ask
        window = self._window_of(ask)
        if window is None:
            self._small.append(number)
        else:
            window.add(number, ask.shared_bytes)

    def _window_of(self, ask: Ask) -> Window | None:
        if ask.shared_bytes < SHARED_BYTES_MIN:
            return None
        return self._pushes if ask.views else self._reads

    def ready(self) -> Iterator[int]:
        """The requests that are to be sent now, each once."""
        while self._small:
            if (number := self._small.popleft()) in self.asks:
                yield number
        yield from self._pushes.ready()
        yield from self._reads.ready()

    def remove(self, number: int) -> Ask | None:
        """This request, if it is known: it is answered, or taken back."""
        ask = self.asks.pop(number, None)
        window = self._window_of(ask) if ask is not None else None
        if window is not None:
            window.remove(number)
        return ask

    # ---- memory

    def through_memory(self, ask: Ask) -> tuple[Head, Sequence[memoryview]]:
        """What has to be said of the memory, and what has to be sent."""
        ask.part = None
        if self.memory is None or self._parts is None or ask.shared_bytes < SHARED_BYTES_MIN:
            return {}, ask.views
        start = self._parts.take(ask.shared_bytes)
        if start is None:
            return {}, ask.views
        ask.part = (start, ask.shared_bytes)
        if ask.views:
            self.memory.copy_in(start, list(ask.views))
        return {"memory": list(ask.part)}, ()

    def read_memory(self, ask: Ask, head: Head) -> None:
        """The answer to this one has come: what is in the memory is taken, and its part is free again."""
        if ask.part is None or self.memory is None or self._parts is None:
            return
        if ask.into and "refused" not in head and not self.filled:
            self.memory.copy_out(ask.part[0], list(ask.into))
        self._parts.give_back(ask.part[0])
        ask.part = None

    # ---- answers

    def is_silent(self, now: float) -> bool:
        """Nothing was sent or received for a while."""
        moved = self.stream.moved_bytes if self.stream is not None else 0
        if moved != self._moved[0]:
            self._moved = (moved, now)
        return bool(self.asks) and now - self._moved[1] > SILENT_S

    def place(self, head: Head, nbytes: int) -> Sequence[memoryview] | None:
        ask = self.asks.get(head.get("id", -1))
        if ask is None or "refused" in head:
            return None
        if ask.into is None:
            ask.body = memoryview(mmap.mmap(-1, nbytes))
            return [ask.body]
        if sum(view.nbytes for view in ask.into) != nbytes:
            raise ProtocolError(f"an answer of {nbytes} bytes, which is not what was asked for")
        self.filling, self.filled = head["id"], True
        return ask.into
