"""Who replicates a slice: the configuration that the ledger holds, and the rules by which the next one may follow it.

A configuration changes only by compare-and-set with the next epoch. Between two configurations at most one replica
comes or goes, so that a majority of the one and a majority of the other always share a replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Configuration:
    """Servers are named with their incarnation: one that lost what it stored comes back under another name."""

    epoch: int
    primary: str
    replicas: tuple[str, ...]
    reason: str = ""

    def __post_init__(self) -> None:
        assert self.epoch >= 1, self
        assert self.primary in self.replicas, self
        assert len(set(self.replicas)) == len(self.replicas), self

    @property
    def majority(self) -> int:
        return len(self.replicas) // 2 + 1

    def next(self, reason: str, *, primary: str = "", replicas: tuple[str, ...] = ()) -> Configuration:
        following = Configuration(self.epoch + 1, primary or self.primary, replicas or self.replicas, reason)
        assert len(set(self.replicas) ^ set(following.replicas)) <= 1, (self, following)
        return following


@dataclass(frozen=True, slots=True, order=True)
class LogEnd:
    """Where a log ends. Of two logs the one with the greater end is the newer, whatever their lengths are."""

    epoch: int
    index: int


def newest(ends: Mapping[str, LogEnd], preferred: str) -> str:
    """Whose log is the newest. Between equals it is the preferred one, else the first by name."""
    best = max(ends.values())
    equals = sorted(name for name, end in ends.items() if end == best)
    return preferred if preferred in equals else equals[0]


def reached_by_majority(values: Iterable[float], majority: int) -> float:
    """The greatest value that at least a majority has reached."""
    return sorted(values, reverse=True)[majority - 1]
