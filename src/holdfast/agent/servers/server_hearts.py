"""Whether this host's parameter servers get on, by their heartbeats: who is silent, and whose thread stands still.

A slice whose primary hangs has another after the lease, whatever is found here. This is to end the process that hangs,
so that another can take its place. `judge` is pure; `ServerHearts` reads the pages, in the agent's main thread.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.workers.stacks import collect
from holdfast.detection.beat import Activity, Beat
from holdfast.detection.pages import SERVER_BEATS, Note, Page, note_path

SILENT_S = 5.0  # without a beat
LONGEST_TIMES = 3.0  # the longest turn so far, and as long twice again, is no hang
LOOK_S_MAX = 1.0  # of the time between two looks: the agent may have stood still itself


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """`stuck_s`: for so long its thread may stand still while its heart beats; None: for ever."""

    silent_s: float = SILENT_S
    stuck_s: float | None = 5.0


@dataclass(frozen=True, kw_only=True)
class Sight:
    """Times are as the one who looks has seen them pass."""

    silent_s: float = 0.0  # without a new beat
    still_s: float = 0.0  # beats came, and the server's thread stood still
    longest_s: float = 0.0  # of its turns so far


@dataclass(frozen=True, kw_only=True)
class HungServer:
    server: str
    reason: str
    seconds: float
    stacks: str


def judge(sight: Sight, limits: ServerLimits) -> str:
    """Why it hangs; empty: it does not, as far as can be seen."""
    if sight.silent_s > limits.silent_s:
        return f"no heartbeat for {sight.silent_s:.1f} s"
    if limits.stuck_s is not None and sight.still_s > max(limits.stuck_s, LONGEST_TIMES * sight.longest_s):
        return f"its thread stands still for {sight.still_s:.1f} s; its turns took {sight.longest_s:.2f} s at most"
    return ""


def see(before: Sight, was: Beat | None, beat: Beat, passed_s: float) -> Sight:
    """How it looks after another look, at a beat that may be the one of the last time."""
    if beat.activity in (Activity.STARTING, Activity.CLOSED):
        return Sight()  # it reads what it has on disk, or ends
    longest_s = beat.usual.longest_s
    if was is None or beat.number != was.number:
        moved = was is None or beat.moved_at != was.moved_at
        return Sight(still_s=0.0 if moved else before.still_s + passed_s, longest_s=longest_s)
    return Sight(silent_s=before.silent_s + passed_s, still_s=before.still_s, longest_s=longest_s)


class ServerHearts:
    def __init__(self, run_dir: Path, limits: ServerLimits) -> None:
        self._place = run_dir / SERVER_BEATS
        self._limits = limits
        self._pages: dict[str, Page] = {}
        self._beats: dict[str, Beat] = {}
        self._sights: dict[str, Sight] = {}
        self._looked_at: float | None = None

    def look(self, servers: Collection[str], now: float) -> list[HungServer]:
        """Those that hang, of these. Each is told once: it is ended then."""
        passed_s = 0.0 if self._looked_at is None else min(LOOK_S_MAX, max(0.0, now - self._looked_at))
        self._looked_at = now
        for gone in self._pages.keys() - set(servers):
            self._forget(gone)
        found = []
        for server in servers:
            page, beat = self._open(server), None
            if page is not None:
                with suppress(OSError):
                    beat = page.read()
            if page is None or beat is None:
                continue
            sight = see(self._sights.get(server, Sight()), self._beats.get(server), beat, passed_s)
            self._sights[server], self._beats[server] = sight, beat
            if reason := judge(sight, self._limits):
                stacks = collect(page.note, thread=beat.thread)
                found.append(
                    HungServer(
                        server=server, reason=reason, seconds=round(sight.silent_s or sight.still_s, 2), stacks=stacks
                    )
                )
                self._forget(server)
        return found

    def _open(self, server: str) -> Page | None:
        if server not in self._pages:
            note = Note.read(note_path(self._place, server))
            if note is None:
                return None  # it starts
            with suppress(OSError):
                self._pages[server] = Page(note)
        return self._pages.get(server)

    def _forget(self, server: str) -> None:
        if (page := self._pages.pop(server, None)) is not None:
            page.close()
        self._beats.pop(server, None)
        self._sights.pop(server, None)

    def close(self) -> None:
        for server in list(self._pages):
            self._forget(server)
