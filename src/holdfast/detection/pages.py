"""Where heartbeats are written: a page of memory of each worker's own, which its agent reads through /proc.

The memory has no name and goes with the process, as arenas do. A small file, `beats/w3.2.json` in the run directory,
says where it is: the process, and the numbers of two of its descriptors. The second is for its stacks.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.detection.beat import RECORD_BYTES, Beat

FOLDER = "beats"
SERVER_BEATS = "server-beats"  # in it is another such folder, of the parameter servers' pages
PAGE_BYTES = 4096
STEP_AT = 2048  # in the page, eight bytes: the step that the training thread is at, to the moment
READS_MAX = 3  # a record that is just being written is whole the next time
NOTE_BYTES_MAX = 4096


@dataclass(frozen=True, kw_only=True)
class Note:
    """Where a worker's page is, and the signal upon which it writes its stacks; 0: it does not."""

    pid: int
    started: int  # clock ticks since boot: with the pid it names a process for good
    page: int
    stacks: int = -1
    signal: int = 0

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Note | None:
        """None if there is none, or none that makes sense."""
        try:
            with path.open("rb") as file:
                value = json.loads(file.read(NOTE_BYTES_MAX))
            if all(type(number) is int for number in value.values()):
                return cls(**value)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            pass
        return None


def note_path(run_dir: Path, worker: str) -> Path:
    return run_dir / FOLDER / f"{worker}.json"


class Page:
    """The reading side. Raises OSError if the process is gone or the kernel does not let us."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self._file = os.open(f"/proc/{note.pid}/fd/{note.page}", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> Beat | None:
        for _ in range(READS_MAX):
            beat = Beat.decode(os.pread(self._file, RECORD_BYTES, 0))
            if beat is not None:
                return beat
        return None

    def step(self) -> int:
        """The step that it is at, or was at when it died: the page outlives its process while this is open."""
        return int.from_bytes(os.pread(self._file, 8, STEP_AT), sys.byteorder, signed=True)

    def close(self) -> None:
        os.close(self._file)
