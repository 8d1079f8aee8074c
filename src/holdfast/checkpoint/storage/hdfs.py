"""Storage on HDFS, through hdfs-native: a client in Rust, so no Java is needed here.

`hdfs://host:port/directory` names a NameNode; `hdfs://nameservice/directory` and `hdfs:///directory` are looked up in
the files of $HADOOP_CONF_DIR. Who we are is said by $HADOOP_USER_NAME, or by Kerberos, as for every client of HDFS.

Bytes go to a file with a name of its own in the same directory, every block of it is flushed to the DataNodes' disks,
and only then it gets the name it is meant to have: a rename is atomic in the NameNode, and in its journal when it
returns. The client asks for the flush itself, with the last packet of each block. Its `hsync` would do so again; after
that, a DataNode that dies in the middle of a write makes the client hang, as its `close` does after an error.
A writer that dies leaves such a file behind; `list` does not show it, and removes it after a day.

The client asks a NameNode that is silent for ever. So each call runs in a thread of its own, and its caller leaves it
alone once a step (a question, a block of bytes) takes longer than `step_s`. Such a thread touches the caller's memory
no more, gives no file its name any more, and is not counted on: the next call has a new client. Only a rename that was
already sent may still happen; the bytes under that name are then whole.

In a process that forked, the parent's client is dead. The child makes its own, and waits out the few seconds in which
the library might hand it a connection that its parent had used.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from holdfast.checkpoint.storage.hdfs_errors import first_line, reason_of, translated
from holdfast.checkpoint.storage.names import check_name, check_prefix, is_name
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import ConfigError, HoldfastError, IntegrityError, StorageUnavailable

if TYPE_CHECKING:
    from hdfs_native import Client, FileStatus

STEP_S = 60.0
BLOCK_BYTES = 8 << 20  # handed over as `bytes`: the client copies any other buffer byte by byte
STUCK_MAX = 32  # calls that were given up and still wait; each holds a client
UNFINISHED_AGE_MAX_MS = 24 * 3600 * 1000  # HDFS renews no file's time while it is written
SWEPT_MAX = 100  # in one list

_UNFINISHED = ".holdfast-"
_CONNECTION_KEPT_S = 3.2  # the library keeps connections to DataNodes for 3 s, for all clients of a process
_T = TypeVar("_T")


class HdfsStorage:
    """Threads: any may call; each call has one of its own besides. `_lock` guards the client and the count."""

    def __init__(self, uri: str, *, step_s: float = STEP_S) -> None:
        self.uri = uri
        self.writers = 4
        self.block_bytes = 8 << 20
        self._authority, self._root = _parsed(uri)
        self._step_s = step_s
        self._lock = threading.Lock()
        self._stuck = 0
        self._client: Client | None = self._connected()  # contacts nobody yet
        _storages.add(self)

    # -- the port

    def write(self, name: str, data: memoryview) -> None:
        check_name(name)
        path = self._path(name)
        self._bounded(f"write {path}", lambda client, steps: _store(client, steps, path, overwrite=True), data)

    def create(self, name: str, data: bytes) -> bool:
        check_name(name)
        path = self._path(name)

        def work(client: Client, steps: _Steps) -> bool:
            # Asking first spares the writing; whoever passes here still has to win.
            return _info(client, path) is None and _store(client, steps, path, overwrite=False)

        return self._bounded(f"create {path}", work, memoryview(data))

    def read(self, name: str, bytes_max: int) -> bytes:
        check_name(name)
        path = self._path(name)

        def work(client: Client, steps: _Steps) -> bytes:
            reader = client.read(path)
            size = len(reader)
            if size > bytes_max:
                raise IntegrityError(f"{path} has {size} bytes, more than the {bytes_max} it may have")
            chunks = []
            for chunk in reader.read_range_stream(0, size):
                steps.next()
                chunks.append(chunk)
            return b"".join(chunks)

        return self._bounded(f"read {path}", work)

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        check_name(name)
        path = self._path(name)
        length = memory.nbytes

        def work(client: Client, steps: _Steps) -> None:
            reader = client.read(path)
            if len(reader) < offset + length:
                raise IntegrityError(f"{path} has {len(reader)} bytes, fewer than the {offset + length} it must have")
            position = 0
            for chunk in reader.read_range_stream(offset, length) if length else ():
                steps.put(position, chunk)
                position += len(chunk)
            if position != length:
                raise IntegrityError(f"{path} ended after {offset + position} bytes")

        self._bounded(f"read {path}", work, memory)

    def list(self, prefix: str = "") -> builtins.list[Stored]:
        check_prefix(prefix)
        top = self._path(prefix.rpartition("/")[0])
        return self._bounded(f"list {top}", lambda client, steps: _listed(client, steps, self._root, top, prefix))

    def delete(self, name: str) -> None:
        check_name(name)
        path = self._path(name)
        self._bounded(f"delete {path}", lambda client, steps: _delete(client, steps, path, self._root))

    def close(self) -> None:
        with self._lock:
            self._client = None

    def _forked(self) -> None:
        """This is a child now, in which no other thread lives on."""
        self._lock = threading.Lock()
        self._stuck = 0
        if self._client is not None:
            # Whoever frees it would wait for its threads to end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._client))
            self._client = None

    # -- calls that end

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root or "/"

    def _bounded(self, doing: str, work: Callable[[Client, _Steps], _T], memory: memoryview | None = None) -> _T:
        """Run `work` in a thread until it ends, or a step of it takes too long. Every error is a StorageError."""
        client = self._usable_client(doing)
        # Only `steps` has the memory: whoever gives up takes it away, and can then use or free it.
        steps = _Steps(memory.cast("B") if memory is not None and memory.nbytes else memoryview(b""))
        outcome: builtins.list[_T] = []
        failure: builtins.list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work(client, steps))
            except BaseException as error:  # a panic of the client is not even an Exception
                failure.append(error)
            if not steps.end():
                with self._lock:
                    self._stuck -= 1

        threading.Thread(target=run, name="holdfast-hdfs", daemon=True).start()
        try:
            steps.wait(self._step_s)
        finally:  # also where a signal ends the wait
            ended = steps.leave()
            if not ended:
                with self._lock:
                    self._stuck += 1
                    if self._client is client:
                        self._client = None
        if not ended:
            raise StorageUnavailable(f"cannot {doing}: no answer from {self._authority} in {self._step_s:g} s")
        if failure:
            error = failure.pop()
            if isinstance(error, HoldfastError):
                raise error
            raise translated(error, doing, self._authority) from error
        return outcome.pop()

    def _usable_client(self, doing: str) -> Client:
        with self._lock:
            if self._stuck >= STUCK_MAX:
                raise StorageUnavailable(
                    f"cannot {doing}: {self._stuck} calls to {self._authority} are still without an answer"
                )
            if self._client is None:
                self._client = self._connected()
            client = self._client
        time.sleep(max(0.0, _quiet_until - time.monotonic()))
        return client

    def _connected(self) -> Client:
        try:
            from hdfs_native import Client
        except ImportError as error:
            raise ConfigError(
                f"{self.uri} needs the package hdfs-native", hint="pip install 'holdfast[hdfs]'"
            ) from error
        settings = {
            # All NameNodes of a nameservice are asked, or the one again after a moment; the rest is the caller's.
            "dfs.client.failover.max.attempts": "2",
            "dfs.client.failover.sleep.base.millis": "100",
            "dfs.client.failover.sleep.max.millis": "500",
            # A DataNode that falls silent: time enough for the client to go on with others within one step.
            "dfs.client.socket-timeout": str(int(self._step_s * 1000 / 3)),
        }
        try:
            return Client(f"hdfs://{self._authority}" if self._authority else None, settings)
        except (OSError, RuntimeError) as error:
            _, reason = reason_of(error)
            raise ConfigError(
                f"{self.uri} does not lead to a NameNode: {reason}",
                hint="write hdfs://host:port/directory, or set HADOOP_CONF_DIR to where hdfs-site.xml is",
            ) from error


class _GivenUp(Exception):
    """Nobody waits for this call any more."""


class _Steps:
    """What a call's thread and its caller share: how far it is, and the caller's memory for as long as it waits."""

    def __init__(self, memory: memoryview) -> None:
        self.size = memory.nbytes
        self._memory = memory
        self._changed = threading.Condition()
        self._last = time.monotonic()
        self._ended = False
        self._left = False

    # -- the thread

    def next(self) -> None:
        """A step is done, and another begins."""
        with self._changed:
            self._go_on()

    def take(self, start: int, end: int) -> bytes:
        with self._changed:
            self._go_on()
            return bytes(self._memory[start:end])

    def put(self, start: int, chunk: bytes) -> None:
        with self._changed:
            self._go_on()
            self._memory[start : start + len(chunk)] = chunk

    def _go_on(self) -> None:
        if self._left:
            raise _GivenUp
        self._last = time.monotonic()

    def end(self) -> bool:
        """Whether the caller still waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return not self._left

    # -- the caller

    def wait(self, step_s: float) -> None:
        """Until it ends, or a step takes too long."""
        with self._changed:
            while not self._ended and (left_s := self._last + step_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def leave(self) -> bool:
        """Take the memory back, and say whether the thread has ended."""
        with self._changed:
            self._left = True
            self._memory.release()
            return self._ended


# -- what a call's thread does


def _store(client: Client, steps: _Steps, path: str, *, overwrite: bool) -> bool:
    """Write to a name of our own, then give it the one it is meant to have. False: something has that."""
    from hdfs_native import WriteOptions

    unfinished = f"{path.rpartition('/')[0]}/{_UNFINISHED}{secrets.token_hex(8)}"
    renamed = False
    try:
        steps.next()
        # Not Client.create: its object would close itself when it is freed after an error, and hang.
        writer = client.inner.create(unfinished, WriteOptions(overwrite=False, create_parent=True))
        for start in range(0, steps.size, BLOCK_BYTES):
            writer.write(steps.take(start, start + BLOCK_BYTES))
        steps.next()
        writer.close()
        steps.next()
        renamed = _renamed(client, unfinished, path, overwrite=overwrite)
        return renamed
    except FileNotFoundError as error:
        raise StorageUnavailable(f"cannot write {path}: somebody removed {unfinished}") from error
    finally:
        if not renamed:
            try:
                client.delete(unfinished, False)
            except BaseException:  # out of reach now; a later list removes it
                pass


def _renamed(client: Client, unfinished: str, path: str, *, overwrite: bool) -> bool:
    try:
        client.rename(unfinished, path, overwrite)
    except (FileExistsError, FileNotFoundError) as error:
        # The client asks again where an answer was lost, and may then find what it has done itself.
        if _info(client, unfinished) is None:
            if _info(client, path) is None:
                raise StorageUnavailable(f"cannot write {path}: somebody removed {unfinished}") from error
        elif overwrite or isinstance(error, FileNotFoundError):
            raise StorageUnavailable(f"cannot write {path}: {first_line(str(error))}") from error
        else:
            return False
    return True


def _listed(client: Client, steps: _Steps, root: str, top: str, prefix: str) -> builtins.list[Stored]:
    found = []
    unfinished: builtins.list[FileStatus] = []
    newest_ms = 0
    directories = [top]
    while directories:
        try:
            for entry in client.list_status(directories.pop(), False):
                steps.next()
                newest_ms = max(newest_ms, entry.modification_time)
                name = entry.path[len(root) + 1 :]
                if entry.path.rpartition("/")[2].startswith(_UNFINISHED) and not entry.isdir:
                    unfinished.append(entry)
                elif entry.isdir:
                    if is_name(name) and (name.startswith(prefix) or prefix.startswith(f"{name}/")):
                        directories.append(entry.path)
                elif is_name(name) and name.startswith(prefix):
                    found.append(Stored(name, entry.length))
        except FileNotFoundError:
            steps.next()  # nothing there yet, or not any more
    # By the NameNode's clock, of which this is the least it can show: never older than it is.
    left = [entry.path for entry in unfinished if newest_ms - entry.modification_time > UNFINISHED_AGE_MAX_MS]
    _sweep(client, steps, left[:SWEPT_MAX], root)
    return sorted(found, key=lambda stored: stored.name)


def _sweep(client: Client, steps: _Steps, left: builtins.list[str], root: str) -> None:
    """Remove what dead writers have left behind."""
    for path in left:
        try:
            _delete(client, steps, path, root)
        except (OSError, RuntimeError):  # in nobody's way; whoever lists with more rights removes it
            continue


def _info(client: Client, path: str) -> FileStatus | None:
    try:
        return client.get_file_info(path)
    except FileNotFoundError:
        return None


def _delete(client: Client, steps: _Steps, path: str, root: str) -> None:
    """And the directories it leaves empty. A writer's own file is in its directory before it needs that."""
    while path != root and _deleted(client, path):
        path = path.rpartition("/")[0]
        steps.next()


def _deleted(client: Client, path: str) -> bool:
    """Whether a file or an empty directory was there."""
    try:
        return client.delete(path, False)
    except FileNotFoundError:
        return False
    except RuntimeError as error:
        if reason_of(error)[0] == "PathIsNotEmptyDirectoryException":
            return False
        raise


def _parsed(uri: str) -> tuple[str, str]:
    """Authority (empty: the default of HADOOP_CONF_DIR) and path without its last slash."""
    form = "write hdfs://host:port/directory, or hdfs://nameservice/directory with HADOOP_CONF_DIR set"
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{uri} is no URI of HDFS: {error}", hint=form) from error
    if parts.username is not None or parts.password is not None:
        # Without what stands before the @, which may be a secret.
        raise ConfigError("a URI of HDFS names no user", hint="set HADOOP_USER_NAME, or log in with kinit")
    if parts.query or parts.fragment:
        raise ConfigError(f"{uri} has a ? or a #, which means nothing to HDFS", hint=form)
    names = [part for part in parts.path.split("/") if part]
    if parts.scheme.lower() != "hdfs" or port == 0 or any(part in (".", "..") or ":" in part for part in names):
        raise ConfigError(f"{uri} is no URI of HDFS", hint=form)
    return parts.netloc, "".join(f"/{part}" for part in names)


# -- forks

_storages: weakref.WeakSet[HdfsStorage] = weakref.WeakSet()
_quiet_until = 0.0


def _after_fork() -> None:
    global _quiet_until
    _quiet_until = time.monotonic() + _CONNECTION_KEPT_S
    for storage in _storages:
        storage._forked()


os.register_at_fork(after_in_child=_after_fork)
