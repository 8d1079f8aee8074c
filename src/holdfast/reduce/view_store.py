"""What torch's process groups meet by: a store that lives in the connections between a view's members.

Whatever a member sets is said to all others, and each keeps a copy. So there is no further server to reach, to prove
oneself to, and to lose; and a view has a store of its own by itself. Keys are set once: that is all that is needed
where groups are built, and who sets one again, or wants to count, is refused.

The thread that builds the group asks and waits; the loop's thread tells what has come. A condition guards it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store  # as torch.distributed has it, with types

from holdfast.core.errors import PeerError
from holdfast.net.kernel import Kernel

KEYS_MAX = 1 << 14
KEY_CHARACTERS_MAX, VALUE_BYTES_MAX = 512, 64 * 1024


class ViewStore(Store):
    """`say(key, value)` tells the other members."""

    def __init__(self, say: Callable[[str, bytes], None], kernel: Kernel, timeout_s: float) -> None:
        super().__init__()
        self._say = say
        self._now = kernel.now
        self._timeout_s = timeout_s
        self._changed = kernel.condition()
        self._values: dict[str, bytes] = {}
        self._closed = False

    def heard(self, key: str, value: bytes) -> None:
        with self._changed:
            if len(self._values) < KEYS_MAX:
                self._values.setdefault(key, value)
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits is told that what it waits for will not come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- what torch asks of a store

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if len(key) > KEY_CHARACTERS_MAX or len(data) > VALUE_BYTES_MAX:
            raise PeerError(f"{key[:80]!r} with {len(data)} bytes is too much for the store of a view")
        self.heard(key, data)
        self._say(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        at_most_s = timeout.total_seconds() if timeout is not None else self._timeout_s
        until = self._now() + at_most_s
        with self._changed:
            while missing := [key for key in keys if key not in self._values]:
                left_s = until - self._now()
                if self._closed or left_s <= 0:
                    why = "the view is over" if self._closed else f"nobody has set it within {at_most_s:.0f} s"
                    raise PeerError(f"there is no {missing[0]}: {why}")
                self._changed.wait(min(left_s, 1.0))

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        return len(self._values)

    def delete_key(self, key: str) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return False
