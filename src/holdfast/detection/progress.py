"""Does a worker get on? From its heartbeat and what the kernel says of its process: a level, and a sentence. Pure.

Two things go wrong. Its beats stop, because the process is stopped, swapped out or stuck as a whole. Or it beats, and
the thread that trains stands still: no processor time, the same line of the same function, for much longer than this
worker was ever seen to be in what it is in. A thread that computes gets on, however long it takes. One that waits for
its peers is not the one that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from holdfast.detection.beat import Activity, Beat
from holdfast.detection.phi import phi

PHI_HUNG = 8.0
BEAT_DEVIATION_S = 0.05  # beats are not more regular than this, whatever their past says
SHARD_DEVIATION_S = 0.1
SLOW_S = 0.5  # without a beat
STOPPED_S = 0.8
HISTORY_MIN = 8  # shards: before that nobody knows what is usual
LOADING_TIMES = 3.0  # the patience for a shard: storage stalls for seconds now and then, where computing does not
LONGEST_TIMES = 2.0  # as long as the longest so far, and as long again, is no hang
STOPPED = ("T", "t")


class Level(IntEnum):
    OK = 0
    SLOW = 1  # it beats late, but computes or is not given a processor
    SUSPECT = 2
    HUNG = 3

    @property
    def words(self) -> str:
        return ("ok", "slow to answer", "suspect", "hung")[self]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """After how long it is a hang, where the past does not ask for more patience."""

    stuck_s: float | None = 5.0  # in a shard; fetching a batch, three times that. None: like everything else
    hang_s: float | None = 120.0  # elsewhere, and where nothing is known of the past. None: nobody is said to hang
    silent_s: float = 2.0  # without a beat, and without processor time
    stopped_s: float = STOPPED_S  # without a beat, when the kernel says that it is stopped


@dataclass(frozen=True, kw_only=True)
class Sight:
    """How one worker looks. Times are as the one who looks has seen them pass: its own absence does not count."""

    beat: Beat
    silent_s: float  # without a new beat
    still_s: float  # beats came, and the thread that trains stood still
    state: str = "S"  # the kernel's letter for the process; only of interest where it is silent
    computes: bool = False  # the process, or its children, used a processor meanwhile
    holds_up: bool = False  # others have waited for it for as long as the limit


@dataclass(frozen=True)
class Suspicion:
    level: Level
    seconds: float = 0.0
    phi: float = 0.0
    reason: str = ""
    standing: bool = False  # it beats, and its thread stands still


FINE = Suspicion(Level.OK)


def suspect(sight: Sight, limits: Limits) -> Suspicion:
    """The worse of the two things that go wrong comes first: who does not beat tells nothing of its thread."""
    if sight.beat.activity == Activity.CLOSED:
        return FINE
    found = _silent(sight, limits) if sight.silent_s >= SLOW_S else _still(sight, limits)
    if found.level == Level.HUNG and limits.hang_s is None:
        return replace(found, level=Level.SUSPECT)
    return found


def _silent(sight: Sight, limits: Limits) -> Suspicion:
    seconds = sight.silent_s
    level = phi(seconds, sight.beat.pace, deviation_s_min=BEAT_DEVIATION_S)
    if sight.state in STOPPED:
        hung = seconds >= limits.stopped_s and level >= PHI_HUNG
        return _say(Level.HUNG if hung else Level.SUSPECT, seconds, level, "the process is stopped")
    if sight.computes or sight.state == "R":
        # It computes and lets no other thread have the interpreter, or others have the processor.
        return _say(Level.SLOW, seconds, level, "no heartbeat, but it computes or waits for a processor")
    if seconds >= limits.silent_s and level >= PHI_HUNG:
        return _say(Level.HUNG, seconds, level, "no heartbeat and no processor time")
    return _say(Level.SUSPECT if level >= PHI_HUNG else Level.SLOW, seconds, level, "no heartbeat")


def _still(sight: Sight, limits: Limits) -> Suspicion:
    beat, seconds = sight.beat, sight.still_s
    limit_s = patience(beat, limits, computes=sight.computes, holds_up=sight.holds_up)
    if limit_s is None or seconds < limit_s / 2.0:
        return FINE
    known = beat.usual.count >= HISTORY_MIN
    level = phi(seconds, beat.usual, deviation_s_min=SHARD_DEVIATION_S) if known else 0.0
    hung = seconds >= limit_s and (not known or level >= PHI_HUNG)
    reason = f"{beat.activity.words} of step {beat.step}, and the thread that trains does not move"
    return _say(Level.HUNG if hung else Level.SUSPECT, seconds, level, reason, standing=True)


def patience(beat: Beat, limits: Limits, *, computes: bool, holds_up: bool = False) -> float | None:
    """How long its thread may stand still in what it is in; None: for ever."""
    if beat.activity in (Activity.STARTING, Activity.WAITING, Activity.CLOSED):
        return None
    if beat.activity == Activity.ENDED:
        # A script may take its time at its end, to evaluate or to save, unless others wait for it to go on.
        return limits.hang_s if holds_up else None
    if beat.activity == Activity.SCRIPT or beat.usual.count < HISTORY_MIN:
        return limits.hang_s
    if limits.stuck_s is None:
        return limits.hang_s
    least_s = limits.stuck_s * (LOADING_TIMES if beat.activity == Activity.LOADING else 1.0)
    stuck_s = max(least_s, LONGEST_TIMES * beat.usual.longest_s)
    if computes:  # in other threads or in loader processes: for this one, perhaps, or perhaps not
        return None if limits.hang_s is None else max(stuck_s, limits.hang_s)
    return stuck_s


def _say(level: Level, seconds: float, phi: float, reason: str, *, standing: bool = False) -> Suspicion:
    return Suspicion(level, round(seconds, 2), round(phi, 1), f"{reason}, for {seconds:.1f} s", standing)
