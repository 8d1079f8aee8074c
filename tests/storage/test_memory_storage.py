"""The storage in memory keeps the contract, and fails when it is told to."""

from __future__ import annotations

import pytest

from holdfast.core.errors import StorageRefused, StorageUnavailable
from tests.harness.memory_storage import MemoryStorage

from .storage_contract import StorageContract, write


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> MemoryStorage:
        return MemoryStorage()


def test_it_fails_as_told_and_changes_nothing() -> None:
    storage = MemoryStorage()
    write(storage, "a", b"old")
    storage.fail_with(StorageUnavailable("full"), calls={"write", "create"})
    with pytest.raises(StorageUnavailable, match="full"):
        write(storage, "a", b"new")
    with pytest.raises(StorageUnavailable, match="full"):
        storage.create("b", b"new")
    assert storage.read("a", 10) == b"old"
    assert len(storage.list()) == 1
    storage.fail_with(StorageRefused("no"))
    for call in (lambda: storage.list(), lambda: storage.read("a", 10), lambda: storage.delete("a")):
        with pytest.raises(StorageRefused):
            call()
    storage.fail_with(None)
    write(storage, "a", b"new")
    assert storage.read("a", 10) == b"new"
