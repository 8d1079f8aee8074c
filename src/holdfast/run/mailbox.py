"""How other threads talk to the thread that runs the user's loop: a queue, and a descriptor that wakes its poll.

Any thread may `put`. Only the loop's thread takes. The queue is bounded in practice by what fills it: ledger news
replace each other, connections are limited by the listener.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any


class Mailbox:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._newest: dict[str, Any] = {}  # for what only the newest of counts
        self._lock = threading.Lock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, item: Any, *, replace: str = "") -> None:
        """`replace`: an item of that name that was not taken yet is no longer wanted."""
        with self._lock:
            if replace:
                self._newest[replace] = item
            else:
                self._items.append(item)
        self.wake()

    def wake(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget wake-ups. Look at `is_empty` afterwards, not before."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def take_all(self) -> list[Any]:
        self.clear()
        with self._lock:
            items = [*self._newest.values(), *self._items]
            self._newest.clear()
            self._items.clear()
        return items

    @property
    def is_empty(self) -> bool:
        return not self._items and not self._newest

    def close(self) -> None:
        with suppress(OSError):
            os.close(self.fd)
