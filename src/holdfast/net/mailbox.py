"""How other threads talk to the thread that runs the user's loop: a queue, and a descriptor that wakes its poll.

Any thread may `put`, and so may a signal handler in the middle of `take_all`: there is no lock to wait for. Only the
loop's thread takes. What fills the queue is bounded: ledger news come with changes of membership, connections are
limited by the listener.
"""

from __future__ import annotations

import os
import select
from collections import deque
from contextlib import suppress
from typing import Any


class Mailbox:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """End a wait, also one in a poll that watches the descriptor."""
        with suppress(OSError):
            os.eventfd_write(self.fd, 1)

    def wait(self, at_most_s: float) -> None:
        """For an item or a wake-up."""
        self._poll.poll(at_most_s * 1000)

    def clear(self) -> None:
        """Forget wake-ups. Look at `is_empty` afterwards, not before."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def take_all(self) -> list[Any]:
        self.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    @property
    def is_empty(self) -> bool:
        return not self._items
