"""Which workers of other hosts a run has lost, by what this host's own workers tell. Pure.

Their deaths are in the event log of their own host. Here they are losses that survivors write down, and those are also
written about workers that only closed a connection because they had lost another: whoever is in the next view lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.words import host_of

KEPT_MAX = 4096


class LostElsewhere:
    def __init__(self) -> None:
        self._view = 0
        self._missed: set[str] = set()
        self._counted: dict[str, None] = {}  # each worker counts once; the oldest are forgotten first

    def feed(self, event: Mapping[str, Any]) -> int:
        """How many more are lost, now that this is known."""
        kind = event.get("kind")
        if kind == "lost":
            peer = str(event.get("peer"))
            if host_of(peer) != host_of(str(event["who"])) and int(event.get("view", 0)) >= self._view:
                self._missed.add(peer)
        elif kind == "view" and int(event.get("view", 0)) > self._view:
            self._view = int(event["view"])
            lost = self._missed - set(map(str, event.get("members", ()))) - self._counted.keys()
            self._missed.clear()
            self._counted |= dict.fromkeys(sorted(lost))
            for name in list(self._counted)[:-KEPT_MAX]:
                del self._counted[name]
            return len(lost)
        return 0
