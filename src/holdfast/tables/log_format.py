"""What a shard's log in storage looks like: entries in order, each with parts that hold its rows.

    0000-of-0002/log/000000000007.json          an entry: committed when it is there
    0000-of-0002/data/000000000007-9f3a…-0000   a part of it: written before, under a name of its own

An entry is a base, which is the whole shard, or a delta, which says what changed since the entry before. It has the
checksum of that one, the updates it goes from and to, and the checksums of its parts. So a gap, a repetition, a part
that is missing or damaged, and an entry of another history are each found and named. Entries are created, never
replaced: of two writers one wins.

Everything read is checked before it is used; nothing is unpickled. Owns nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import IntegrityError, NotStored, ProtocolError
from holdfast.core.words import encode_json
from holdfast.tables.rows.port import HEADER_WORDS, Layout, Records
from holdfast.tables.settings import TableSettings
from holdfast.tables.shard import Changes, Moment

FORMAT = 1
ENTRY_BYTES_MAX = 16 << 20
PART_BYTES = 64 << 20  # about; a reader holds one at a time
PART_BYTES_MAX = 256 << 20
KINDS = ("records", "candidates")


@dataclass(frozen=True)
class Part:
    kind: str
    name: str
    size: int  # bytes
    checksum: str


@dataclass(frozen=True)
class TableLogEntry:
    sequence: int
    base: bool
    since: int
    moment: Moment
    settings: TableSettings
    at_ms: int  # when what it holds was captured, by the writer's clock
    previous: str  # checksum of the entry before; empty for a base
    parts: tuple[Part, ...]
    checksum: str = field(default="", compare=False)  # of all this

    @property
    def nbytes(self) -> int:
        return sum(part.size for part in self.parts)

    def encode(self) -> bytes:
        plain = {
            "format": FORMAT,
            "sequence": self.sequence,
            "base": self.base,
            "since": self.since,
            "moment": self.moment.encode(),
            "settings": self.settings.encode(),
            "at_ms": self.at_ms,
            "previous": self.previous,
            "parts": [[part.kind, part.name, part.size, part.checksum] for part in self.parts],
        }
        return encode_json({"entry": plain, "checksum": checksum_of(encode_json(plain))})

    @classmethod
    def decode(cls, content: bytes, name: str) -> TableLogEntry:
        """IntegrityError for what no writer wrote."""
        try:
            told = json.loads(content)
            plain = told["entry"]
            if told["checksum"] != checksum_of(encode_json(plain)) or plain["format"] != FORMAT:
                raise ValueError("its checksum is wrong")
            parts = tuple(Part(*one) for one in plain["parts"])
            numbers = [plain[one] for one in ("sequence", "since", "at_ms")] + [part.size for part in parts]
            if not all(type(one) is int and one >= 0 for one in numbers) or type(plain["base"]) is not bool:
                raise ValueError("its numbers make no sense")
            if not all(part.kind in KINDS and part.size <= PART_BYTES_MAX for part in parts):
                raise ValueError("its parts make no sense")
            moment, settings = Moment.decode(plain["moment"]), TableSettings.decode(plain["settings"])
            given = plain["sequence"], plain["base"], plain["since"], moment, settings, plain["at_ms"]
            return cls(*given, plain["previous"], parts, told["checksum"])
        except (ValueError, KeyError, TypeError, ProtocolError) as error:
            raise IntegrityError(f"{name} is not an entry of a table's log: {str(error)[:100]}") from error


def checksum_of(content: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def place_of(shard: int, shards: int) -> str:
    return f"{shard:04d}-of-{shards:04d}"


def entry_name(place: str, sequence: int) -> str:
    return f"{place}/log/{sequence:012d}.json"


def sequences(storage: Storage, place: str) -> list[int]:
    """Of the entries that are there, in order."""
    found = []
    for stored in storage.list(f"{place}/log/"):
        name = stored.name.removeprefix(f"{place}/log/").removesuffix(".json")
        if name.isdecimal() and entry_name(place, int(name)) == stored.name:
            found.append(int(name))
    return sorted(found)


def read_entry(storage: Storage, place: str, sequence: int) -> TableLogEntry:
    """NotStored if there is none; IntegrityError if it is damaged."""
    name = entry_name(place, sequence)
    entry = TableLogEntry.decode(storage.read(name, ENTRY_BYTES_MAX), name)
    if entry.sequence != sequence:
        raise IntegrityError(f"{name} says that it is entry {entry.sequence}")
    return entry


def check_follows(entry: TableLogEntry, before: TableLogEntry) -> None:
    """IntegrityError, with what is wrong, unless this delta comes right after that entry."""
    name, end = f"entry {entry.sequence}", before.moment.updates
    if entry.sequence != before.sequence + 1:
        raise IntegrityError(f"the log has a gap: {name} comes after entry {before.sequence}")
    if entry.since > end:
        raise IntegrityError(f"the log has a gap: updates {end + 1} to {entry.since} are in no entry before {name}")
    if entry.since < end:
        raise IntegrityError(f"the log has a repetition: updates {entry.since + 1} to {end} are in {name} again")
    if entry.previous != before.checksum or entry.settings != before.settings:
        raise IntegrityError(f"{name} follows on another history than entry {before.sequence} is of")


def newest_chain(storage: Storage, place: str) -> list[TableLogEntry]:
    """The newest base and the deltas after it. Empty: there is no log. IntegrityError for one that is not whole."""
    numbers = sequences(storage, place)
    chain: list[TableLogEntry] = []
    for position in reversed(range(len(numbers))):
        try:
            entry = read_entry(storage, place, numbers[position])
        except NotStored:  # removed meanwhile, as what is older than two bases is
            break
        if chain and not chain[0].base:
            check_follows(chain[0], entry)
        chain.insert(0, entry)
        if entry.base:
            return chain
    if chain:
        raise IntegrityError(f"the log has a gap: nothing before entry {chain[0].sequence}, which is no base")
    return []


def bases(storage: Storage, place: str, after: int) -> Iterator[TableLogEntry]:
    """Those that can be read, newest first, of entries with higher numbers than `after`."""
    for sequence in reversed(sequences(storage, place)):
        if sequence <= after:
            return
        try:
            entry = read_entry(storage, place, sequence)
        except (NotStored, IntegrityError):
            continue
        if entry.base:
            yield entry


def parts_of(changes: Changes, part_bytes: int = PART_BYTES) -> Iterator[tuple[str, memoryview]]:
    """Their kinds and bytes, by reference where they lie one after another."""
    records = changes.records
    step = max(1, part_bytes // max(1, records.strides[0])) if len(records) else 1
    for start in range(0, len(records), step):
        yield "records", np.ascontiguousarray(records[start : start + step]).data.cast("B")
    pairs = np.stack(changes.candidates, axis=1)
    step = max(1, part_bytes // 16)
    for start in range(0, len(pairs), step):
        yield "candidates", np.ascontiguousarray(pairs[start : start + step]).data.cast("B")


def read_pieces(storage: Storage, entry: TableLogEntry, *, values_only: bool = False) -> Iterator[Changes]:
    """What the entry holds, a part at a time: all of them, one after the other, are its changes.

    NotStored or IntegrityError, with the part's name. `values_only`: for look-ups.
    """
    layout = Layout.of(entry.settings)
    kept = Layout(layout.dim, 0) if values_only else layout
    nothing = np.zeros(0, dtype=np.uint64)
    records: Records = np.zeros((0, kept.words), dtype=np.uint32)
    yield Changes(entry.since, entry.moment, records, (nothing, nothing))
    for part in entry.parts:
        if values_only and part.kind == "candidates":
            continue
        content = bytearray(part.size)
        storage.read_into(part.name, memoryview(content))
        if checksum_of(memoryview(content)) != part.checksum:
            raise IntegrityError(f"{part.name} does not match its checksum")
        if part.size % (layout.nbytes if part.kind == "records" else 16):
            raise IntegrityError(f"{part.name} has {part.size} bytes, which are no whole rows")
        if part.kind == "records":
            rows = _narrowed(np.frombuffer(content, dtype=np.uint32).reshape(-1, layout.words), kept)
            yield Changes(entry.since, entry.moment, rows, (nothing, nothing))
        else:
            pairs = np.frombuffer(content, dtype=np.uint64).reshape(-1, 2)
            yield Changes(entry.since, entry.moment, records, (pairs[:, 0].copy(), pairs[:, 1].copy()))


def _narrowed(records: Records, layout: Layout) -> Records:
    if records.shape[1] == layout.words:
        return records
    narrow = np.zeros((len(records), layout.words), dtype=np.uint32)
    narrow[:, : HEADER_WORDS + layout.dim] = records[:, : HEADER_WORDS + layout.dim]
    return narrow


def check_settings(entry: TableLogEntry, settings: TableSettings) -> None:
    if entry.settings != settings:
        raise IntegrityError("the log is of a table with other settings")


def as_told(value: Any) -> str:
    return str(value).splitlines()[0][:200]
