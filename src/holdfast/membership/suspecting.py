"""Whose doing is it that members differ: the script's, or the hardware's? Pure.

A flipped bit changes one number in one tensor, and its optimizer's entries with it: every member applies the same mean,
so the rest of the state stays the same. A script that does on one worker what it does not do on others changes values
that are no tensors, counts, all of an object at once; and it does so again, with the same bits, when the run has gone
back and comes to the same step. So the script is suspected first, and the hardware of what is left.

What members differ in, they tell each other entry by entry (`Details`) once digests have shown that they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.rewinds import Clue, Rewind
from holdfast.core.words import host_of, slot_of

VALUE, NUMBER, TENSOR = "value", "number", "tensor"  # no tensor; a tensor of one number; any other
PARAMETER, BUFFER, OPTIMIZER, EXTRA = "parameter", "buffer", "optimizer", "extra "  # an extra's name follows
NAMED_MAX = 3
MANY = 3  # tensors that no single flipped bit changes together

EVERYWHERE = (
    "what changes the training must happen on every worker alike: look for lines under `if run.leader:` or that depend "
    "on run.id, for the clock, and for a random generator of the script's own"
)
IN_EXTRAS = (
    "change what is in extras on every worker alike, from step.metrics and not from this worker's own shards; what "
    "only one worker keeps, such as under `if run.leader:`, does not belong into extras"
)
NOT_TRAVELLED = (
    "what changes during training and is neither in the model nor in the optimizer must be in join's extras, or who "
    "joins begins with another; look for counters, averages and generators that the script's loop changes"
)
CALL_IT_EVERYWHERE = (
    "call it on every worker, after `for batch in step:` has ended: .grad is the same everywhere; only printing and "
    "saving belong under `if run.leader:`"
)
BACKWARD_INSIDE = (
    "call backward inside `for batch in step:`, shard by shard; afterwards only what is the same on every worker, such "
    "as a penalty on weights, may be added to .grad"
)
SAME_BITS = (
    "a shard must give the same bits wherever it is computed: look for a random generator of the script's own, the "
    "clock, and state that a forward pass changes and that is no buffer"
)

SAME_BITS_AS_LEADER = f"compute nothing else under `if run.leader:` than on other workers; {SAME_BITS}"


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One thing in the state. `part`: what it belongs to; `value`: short text, or a digest."""

    name: str
    part: str
    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Details:
    """A member's state, entry by entry. `came`: the step with which it was given the state, or began."""

    entries: tuple[StateEntry, ...]
    came: int = 0
    whole: bool = True  # nothing was left out for want of room


@dataclass(frozen=True, slots=True)
class Differing:
    """An entry that members do not agree on. `values`: of those that have it."""

    entry: StateEntry
    values: tuple[tuple[str, str], ...]
    missing: bool = False  # somebody does not have it

    def words(self, members: Sequence[str]) -> str:
        """`the extra 'best', key loss (0.5 on w0.1, 0.7 on w1.1 and w2.1)`"""
        said = dict(self.values)
        without = [member for member in members if member not in said]
        if self.missing:
            return f"{self.entry.name} ({listed(without)} {'have' if len(without) > 1 else 'has'} none)"
        groups = {value: listed([one for one in members if said.get(one) == value]) for value in said.values()}
        if self.entry.kind == TENSOR and len(groups) == 2:
            odd, usual = sorted(groups.values(), key=len)
            return f"{self.entry.name} ({odd} {'have' if ' and ' in odd else 'has'} other bits than {usual})"
        if self.entry.kind == TENSOR:
            return f"{self.entry.name} (other bits on {', on '.join(groups.values())})"
        return f"{self.entry.name} ({', '.join(f'{value} on {who}' for value, who in groups.items())})"


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def differing(details: Mapping[str, Details]) -> list[Differing]:
    """What members do not agree on: what is no tensor first, then parameters, buffers, extras, the optimizer."""
    found: dict[str, dict[str, StateEntry]] = {}
    for member, said in details.items():
        for entry in said.entries:
            found.setdefault(entry.name, {})[member] = entry
    whole = all(said.whole for said in details.values())
    differs = []
    for by_member in found.values():
        everywhere = len(by_member) == len(details)
        if len({entry.value for entry in by_member.values()}) > 1 or (whole and not everywhere):
            values = tuple((member, entry.value) for member, entry in by_member.items())
            differs.append(Differing(next(iter(by_member.values())), values, whole and not everywhere))
    return sorted(differs, key=_rank)


def _rank(one: Differing) -> tuple[bool, int]:
    order = {PARAMETER: 0, BUFFER: 1, OPTIMIZER: 3}
    return one.entry.kind != VALUE, order.get(one.entry.part, 2)


def named(differs: Sequence[Differing], members: Sequence[str]) -> str:
    """The first of them, in words, and how many more there are."""
    words = [one.words(members) for one in differs[:NAMED_MAX]]
    more = len(differs) - NAMED_MAX
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def outliers(differs: Iterable[Differing], members: Sequence[str]) -> list[str]:
    """Who differs from most, in anything."""
    found = set()
    for one in differs:
        said = dict(one.values)
        usual = Counter(said.get(member, "") for member in members).most_common(1)[0][0]
        found |= {member for member in members if said.get(member, "") != usual}
    return [member for member in members if member in found]


def is_structured(differs: Sequence[Differing], entries: Iterable[StateEntry]) -> bool:
    """Whether these differ as no flipped bit makes them differ: see the module."""
    if any(one.entry.kind == VALUE or _is_of_another_shape(one) for one in differs):
        return True
    if sum(one.entry.kind == NUMBER for one in differs) > 1:
        return True
    sizes = Counter(entry.part for entry in entries if entry.kind != VALUE)
    counts = Counter(one.entry.part for one in differs)
    if counts[PARAMETER] >= MANY and 2 * counts[PARAMETER] >= sizes[PARAMETER]:
        return True
    elsewhere = counts[PARAMETER] + counts[BUFFER] + counts[OPTIMIZER]
    return any(part.startswith(EXTRA) and 2 <= count == sizes[part] and not elsewhere for part, count in counts.items())


def _is_of_another_shape(one: Differing) -> bool:
    """A tensor's value is its shape and its digest."""
    return one.missing or (one.entry.kind == TENSOR and len({value.rpartition(" ")[0] for _, value in one.values}) > 1)


def comes_back(clue: Clue, liars: Sequence[str], earlier: Iterable[Rewind]) -> bool:
    """Whether the run went back because of this before: the same bits, or the same place and another worker."""
    for record in earlier:
        before = record.clue
        if before is None:
            continue
        same_step = before.step == clue.step
        same_place = before.where == clue.where
        if same_step and (same_place or before.digest == clue.digest):
            return True
        others = not {_home(worker) for worker in record.evict} & {_home(worker) for worker in liars}
        if (same_step or same_place) and others and liars:
            return True
    return False


def _home(worker: str) -> tuple[int, str]:
    return slot_of(worker), host_of(worker)


def advice(differs: Sequence[Differing], details: Mapping[str, Details], since: int) -> str:
    """What to look for in the script. `since`: the step at which they agreed, or at which one was given the state."""
    if differs and all(one.entry.part.startswith(EXTRA) for one in differs):
        return IN_EXTRAS
    came = {said.came for said in details.values()}
    joined = since in came and since > min(came)
    return f"{NOT_TRAVELLED}; {EVERYWHERE}" if joined else EVERYWHERE


def calls_sentence(step: int, calls: Mapping[str, tuple[int, ...]]) -> str:
    """For counts of optimizer.step() that differ."""
    did = [member for member, counts in calls.items() if any(counts)]
    if len(set(calls.values())) == 2 and len(did) < len(calls):
        return f"optimizer.step() was called on {listed(did)} only at step {step}"
    by_count: dict[int, list[str]] = {}
    for member, counts in calls.items():
        by_count.setdefault(sum(counts), []).append(member)
    if len(by_count) == 1:
        return f"workers called step() of different optimizers at step {step}"
    said = [f"{_times(count)} on {listed(members)}" for count, members in sorted(by_count.items())]
    return f"optimizer.step() was called {', '.join(said)} at step {step}"


def _times(count: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")
