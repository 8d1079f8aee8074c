"""What the parameter servers of a host have on its disk, and which name each has by that.

    RUN/servers/s0@host/life.json    {"started_over": N}: how often the run's slices had been lost when it was begun
    RUN/servers/s0@host/SLICE/       servers/durable.py

A server's name stands for what it has confirmed to have. So a slot's server keeps its name for as long as its directory
is there; where that is gone, emptied or of before a loss, the server comes back under a name that nobody has had, and
is no replica of anything until it is added. Belongs to the agent.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from holdfast.core.errors import ProtocolError
from holdfast.core.words import decode_whole, encode_json
from holdfast.log.files import sync_directory

SERVER_DISKS = "servers"
SERVER_ROWS = "rows"  # of tables, that are used least: nothing there outlives its process
LIFE = "life.json"
NEW = ".new-"


class ServerDisks:
    def __init__(self, run_dir: Path, host: str) -> None:
        self._place = run_dir / SERVER_DISKS
        self._suffix = f"@{host}" if host else ""

    def kept(self, slot: int, started_over: int) -> str:
        """The name under which this slot's server can go on; empty: there is nothing that it could go on with."""
        names = [name for name in self._of_slot(slot) if self._life(name) == started_over]
        return max(names, key=_number, default="")

    def begin(self, slot: int, count: int, started_over: int) -> str:
        """A name that nobody has had, of the `count`-th process of this slot, and a directory for it.

        What is left of before a loss, or was given up, goes. OSError if there is no room.
        """
        for name in self._of_slot(slot):
            if (life := self._life(name)) is not None and life <= started_over:
                shutil.rmtree(self._place / name, ignore_errors=True)
        name = f"s{slot}{self._suffix}" if count <= 1 else f"s{slot}.{count}{self._suffix}"
        self._make(name, started_over)
        return name

    def _of_slot(self, slot: int) -> list[str]:
        with suppress(FileNotFoundError):
            names = [path.name for path in self._place.iterdir() if path.is_dir() and not path.name.startswith(NEW)]
            return [name for name in names if _is_of(name, slot, self._suffix)]
        return []

    def _life(self, name: str) -> int | None:
        """None: this is no server's directory, or somebody has emptied it."""
        with suppress(OSError, ProtocolError):
            return decode_whole((self._place / name / LIFE).read_bytes(), "started_over")
        return None

    def _make(self, name: str, started_over: int) -> None:
        """With its mark from the beginning: a directory without one is not taken for a server's."""
        new, final = self._place / (NEW + name), self._place / name
        for left in (new, final):
            if left.exists():
                shutil.rmtree(left)
        new.mkdir(parents=True)
        with (new / LIFE).open("wb") as file:
            file.write(encode_json({"started_over": started_over}))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(new)
        new.rename(final)
        sync_directory(self._place)


def slot_of(server: str) -> tuple[str, str]:
    """The slot and the host of a server: who has these has taken the place of who had them before."""
    name, _, host = server.partition("@")
    return name.partition(".")[0], host


def _is_of(name: str, slot: int, suffix: str) -> bool:
    return slot_of(name) == (f"s{slot}", suffix[1:])


def _number(name: str) -> int:
    number = name.partition("@")[0].partition(".")[2]
    return int(number) if number.isdecimal() else 0
