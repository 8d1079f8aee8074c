"""Storage in a directory: of this host, or of a network file system that all hosts have mounted.

Bytes go to a file with a name of its own in the same directory, are flushed to the disk, and only then get the name
they are meant to have, by rename (write) or link (create), which are atomic. The directory is flushed last. A writer
that dies in between leaves such a file behind; `list` does not show it, and the next write to that directory removes
it once its process is gone, or after an hour where nobody can know.

A call is as bounded as the file system under it: the kernel lets nobody give up on a disk, or on a hard NFS mount,
that does not answer.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.checkpoint.host_memory.place import place_mark
from holdfast.checkpoint.storage.direct_io import UNSUPPORTED, read_whole, write_whole
from holdfast.checkpoint.storage.names import check_name, check_prefix, is_name
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import IntegrityError, NotStored, StorageError, StorageRefused, StorageUnavailable

BLOCK_BYTES = 2 << 20  # fits the cache of a core: what is read is hashed and copied from there
UNFINISHED_AGE_MAX_S = 3600.0  # a block takes seconds at most, and each one renews the file's time
DIRECTORY_TRIES_MAX = 20  # a writer makes a directory while a deleter removes it as empty

_UNFINISHED = re.compile(r"\.holdfast-([0-9a-f]{16})-(\d{1,10})-[0-9a-f]{8}")

_UNAVAILABLE = {
    errno.ENOSPC: ("the disk is full", "free some space there, or keep fewer checkpoints"),
    errno.EDQUOT: ("the quota is used up", "free some space there, or keep fewer checkpoints"),
    errno.EIO: ("the disk failed", "the kernel's log (dmesg) says which one, and why"),
    errno.ESTALE: ("the network file system was replaced", "mount it again on this host"),
}
_REFUSED = {
    errno.EACCES: ("no permission", "let the user of this process write there, or choose another directory"),
    errno.EPERM: ("the file system does not allow it", "choose another directory"),
    errno.EROFS: ("the file system is read-only", "mount it for writing, or choose another directory"),
    errno.ENOTDIR: ("a part of that path is a file", "choose another directory, or move that file away"),
    errno.EEXIST: ("a part of that path is a file", "choose another directory, or move that file away"),
    errno.EISDIR: ("there is a directory of that name", "choose another directory, or move that one away"),
    errno.EFBIG: ("larger files are not allowed", "raise the limit (ulimit -f), or choose another file system"),
    errno.ENAMETOOLONG: ("that path is too long", "choose a directory with a shorter path"),
    errno.ELOOP: ("that path is a circle of links", "choose another directory"),
}


class LocalStorage:
    def __init__(self, path: str | Path, *, uri: str = "") -> None:
        self.uri = uri or str(path)
        self.writers = 2
        self.block_bytes = BLOCK_BYTES
        self._root = Path(path).absolute()  # the process may change its directory

    def write(self, name: str, data: memoryview) -> None:
        check_name(name)
        path = self._root / name
        with _named(path, "write"), self._unfinished(path.parent) as (file, own):
            write_whole(file, data)
            own.rename(path)
            self._flush_directories(path.parent)

    def create(self, name: str, data: bytes) -> bool:
        check_name(name)
        path = self._root / name
        with _named(path, "create"):
            if path.is_file():
                return False  # spares the writing; whoever passes here still has to win
            with self._unfinished(path.parent) as (file, own):
                write_whole(file, memoryview(data))
                won = _linked(own, path)
                if won:
                    self._flush_directories(path.parent)
                    self._sweep_neighbours(path.parent)
                return won

    def _sweep_neighbours(self, directory: Path) -> None:
        """Who died in a first write has left a directory that nobody lists. Whoever commits looks for such."""
        if directory == self._root:
            return
        with suppress(OSError), os.scandir(directory.parent) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and Path(entry.path) != directory:
                    _sweep(Path(entry.path))
                    _removed_if_empty(Path(entry.path))

    def read(self, name: str, bytes_max: int) -> bytes:
        with self._opened(name) as (file, size):
            if size > bytes_max:
                raise IntegrityError(f"{self._root / name} has {size} bytes, more than the {bytes_max} it may have")
            content = memoryview(bytearray(size))
            return bytes(content[: read_whole(file, content, 0)])

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        with self._opened(name) as (file, size):
            end = offset + len(memory)
            if size < end or read_whole(file, memory, offset) < len(memory):
                raise IntegrityError(f"{self._root / name} has {size} bytes, fewer than the {end} it must have")

    def list(self, prefix: str = "") -> builtins.list[Stored]:
        check_prefix(prefix)
        found: builtins.list[Stored] = []
        with _named(self._root, "list"):
            _collect(self._root, prefix.rpartition("/")[0], prefix, found)
        return sorted(found, key=lambda stored: stored.name)

    def delete(self, name: str) -> None:
        check_name(name)
        path = self._root / name
        with _named(path, "delete"):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            directory = path.parent
            _sweep(directory)
            while directory != self._root and _removed_if_empty(directory):
                directory = directory.parent
            self._flush_directories(directory)

    def close(self) -> None:
        pass

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """A file to read, and its size."""
        check_name(name)
        path = self._root / name
        with _named(path, "read"):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise NotStored(f"there is no {path}") from None
            except NotADirectoryError:
                if not self._root.is_dir():
                    raise
                raise NotStored(f"there is no {path}") from None
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise NotStored(f"{path} is not a file")
                yield file, status.st_size
            finally:
                os.close(file)

    @contextmanager
    def _unfinished(self, directory: Path) -> Iterator[tuple[int, Path]]:
        """A new file under a name of its own, gone afterwards unless it was renamed."""
        own = directory / f".holdfast-{place_mark()}-{os.getpid()}-{secrets.token_hex(4)}"
        for tries_left in reversed(range(DIRECTORY_TRIES_MAX)):
            self._make_directory(directory)
            try:
                file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                break
            except FileNotFoundError:  # somebody found the directory empty and removed it
                if not tries_left:
                    raise
        try:
            try:
                _sweep(directory)
                yield file, own
            finally:
                os.close(file)
        finally:
            own.unlink(missing_ok=True)

    def _make_directory(self, directory: Path) -> None:
        made = None
        for tries_left in reversed(range(DIRECTORY_TRIES_MAX)):
            missing = [one for one in (directory, *directory.parents) if not one.exists()]
            try:
                for one in reversed(missing):
                    one.mkdir(exist_ok=True)
                    made = made or one
                break
            except FileNotFoundError:
                if not tries_left:
                    raise
        # Below the root every write flushes all directories; above it only the one that made something has to.
        while made is not None and self._root.is_relative_to(made):
            _flush_directory(made.parent)
            if made == self._root:
                break
            made = made / self._root.relative_to(made).parts[0]

    def _flush_directories(self, directory: Path) -> None:
        """Up to the root: whoever made one of them may not have come to flushing it yet."""
        _flush_directory(directory)
        while directory != self._root:
            directory = directory.parent
            _flush_directory(directory)


def _linked(own: Path, path: Path) -> bool:
    try:
        os.link(own, path)
    except FileExistsError:
        # NFS sends a request again whose answer was lost, and then finds its own link.
        return own.stat().st_nlink > 1
    except OSError as error:
        if error.errno in (errno.EPERM, *UNSUPPORTED):
            raise StorageRefused(
                f"cannot create {path}: its file system has no hard links", hint="choose a directory on another one"
            ) from error
        raise
    return True


def _collect(root: Path, inside: str, prefix: str, found: builtins.list[Stored]) -> None:
    try:
        entries = os.scandir(root / inside)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if inside and root.is_dir():
            return
        raise
    with entries:
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            if not is_name(name):
                continue
            if entry.is_dir(follow_symlinks=False):
                if name.startswith(prefix) or prefix.startswith(f"{name}/"):
                    _collect(root, name, prefix, found)
            elif name.startswith(prefix) and entry.is_file():
                try:
                    found.append(Stored(name, entry.stat().st_size))
                except FileNotFoundError:  # deleted meanwhile
                    pass


def _sweep(directory: Path) -> None:
    """Remove what dead writers have left behind in a directory that was just changed."""
    try:
        now = directory.stat().st_mtime  # by the file system's clock, which need not be ours
        with os.scandir(directory) as entries:
            for entry in entries:
                match = _UNFINISHED.fullmatch(entry.name)
                if match and _is_left(match[1], int(match[2]), now - entry.stat(follow_symlinks=False).st_mtime):
                    Path(entry.path).unlink(missing_ok=True)
    except OSError:
        pass  # it is in nobody's way; the next write looks again


def _is_left(place: str, pid: int, age_s: float) -> bool:
    if age_s > UNFINISHED_AGE_MAX_S:
        return True
    if place != place_mark():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def _removed_if_empty(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return False
    return True


def _flush_directory(directory: Path) -> None:
    try:
        file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # removed since, with nothing in it
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in UNSUPPORTED:  # some network file systems have nothing to flush
            raise
    finally:
        os.close(file)


@contextmanager
def _named(path: Path, doing: str) -> Iterator[None]:
    """Turn the system's errors into ours: what could not be done, where, why, and what helps."""
    try:
        yield
    except OSError as error:
        raise _translated(error, path, doing) from error


def _translated(error: OSError, path: Path, doing: str) -> StorageError:
    number = error.errno or 0
    if number in _REFUSED:
        reason, hint = _REFUSED[number]
        return StorageRefused(f"cannot {doing} {path}: {reason}", hint=hint)
    reason, hint = _UNAVAILABLE.get(number, (error.strerror or str(error), ""))
    return StorageUnavailable(f"cannot {doing} {path}: {reason}", hint=hint)
