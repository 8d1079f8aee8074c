"""Which worker gets how many shards: as its measured pace says, and not for every breath of wind. Pure.

Assignment changes nothing in the result, so it may follow the workers' speeds at any step. All members decide it from
the same numbers, those in each other's last Ready, and so come to the same answer without a word about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from statistics import median

from holdfast.membership.view_rules import by_host

GAIN_MIN = 0.1  # of the expected time of a step: for less, nothing is moved
GAIN_S_MIN = 0.005  # nor for less than this: it is lost in what else goes on
SMOOTHING = 0.5  # how much of a pace is that of the last step
WARM_UP_STEPS = 3  # of a worker's own: in the first ones it compiles, allocates and reads for the first time
IDLE_DECAY = 0.98  # a worker without shards has no new pace: what is known of it is believed less with every step

SLOW_TIMES = 2.0  # the usual pace
SLOW_AFTER_S = 5.0


class Pace:
    """How long a shard takes this worker: the median of a step's shards, smoothed over a few steps."""

    def __init__(self) -> None:
        self.seconds = 0.0  # not known yet
        self._warming = WARM_UP_STEPS

    def took(self, durations_s: Sequence[float]) -> float:
        """A step's shards took so long, each. Rounded, since it is said to all in every step; 0: not known yet."""
        if not durations_s:
            self.seconds *= IDLE_DECAY
        elif self._warming:
            self._warming -= 1
        elif not self.seconds:
            self.seconds = median(durations_s)
        else:
            self.seconds += SMOOTHING * (median(durations_s) - self.seconds)
        return float(f"{self.seconds:.3g}")


def fill_in(paces: Mapping[str, float]) -> dict[str, float]:
    """Seconds per shard of every member. Who has none yet is taken for average."""
    known = [pace for pace in paces.values() if pace > 0]
    usual = median(known) if known else 1.0
    return {member: pace if pace > 0 else usual for member, pace in paces.items()}


def divide(shards: int, members: Sequence[str], paces: Mapping[str, float]) -> dict[str, tuple[int, ...]]:
    """Contiguous ranges, so long that the slowest is through as early as can be."""
    members = by_host(members)
    counts = dict.fromkeys(members, 0)
    through = [(paces[member], rank, member) for rank, member in enumerate(members)]  # each with one shard more
    heapify(through)
    for _ in range(shards):
        _, rank, member = through[0]
        counts[member] += 1
        heapreplace(through, ((counts[member] + 1) * paces[member], rank, member))
    return _ranges(members, counts)


def _ranges(members: Sequence[str], counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {}
    start = 0
    for member in members:
        result[member] = tuple(range(start, start + counts[member]))
        start += counts[member]
    return result


def expected_s(assignment: Mapping[str, Sequence[int]], paces: Mapping[str, float]) -> float:
    return max((len(shards) * paces[member] for member, shards in assignment.items()), default=0.0)


def rebalanced(
    current: Mapping[str, tuple[int, ...]], shards: int, paces: Mapping[str, float]
) -> dict[str, tuple[int, ...]] | None:
    """A better assignment than the current one; None if it would not be better by enough."""
    if len(current) < 2 or not any(pace > 0 for pace in paces.values()):
        return None
    filled = fill_in(paces)
    expected = expected_s(current, filled)
    wanted = expected - max(GAIN_MIN * expected, GAIN_S_MIN)
    if shards / sum(1 / pace for pace in filled.values()) > wanted:
        return None  # as in nearly every step: not even with shards of any size
    better = divide(shards, list(current), filled)
    return better if expected_s(better, filled) <= wanted else None


@dataclass(frozen=True)
class Slow:
    """A worker that takes `times` as long as is usual, since `since_s`; `costs`: of what all could do together."""

    worker: str
    times: float
    since_s: float
    costs: float


class Slowness:
    """Who is slow, and since when. A worker is when it stays above SLOW_TIMES for SLOW_AFTER_S."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def look(self, paces: Mapping[str, float], now: float) -> tuple[list[Slow], list[str]]:
        """Those that are slow and were not told of before, and those that no longer are."""
        known = {member: pace for member, pace in paces.items() if pace > 0}
        usual = median(known.values()) if len(known) > 1 else 0.0
        above = {member: pace / usual for member, pace in known.items() if usual and pace > SLOW_TIMES * usual}
        self._since = {member: self._since.get(member, now) for member in above}
        found = []
        for member, times in above.items():
            if member not in self._told and now - self._since[member] >= SLOW_AFTER_S:
                self._told.add(member)
                costs = (1 - 1 / times) / len(known)
                found.append(Slow(member, times, now - self._since[member], costs))
        over = sorted(member for member in self._told if member in known and member not in above)
        self._told &= above.keys()
        return found, over
