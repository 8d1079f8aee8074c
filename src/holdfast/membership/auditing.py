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

from holdfast.core.rewinds import Clue, Rewind
from holdfast.membership.suspecting import (
    BACKWARD_INSIDE,
    CALL_IT_EVERYWHERE,
    NAMED_MAX,
    SAME_BITS,
    SAME_BITS_AS_LEADER,
    Details,
    advice,
    calls_sentence,
    comes_back,
    differing,
    is_structured,
    listed,
    named,
    outliers,
)

LEADERS_WITHIN = 10  # steps
_FINEST = 1_000_000  # the smallest fraction that is told from none is one in so many


@dataclass(frozen=True, slots=True)
class Said:
    """What a member says in its Ready. Empty: nothing is audited in this step."""

    shards: tuple[tuple[int, str], ...] = ()  # of the step's shards that it has computed: audited ones, doubtful ones
    state: str = ""  # digest of the slice of the state that is due in this step
    calls: tuple[int, ...] = ()  # of each optimizer's step() in the step before; empty: it was not in that step
    details: Details | None = None  # once states are known to differ
    late: int = 0  # of the gradients in the step before, if a backward added to them after the shards; else 0
    leader: tuple[str, int] | None = None  # who led and was wrong about a shard not long ago, and in which step
    distrusts: tuple[str, str] | None = None  # whom it would evict, and why: see trusting.py


NOTHING = Said()


@dataclass(frozen=True, kw_only=True)
class AuditRules:
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
    """Members disagree. `liars`: who is in the minority; `third`: who shall compute it too; `narrow`: all say more;
    `script`: it is the script's doing, as this sentence says; none of these: undecidable."""

    step: int
    what: str  # "shard", "state", "calls" or "trust"
    number: int  # of the shard, or of the slice
    digests: tuple[tuple[str, str], ...]  # who said what, in rank order
    liars: tuple[str, ...] = ()
    third: str = ""
    good: int | None = None  # what came after so many steps may be spoiled; None: nothing is, that is known
    narrow: bool = False
    script: str = ""
    hint: str = ""  # for a script
    whole: bool = False  # of the state: all of it, rather than a slice
    where: str = ""  # what differs, for people
    clue: Clue | None = None  # to know it again

    @property
    def reason(self) -> str:
        if self.script:
            return self.script
        if self.what == "trust":
            return f"{self.liars[0]} is distrusted by {len(self.digests)} members: {self.where}"
        if self.narrow:
            return f"{listed([member for member, _ in self.digests])} find out in what their states differ"
        what = f"shard {self.number} of step {self.step}" if self.what == "shard" else f"the state at step {self.step}"
        what += f", in {self.where}" if self.where else ""
        if self.liars:
            agree = len(self.digests) - len(self.liars)
            return f"{', '.join(self.liars)} was wrong about {what}: {agree} of {len(self.digests)} agree on another"
        who = listed([member for member, _ in self.digests])
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


def first_audit(rules: AuditRules, shards: int, step: int) -> int:
    """The number of audits in all steps before this one."""
    exact = rules.exactly
    return step * shards * exact.numerator // exact.denominator


def sampled(rules: AuditRules, shards: int, step: int) -> dict[int, int]:
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

    def __init__(self, me: str, shards: int, rules: AuditRules | None = None) -> None:
        self.rules = rules or AuditRules()
        self._me = me
        self._shards = shards
        self._step = -1
        self._sampled: dict[int, int] = {}
        self._disputed: dict[int, str] = {}  # shards of this step, and who decides
        self._vouched: dict[str, int] = {}  # member -> the last step in which others found it right
        self._narrowed = -1  # the step in which all were asked to say more
        self.doubted = -1  # the step whose whole state is compared, due or not: see doubting.py
        self.leader: tuple[str, int] | None = None  # as in Said
        self.earlier: tuple[Rewind, ...] = ()  # how often the run went back, and why

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
        if len(members) < 2 and not self.rules.exactly:
            return None  # nobody to disagree with
        called = self._called(step, members, said)
        if called is not None:
            return called
        state = self._state(step, members, said)
        if state is not None and (state.narrow or state.script):
            return state
        shards = (
            self._judged(step, members, said) if self.rules.exactly or any(one.shards for one in said.values()) else []
        )
        findings = [*([state] if state else []), *shards]
        for finding in findings:
            if finding.liars or finding.script:
                return self._led(finding, members, said)
        for finding in findings:
            if finding.third:
                self._disputed[finding.number] = finding.third
        found = next((finding for finding in findings if finding.third), findings[0] if findings else None)
        return found or _distrusted(step, members, said)

    def _led(self, finding: Finding, members: Sequence[str], said: Mapping[str, Said]) -> Finding:
        """One leader after the other is wrong about shards: that comes with leading, not with the machine."""
        if finding.what != "shard" or finding.liars != tuple(members[:1]):
            return finding
        leader = finding.liars[0]
        for before in {one.leader for one in said.values() if one.leader is not None}:
            if before[0] != leader and finding.step - before[1] <= LEADERS_WITHIN:
                who = f"{before[0]} at step {before[1]} and then {leader} at step {finding.step}"
                sentence = f"{who}, each as the leader, got other gradients for a shard than others"
                return replace(finding, liars=(), script=sentence, hint=SAME_BITS_AS_LEADER)
        self.leader = (leader, finding.step)
        return finding

    def recent_leader(self, step: int) -> tuple[str, int] | None:
        """What I say of it in my Ready, so that who came since then knows as much."""
        return self.leader if self.leader is not None and step - self.leader[1] <= LEADERS_WITHIN else None

    def _called(self, step: int, members: Sequence[str], said: Mapping[str, Said]) -> Finding | None:
        """Who applies a step calls the same optimizers as often as the others: else their states go apart."""
        calls = {member: said[member].calls for member in members if said[member].calls}
        late = {member: said[member].late for member in calls}
        if len(set(late.values())) > 1:
            digests = tuple((member, f"{value:x}") for member, value in late.items())
            sentence = (
                f"backward() was called after the loop over the shards of step {step - 1}, on samples of one worker"
            )
            return Finding(step, "calls", 0, digests, script=sentence, hint=BACKWARD_INSIDE, where="backward()")
        if len(set(calls.values())) < 2:
            return None
        digests = tuple((member, " ".join(map(str, counts))) for member, counts in calls.items())
        sentence = calls_sentence(step - 1, calls)
        return Finding(step, "calls", 0, digests, script=sentence, hint=CALL_IT_EVERYWHERE, where="optimizer.step()")

    def _state(self, step: int, members: Sequence[str], said: Mapping[str, Said]) -> Finding | None:
        whole = step == self.doubted
        number = 0 if whole else self.rules.slice_due(step)
        digests = {member: said[member].state for member in members if said[member].state}
        if number is None or len(set(digests.values())) < 2:
            return None
        good = max(0, step - self.rules.every)
        finding = Finding(step, "state", number, tuple(digests.items()), good=good, whole=whole)
        details = {member: detail for member in digests if (detail := said[member].details) is not None}
        if not details and self._narrowed != step:
            self._narrowed = step
            return replace(finding, narrow=True)
        finding = _with_liars(finding, majority(digests))
        # Who has come since then was not asked. What those who were asked say is enough, if they differ.
        told = len({digests[member] for member in details}) > 1
        return self._suspected(finding, details) if told else finding

    def _suspected(self, finding: Finding, details: Mapping[str, Details]) -> Finding:
        """What differs, since when, and whether it is the script's doing."""
        members = list(details)
        differs = differing(details)
        names = [one.entry.name for one in differs[:NAMED_MAX]]
        where = ", ".join([*names, *([f"and {len(differs) - NAMED_MAX} more"] if len(differs) > NAMED_MAX else [])])
        finding = self._recognizable(replace(finding, where=where))
        again = self._comes_back(finding)
        apart = not finding.liars and len(members) > 2  # independent errors of several at the same time: hardly
        entries = next(iter(details.values())).entries
        if not (again or apart or is_structured(differs, entries)):
            return finding
        odd = [liar for liar in finding.liars if liar in details] or outliers(differs, members)
        rest = [details[member].came for member in members if member not in odd]
        since = max(0, finding.step - self.rules.every, *(details[member].came for member in odd or members))
        since = max(since, min(rest, default=0))
        what = named(differs, members) or "the order of their state"
        sentence = f"the script's workers differ in {what} at step {finding.step}, and agreed at step {since}"
        sentence += "; the run has gone back because of it, and it came back" if again else ""
        hint = advice(differs, details, since)
        return replace(finding, liars=(), script=sentence, hint=hint)

    def _recognizable(self, finding: Finding) -> Finding:
        """With a clue, for the record of rewinds."""
        said = dict(finding.digests)
        wrong = said[finding.liars[0]] if finding.liars else ""
        where = finding.where or f"{finding.what} {finding.number}"
        return replace(finding, clue=Clue(step=finding.step, where=where, digest=wrong).bounded())

    def _comes_back(self, finding: Finding) -> bool:
        return finding.clue is not None and comes_back(finding.clue, finding.liars, self.earlier)

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
            judged = _with_liars(finding, believed)
            return self._again(self._recognizable(replace(judged, good=self._good(step, judged.liars))))
        number = self.sampled(step).get(shard, shard)
        third = auditor_of(number, self._shards, "", members, tuple(digests))
        if not third and len(set(digests.values())) > 2:  # independent errors of several: hardly
            sentence = f"{listed(list(digests))} each got other gradients for shard {shard} of step {step}"
            return replace(finding, script=sentence, hint=SAME_BITS)
        return replace(finding, third=third)

    def _again(self, finding: Finding) -> Finding:
        if not self._comes_back(finding):
            return finding
        sentence = f"{finding.reason}, as when the run went back before: it is the script's doing"
        return replace(finding, liars=(), script=sentence, hint=SAME_BITS)

    def _good(self, step: int, liars: Sequence[str]) -> int | None:
        """Since when a worker whose gradient is wrong may have been wrong unseen. None: every shard was compared.

        Its state may have been wrong since it was last compared; what it computed, since others last found it right.
        """
        if self.rules.exactly >= 1:
            return None
        compared = [max(0, step - self.rules.every)] if self.rules.every else []
        vouched = [self._vouched[liar] for liar in liars] if self.rules.exactly else []
        return min([*compared, *vouched], default=None)


def _distrusted(step: int, members: Sequence[str], said: Mapping[str, Said]) -> Finding | None:
    """More than half of all distrust one of them. A few, who may be hostile themselves, decide nothing."""
    named = {member: one for member in members if (one := said[member].distrusts) is not None}
    if not named:
        return None
    counted = Counter(one[0] for one in named.values() if one[0] in members)
    for worker, count in counted.most_common(1):
        if 2 * count > len(members):
            who = tuple((member, one[0]) for member, one in named.items() if one[0] == worker)
            why = next(one[1] for one in named.values() if one[0] == worker)
            return Finding(step, "trust", 0, who, liars=(worker,), where=why)
    return None


def _with_liars(finding: Finding, believed: str) -> Finding:
    if not believed:
        return finding
    return replace(finding, liars=tuple(member for member, digest in finding.digests if digest != believed))
