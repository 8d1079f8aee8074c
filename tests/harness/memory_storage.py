"""A storage in this process's memory: the twin of the real ones, for simulation and for tests.

storage = MemoryStorage()
storage.fail_with(StorageUnavailable("the disk is full"), calls={"write", "create"})
storage.fail_with(None)
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Collection

from holdfast.checkpoint.storage.names import check_name, check_prefix
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import IntegrityError, NotStored, StorageError

CALLS = frozenset({"write", "create", "read", "read_into", "list", "delete"})


class MemoryStorage:
    def __init__(self, uri: str = "memory://") -> None:
        self.uri = uri
        self.writers = 2
        self.block_bytes = 2 << 20
        self._lock = threading.Lock()
        self._contents: dict[str, bytes] = {}
        self._error: StorageError | None = None
        self._failing: frozenset[str] = CALLS

    def fail_with(self, error: StorageError | None, calls: Collection[str] = CALLS) -> None:
        """From now on these calls raise `error` and do nothing else; None ends it."""
        assert set(calls) <= CALLS, calls
        with self._lock:
            self._error, self._failing = error, frozenset(calls)

    def write(self, name: str, data: memoryview) -> None:
        check_name(name)
        content = bytes(data)
        with self._lock:
            self._may("write")
            self._contents[name] = content

    def create(self, name: str, data: bytes) -> bool:
        check_name(name)
        content = bytes(data)
        with self._lock:
            self._may("create")
            if name in self._contents:
                return False
            self._contents[name] = content
            return True

    def read(self, name: str, bytes_max: int) -> bytes:
        content = self._content("read", name)
        if len(content) > bytes_max:
            raise IntegrityError(f"{name} in {self.uri} has {len(content)} bytes, more than {bytes_max}")
        return content

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        content = self._content("read_into", name)
        if len(content) < offset + len(memory):
            raise IntegrityError(f"{name} in {self.uri} ends after {len(content)} bytes, before {offset + len(memory)}")
        memory[:] = content[offset : offset + len(memory)]

    def list(self, prefix: str = "") -> builtins.list[Stored]:
        check_prefix(prefix)
        with self._lock:
            self._may("list")
            return [
                Stored(name, len(self._contents[name])) for name in sorted(self._contents) if name.startswith(prefix)
            ]

    def delete(self, name: str) -> None:
        check_name(name)
        with self._lock:
            self._may("delete")
            self._contents.pop(name, None)

    def close(self) -> None:
        pass

    def _content(self, call: str, name: str) -> bytes:
        check_name(name)
        with self._lock:
            self._may(call)
            if name not in self._contents:
                raise NotStored(f"there is no {name} in {self.uri}")
            return self._contents[name]

    def _may(self, call: str) -> None:
        if self._error is not None and call in self._failing:
            raise self._error
