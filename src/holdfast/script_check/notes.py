"""What a process of a check writes down, as JSON lines, and what it is told by its environment. Read without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.membership.suspecting import StateEntry

PLACE = "HOLDFAST_CHECK"  # the directory, the role, how many steps, and before which of them the second process joins
FIRST, JOINER = "first", "joiner"
FETCH, ORDER, RESTORE, JOIN, AGAIN = "fetch", "order", "restore", "join", "again"
BATCH, STATE = "the batch", "the state"
SHARD, MEAN = "shard", "mean"  # what a shard must not do, and what is made of all of them

Words = dict[str, str]  # name of a thing -> its value, or a digest of it


@dataclass(frozen=True)
class Task:
    """What a process of a check is to do."""

    directory: Path
    role: str
    steps: int
    join_at: int
    parent: int = 0  # the process that conducts the check

    def encode(self) -> str:
        return json.dumps([str(self.directory), self.role, self.steps, self.join_at, self.parent])

    @classmethod
    def decode(cls, text: str) -> Task:
        directory, role, steps, join_at, parent = json.loads(text)
        return cls(Path(directory), role, steps, join_at, parent)

    @property
    def notes(self) -> Path:
        return self.directory / f"{self.role}.jsonl"

    @property
    def snapshot(self) -> Path:
        return self.directory / "snapshot"


@dataclass(frozen=True)
class Found:
    """Something that is not the same. `check`: which of the checks has found it."""

    check: str
    what: str
    step: int
    shard: int = -1
    more: int = 0  # things that differ beside `what`
    around: tuple[str, ...] = ()  # what the script keeps that has changed meanwhile, in words
    clue: str = ""  # what else is known


@dataclass
class Noted:
    """All that one process wrote down."""

    shards: dict[int, dict[int, Words]] = field(default_factory=dict)  # step -> shard -> what it left behind
    states: dict[int, tuple[StateEntry, ...]] = field(default_factory=dict)  # after so many steps
    around: dict[int, Words] = field(default_factory=dict)  # before the shards of a step: what the script keeps
    generators: dict[int, str] = field(default_factory=dict)
    found: Found | None = None
    again: int = 0  # shards that were computed again
    steps: int = 0
    joined: bool = False  # the run was joined at all
    tables: tuple[str, ...] = ()  # embedding tables that the script trains, and that stayed as they were
    over: bool = False  # it came to its end


class Notes:
    """Written by the thread of the user's loop."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        os.write(self._file, json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def found(self, found: Found) -> None:
        self.write("found", found=asdict(found))


def read_notes(path: Path) -> Noted:
    noted = Noted()
    if not path.exists():
        return noted
    for line in path.read_bytes().splitlines():
        try:
            _take(noted, json.loads(line))
        except ValueError:  # the process was ended while it wrote
            continue
    return noted


def _take(noted: Noted, record: Mapping[str, Any]) -> None:
    kind = record["kind"]
    if kind == "joined":
        noted.joined = True
        noted.tables = tuple(record.get("tables", ()))
    elif kind == "shards":
        noted.shards[record["step"]] = {int(shard): words for shard, words in record["shards"].items()}
        noted.again += record["again"]
        noted.steps += 1
    elif kind == "state":
        noted.states[record["step"]] = tuple(StateEntry(*entry) for entry in record["entries"])
    elif kind == "around":
        noted.around[record["step"]] = record["around"]
        noted.generators[record["step"]] = record["generators"]
    elif kind == "found":
        noted.found = Found(**{**record["found"], "around": tuple(record["found"]["around"])})
    elif kind == "over":
        noted.over = True
