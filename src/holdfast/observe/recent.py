"""The newest events of each kind, how many there were, and which of them are news. Pure, of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from holdfast.core.events import KINDS
from holdfast.events.telling import describe

Event = Mapping[str, Any]

UNKNOWN_KINDS_MAX = 16  # of a newer version's vocabulary
TOLD_MAX = 512
RECENT_DEFAULT = 60
RECENT: Final = {
    "progress": 8,
    "spent": 0,
    "serving": 0,
    "staleness": 8,
    "rebalanced": 20,
    "left_out": 8,
    "registered": 40,
    "warning": 100,
    "worker_exited": 200,
    "view": 100,
}
# Several workers tell of the same thing; one of them is enough. The fields say which events are the same.
_TOLD_BY_MANY: Final[dict[str, tuple[str, ...]]] = {
    "view": ("view", "own"),
    "lost": ("view", "peer"),
    "recovered": ("view",),
    "recorded": ("step", "metrics"),
    "skipped": ("step",),
    "rewound": ("number",),
    "started_over": ("view",),
    "corruption": ("step", "where", "decided"),
    "distrusted": ("step", "worker"),
    "script_mistake": ("where",),
    "early_stop": ("step",),
}


class _Kind:
    __slots__ = ("count", "newest", "same")

    def __init__(self, name: str) -> None:
        self.same = _TOLD_BY_MANY.get(name)
        self.count = 0
        self.newest: deque[tuple[int, Event]] = deque(maxlen=RECENT.get(name, RECENT_DEFAULT))


class RecentEvents:
    """Takes events in order, each with its number."""

    def __init__(self) -> None:
        self._kinds = {name: _Kind(name) for name in KINDS}
        self._told: dict[tuple[Any, ...], None] = {}  # the oldest are forgotten first

    def take(self, kind: str, number: int, event: Event) -> bool:
        """Whether it is news: nobody else has told it before."""
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= len(KINDS) + UNKNOWN_KINDS_MAX:
                return True
            known = self._kinds[kind] = _Kind(kind)
        known.count += 1
        if known.same is not None:
            mine = (event.get("who"),) if event.get("own") else ()  # a view that nobody else tells of
            key = (kind, *map(event.get, known.same), *mine)
            try:
                told = key in self._told
            except TypeError:  # the fields are no plain values
                key = (kind, str(key))
                told = key in self._told
            if told:
                return False
            self._told[key] = None
            if len(self._told) > TOLD_MAX:
                del self._told[next(iter(self._told))]
        known.newest.append((number, event))
        if kind == "rewound":  # the steps come again, and what is skipped then is news
            self._told = {key: None for key in self._told if key[0] != "skipped"}
        return True

    @property
    def counts(self) -> dict[str, int]:
        return {name: known.count for name, known in self._kinds.items() if known.count}

    def newest(self, since: int = 0, most: int = 600) -> list[dict[str, Any]]:
        """Those after the event with this number, newest first, with their numbers."""
        found = [pair for known in self._kinds.values() for pair in known.newest if pair[0] > since]
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [{"n": number, **describe(event)} for number, event in found[:most]]
