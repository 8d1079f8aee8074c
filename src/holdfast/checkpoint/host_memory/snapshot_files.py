"""The newest snapshot in this host's memory: files in /dev/shm, which outlive the workers and the agent.

A run has one directory on each host, of this user alone, in the format of storage: what `fragments` says that the
host keeps, and a manifest once all of it is there. The host's workers share the work, and nothing passes between
them; whoever finds everything there writes the manifest. The newest complete step stays while the next one is written
over what is older, so there are two steps at most, and a save touches no fresh memory after the second.

Everything here belongs to the saver's thread, and no error leaves it: a snapshot that
memory has no room for is a warning, and training goes on.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

from holdfast.checkpoint.format.manifest import MANIFEST, Manifest, directory_of, step_of
from holdfast.checkpoint.format.parts import view_of
from holdfast.checkpoint.host_memory.erasure import Code, fragment_bytes
from holdfast.checkpoint.host_memory.fragments import Fragment, PlaceAmongHosts, code_for, indices_of, kept_by
from holdfast.checkpoint.host_memory.place import OWNER, kept_steps, place_mark, sweep
from holdfast.checkpoint.saving.side_by_side import image_buffer

BLOCK_BYTES = 8 << 20
RESERVE_BYTES = 256 << 20  # of the machine's memory that is left to others
CONTROL_GROUPS = Path("/sys/fs/cgroup")
_UNFINISHED = ".new-"
_UNLIMITED = 1 << 62


class HostMemory:
    """`kind` is None for plain copies, or (k, m). `warn` is told once for each spell of trouble."""

    def __init__(
        self, root: Path, kind: tuple[int, int] | None, *, run_directory: Path, warn: Callable[[str], None]
    ) -> None:
        self.root = root
        self._kind = kind
        self._warn = warn
        self._warned = False
        self._scratch: dict[int, torch.Tensor] = {}
        self._run_directory = run_directory
        self._prepared = False

    def _prepare(self) -> None:
        """Make the directory, of this user alone, unless it is there."""
        if self.root.is_dir() and self._prepared:
            return
        self.root.mkdir(mode=0o700, exist_ok=True)
        found = self.root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{self.root} is not a directory of this user")
        self.root.chmod(0o700)
        owner = json.dumps({"place": place_mark(), "run_directory": str(self._run_directory)})
        self._put(self.root / OWNER, memoryview(owner.encode()), None)
        sweep(self.root.parent)
        self._prepared = True

    def parts(self, place: PlaceAmongHosts, count: int) -> frozenset[int]:
        """The parts of `count` that a worker at this place must have the image of."""
        return kept_by(place, self._kind, count)

    def share(self, hosts: int, workers: int) -> float:
        """Which part of a state that is, about, for one of a host's `workers`."""
        code = code_for(self._kind, max(1, hosts))
        return (1.0 if code is None else min(1.0, (code.k + code.m) / hosts)) / max(1, workers)

    def keep(self, place: PlaceAmongHosts, manifest: Manifest, images: Mapping[int, torch.Tensor]) -> bool:
        """Write this worker's share of what the host keeps. Whether it was, as far as this worker is concerned."""
        for again in (True, False):
            written: list[Path] = []
            try:
                self._prepare()
                self._write(place, manifest, images, written)
            except OSError as error:
                for path in written:
                    with suppress(OSError):
                        path.unlink()
                if again and not self.root.is_dir():
                    continue  # somebody has cleared it away: a worker of this host whose script has ended
                self._say(f"the snapshot of step {manifest.step} is not kept in memory: {error.strerror or error}")
                return False
            break
        self._warned = False
        return True

    def _write(
        self, place: PlaceAmongHosts, manifest: Manifest, images: Mapping[int, torch.Tensor], written: list[Path]
    ) -> None:
        directory = self.root / directory_of(manifest.step)
        directory.mkdir(mode=0o700, exist_ok=True)
        old = self._superseded(manifest.step)
        self._check_room(place, manifest, old)
        for name, data in self._files(place, manifest, images):
            self._put(directory / name, data, old.pop() if old else None)
            written.append(directory / name)
        if self._is_complete(place, manifest, directory):
            self._put(directory / MANIFEST, memoryview(manifest.encode()), None)
            self._clear(manifest.step)

    def _say(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(text)

    # ---- what is written

    def _files(
        self, place: PlaceAmongHosts, manifest: Manifest, images: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[str, memoryview]]:
        """Names inside the directory, and bytes that hold until the next one is asked for."""
        code = code_for(self._kind, place.hosts)
        for number in sorted(kept_by(place, self._kind, len(manifest.parts))):
            stored, image = manifest.parts[number], images[number]
            if code is None:
                yield stored.name, view_of(image)[: stored.size]
                continue
            wanted = indices_of(number, code, place)
            for index, fragment in self._cut(code, image[: stored.size], wanted).items():
                view = view_of(fragment)
                digest = xxhash.xxh3_128_hexdigest(view)
                yield Fragment(stored.name, index, code.k, code.m, stored.size, digest).name, view

    def _cut(self, code: Code, image: torch.Tensor, wanted: list[int]) -> dict[int, torch.Tensor]:
        length = fragment_bytes(len(image), code.k)
        parities = {index: self._buffer(index, length) for index in wanted if index >= code.k}
        data = {}
        for index in range(code.k) if parities else wanted:
            there = image[index * length : (index + 1) * length]
            if len(there) < length:
                buffer = self._buffer(index, length)
                buffer[: len(there)].copy_(there)
                buffer[len(there) :].zero_()
                there = buffer
            data[index] = there
        if parities:
            code.encode([data[index] for index in range(code.k)], parities)
        return {index: parities[index] if index in parities else data[index] for index in wanted}

    def _buffer(self, index: int, length: int) -> torch.Tensor:
        known = self._scratch.get(index)
        if known is None or len(known) < length:
            known = self._scratch[index] = image_buffer(length)
        return known[:length]

    def _put(self, path: Path, data: memoryview, old: Path | None) -> None:
        """A whole file or none. An older one's memory is used again: fresh pages cost more than the bytes in them."""
        own = path.parent / f"{_UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}"
        if old is not None:
            with suppress(FileNotFoundError):  # another worker has taken it
                old.rename(own)
        file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                if os.fstat(file).st_size > len(data):
                    os.ftruncate(file, len(data))
                done = 0
                while done < len(data):
                    done += os.pwrite(file, data[done : done + BLOCK_BYTES], done)
            finally:
                os.close(file)
            own.rename(path)
        except OSError:
            own.unlink(missing_ok=True)
            raise

    def _expected(self, place: PlaceAmongHosts, manifest: Manifest) -> dict[tuple[str, int], int]:
        """What this host keeps of a snapshot: file and fragment (-1: whole) to length."""
        code = code_for(self._kind, place.hosts)
        if code is None:
            return {(stored.name, -1): stored.size for stored in manifest.parts}
        return {
            (stored.name, index): fragment_bytes(stored.size, code.k)
            for number, stored in enumerate(manifest.parts)
            for index in indices_of(number, code, place)
        }

    def _is_complete(self, place: PlaceAmongHosts, manifest: Manifest, directory: Path) -> bool:
        code = code_for(self._kind, place.hosts)
        there = set()
        for path in directory.iterdir():
            fragment = Fragment.parse(path.name)
            if fragment is None:
                there.add((path.name, -1))
            elif code is not None and (fragment.k, fragment.m) == (code.k, code.m):
                there.add((fragment.file, fragment.index))
        return self._expected(place, manifest).keys() <= there

    # ---- what is older

    def _superseded(self, step: int) -> list[Path]:
        """Files that a save of `step` may take: all but its own and those of the newest complete step before it.

        A later step is one that the run has gone back from. The manifests go first: what is left is no snapshot.
        """
        stays = max((one for one in kept_steps(self.root) if one < step), default=None)
        found = []
        for directory in self.root.iterdir():
            one = step_of(directory.name)
            if one is None or one in (step, stays):
                continue
            (directory / MANIFEST).unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # another worker has found its step complete, and has cleared this away
                found += list(directory.iterdir())
        return found

    def _clear(self, step: int) -> None:
        """This host has all of `step`: nobody takes the rest of what is older."""
        stays = max((one for one in kept_steps(self.root) if one < step), default=step)
        for directory in self.root.iterdir():
            one = step_of(directory.name)
            if one is not None and one < stays:
                shutil.rmtree(directory, ignore_errors=True)

    def _check_room(self, place: PlaceAmongHosts, manifest: Manifest, old: list[Path]) -> None:
        """OSError if the host's share does not fit: half a snapshot would only take up memory."""
        there = list((self.root / directory_of(manifest.step)).iterdir())
        need = sum(self._expected(place, manifest).values()) - sum(map(_size, [*old, *there]))
        status = os.statvfs(self.root)
        room = min(status.f_bavail * status.f_frsize, _available_bytes() - RESERVE_BYTES)
        if need > room:
            raise OSError(0, f"{need / 1e9:.3f} GB are needed, and {self.root.parent} has room for {room / 1e9:.3f} GB")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _available_bytes() -> int:
    """What can still be had without anyone being killed: /dev/shm's own limit may be more than there is."""
    room = _container_bytes()
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            room = min(room, int(rest.split()[0]) * 1024)
    return room


def _container_bytes() -> int:
    """The same of the control group that this process is in, whose pages count against its limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        inside = next(line[len("0::/") :] for line in lines if line.startswith("0::/"))
        group = CONTROL_GROUPS / inside
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return _UNLIMITED
        used = int((group / "memory.current").read_text())
        words = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + next(int(value) for name, value in words if name == "inactive_file")
    except (OSError, ValueError, StopIteration):
        return _UNLIMITED  # the first version of control groups, or none
