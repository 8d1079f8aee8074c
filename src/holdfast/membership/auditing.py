"""Audits against hardware that lies: which shards are computed twice and by whom, what is compared, who is believed.

Pure. Every member's state has the same bits, and any worker that computes a shard gets the same bits. So two answers
to one question show that somebody is wrong, and the answer that more of them give shows who. All members decide from
the same words, those in each other's Ready, before the step commits; nobody has to be told the verdict.

Audits come at a fixed rate: the k-th of a run is due in the step in which k first is below `fraction` times the shards
so far. Consecutive audits go to different shards, each as often as any other, and each shard's go to the members other
than its owner in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import gcd

_FINEST = 1_000_000  # the smallest fraction that is told from none is one in so many


@dataclass(frozen=True, slots=True)
class Said:
    """What a member says in its Ready. Empty: nothing is audited in this step."""

    shards: tuple[tuple[int, str], ...] = ()  # of the step's shards that it has computed: audited ones, doubtful ones
    state: str = ""  # digest of the slice of the state that is due in this step


NOTHING = Said()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is audited. The same for all members of a run."""

    seed: int = 0
    fraction: float = 0.0  # of all shards; 0: none
    every: int = 0  # the whole state is compared once in so many steps; 0: never
    slices: int = 1  # in so many portions, spread over those steps; at most `every`

    @cached_property
    def exactly(self) -> Fraction:
        return Fraction(self.fraction).limit_denominator(_FINEST)

    def slice_due(self, step: int) -> int | None:
        """The portion of the state whose digest is compared in this step.

        Not in those with round numbers, if it can be helped: checkpoints are saved then, and both read the state.
        """
        if not self.every:
            return None
        slices = min(self.slices, self.every)
        place = (step - self.every // (3 * slices)) % self.every
        number = place * slices // self.every
        return number if place == 0 or (place - 1) * slices // self.every < number else None


@dataclass(frozen=True, slots=True)
class Finding:
    """Members disagree. `liars`: who is in the minority; `third`: who shall compute it too; neither: undecidable."""

    step: int
    what: str  # "shard" or "state"
    number: int  # of the shard, or of the slice
    digests: tuple[tuple[str, str], ...]  # who said what, in rank order
    liars: tuple[str, ...] = ()
    third: str = ""
    good: int | None = None  # what came after so many steps may be spoiled; None: nothing is, that is known

    @property
    def reason(self) -> str:
        what = f"shard {self.number} of step {self.step}" if self.what == "shard" else f"the state at step {self.step}"
        if self.liars:
            agree = len(self.digests) - len(self.liars)
            return f"{', '.join(self.liars)} was wrong about {what}: {agree} of {len(self.digests)} agree on another"
        who = " and ".join(member for member, _ in self.digests)
        if len(self.digests) == 1:
            return f"{who} doubts its own {what}, which is not finite; {self.third} computes it too"
        if self.third:
            return f"{who} disagree about {what}; {self.third} computes it too"
        return f"{who} disagree about {what}, and there is no majority"


def majority(digests: Mapping[str, str]) -> str:
    """The digest to believe: said by more than any other, and by two at least. Empty: there is none.

    Two that are wrong independently do not agree on 128 bits; so where two agree and two others each say something
    else, the two are believed. Two against two is nobody's majority.
    """
    counted = Counter(digests.values()).most_common(2)
    if counted[0][1] < 2 or (len(counted) == 2 and counted[1][1] == counted[0][1]):
        return ""
    return counted[0][0]


def first_audit(rules: Rules, shards: int, step: int) -> int:
    """The number of audits in all steps before this one."""
    exact = rules.exactly
    return step * shards * exact.numerator // exact.denominator


def sampled(rules: Rules, shards: int, step: int) -> dict[int, int]:
    """The audited shards of a step, and the number that each audit has in the run."""
    if not rules.exactly:
        return {}
    stride, offset = _stride(rules.seed, shards), rules.seed % shards
    numbers = range(first_audit(rules, shards, step), first_audit(rules, shards, step + 1))
    return {(offset + number * stride) % shards: number for number in numbers}


def _stride(seed: int, shards: int) -> int:
    """Without a common divisor with `shards`: any `shards` consecutive audits go to different ones."""
    stride = (seed // shards) % shards or 1
    while gcd(stride, shards) != 1:
        stride += 1
    return stride


def auditor_of(number: int, shards: int, owner: str, able: Sequence[str], said: Sequence[str] = ()) -> str:
    """Who computes a shard that others have computed: each time another. Empty: there is nobody left."""
    others = [member for member in able if member != owner and member not in said]
    return others[(number % shards + number // shards) % len(others)] if others else ""


class Auditing:
    """A member's part in a run's audits. Owned by its machine."""

    def __init__(self, me: str, shards: int, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self._me = me
        self._shards = shards
        self._step = -1
        self._sampled: dict[int, int] = {}
        self._disputed: dict[int, str] = {}  # shards of this step, and who decides
        self._vouched: dict[str, int] = {}  # member -> the last step in which others found it right

    def sampled(self, step: int) -> Mapping[int, int]:
        if step != self._step:
            self._step, self._disputed = step, {}
            self._sampled = sampled(self.rules, self._shards, step)
        return self._sampled

    def extra(self, step: int, assignment: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shards of others that I compute in this step, to compare and not to count."""
        found = []
        owners = {shard: member for member, shards in assignment.items() for shard in shards}
        for shard, number in self.sampled(step).items():
            if shard in owners and auditor_of(number, self._shards, owners[shard], tuple(assignment)) == self._me:
                found.append(shard)
        mine = [shard for shard, third in self._disputed.items() if third == self._me and shard not in found]
        return tuple(shard for shard in sorted([*found, *mine]) if owners.get(shard) != self._me)

    def judge(self, step: int, members: Sequence[str], said: Mapping[str, Said]) -> Finding | None:
        """What follows from the members' words on this step. None: nobody disagrees.

        Who is named goes first: without it the others may agree. Then a third opinion is asked for.
        """
        state = self._state(step, members, said)
        shards = (
            self._judged(step, members, said) if self.rules.exactly or any(one.shards for one in said.values()) else []
        )
        findings = [*([state] if state else []), *shards]
        for finding in findings:
            if finding.liars:
                return finding
        for finding in findings:
            if finding.third:
                self._disputed[finding.number] = finding.third
        return next((finding for finding in findings if finding.third), findings[0] if findings else None)

    def _state(self, step: int, members: Sequence[str], said: Mapping[str, Said]) -> Finding | None:
        number = self.rules.slice_due(step)
        digests = {member: said[member].state for member in members if said[member].state}
        if number is None or len(set(digests.values())) < 2:
            return None
        finding = Finding(step, "state", number, tuple(digests.items()), good=max(0, step - self.rules.every))
        return _with_liars(finding, majority(digests))

    def _judged(self, step: int, members: Sequence[str], said: Mapping[str, Said]) -> list[Finding]:
        found = []
        by_shard: dict[int, dict[str, str]] = {}
        for member in members:
            self._vouched.setdefault(member, step)
            for shard, digest in said[member].shards:
                by_shard.setdefault(shard, {})[member] = digest
        for shard, digests in sorted(by_shard.items()):
            if len(set(digests.values())) > 1:
                found.append(self._disagreement(step, shard, digests, members))
            elif len(digests) == 1 and shard not in self.sampled(step) and len(members) > 1:
                found.append(self._disagreement(step, shard, digests, members))  # it doubts itself: somebody look at it
        wrong = {member for finding in found for member, _ in finding.digests}
        for digests in by_shard.values():
            if len(digests) > 1 and not wrong & digests.keys():
                self._vouched.update(dict.fromkeys(digests, step))
        return found

    def _disagreement(self, step: int, shard: int, digests: Mapping[str, str], members: Sequence[str]) -> Finding:
        finding = Finding(step, "shard", shard, tuple(digests.items()))
        believed = majority(digests)
        if believed:
            named = _with_liars(finding, believed)
            return replace(named, good=self._good(step, named.liars))
        number = self.sampled(step).get(shard, shard)
        third = auditor_of(number, self._shards, "", members, tuple(digests))
        return replace(finding, third=third)

    def _good(self, step: int, liars: Sequence[str]) -> int | None:
        """Since when a worker whose gradient is wrong may have been wrong unseen. None: every shard was compared.

        Its state may have been wrong since it was last compared; what it computed, since others last found it right.
        """
        if self.rules.exactly >= 1:
            return None
        compared = [max(0, step - self.rules.every)] if self.rules.every else []
        vouched = [self._vouched[liar] for liar in liars] if self.rules.exactly else []
        return min([*compared, *vouched], default=None)


def _with_liars(finding: Finding, believed: str) -> Finding:
    if not believed:
        return finding
    return replace(finding, liars=tuple(member for member, digest in finding.digests if digest != believed))
