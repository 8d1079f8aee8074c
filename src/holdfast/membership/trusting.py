"""Who is left out of steps more often than chance explains, where a robust rule combines the shards. Pure.

A rule that must choose leaves somebody out in every step, also where all are honest. Shards are drawn at random, so if
nobody is hostile every shard of a step is as likely to be left out as any other: of U that were left out among n, a
worker with c shards has as many as a blind draw of c gives it (hypergeometric). Against that a bet is kept for every
worker: what it is worth is multiplied, step by step, with exp(b·u) over what that is worth on average, u being those of
its shards that were left out. While the worker is honest, the bet's worth is on average 1 whatever comes and however
long the run is, and so it ever reaches 1 / FALSE_ALARM with a probability of at most FALSE_ALARM (Ville's inequality).
Several b are bet on at once, and the mean of their worths counts. Where others are hostile, honest shards are left out
less often than by a blind draw, and the bound holds all the more.

What it does not cover: hostile workers who see an honest one's gradients beforehand may place theirs so that the rule
leaves that one out. And shards that are not drawn at random are not counted: see `count`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import comb, exp, log

BETS = (0.5, 1.0, 2.0, 4.0)
FALSE_ALARM = 1e-6  # of each worker, in a whole run
STEPS_MIN = 5  # in which somebody is seen before it is accused
WORKERS_KEPT = 512


@dataclass
class Account:
    """One worker's. `worths`: the logarithms of the bets' worths."""

    shards: int = 0
    left_out: int = 0
    steps: int = 0
    worths: list[float] = field(default_factory=lambda: [0.0] * len(BETS))

    @property
    def suspicion(self) -> float:
        """1 or more: it is left out more often than chance explains."""
        high = max(self.worths)
        worth = high + log(sum(exp(one - high) for one in self.worths) / len(BETS))
        return max(0.0, worth / -log(FALSE_ALARM))


@dataclass(frozen=True)
class Distrust:
    """A worker that is to be evicted, and why."""

    worker: str
    shards: int
    left_out: int
    steps: int

    @property
    def reason(self) -> str:
        return (
            f"{self.left_out} of its {self.shards} shards in {self.steps} steps were left out by the robust rule; "
            f"of honest workers that would happen to one in {1 / FALSE_ALARM:,.0f}"
        )


class TrustBook:
    """Owned by a worker's loop. `f`: so many shards of a step may be hostile; `least`: the rule needs so many."""

    def __init__(self, *, shards: int, f: int, least: int, whole: bool) -> None:
        self.accounts: dict[str, Account] = {}
        self._shards = shards
        self._f = f
        self._least = least
        self._whole = whole

    def count(
        self, brought: Sequence[tuple[str, tuple[int, ...]]], trusted: Mapping[int, bool], *, alike: bool
    ) -> None:
        """A step was committed. `alike`: its shards were drawn at random, and are of one size."""
        out = sum(not one for one in trusted.values())
        for worker, shards in brought:
            if not shards:
                continue
            account = self.accounts.setdefault(worker, Account())
            mine = sum(not trusted[shard] for shard in shards)
            account.shards += len(shards)
            account.left_out += mine
            account.steps += 1
            if alike:
                for number, bet in enumerate(BETS):
                    account.worths[number] += bet * mine - average(len(trusted), out, len(shards), bet)
        while len(self.accounts) > WORKERS_KEPT:
            del self.accounts[next(iter(self.accounts))]

    def distrusts(self, members: Sequence[str]) -> tuple[Distrust, ...]:
        """The most suspect of them, if it is suspect enough and the others are enough without it."""
        known = [(self.accounts[one].suspicion, one) for one in members if one in self.accounts]
        suspicion, worker = max(known, default=(0.0, ""))
        if suspicion < 1.0 or self.accounts[worker].steps < STEPS_MIN or not self.can_spare_one(len(members)):
            return ()
        account = self.accounts[worker]
        return (Distrust(worker, account.shards, account.left_out, account.steps),)

    def can_spare_one(self, workers: int) -> bool:
        """Whether those who are left withstand one hostile worker less than these do, and have shards enough."""
        if workers < 3:
            return False  # with two, it is one's word against the other's
        if not self._whole:  # the others go on with the shards they have
            share = most_of(1, self._shards, workers)
            return self._f >= share and self._shards - share >= self._least
        before = max(hostile for hostile in range(workers) if most_of(hostile, self._shards, workers) <= self._f)
        return before >= 1 and most_of(before - 1, self._shards, workers - 1) <= self._f


def most_of(hostile: int, shards: int, workers: int) -> int:
    """How many shards so many of the workers have at most, if they are spread evenly."""
    each, more = divmod(shards, workers)
    return hostile * each + min(hostile, more)


@lru_cache(maxsize=4096)
def average(n: int, out: int, mine: int, bet: float) -> float:
    """The logarithm of what exp(bet * u) is on average, of u left out among `mine` drawn blindly from n."""
    ways = [(comb(out, u) * comb(n - out, mine - u), u) for u in range(min(out, mine) + 1)]
    top = bet * min(out, mine)
    return top + log(sum(count / comb(n, mine) * exp(bet * u - top) for count, u in ways))
