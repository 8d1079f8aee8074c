"""Where a replica's log and snapshots are kept: a port. In memory, where they are already, or on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.log import messages as m
from holdfast.servers.buffers import BufferPool, KeptPayload
from holdfast.servers.durable import DurableSlices, OnDisk
from holdfast.servers.replicated import Answer, Payload


class LogStorage(Protocol):
    """Nothing here waits."""

    def store(self, name: str, effect: m.Store, kept_of: Callable[[m.Update], KeptPayload]) -> bool:
        """True: it is stored now. False: the replica is told Persisted or StoreFailed."""

    def hold_snapshot(self, name: str, snapshot: m.Snapshot, capture: Callable[[], Answer]) -> bool:
        """True: the state itself is snapshot enough. False: the replica is told when it is held."""

    def hold_fetched(self, name: str, snapshot: m.Snapshot, state: Payload, then: Callable[[], None]) -> None:
        """Of another replica; `then` is called in the server's thread when it is held."""

    def drop_prefix(self, name: str, through: int) -> None: ...

    def remove(self, name: str) -> None:
        """Everything of this slice, which is replicated here no more."""


class MemoryStorage:
    def store(self, name: str, effect: m.Store, kept_of: Callable[[m.Update], KeptPayload]) -> bool:
        return True

    def hold_snapshot(self, name: str, snapshot: m.Snapshot, capture: Callable[[], Answer]) -> bool:
        return True

    def hold_fetched(self, name: str, snapshot: m.Snapshot, state: Payload, then: Callable[[], None]) -> None:
        then()

    def drop_prefix(self, name: str, through: int) -> None:
        pass

    def remove(self, name: str) -> None:
        pass


class DiskStorage:
    """The server's side of durable.py: payloads are held until they are written."""

    def __init__(self, directory: Path, post: Callable[[OnDisk], None]) -> None:
        self.slices = DurableSlices(directory, post)

    def store(self, name: str, effect: m.Store, kept_of: Callable[[m.Update], KeptPayload]) -> bool:
        entries = effect.operation.entries if isinstance(effect.operation, m.Write) else ()
        kept = {one.content: kept_of(one.content) for one in entries if isinstance(one.content, m.Update)}
        for one in kept.values():
            one.hold()

        def then() -> None:
            for one in kept.values():
                one.release()

        self.slices.store(name, effect, lambda update: kept[update].payload, then)
        return False

    def hold_snapshot(self, name: str, snapshot: m.Snapshot, capture: Callable[[], Answer]) -> bool:
        state = capture()
        copied = Payload(state.head, memoryview(bytearray(b"".join(state.views))))
        self.slices.keep_snapshot(name, snapshot, copied, m.SnapshotTaken(snapshot), lambda: None)
        return False

    def hold_fetched(self, name: str, snapshot: m.Snapshot, state: Payload, then: Callable[[], None]) -> None:
        self.slices.keep_snapshot(name, snapshot, state, None, then)

    def drop_prefix(self, name: str, through: int) -> None:
        self.slices.drop_prefix(name, through)

    def remove(self, name: str) -> None:
        self.slices.remove(name)


def kept_in(pool: BufferPool, payload: Payload) -> KeptPayload:
    """A payload that was read from disk, in memory of the pool."""
    if not payload.nbytes:
        return KeptPayload(payload.head, None)
    buffer = pool.get(payload.nbytes)
    buffer.view[:] = payload.body
    return KeptPayload(payload.head, buffer)
