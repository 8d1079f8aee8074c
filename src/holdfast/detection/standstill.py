"""Whether a run stands still: every member waits for a member, and nobody computes, loads or saves. Pure.

It is given the heartbeats of a host's workers at every look, and what the agents of other hosts say of theirs. One
member that does anything else than wait for peers, or whose wait is for something that moves by itself (the ledger,
storage, the state on its way, the next view), is enough: then nobody is judged. So are a silent heart, a host that has
not been heard of, and a ledger that is away, without which nothing could be changed.

Who is in the way is whom the most wait for. One that waits for nothing that it knows of comes before all, then one that
was waited for in an earlier standstill too. Of two, it is the one that is further: its word is missing. It is ended if
another member has the state. The others are told by its connections, agree on a view without it and go on; the next
worker of its slot joins. If that has been done in vain, or must not be done, the run ends.

Invariants:
- time in which this agent did not look itself counts for nobody's wait, nor does time before the view was there: a view
  that is new moves everybody, and what a heart said last may be of the one before;
- a standstill is said once; who is in the way is ended once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.core.waits import Wait, WaitKind
from holdfast.core.words import host_of
from holdfast.detection.beat import Activity, Beat

STILL_S = 5.0
TELL_S = 1.0  # more, before one is ended: that moves the workers of other hosts, which tell of it first
GAP_S_MAX = 0.5  # of its own: a longer one is an absence
SILENT_S = 1.0  # without a beat it is not known what a worker does
HEARD_S_MAX = 3.0  # so old may be what another host says
REST_S = 10.0  # until the same standstill is judged again
PAST_S = 120.0  # so long it is remembered
ENDED_MAX = 5  # workers in that time: one more will not help
VOTES_MAX = 6
VOTE = 10  # one worker waits for another; the last digit is for those that are further than who waits for them
GONE_S = 3600.0  # for a host of whose members nobody lives


@dataclass(frozen=True)
class Idle:
    """What one host says of its members of the view, all of which wait: for so long, and for whom."""

    seconds: float
    members: int
    with_state: int
    votes: tuple[tuple[str, int], ...] = ()  # whom they wait for, and how much that says against it


@dataclass(frozen=True)
class Standstill:
    """`waits`: of this host's members. `ended`: who is in the way and is to be ended, if it is this host's."""

    step: int
    seconds: float
    waits: Mapping[str, Wait]
    blamed: str
    ended: str = ""
    hopeless: str = ""  # why the run must end
    alone: bool = False  # the others went on without it

    @property
    def reason(self) -> str:
        each = "; ".join(f"{worker} is {wait.words}" for worker, wait in self.waits.items())
        return f"the others went on, and {each}" if self.alone else f"everybody waits: {each}"


@dataclass
class _Seen:
    key: tuple[int, float] | None = None
    still_s: float = 0.0
    silent_s: float = 0.0
    number: int = -1


@dataclass
class StandstillJudge:
    """`may_end`: workers may be ended at all; else what is found is only told."""

    host: str = ""
    may_end: bool = True
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _looked_at: float | None = None
    _judged: tuple[tuple[str, ...], float] | None = None  # the members that were judged, and when
    _view: tuple[tuple[str, ...], float] = ((), 0.0)  # the members at the last look, and since when it is these
    _gone: set[str] = field(default_factory=set)  # whose process has ended
    _past: list[tuple[float, frozenset[str]]] = field(default_factory=list)  # who was waited for in earlier ones
    _strays: set[str] = field(default_factory=set)  # that were told of

    def ended(self, worker: str) -> None:
        """Its process has: it does nothing, and waits for nobody, though the view may still have it."""
        self._gone.add(worker)

    def ledger_is_away(self) -> None:
        """Nobody is judged meanwhile, and when it is back, everything that waited for it moves first."""
        self._view = ((), 0.0)

    def observe(self, beats: Mapping[str, Beat], now: float) -> None:
        """At every look, before `judge` and `idle`."""
        gap_s = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), GAP_S_MAX)
        self._looked_at = now
        self._seen = {worker: self._seen.get(worker, _Seen()) for worker in beats}
        for worker, beat in beats.items():
            seen = self._seen[worker]
            if beat.number == seen.number:
                seen.silent_s += gap_s
                continue
            seen.number, seen.silent_s = beat.number, 0.0
            wait = beat.wait
            if wait is None and seen.key is not None and seen.key[0] == beat.entered:
                continue  # it has just looked at something that came, and goes on waiting
            if wait is None or not wait.could_last or beat.activity is not Activity.WAITING:
                seen.key, seen.still_s = None, 0.0
                continue
            key = (beat.entered, wait.since)
            seen.still_s = seen.still_s + gap_s if key == seen.key else 0.0
            seen.key = key

    def idle(self, beats: Mapping[str, Beat], members: Sequence[str]) -> Idle | None:
        """What this host says of its members; None: one of them does something, or it has none."""
        mine = [member for member in members if host_of(member) == self.host]
        here = [member for member in mine if member not in self._gone]
        if not mine or any(member not in beats or self._still_s(member) <= 0 for member in here):
            return None
        seconds = min((self._still_s(member) for member in here), default=GONE_S)
        votes: Counter[str] = Counter()
        for member in here:
            wait = beats[member].wait
            if wait is None:
                continue
            if wait.kind is WaitKind.NOTHING:
                votes[member] += 2 * VOTE * len(members)
            for one in wait.whom:
                other = beats[one].wait if one in beats else None
                further = other is not None and other.place > wait.place
                if one in members:
                    votes[one] += VOTE + further
        with_state = sum(beats[member].has_state for member in here)
        return Idle(round(seconds, 2), len(mine), with_state, tuple(votes.most_common(VOTES_MAX)))

    def judge(
        self,
        beats: Mapping[str, Beat],
        members: Sequence[str],
        elsewhere: Mapping[str, tuple[float, Idle | None]],
        now: float,
    ) -> Standstill | None:
        """`members`: of the view, in rank order. `elsewhere`: what other hosts said of theirs, and how old that is."""
        if tuple(members) != self._view[0]:
            self._view = (tuple(members), now)
        mine = self.idle(beats, members)
        if mine is None or min(mine.seconds, now - self._view[1]) < STILL_S or self._is_resting(members, now):
            return None
        idle = [mine]
        counts = Counter(host_of(member) for member in members)
        for host, count in counts.items():
            if host == self.host:
                continue
            age_s, said = elsewhere.get(host, (HEARD_S_MAX, None))
            if said is None or age_s >= HEARD_S_MAX or said.members != count or said.seconds < STILL_S:
                return None
            idle.append(said)
        here = [member for member in members if host_of(member) == self.host and member not in self._gone]
        waits = {member: wait for member in here if (wait := beats[member].wait) is not None}
        if not here or len(waits) < len(here):
            return None  # at the next look; or another host tells of it
        self._past = [(when, whom) for when, whom in self._past if now - when < PAST_S]
        found = self._conclude(beats, members, idle, waits)
        if found.ended and len(idle) > 1 and found.seconds < STILL_S + TELL_S:
            return None
        self._judged = (tuple(members), now)
        self._past.append((now, frozenset(one for said in idle for one, _ in said.votes)))
        return found

    def _conclude(
        self, beats: Mapping[str, Beat], members: Sequence[str], idle: Collection[Idle], waits: Mapping[str, Wait]
    ) -> Standstill:
        votes: Counter[str] = Counter()
        for one in idle:
            votes.update(dict(one.votes))
        for _, whom in self._past:
            votes.update(dict.fromkeys(whom & votes.keys(), VOTE * len(members)))
        living = [member for member in members if member not in self._gone]
        blamed = max(living, key=lambda member: (votes[member], members.index(member)))
        step = max(beats[member].step for member in waits)
        found = Standstill(step, min(one.seconds for one in idle), waits, blamed)
        # Of one on another host it is not known here whether it has the state: it is taken to have it.
        has_state = beats[blamed].has_state if blamed in beats else True
        if not self.may_end:
            return found
        with_state = sum(one.with_state for one in idle)
        if len(living) == 1 or (with_state and with_state - has_state < 1):
            return replace(found, hopeless=f"no other member than {blamed} has the state")
        if len(self._past) >= ENDED_MAX:
            return replace(found, hopeless=f"{len(self._past)} workers were ended for that within minutes, in vain")
        return replace(found, ended=blamed if host_of(blamed) == self.host else "")

    def strays(self, beats: Mapping[str, Beat], late: Collection[str]) -> list[Standstill]:
        """Workers that were left behind and wait for nothing: they would never come back. Each is said once."""
        found = []
        for worker in late:
            wait = beats[worker].wait if worker in beats else None
            lost = wait is not None and wait.kind is WaitKind.NOTHING and self._still_s(worker) >= STILL_S
            if lost and wait is not None and worker not in self._strays:
                self._strays.add(worker)
                ended = worker if self.may_end else ""
                seconds = round(self._still_s(worker), 2)
                found.append(Standstill(beats[worker].step, seconds, {worker: wait}, worker, ended, alone=True))
        return found

    def _is_resting(self, members: Sequence[str], now: float) -> bool:
        return self._judged is not None and self._judged[0] == tuple(members) and now - self._judged[1] < REST_S

    def _still_s(self, worker: str) -> float:
        seen = self._seen.get(worker)
        return seen.still_s if seen is not None and seen.key is not None and seen.silent_s < SILENT_S else 0.0
