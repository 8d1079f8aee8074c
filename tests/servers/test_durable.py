"""Logs of slices on disk: what was stored is found again, and a disk that is full stores nothing out of order."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from holdfast.core.errors import StorageUnavailable
from holdfast.log import messages as m
from holdfast.log.configuration import LogEnd
from holdfast.log.segments import Segments
from holdfast.servers.durable import REMOVED, DurableSlices, OnDisk
from holdfast.servers.replicated import Payload

NAME = "parameters/0"


class Disk:
    """The slices of a directory, and what their thread says."""

    def __init__(self, directory: Path) -> None:
        self.said: queue.SimpleQueue[OnDisk] = queue.SimpleQueue()
        self.slices = DurableSlices(directory, self.said.put)

    def write(self, ticket: int, index: int) -> None:
        update = m.Update("w0", 1, index, index, 5)
        effect = m.Store(ticket, m.Write((m.Entry(1, index, update),)), durable=True)
        payload = Payload({"kind": "update", "number": index}, memoryview(f"body{index}".encode()))
        self.slices.store(NAME, effect, lambda update: payload, lambda: None)

    def hear(self) -> m.Event | None:
        return self.slices.heard(self.said.get(timeout=10))


def test_entries_promises_and_snapshots_are_found_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.slices.start()
    for index in (1, 2, 3):
        disk.write(index, index)
    disk.slices.store(NAME, m.Store(4, m.Promise(7), durable=True), lambda update: Payload({}, memoryview(b"")), list)
    snapshot = m.Snapshot(LogEnd(1, 2), (m.Remembered("w0", 1, False, 2, ((1, 1), (2, 2))),))
    state = Payload({"kind": "nothing"}, memoryview(b"all of it"))
    disk.slices.keep_snapshot(NAME, snapshot, state, m.SnapshotTaken(snapshot), lambda: None)
    disk.slices.drop_prefix(NAME, 1)
    events = [disk.hear() for _ in range(6)]
    assert [one for one in events if isinstance(one, m.Persisted)] == [m.Persisted(ticket) for ticket in (1, 2, 3, 4)]
    disk.slices.close()

    again = Disk(tmp_path)
    assert again.slices.names() == [NAME]
    found = again.slices.find(NAME)
    assert found.stored.promised == 7 and found.stored.snapshot == snapshot
    assert [entry.index for entry in found.stored.entries][-2:] == [2, 3]  # files go as a whole
    assert [bytes(one.body) for one in found.payloads if one is not None][-2:] == [b"body2", b"body3"]
    assert found.state is not None and bytes(found.state.body) == b"all of it"
    again.slices.start()
    again.slices.close()


def test_after_a_failure_nothing_is_stored_until_it_was_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.write(1, 1)
    disk.write(2, 2)
    real, full = Segments.commit, [True]

    def commit(self: Segments) -> None:
        if full.pop() if full else False:
            self._added.clear()
            self._added_last = self.last
            raise StorageUnavailable("the disk is full")
        real(self)

    monkeypatch.setattr(Segments, "commit", commit)
    disk.slices.start()
    first = disk.said.get(timeout=10)
    assert first.event == m.StoreFailed(1, "the disk is full")
    disk.write(3, 1)  # handed over before the replica has heard of it
    second, third = disk.said.get(timeout=10), disk.said.get(timeout=10)
    assert second.event is None and third.event is None
    disk.slices.heard(first)
    disk.write(4, 1)
    assert disk.hear() == m.Persisted(4)
    disk.slices.close()
    assert [entry.index for entry in Disk(tmp_path).slices.find(NAME).stored.entries] == [1]


def test_a_slice_that_is_removed_leaves_nothing_and_says_nothing_to_the_one_after_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.write(1, 1)
    disk.write(2, 2)
    disk.slices.remove(NAME)
    disk.slices.start()
    assert [disk.hear(), disk.hear()] == [None, None], "stored, and nobody is left to be told"
    disk.write(1, 1)
    assert disk.hear() == m.Persisted(1), "of a replica that came after"
    disk.slices.close()
    assert [entry.index for entry in Disk(tmp_path).slices.find(NAME).stored.entries] == [1]


def test_what_was_being_deleted_when_the_server_ended_is_no_slice(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.write(1, 1)
    disk.slices.start()
    assert disk.hear() == m.Persisted(1)
    disk.slices.close()
    path = next(tmp_path.iterdir())
    path.rename(path.with_name(REMOVED + path.name))
    assert Disk(tmp_path).slices.names() == [] and not list(tmp_path.iterdir())
