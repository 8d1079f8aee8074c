"""What this host says of a run beside its events: who lives, how the hearts beat, how much memory is used.

Owned by the keeper's thread. Of workers on other hosts there is nothing here.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.agent.workers.heartbeat_watch import described_limits, find_pages, level_of
from holdfast.detection.pages import FOLDER, Page
from holdfast.detection.progress import Limits
from holdfast.placement.directory import RunDirectory
from holdfast.placement.proc import find_workers

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
WORKERS_MAX = 1024
FIND_S = 2.0


class Facts:
    """As of the last `look`. `workers` has those that live on this host, by id."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._pages: dict[str, Page] = {}
        self._limits: Limits | None = None
        self._pids: dict[str, int] = {}
        self._find_at = 0.0
        self.agent = False
        self.workers: dict[str, dict[str, Any]] = {}

    @property
    def lives(self) -> bool:
        return bool(self._pids)

    def look(self) -> bool:
        """Whether something has changed."""
        before = (self.agent, self.workers)
        self.agent = self._directory.agent() is not None
        now = time.monotonic()
        if now >= self._find_at:
            self._find_at = now + FIND_S
            self._find()
        facts: dict[str, dict[str, Any]] = {}
        for worker, pid in tuple(self._pids.items())[:WORKERS_MAX]:
            rss = _resident_bytes(pid)
            if rss is None:
                del self._pids[worker]
                continue
            facts[worker] = {"pid": pid, "rss": rss, **self._heart(worker, now)}
        self.workers = facts
        return before != (self.agent, self.workers)

    def _find(self) -> None:
        self._pids = {found.worker: found.pid for found in find_workers(self._directory.path)}
        for worker in self._pages.keys() - self._pids.keys():
            self._pages.pop(worker).close()
        if self._pids:
            self._pages |= find_pages(self._directory.path / FOLDER, known=self._pages)

    def _heart(self, worker: str, now: float) -> dict[str, Any]:
        """Its level of suspicion, by the limits that the run was started with, and what it is in."""
        page = self._pages.get(worker)
        try:
            seen = level_of(page, self._patience(), now) if page is not None else None
        except OSError:
            seen = None
        if seen is None:
            return {}
        suspicion, beat = seen
        fields: dict[str, Any] = {
            "level": suspicion.level.words,
            "phi": round(min(suspicion.phi, 999.0), 1),
            "activity": beat.activity.words,
            "step": beat.step,
        }
        return {**fields, "reason": suspicion.reason} if suspicion.reason else fields

    def _patience(self) -> Limits:
        if self._limits is None:
            self._limits = described_limits(self._directory.read())
        return self._limits

    def close(self) -> None:
        for page in self._pages.values():
            page.close()
        self._pages.clear()


def stored_steps(uri: str) -> set[int] | None:
    """The steps whose checkpoints are committed in a directory; None where that cannot be seen from here."""
    if not uri.startswith("/"):
        return None
    steps = set()
    with suppress(OSError):
        for manifest in Path(uri).glob("checkpoint-*/manifest.json"):
            with suppress(ValueError):
                steps.add(int(manifest.parent.name.removeprefix("checkpoint-")))
        return steps
    return None


def _resident_bytes(pid: int) -> int | None:
    """None if the process is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * PAGE_BYTES or None
