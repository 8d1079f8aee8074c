"""One storage, for reading, out of what several hosts keep in memory: whole parts, or fragments that make them up.

A part is there if one host has it whole, or if k of its fragments are on any of the hosts. A host that does not answer
any more, or a fragment that cannot be read, is passed over as long as others do. Bytes are not checked as they are
read, since whoever reads checks the parts' digests; `weed` finds out which files are damaged, so that the same
snapshot can be had from the others.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from holdfast.checkpoint.format.manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest, decode, directory_of, step_of
from holdfast.checkpoint.format.parts import check_image, number_of, view_of
from holdfast.checkpoint.host_memory.erasure import Code
from holdfast.checkpoint.host_memory.fragments import FILE_BYTES_MAX, Fragment
from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest, read_snapshot
from holdfast.checkpoint.saving.side_by_side import image_buffer
from holdfast.checkpoint.storage.port import Storage, Stored
from holdfast.core.errors import HoldfastError, IntegrityError, NotStored, ProtocolError, StorageError, StorageRefused
from holdfast.state.snapshot import Snapshot

READERS = 4  # parts that are read at a time


@dataclass(frozen=True)
class MemorySource:
    """A host, and what it keeps."""

    host: str
    storage: Storage


@dataclass(frozen=True)
class _Held:
    """A file at one of the sources."""

    source: MemorySource
    path: str
    fragment: Fragment | None


class GatheredStorage:
    """What the sources had when it was made. Those that cannot be listed are left out."""

    def __init__(self, sources: Sequence[MemorySource]) -> None:
        self.writers = READERS
        self.block_bytes = 8 << 20
        self.sources: builtins.list[MemorySource] = []
        self.failures: dict[str, str] = {}  # host -> why it was left out
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._held: dict[str, builtins.list[_Held]] = {}  # name as storage has it -> where it is, whole or in fragments
        self._sizes: dict[str, int] = {}
        for source in sources:
            try:
                listed = source.storage.list("checkpoint-")
            except StorageError as error:
                self.failures[source.host] = error.message
                continue
            self.sources.append(source)
            for entry in listed:
                self._add(source, entry)
        self.uri = "memory of " + ", ".join(source.host for source in self.sources)

    def _add(self, source: MemorySource, entry: Stored) -> None:
        directory, _, name = entry.name.rpartition("/")
        fragment = Fragment.parse(name)
        if fragment is None:
            if name == MANIFEST or (number_of(name) is not None and entry.size <= FILE_BYTES_MAX):
                self._sizes[entry.name] = entry.size
                self._held.setdefault(entry.name, []).append(_Held(source, entry.name, None))
        elif entry.size == fragment.length:
            name = f"{directory}/{fragment.file}"
            self._sizes.setdefault(name, fragment.size)
            self._held.setdefault(name, []).append(_Held(source, entry.name, fragment))

    # ---- the port's side

    def list(self, prefix: str = "") -> builtins.list[Stored]:
        with self._lock:
            names = [name for name, held in self._held.items() if name.startswith(prefix) and _is_enough(held)]
            return [Stored(name, self._sizes[name]) for name in sorted(names)]

    def read(self, name: str, bytes_max: int) -> bytes:
        """A manifest, which hosts may have written at different times: the first that is one."""
        failure: StorageError = NotStored(f"no host has {name}")
        for held in self._copies(name):
            try:
                data = held.source.storage.read(name, bytes_max)
                decode(data)
                return data
            except (StorageError, ProtocolError) as error:
                failure = IntegrityError(f"{name} of {held.source.host}: {error.message}")
        raise failure

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        while True:
            held = self._copies(name)
            whole = [one for one in held if one.fragment is None]
            try:
                if whole:
                    self._from(whole[0], memory, offset)
                else:
                    self._assemble(name, held, memory, offset)
                return
            except _Unreadable as error:
                self._drop(name, error.held)

    def write(self, name: str, data: memoryview) -> None:
        raise StorageRefused("what hosts keep in memory is only read from here")

    def create(self, name: str, data: bytes) -> bool:
        raise StorageRefused("what hosts keep in memory is only read from here")

    def delete(self, name: str) -> None:
        raise StorageRefused("what hosts keep in memory is only read from here")

    def close(self) -> None:
        for source in self.sources:
            source.storage.close()

    def place_of(self, step: int) -> str:
        """Whose memory has anything of a step, for people."""
        prefix = f"{directory_of(step)}/"
        with self._lock:
            hosts = {one.source.host for name, held in self._held.items() if name.startswith(prefix) for one in held}
        return "memory of " + ", ".join(sorted(hosts))

    def newest_seen(self) -> int:
        """The newest step that any host has anything of; -1: none has."""
        with self._lock:
            return max((step_of(name) or 0 for name, held in self._held.items() if held), default=-1)

    def pass_over(self, step: int) -> None:
        """As if no host had anything of it."""
        prefix = f"{directory_of(step)}/"
        with self._lock:
            for name in [name for name in self._held if name.startswith(prefix)]:
                del self._held[name]

    # ---- reading

    def _copies(self, name: str) -> builtins.list[_Held]:
        with self._lock:
            return list(self._held.get(name, ()))

    def _drop(self, name: str, held: _Held) -> None:
        with self._lock:
            self._held[name] = [one for one in self._held[name] if one is not held]

    def _from(self, held: _Held, memory: memoryview, offset: int) -> None:
        try:
            held.source.storage.read_into(held.path, memory, offset)
        except StorageError as error:
            raise _Unreadable(held) from error

    def _assemble(self, name: str, held: Sequence[_Held], memory: memoryview, offset: int) -> None:
        """A range of a part's file, from the ranges of its fragments that it lies in."""
        chosen = _enough(held)
        if not chosen:
            raise IntegrityError(f"{name}: too few of its fragments are left")
        first = next(iter(chosen.values())).fragment
        assert first is not None
        end = offset + len(memory)
        if end > first.size:
            raise IntegrityError(f"{name} has {first.size} bytes, fewer than the {end} it must have")
        spans = list(_spans(first, offset, end))
        if all(index in chosen for index, _, _ in spans):
            for index, start, stop in spans:
                place = index * first.length + start - offset
                self._from(chosen[index], memory[place : place + stop - start], start)
            return
        self._recover(first, chosen, spans, memory, offset)

    def _recover(
        self,
        first: Fragment,
        chosen: dict[int, _Held],
        spans: Sequence[tuple[int, int, int]],
        memory: memoryview,
        offset: int,
    ) -> None:
        """The same where some fragments of data are lost: from that range of k others in which they all lie."""
        low, high = min(start for _, start, _ in spans), max(stop for _, _, stop in spans)
        target = torch.frombuffer(memory, dtype=torch.uint8)
        places = {}
        for index, start, stop in spans:
            place = index * first.length + start - offset
            places[index] = target[place : place + stop - start]

        def buffer(index: int) -> torch.Tensor:
            """At its place at once, unless less of it is wanted than the others need."""
            there = places.get(index)
            return there if there is not None and len(there) == high - low else self._buffer(index, high - low)

        used = list(chosen)[: first.k]
        fragments = {index: buffer(index) for index in used}
        for index in used:
            self._from(chosen[index], view_of(fragments[index]), low)
        lost = {index: buffer(index) for index in places if index not in fragments}
        Code(first.k, first.m).decode(fragments, lost)
        for index, start, stop in spans:
            source = (fragments | lost)[index][start - low : stop - low]
            if source.data_ptr() != places[index].data_ptr():
                places[index].copy_(source)

    def _buffer(self, index: int, length: int) -> torch.Tensor:
        """Of this thread, and used again: fresh pages cost more than the arithmetic."""
        known: dict[str, torch.Tensor] = self._scratch.__dict__
        name = f"fragment {index}"
        if name not in known or len(known[name]) < length:
            known[name] = image_buffer(length)
        return known[name][:length]

    # ---- damage

    def weed(self, step: int) -> builtins.list[str]:
        """Read every file of a step and pass over those that are not what was written; a sentence for each of them."""
        prefix = f"{directory_of(step)}/"
        with self._lock:
            files = [(name, one) for name, held in self._held.items() if name.startswith(prefix) for one in held]
        found = []
        for name, one in files:
            reason = self._damage(name, one)
            if reason:
                self._drop(name, one)
                found.append(f"{one.path} in the memory of {one.source.host}: {reason}")
        return found

    def _damage(self, name: str, held: _Held) -> str:
        storage, fragment = held.source.storage, held.fragment
        try:
            if name.endswith(f"/{MANIFEST}"):
                decode(storage.read(held.path, MANIFEST_BYTES_MAX))
                return ""
            image = image_buffer(fragment.length if fragment else self._sizes[name])
            storage.read_into(held.path, view_of(image))
            if fragment is None:
                check_image(name.rpartition("/")[2], view_of(image))
            elif xxhash.xxh3_128_hexdigest(view_of(image)) != fragment.digest:
                return "its bytes are not those that were written"
        except HoldfastError as error:
            return error.message
        return ""


class _Unreadable(Exception):
    def __init__(self, held: _Held) -> None:
        super().__init__(held.path)
        self.held = held


def _spans(fragment: Fragment, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Which bytes of which data fragments a range of the file is: index, start, stop."""
    for index in range(fragment.k):
        start, stop = max(offset, index * fragment.length), min(end, (index + 1) * fragment.length)
        if start < stop:
            yield index, start - index * fragment.length, stop - index * fragment.length


def _enough(held: Sequence[_Held]) -> dict[int, _Held]:
    """Fragments of one code that make up a part, those of data first; empty: there are too few."""
    codes: dict[tuple[int, int, int], dict[int, _Held]] = {}
    for one in held:
        if one.fragment is not None:
            key = (one.fragment.k, one.fragment.m, one.fragment.size)
            codes.setdefault(key, {}).setdefault(one.fragment.index, one)
    for (k, _, _), found in codes.items():
        if len(found) >= k:
            return dict(sorted(found.items()))
    return {}


def _is_enough(held: Sequence[_Held]) -> bool:
    return any(one.fragment is None for one in held) or bool(_enough(held))


# -- the newest snapshot


def whole_steps(storage: GatheredStorage) -> list[int]:
    """The steps of which all parts are there, newest first."""
    there = {(entry.name, entry.size) for entry in storage.list()}
    found = []
    for listed in list_checkpoints(storage):
        try:
            manifest = read_manifest(storage, listed.step) if listed.committed else None
        except (StorageError, ProtocolError):
            continue
        if manifest and all((manifest.path(part), part.size) in there for part in manifest.parts):
            found.append(listed.step)
    return found


def newest_gathered(
    storage: GatheredStorage, *, at_least: int, warn: Callable[[str], None]
) -> tuple[Manifest, Snapshot] | None:
    """The newest snapshot that verifies and is not older than `at_least`. Damaged files are named and passed over."""
    for step in whole_steps(storage):
        if step < at_least:
            break
        for again in (True, False):
            try:
                return read_snapshot(storage, step)
            except (IntegrityError, ProtocolError, NotStored) as error:
                found = storage.weed(step) if again else []
                for sentence in found:
                    warn(sentence)
                if not found:
                    warn(f"the snapshot of step {step} in memory cannot be used: {error.message}")
                    break
    return None
