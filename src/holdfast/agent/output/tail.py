"""Follows the workers' log files and hands out their lines.

Lines are withheld for a moment where they may be the last words of a script that fails in every worker: the agent
then shows one traceback and drops the others. Whatever happens, the files keep everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

READ_BYTES_MAX = 256 * 1024  # for each look: a worker that floods its log does not flood the agent
LINE_BYTES_MAX = 16 * 1024
WITHHOLD_S = 1.0
TRACEBACK = "Traceback (most recent call last)"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # colours and cursor movements


@dataclass
class _Tail:
    path: Path
    offset: int = 0
    partial: bytes = b""
    lines: list[tuple[float, str]] = field(default_factory=list)  # read, not handed out yet
    settled: bool = False  # it works: nothing but a traceback is withheld
    ended: bool = False
    drained: bool = False  # the last look reached the end of the file
    failed: bool = False


class Tails:
    """Owned by the agent's main thread."""

    def __init__(self, note: Callable[[str, int], None] = lambda worker, offset: None) -> None:
        """`note` is told up to where a worker's log was read, when something was there."""
        self._note = note
        self._tails: dict[str, _Tail] = {}
        self.failures_matter = True  # no step was made yet: last words of failed workers are kept back

    def __len__(self) -> int:
        return len(self._tails)

    def follow(self, worker: str, path: Path, *, from_end: bool) -> None:
        size = path.stat().st_size if from_end and path.exists() else 0
        self._tails[worker] = _Tail(path, size)

    def settle(self, worker: str) -> None:
        if worker in self._tails:
            self._tails[worker].settled = True

    def end(self, worker: str, *, failed: bool) -> None:
        if worker in self._tails:
            self._tails[worker].ended = True
            self._tails[worker].failed = failed

    def look(self, now: float) -> list[tuple[str, str]]:
        """(worker, line) pairs that may be shown now."""
        shown: list[tuple[str, str]] = []
        for worker, tail in list(self._tails.items()):
            self._read(worker, tail, now)
            if tail.ended and tail.failed and self.failures_matter:
                continue
            ready = len(tail.lines) if tail.ended else self._ready(tail, now)
            shown += [(worker, line) for _, line in tail.lines[:ready]]
            del tail.lines[:ready]
            if tail.ended and tail.drained and not tail.lines and not tail.partial:
                del self._tails[worker]
        return shown

    def last_lines(self, worker: str, now: float) -> list[str]:
        """What a worker that has ended said last. A traceback is withheld a little longer."""
        tail = self._tails.get(worker)
        if tail is None:
            return []
        self._read(worker, tail, now)
        if tail.failed and self.failures_matter:
            return []
        said = _before_traceback(tail) if tail.failed else len(tail.lines)
        lines = [line for _, line in tail.lines[:said]]
        del tail.lines[:said]
        return lines

    def drop_withheld(self, explained: str = "") -> list[str]:
        """The run ends with one traceback, that of `explained`; the rest stays in the files. Returns what that worker
        had said before it, and was withheld."""
        said: list[str] = []
        for worker, tail in list(self._tails.items()):
            if tail.lines or tail.partial or tail.failed:
                before = _before_traceback(tail)
                if worker == explained and before < len(tail.lines):
                    said = [line for _, line in tail.lines[:before]]
                del self._tails[worker]
        return said

    def _ready(self, tail: _Tail, now: float) -> int:
        old = sum(1 for when, _ in tail.lines if when <= now - WITHHOLD_S)
        if not tail.settled:
            return old
        before = _before_traceback(tail)
        return max(before, old) if before < len(tail.lines) else before

    def _read(self, worker: str, tail: _Tail, now: float) -> None:
        data = read_piece(tail.path, tail.offset, READ_BYTES_MAX)
        if data is None:
            return
        if data:
            tail.offset += len(data)
            self._note(worker, tail.offset)
        tail.drained = len(data) < READ_BYTES_MAX
        pieces = (tail.partial + data).split(b"\n")
        tail.partial = pieces.pop()
        if len(tail.partial) > LINE_BYTES_MAX or (tail.ended and tail.partial and tail.drained):
            pieces.append(tail.partial)
            tail.partial = b""
        # A carriage return is how progress bars redraw a line: its last state is what a terminal would show.
        tail.lines += [(now, shown(piece)) for piece in pieces]


def _before_traceback(tail: _Tail) -> int:
    """How many of its lines come before one. A script may have printed something without an end of line before it."""
    for index, (_, line) in enumerate(tail.lines):
        if TRACEBACK in line:
            return index
    return len(tail.lines)


def read_piece(path: Path, offset: int, size: int) -> bytes | None:
    """From there on, at most so much; None if there is no such file now."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError:
        return None


def shown(piece: bytes) -> str:
    """A line of a log as a terminal may show it: nothing in it moves the cursor or changes colours."""
    text = piece.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    return "".join(c for c in _ESCAPES.sub("", text) if c.isprintable() or c == "\t")


def last_words(path: Path, *, lines_max: int = 80) -> list[str]:
    """The end of a log, from its traceback on if there is one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 64 * 1024))
            lines = [shown(piece) for piece in file.read().rstrip(b"\n").split(b"\n")]
    except OSError:
        return []
    lines = lines[-lines_max:]
    for index, line in enumerate(lines):
        if TRACEBACK in line:
            return lines[index:]
    return lines
