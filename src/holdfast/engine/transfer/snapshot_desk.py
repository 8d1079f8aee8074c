"""Where joiners' connections find the snapshot: put there by the loop, read by the listener's threads."""

from __future__ import annotations

from holdfast.net.kernel import SYSTEM, Kernel
from holdfast.state.snapshot import Snapshot


class SnapshotDesk:
    """Holds at most one snapshot, of one view, from when the view is level until its step commits."""

    def __init__(self, kernel: Kernel = SYSTEM) -> None:
        self._changed = kernel.condition()
        self._offered: tuple[int, Snapshot] | None = None
        self._over = 0  # nothing will be offered for this view, or for one before it, that is not offered now

    def expect(self, view: int) -> None:
        """This view begins: whoever asks for an older one need not wait."""
        with self._changed:
            self._over = max(self._over, view - 1)
            self._changed.notify_all()

    def offer(self, view: int, snapshot: Snapshot) -> None:
        with self._changed:
            self._offered = (view, snapshot)
            self._over = max(self._over, view)
            self._changed.notify_all()

    def withdraw(self) -> None:
        with self._changed:
            self._offered = None
            self._changed.notify_all()

    def offers(self, snapshot: Snapshot) -> bool:
        """Whether it is as it was. Once it is withdrawn, what it refers to may change at any moment."""
        with self._changed:
            return self._offered is not None and self._offered[1] is snapshot

    def wait_for(self, view: int, timeout_s: float) -> Snapshot | None:
        """The snapshot of that view, which may be offered a little later than it is asked for, but not again."""
        with self._changed:
            self._changed.wait_for(lambda: self._over >= view, timeout_s)
            if self._offered is None or self._offered[0] != view:
                return None
            return self._offered[1]
