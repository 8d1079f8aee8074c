"""What earlier agents and their workers wrote down: how a new agent knows what it takes over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.events import EventReader
from holdfast.observe.fold import RunRecord


class History:
    """What the events so far say, for when the agent begins, and the reader that goes on from there."""

    def __init__(self, events: Path) -> None:
        self.reader = EventReader(events)
        self.record = RunRecord()
        self._past: dict[tuple[str, ...], dict[str, Any]] = {}
        self.poll()

    def poll(self) -> None:
        for event in self.reader.stream():
            key = tuple(str(event.get(name)) for name in ("who", "kind", "worker", "liars"))
            self._past.pop(key, None)
            self._past[key] = event
            self.record.feed(event)

    def take_past(self) -> list[dict[str, Any]]:
        """The newest of each kind that each worker wrote, in order; and forget them."""
        past, self._past = list(self._past.values()), {}
        return past

    def pids(self) -> dict[str, int]:
        return {worker: known.pid for worker, known in self.record.workers.by_id.items() if known.pid}

    def has_registered(self, worker: str) -> bool:
        known = self.record.workers.by_id.get(worker)
        return known is not None and known.state != "starting"

    def ended_unattended(self, living: Iterable[str], dead: Iterable[str]) -> list[tuple[str, int, str]]:
        """(worker, pid, reason) of those that ended while nobody watched; `dead` had a registration still."""
        for worker in dead:
            self.record.workers.worker(worker)
        ended = []
        for worker, known in self.record.workers.by_id.items():
            if known.alive and worker not in set(living):
                reason = {"leaving": "left", "finished": "finished", "evicted": "evicted"}.get(known.state)
                ended.append((worker, known.pid, reason or "died while no agent ran"))
        return sorted(ended)
