"""A ledger in which a worker is by itself: nobody waits for a view, so each worker has one of its own.

What this worker's membership reads and writes goes through here. The registrations of others are hidden, and so is the
run's size; the view is kept under a key of this worker's own, under its lease. Everything else is the run's: the order
to stop, the request for a checkpoint, the end. Who the others are is remembered for whoever asks (`registered`).

Used by the two threads of the ledger's feed, and `registered` by any.
"""

from __future__ import annotations

from holdfast.core.words import KEY_DEAD, KEY_OWN_VIEWS, KEY_ROLLS, KEY_SIZE, KEY_VIEW, KEY_WORKERS
from holdfast.ledger.port import Change, Entry, Ledger, Reading, Watch

_OF_OTHERS = (KEY_WORKERS, KEY_ROLLS, KEY_DEAD)


class OwnView:
    """port.Ledger over another one, for the worker `me`."""

    def __init__(self, inner: Ledger, me: str) -> None:
        self._inner = inner
        self._me = me
        self._own = KEY_OWN_VIEWS + me
        self._lease = 0
        self._registered: dict[str, int] = {}  # worker -> the revision of its registration

    def registered(self) -> tuple[str, ...]:
        """All workers of the run, by the ledger as it was last seen; who came first, first."""
        known = self._registered  # the other thread puts another in its place
        return tuple(sorted(known, key=lambda worker: known[worker]))

    def get(self, key: str) -> Entry | None:
        entry = self._inner.get(self._outside(key))
        return self._inside(entry) if entry is not None else None

    def read(self, prefix: str) -> Reading:
        reading = self._inner.read(prefix)
        if not prefix:
            entries = [entry for entry in reading.entries if entry.key.startswith(KEY_WORKERS)]
            self._registered = {entry.key[len(KEY_WORKERS) :]: entry.created for entry in entries}
        shown = [self._inside(entry) for entry in reading.entries if self._is_shown(entry.key)]
        return Reading(tuple(sorted(shown, key=lambda entry: entry.key)), reading.revision)

    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        return self._inner.put(self._outside(key), value, lease=lease)

    def compare_and_set(
        self, key: str, value: bytes, *, expected: int, lease: int = 0, while_at: tuple[str, int] | None = None
    ) -> int | None:
        if key == KEY_VIEW:
            lease = self._lease
        guard = (self._outside(while_at[0]), while_at[1]) if while_at is not None else None
        return self._inner.compare_and_set(self._outside(key), value, expected=expected, lease=lease, while_at=guard)

    def delete(self, key: str) -> bool:
        return self._inner.delete(self._outside(key))

    def grant(self, ttl_s: float) -> int:
        self._lease = self._inner.grant(ttl_s)
        return self._lease

    def keep_alive(self, lease: int) -> float:
        return self._inner.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        self._inner.revoke(lease)

    def watch(self, prefix: str, *, revision: int) -> Watch:
        return _OwnWatch(self, self._inner.watch(prefix, revision=revision))

    def close(self) -> None:
        self._inner.close()

    # ---- the two sides

    def _outside(self, key: str) -> str:
        return self._own if key == KEY_VIEW else key

    def _inside(self, entry: Entry) -> Entry:
        key = KEY_VIEW if entry.key == self._own else entry.key
        return Entry(key, entry.value, entry.revision, entry.created, entry.lease)

    def _is_shown(self, key: str) -> bool:
        if key == self._own or key in [prefix + self._me for prefix in _OF_OTHERS]:
            return True
        return not key.startswith((*_OF_OTHERS, KEY_SIZE, KEY_VIEW, KEY_OWN_VIEWS))

    def seen(self, changes: tuple[Change, ...]) -> tuple[Change, ...]:
        """What this worker is to see of them."""
        for change in changes:
            if change.key.startswith(KEY_WORKERS):
                worker, known = change.key[len(KEY_WORKERS) :], dict(self._registered)
                if change.kind == "delete":
                    known.pop(worker, None)
                else:
                    known.setdefault(worker, change.revision)
                self._registered = known
        shown = [change for change in changes if self._is_shown(change.key)]
        return tuple(
            Change(one.kind, KEY_VIEW if one.key == self._own else one.key, one.value, one.revision) for one in shown
        )


class _OwnWatch:
    def __init__(self, view: OwnView, inner: Watch) -> None:
        self._view = view
        self._inner = inner

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        return self._view.seen(self._inner.next(timeout_s))

    def close(self) -> None:
        self._inner.close()
