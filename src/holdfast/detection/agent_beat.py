"""What the agent of one host says to the next in the ring: how its workers look, whom it finds silent, what it was
told.

A beat has a bounded size, however many hosts and workers there are: of its workers it counts the levels and names a
few of those that are not well, and of what it was told of other hosts it passes on a few at a time, in turn. Ages
travel rather than times, since the clocks of hosts differ. What comes from the wire is checked field by field. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import ProtocolError
from holdfast.core.words import decode_json, encode_json
from holdfast.detection.progress import Level
from holdfast.detection.standstill import VOTES_MAX, Idle

NAMED_MAX = 6  # workers of a host that are not well
PASSED_ON_MAX = 8  # hosts of which something is passed on in one beat
OPINIONS_MAX = 4
NAME_CHARACTERS_MAX = 200
COUNT_MAX = 1 << 40
AGE_S_MAX = 86400.0
BEAT_BYTES_MAX = 16 * 1024


@dataclass(frozen=True)
class CrewHealth:
    """How a host's workers look: how many are at each level, some of those that are not ok, and the newest step."""

    counts: tuple[int, ...] = (0,) * len(Level)
    unwell: tuple[tuple[str, Level], ...] = ()
    step: int = 0
    idle: Idle | None = None  # all its members of the view wait for others, and for whom

    @classmethod
    def of(cls, levels: Mapping[str, Level], step: int, idle: Idle | None = None) -> CrewHealth:
        counts = tuple(sum(level == one for level in levels.values()) for one in Level)
        worst = sorted((worker for worker, level in levels.items() if level), key=lambda one: (-levels[one], one))
        return cls(counts, tuple((worker, levels[worker]) for worker in worst[:NAMED_MAX]), step, idle)

    def fields(self) -> list[Any]:
        idle = self.idle
        said = [] if idle is None else [[idle.seconds, idle.members, idle.with_state, list(map(list, idle.votes))]]
        return [list(self.counts), [[worker, int(level)] for worker, level in self.unwell], self.step, *said]


@dataclass(frozen=True)
class Opinion:
    """What the sender thinks of a host that it hears. `reachable` is false if nothing there answered."""

    host: str
    silent: bool
    reachable: bool
    seconds: float
    phi: float


@dataclass(frozen=True)
class Told:
    """How a host's workers looked `age_s` ago, by its own word."""

    host: str
    age_s: float
    crew: CrewHealth


@dataclass(frozen=True, kw_only=True)
class AgentBeat:
    """One beat."""

    host: str
    crew: CrewHealth = CrewHealth()
    opinions: tuple[Opinion, ...] = ()
    told: tuple[Told, ...] = ()
    leaving: bool = False  # the last one: its silence means nothing

    def encode(self) -> bytes:
        fields = {
            "host": self.host,
            "crew": self.crew.fields(),
            "opinions": [[one.host, one.silent, one.reachable, one.seconds, one.phi] for one in self.opinions],
            "told": [[one.host, one.age_s, one.crew.fields()] for one in self.told],
            "leaving": self.leaving,
        }
        return encode_json(fields)

    @classmethod
    def decode(cls, data: bytes) -> AgentBeat:
        """ProtocolError for what no agent would say."""
        fields = decode_json(data)
        try:
            return cls(
                host=_name(fields["host"]),
                crew=_crew(fields["crew"]),
                opinions=tuple(_opinion(*one) for one in _listed(fields["opinions"], OPINIONS_MAX)),
                told=tuple(_told(*one) for one in _listed(fields["told"], PASSED_ON_MAX)),
                leaving=_flag(fields["leaving"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"not a beat of an agent: {data[:80]!r}") from error


def _crew(fields: Any) -> CrewHealth:
    counts, unwell, step, *idle = _listed(fields, 4)
    found = tuple(_whole(count) for count in _listed(counts, len(Level)))
    if len(found) != len(Level):
        raise ValueError(f"{len(found)} levels")
    named = tuple((_name(worker), Level(level)) for worker, level in _listed(unwell, NAMED_MAX))
    return CrewHealth(found, named, _whole(step), _idle(*idle[0]) if idle else None)


def _idle(seconds: Any, members: Any, with_state: Any, votes: Any) -> Idle:
    named = tuple((_name(worker), _whole(count)) for worker, count in _listed(votes, VOTES_MAX))
    return Idle(_number(seconds), _whole(members), _whole(with_state), named)


def _opinion(host: Any, silent: Any, reachable: Any, seconds: Any, phi: Any) -> Opinion:
    return Opinion(_name(host), _flag(silent), _flag(reachable), _number(seconds), _number(phi))


def _told(host: Any, age_s: Any, crew: Any) -> Told:
    return Told(_name(host), min(_number(age_s), AGE_S_MAX), _crew(crew))


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARACTERS_MAX or not value.isprintable():
        raise ValueError("not a name")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("not a flag")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise ValueError("not a count")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError("not a number")
    return float(value)


def _listed(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError("not a list, or too long")
    return value
