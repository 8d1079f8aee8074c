"""The logs of a server's slices on disk, for runs whose updates count when they are on a majority's disks.

    DIR/SLICE/               log/segments.py: entries, with their payloads; its note is the newest promise
    DIR/SLICE/snapshot-N     the state after entry N: head, body, and a digest of both

One thread, `holdfast-server-disk`, owns all files. It takes everything that has come while it was at work, writes it,
and syncs once for each slice: that is the group commit. What it has done goes into the server's mailbox. When a disk
fails or is full, nothing that the replica has handed over since is written, until the replica has heard of it.

The files of a slice that this server replicates no more are renamed first and then deleted: a server that ends in
between finds none of them as a slice's. What was handed over before says nothing of the replica that may come after.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import xxhash

from holdfast.core.errors import IntegrityError, ProtocolError, StorageError
from holdfast.core.words import decode_json, encode_json
from holdfast.log import messages as m
from holdfast.log.files import sync_directory
from holdfast.log.segments import Segments
from holdfast.servers.log_codec import decode_entry, decode_snapshot, encode_entry, encode_snapshot
from holdfast.servers.replicated import Head, Payload

SNAPSHOT = "snapshot-"
REMOVED = ".removed-"  # what a slice's directory is called while it is deleted
_LENGTHS = struct.Struct("!IQ")
_CHECK_BYTES = 16


@dataclass(frozen=True)
class OnDisk:
    """From the disk's thread: this is done, or, with a reason, failed and so is all that was handed over since."""

    name: str
    event: m.Persisted | m.StoreFailed | m.SnapshotTaken | m.SnapshotFailed | None
    then: Callable[[], None]
    life: int = 0  # of the replica that handed it over: how many of this slice were here before


@dataclass
class Task:
    """`work` is done in the disk's thread. Tasks of one slice keep their order."""

    name: str
    work: Callable[[Segments], None]
    done: m.Persisted | m.SnapshotTaken | None
    failed: Callable[[str], m.StoreFailed | m.SnapshotFailed]
    then: Callable[[], None]  # in the server's thread, whatever came of it
    generation: int = 0
    life: int = 0
    is_of_log: bool = True
    removes: bool = False  # the slice's files, with all that was handed over before


@dataclass
class Found:
    """What an earlier process left of a slice."""

    stored: m.Stored
    payloads: list[Payload | None]
    state: Payload | None = None


class DurableSlices:
    def __init__(self, directory: Path, post: Callable[[OnDisk], None]) -> None:
        self._directory = directory
        self._post = post
        self._open: dict[str, Segments] = {}
        self._tasks: deque[Task] = deque()
        self._asked = threading.Condition()
        self._generations: dict[str, int] = {}  # the server's thread counts failures that it has heard of
        self._lives: dict[str, int] = {}  # and how often a slice's files were removed
        self._broken: dict[str, int] = {}  # the disk's thread: up to here nothing is written
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="holdfast-server-disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._asked:
            self._closing = True
            self._asked.notify()
        self._thread.join(timeout=30.0)
        for segments in self._open.values():
            segments.close()

    # ---- handing over, in the server's thread

    def heard(self, done: OnDisk) -> m.Event | None:
        """What the replica of this slice is told; None: nothing, or it is of one that was here before."""
        done.then()
        if done.life != self._lives.get(done.name, 0):
            return None
        if isinstance(done.event, m.StoreFailed):
            self._generations[done.name] = self._generations.get(done.name, 0) + 1
        return done.event

    def store(
        self, name: str, effect: m.Store, payload_of: Callable[[m.Update], Payload], then: Callable[[], None]
    ) -> None:
        operation = effect.operation

        def work(segments: Segments) -> None:
            if isinstance(operation, m.Write):
                for entry in operation.entries:
                    segments.append(entry.index, _encoded(entry, payload_of))
            elif isinstance(operation, m.Promise):
                segments.keep_note(encode_json({"promised": operation.epoch}))
            else:
                segments.restart_after(operation.end.index)

        def failed(reason: str) -> m.StoreFailed:
            return m.StoreFailed(effect.ticket, reason)

        self._add(Task(name, work, m.Persisted(effect.ticket), failed, then))

    def keep_snapshot(
        self, name: str, snapshot: m.Snapshot, state: Payload, done: m.SnapshotTaken | None, then: Callable[[], None]
    ) -> None:
        def work(segments: Segments) -> None:
            _write_snapshot(self._path(name), snapshot, state)

        def failed(reason: str) -> m.SnapshotFailed:
            return m.SnapshotFailed(snapshot, reason)

        self._add(Task(name, work, done, failed, then, is_of_log=False))

    def drop_prefix(self, name: str, through: int) -> None:
        def work(segments: Segments) -> None:
            segments.drop_through(min(through, segments.last))

        def failed(reason: str) -> m.SnapshotFailed:
            return m.SnapshotFailed(m.Snapshot(), reason)

        self._add(Task(name, work, None, failed, lambda: None, is_of_log=False))

    def remove(self, name: str) -> None:
        """This server replicates the slice no more."""

        def failed(reason: str) -> m.SnapshotFailed:
            return m.SnapshotFailed(m.Snapshot(), reason)

        self._add(Task(name, lambda segments: None, None, failed, lambda: None, removes=True))
        self._lives[name] = self._lives.get(name, 0) + 1
        self._generations.pop(name, None)

    def _add(self, task: Task) -> None:
        task.generation = self._generations.get(task.name, 0)
        task.life = self._lives.get(task.name, 0)
        with self._asked:
            self._tasks.append(task)
            self._asked.notify()

    # ---- the disk's thread

    def _run(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._tasks or self._closing)
                tasks = list(self._tasks)
                self._tasks.clear()
            if not tasks:
                return
            for name in dict.fromkeys(task.name for task in tasks):
                mine = [task for task in tasks if task.name == name]
                while removals := [number for number, task in enumerate(mine) if task.removes]:
                    self._carry_out(name, mine[: removals[0]])
                    self._remove(name)
                    mine = mine[removals[0] + 1 :]
                self._carry_out(name, mine)

    def _remove(self, name: str) -> None:
        self._broken.pop(name, None)
        if (segments := self._open.pop(name, None)) is not None:
            segments.close()
        _delete(self._path(name))

    def _carry_out(self, name: str, tasks: list[Task]) -> None:
        """The log's tasks with one sync, and then the others."""
        if not tasks:
            return
        logged = [task for task in tasks if task.is_of_log]
        fit = [task for task in logged if task.generation > self._broken.get(name, -1)]
        for task in logged:
            if task not in fit:
                self._post(OnDisk(name, None, task.then, task.life))
        try:
            segments = self._segments(name)
            for task in fit:
                task.work(segments)
            segments.commit()
            for task in fit:
                self._post(OnDisk(name, task.done, task.then, task.life))
        except StorageError as error:
            self._broken[name] = max((task.generation for task in fit), default=-1)
            for number, task in enumerate(fit):
                said = task.failed(error.message) if number == 0 else None
                self._post(OnDisk(name, said, task.then, task.life))
        for task in tasks:
            if not task.is_of_log:
                self._carry_out_aside(name, task)

    def _carry_out_aside(self, name: str, task: Task) -> None:
        try:
            task.work(self._segments(name))
            self._post(OnDisk(name, task.done, task.then, task.life))
        except (StorageError, OSError) as error:
            said = task.failed(str(error)) if task.done is not None else None
            self._post(OnDisk(name, said, task.then, task.life))

    def _segments(self, name: str) -> Segments:
        if name not in self._open:
            self._open[name] = Segments.open(self._path(name))
        return self._open[name]

    def _path(self, name: str) -> Path:
        return self._directory / quote(name, safe="")

    # ---- what is there, before the thread starts

    def names(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        there = [path for path in self._directory.iterdir() if path.is_dir()]
        for path in there:
            if path.name.startswith(REMOVED):  # the process ended while it deleted this
                shutil.rmtree(path, ignore_errors=True)
        return sorted(unquote(path.name) for path in there if not path.name.startswith(REMOVED))

    def find(self, name: str) -> Found:
        """IntegrityError if it was damaged."""
        segments = self._segments(name)
        snapshot, state = _newest_snapshot(self._path(name))
        promised = decode_json(segments.note).get("promised", 0) if segments.note else 0
        payloads: list[Payload | None] = []
        entries: list[m.Entry] = []
        try:
            for _, data in segments.read(segments.first, segments.last):
                entry, payload = _decoded(data, sum(one is not None for one in payloads) + 1)
                entries.append(entry)
                payloads.append(payload)
        except ProtocolError as error:
            raise IntegrityError(f"the log in {self._path(name)} cannot be read: {error.message}") from error
        return Found(m.Stored(snapshot, tuple(entries), int(promised)), payloads, state)


def _delete(directory: Path) -> None:
    """All at once: a part of a log must not be found again. What cannot be deleted now is at the next start."""
    removed = directory.with_name(REMOVED + directory.name)
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(OSError):
        directory.rename(removed)
        sync_directory(directory.parent)
        shutil.rmtree(removed, ignore_errors=True)


def _encoded(entry: m.Entry, payload_of: Callable[[m.Update], Payload]) -> bytes:
    payload = payload_of(entry.content) if isinstance(entry.content, m.Update) else None
    head = json.dumps(encode_entry(entry, lambda update: dict(payload.head) if payload is not None else {})).encode()
    body = payload.body if payload is not None else memoryview(b"")
    return b"".join((_LENGTHS.pack(len(head), body.nbytes), head, body))


def _decoded(data: bytes, reference: int) -> tuple[m.Entry, Payload | None]:
    head_bytes, body_bytes = _LENGTHS.unpack_from(data)
    start = _LENGTHS.size + head_bytes
    kept: list[Payload] = []

    def keep(head: Head, nbytes: int) -> int:
        kept.append(Payload(head, memoryview(bytearray(data[start : start + body_bytes]))))
        return reference

    entry = decode_entry(json.loads(data[_LENGTHS.size : start]), keep)
    return entry, kept[0] if kept else None


def _write_snapshot(directory: Path, snapshot: m.Snapshot, state: Payload) -> None:
    head = encode_json({"snapshot": encode_snapshot(snapshot), "state": dict(state.head)})
    final = directory / f"{SNAPSHOT}{snapshot.end.index:012d}"
    new = directory / "snapshot.new"
    pieces = (memoryview(_LENGTHS.pack(len(head), state.nbytes)), memoryview(head), state.body)
    try:
        with new.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.write(_digest(pieces))
            file.flush()
            os.fsync(file.fileno())
        new.rename(final)
        sync_directory(directory)
    except OSError as error:
        raise StorageError(f"the snapshot {final} cannot be written: {error.strerror or error}") from error
    for older in sorted(directory.glob(f"{SNAPSHOT}*"))[:-1]:
        with suppress(OSError):
            older.unlink()


def _newest_snapshot(directory: Path) -> tuple[m.Snapshot, Payload | None]:
    found = sorted(directory.glob(f"{SNAPSHOT}*"))
    if not found:
        return m.Snapshot(), None
    data = memoryview(bytearray(found[-1].read_bytes()))
    content, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if _digest([content]) != bytes(check):
        raise IntegrityError(
            f"{found[-1]} is damaged", hint="remove the server's directory, and it starts as a new replica"
        )
    head_bytes, _ = _LENGTHS.unpack_from(content)
    start = _LENGTHS.size + head_bytes
    head = decode_json(bytes(content[_LENGTHS.size : start]))
    return decode_snapshot(head.get("snapshot")), Payload(head["state"], _aligned(content[start:]))


def _aligned(body: memoryview) -> memoryview:
    """Tensors are read where they lie, so they must begin where their kind may."""
    return memoryview(bytearray(body))


def _digest(pieces: Iterable[memoryview]) -> bytes:
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()
