"""The hosts that an agent hears in the ring: how long each has been silent, how unlikely that is, what was told. Pure.

Invariants:
- time in which this agent did not look itself counts for nobody's silence;
- a host that was never heard is not called silent: a port that is closed to us is no sign of a loss;
- a host is called silent once for each silence, and back when it is heard again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from holdfast.detection.agent_beat import AGE_S_MAX, OPINIONS_MAX, PASSED_ON_MAX, AgentBeat, CrewHealth, Opinion, Told
from holdfast.detection.phi import Intervals, phi
from holdfast.detection.progress import BEAT_DEVIATION_S, PHI_HUNG
from holdfast.detection.ring import BEAT_S, predecessors, successors

GAP_S_MAX = 0.5  # of our own: a longer one is an absence
LATE_S = 3 * BEAT_S / 2
SILENT_S = 0.8
UNKNOWN_S = 3.0  # the same where too little is known of its past
HISTORY_MIN = 8
OPINION_S = 3 * BEAT_S  # so old may be what another says of a host
HOSTS_MAX = 65536

OK, LATE, SILENT, UNHEARD = "ok", "late", "silent", "no word yet"


@dataclass(frozen=True)
class HostSilent:
    host: str
    phi: float
    seconds: float


@dataclass(frozen=True)
class HostBack:
    host: str
    seconds: float  # it was silent


@dataclass
class _Heard:
    """A host that beats to us."""

    silent_s: float = 0.0
    intervals: Intervals = field(default_factory=Intervals)
    beats: int = 0
    told_silent: bool = False
    leaving: bool = False


@dataclass(frozen=True)
class Row:
    """What is known of one host. `by` is who says so: this agent, one that hears it, or itself, passed on."""

    host: str
    level: str
    by: str
    phi: float
    age_s: float  # of the last word of its own
    crew: CrewHealth


class Neighbours:
    def __init__(self, me: str, *, silent_s: float = SILENT_S) -> None:
        self.me = me
        self._silent_s = max(silent_s, SILENT_S)
        self.targets: tuple[str, ...] = ()  # whom we beat to
        self.watched: tuple[str, ...] = ()  # who beats to us
        self._hosts: tuple[str, ...] = ()
        self._heard: dict[str, _Heard] = {}
        self._told: dict[str, tuple[float, CrewHealth]] = {}  # host -> when it said so, by our clock
        self._opinions: dict[str, tuple[float, tuple[Opinion, ...]]] = {}  # of whom we hear, and when
        self._turn = 0
        self._looked_at: float | None = None

    def arrange(self, hosts: Iterable[str]) -> None:
        """These stand in the ledger. Who beat to us before and does not any more is forgotten."""
        self._hosts = tuple(sorted(set(hosts)))[:HOSTS_MAX]
        self.targets, self.watched = successors(self._hosts, self.me), predecessors(self._hosts, self.me)
        self._heard = {host: self._heard.get(host, _Heard()) for host in self.watched}
        self._told = {host: one for host, one in self._told.items() if host in self._hosts}
        self._opinions = {host: one for host, one in self._opinions.items() if host in self._heard}

    # ---- hearing

    def take(self, beat: AgentBeat, now: float) -> list[HostBack]:
        """A beat came. From whom does not belong before us in the ring, nothing is learnt of it by its beats."""
        self._learn(beat.host, now, beat.crew)
        for one in beat.told:
            self._learn(one.host, now - one.age_s, one.crew)
        known = self._heard.get(beat.host)
        if known is None:
            return []
        if known.beats:
            known.intervals.add(known.silent_s)
        silent_s, known.silent_s = known.silent_s, 0.0
        known.beats += 1
        known.leaving = beat.leaving
        self._opinions[beat.host] = (now, beat.opinions)
        was, known.told_silent = known.told_silent, False
        return [HostBack(beat.host, round(silent_s, 2))] if was else []

    def _learn(self, host: str, when: float, crew: CrewHealth) -> None:
        if host != self.me and host in self._hosts and when > self._told.get(host, (float("-inf"), crew))[0]:
            self._told[host] = (when, crew)

    # ---- looking

    def elapse(self, now: float) -> None:
        """Time passes. Then take what has come, then look: who was away itself must not judge by that."""
        gap_s = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), GAP_S_MAX)
        self._looked_at = now
        for known in self._heard.values():
            if known.beats and not known.leaving:
                known.silent_s += gap_s

    def look(self) -> list[HostSilent]:
        """Those that have just become silent."""
        found = []
        for host, known in self._heard.items():
            if not known.told_silent and self.level(host) == SILENT:
                known.told_silent = True
                found.append(HostSilent(host, self.phi(host), round(known.silent_s, 2)))
        return found

    def level(self, host: str) -> str:
        known = self._heard.get(host)
        if known is None or not known.beats:
            return UNHEARD
        if known.silent_s < LATE_S or known.leaving:
            return OK
        if known.intervals.history().count < HISTORY_MIN:
            return SILENT if known.silent_s >= max(UNKNOWN_S, self._silent_s) else LATE
        return SILENT if known.silent_s >= self._silent_s and self.phi(host) >= PHI_HUNG else LATE

    def phi(self, host: str) -> float:
        known = self._heard.get(host)
        if known is None:
            return 0.0
        return round(phi(known.silent_s, known.intervals.history(), deviation_s_min=BEAT_DEVIATION_S), 1)

    def silent_s(self, host: str) -> float:
        known = self._heard.get(host)
        return 0.0 if known is None else known.silent_s

    def silent(self) -> list[str]:
        return [host for host in self._heard if self.level(host) == SILENT]

    def confirmed(self, host: str, now: float) -> str:
        """Another that hears it, has just said so, and finds it as silent and as much out of reach as we do."""
        for other, (when, opinions) in self._opinions.items():
            if other == host or now - when > OPINION_S or self.level(other) != OK:
                continue
            if any(one.host == host and one.silent and not one.reachable for one in opinions):
                return other
        return ""

    # ---- telling

    def beat(self, crew: CrewHealth, now: float, *, out_of_reach: Collection[str], leaving: bool = False) -> AgentBeat:
        """The next beat. `out_of_reach`: hosts that were tried, and nothing there answered."""
        return AgentBeat(
            host=self.me,
            crew=crew,
            opinions=tuple(
                Opinion(
                    host,
                    self.level(host) == SILENT,
                    host not in out_of_reach,
                    round(self.silent_s(host), 2),
                    self.phi(host),
                )
                for host in list(self._heard)[:OPINIONS_MAX]
            ),
            told=self._pass_on(now),
            leaving=leaving,
        )

    def _pass_on(self, now: float) -> tuple[Told, ...]:
        known = sorted(self._told)
        chosen = [known[(self._turn + place) % len(known)] for place in range(min(PASSED_ON_MAX, len(known)))]
        self._turn = (self._turn + len(chosen)) % max(1, len(known))
        return tuple(Told(host, _age(self._told[host][0], now), self._told[host][1]) for host in chosen)

    def rows(self, now: float) -> list[Row]:
        """Every other host of the run, as far as it is known here."""
        opinions = {one.host: (by, one) for by, (_, said) in self._opinions.items() for one in said}
        rows = []
        for host in self._hosts:
            if host == self.me:
                continue
            when, crew = self._told.get(host, (now, CrewHealth()))
            level, by, value = self.level(host), self.me, self.phi(host)
            if host not in self._heard:
                by, value = host, 0.0
                level = OK if host in self._told else UNHEARD
                if host in opinions and opinions[host][1].silent:
                    by, level, value = opinions[host][0], SILENT, opinions[host][1].phi
            rows.append(Row(host, level, by, value, _age(when, now), crew))
        return rows


def _age(when: float, now: float) -> float:
    return round(min(max(0.0, now - when), AGE_S_MAX), 2)
