"""What a worker's heartbeat says: one small record of fixed size, written in place again and again. Pure.

Writer and reader share the memory and no lock: the checksum tells a record that was read half old and half new, and
anything that is none.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum

from holdfast.core.waits import Wait, WaitKind
from holdfast.detection.phi import IntervalHistory

_HISTORY = "qddd"
_TEXT_BYTES = 320  # of what it waits for
_RECORD = struct.Struct("=8sqdqqqddqd" + _HISTORY + _HISTORY + f"qqd{_TEXT_BYTES}s")
_CHECKSUM = struct.Struct("=I")
_MARK = b"HFBEAT02"
RECORD_BYTES = _RECORD.size + _CHECKSUM.size


class Activity(IntEnum):
    """What the thread that trains is in."""

    STARTING = 0  # has joined and not yet begun to train
    WAITING = 1  # in our own lines: for peers, for the ledger, for a snapshot
    LOADING = 2  # fetches a batch
    SHARD = 3  # the script has a batch
    SCRIPT = 4  # the script's lines of a step outside its shards: the update, an evaluation, logging
    ENDED = 5  # the script's lines after a loop over steps
    CLOSED = 6  # it leaves: this was the last beat

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Activity.STARTING: "starting",
    Activity.WAITING: "waiting for the others",
    Activity.LOADING: "loading a batch",
    Activity.SHARD: "in a shard",
    Activity.SCRIPT: "in the script's lines outside the shards",
    Activity.ENDED: "in the script's lines after the loop",
    Activity.CLOSED: "leaving",
}


@dataclass(frozen=True, kw_only=True)
class Beat:
    """`at` and the other times are the host's monotonic clock."""

    number: int  # of beats so far
    at: float
    step: int = 0
    activity: Activity = Activity.STARTING
    entered: int = 0  # how many activities so far: says whether it is still the same
    since: float = 0.0  # of this activity
    moved_at: float = 0.0  # when the thread that trains was last seen to get on
    thread: int = 0  # its identity, as stacks name it
    cost_s: float = 0.0  # processor time of all beats so far
    pace: IntervalHistory = field(default_factory=IntervalHistory)  # of the beats themselves
    usual: IntervalHistory = field(default_factory=IntervalHistory)  # of this activity, earlier
    wait: Wait | None = None  # what it waits for; None: it does not, or cannot say

    @property
    def words(self) -> str:
        """What it is in."""
        waits = self.wait is not None and self.activity in (Activity.WAITING, Activity.ENDED)
        return self.wait.words if waits and self.wait is not None else self.activity.words

    @property
    def has_state(self) -> bool:
        """Whether it has come as far as its first step: then it has the training's state, if it came to fetch it."""
        return self.entered >= 2

    def encode(self) -> bytes:
        record = _RECORD.pack(
            _MARK,
            self.number,
            self.at,
            self.step,
            int(self.activity),
            self.entered,
            self.since,
            self.moved_at,
            self.thread,
            self.cost_s,
            *_fields(self.pace),
            *_fields(self.usual),
            *_of_wait(self.wait),
        )
        return record + _CHECKSUM.pack(zlib.crc32(record))

    @classmethod
    def decode(cls, data: bytes) -> Beat | None:
        """None if that is no record, or one that is just being written."""
        if len(data) < RECORD_BYTES:
            return None
        record = data[: _RECORD.size]
        if _CHECKSUM.unpack(data[_RECORD.size : RECORD_BYTES])[0] != zlib.crc32(record):
            return None
        mark, number, at, step, activity, entered, since, moved_at, thread, cost_s, *rest = _RECORD.unpack(record)
        pace, usual = IntervalHistory(*rest[:4]), IntervalHistory(*rest[4:8])
        kind, place, waits_since, text = rest[8:]
        times = (at, since, moved_at, cost_s, waits_since, *_fields(pace)[1:], *_fields(usual)[1:])
        if mark != _MARK or not all(map(math.isfinite, times)) or activity not in _WORDS:
            return None
        return cls(
            number=number,
            at=at,
            step=step,
            activity=Activity(activity),
            entered=entered,
            since=since,
            moved_at=moved_at,
            thread=thread,
            cost_s=cost_s,
            pace=pace,
            usual=usual,
            wait=_wait(kind, place, waits_since, text),
        )


def _of_wait(wait: Wait | None) -> tuple[int, int, float, bytes]:
    """Names that do not fit are left out, and a sentence that does not is cut."""
    if wait is None:
        return 0, 0, 0.0, b""
    why = wait.why.replace("\n", " ").encode(errors="replace")[: _TEXT_BYTES // 2]
    names = ""
    for name in wait.whom:
        fits = len(names) + len(name) + len(why) + 2 <= _TEXT_BYTES
        if fits and name.isascii() and name.isprintable() and "," not in name:
            names += f",{name}" if names else name
    return int(wait.kind), wait.place, wait.since, why + b"\n" + names.encode()


def _wait(kind: int, place: int, since: float, text: bytes) -> Wait | None:
    if kind not in set(WaitKind):
        return None
    why, _, names = text.rstrip(b"\0").decode(errors="ignore").partition("\n")
    return Wait(WaitKind(kind), why, tuple(filter(None, names.split(","))), since, place)


def _fields(history: IntervalHistory) -> tuple[int, float, float, float]:
    return history.count, history.mean_s, history.deviation_s, history.longest_s
