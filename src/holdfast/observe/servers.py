"""What the events tell of parameter servers: who lives, how often slices had to find another primary, how stale updates
were. Pure: a part of the fold (fold.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)


class Servers:
    def __init__(self) -> None:
        self.alive: set[str] = set()  # of this host, as far as its agent tells
        self.lost = 0
        self.failovers = 0
        self.moves = 0
        self.staleness: Counter[int] = Counter()  # by how many updates of others -> updates
        self.primaries: dict[str, str] = {}  # of slices that had another one before

    def on_agent_started(self, event: Mapping[str, Any], at: float, number: int) -> None:
        if not event.get("took_over"):
            self.alive.clear()

    def on_server_started(self, event: Mapping[str, Any], at: float, number: int) -> None:
        self.alive.add(str(event["server"]))

    def on_server_exited(self, event: Mapping[str, Any], at: float, number: int) -> None:
        self.alive.discard(str(event["server"]))
        self.lost += event.get("reason") != "ended"

    def on_failover(self, event: Mapping[str, Any], at: float, number: int) -> None:
        self.failovers += 1
        self.primaries[str(event["slice"])] = str(event["primary"])

    def on_slice_moves(self, event: Mapping[str, Any], at: float, number: int) -> None:
        self.moves += 1

    def on_staleness(self, event: Mapping[str, Any], at: float, number: int) -> None:
        for stale, updates in dict(event["updates"]).items():
            self.staleness[int(stale)] += int(updates)
