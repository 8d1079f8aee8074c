"""How often each sample was used: by a plan that can be computed again, or as workers wrote down what a sampler gave.

Pure. What is looked at is every place of every epoch: a sample that is twice hides one that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from holdfast.data.epoch_cut import EpochCut
from holdfast.drills.trace import TraceEntry


def uneven(steps: Collection[int], indices: Callable[[int, int], list[int]], plan: Mapping[str, Any]) -> str:
    """What is wrong with the samples of these steps; empty: nothing. The last batch of an epoch may be filled up."""
    per_epoch, once, times = _shape(plan)
    end = max(steps, default=-1) + 1
    epochs: dict[int, list[int]] = {}
    before: list[int] = []
    for step in range(end):
        epoch, place = divmod(step, per_epoch)
        numbers = [one for shard in range(plan["shards"]) for one in indices(step, shard)] if step in steps else []
        if place % times == 0:
            epochs.setdefault(epoch, []).extend(numbers)
        elif numbers != before:
            return f"step {step} has other samples than step {step - 1}, and the same batch"
        before = numbers
    for epoch, used in epochs.items():
        is_over = (epoch + 1) * per_epoch <= end
        wrong = _wrong_in_epoch(used, once, plan["length"], is_over=is_over)
        if wrong:
            return f"{wrong} in epoch {epoch}"
    return ""


def _shape(plan: Mapping[str, Any]) -> tuple[int, int, int]:
    """Steps of an epoch, its places that have a sample of their own, and steps with the same batch."""
    if cut := (plan.get("stream") or {}).get("cut"):
        found = EpochCut.from_words(cut)
        return found.steps, found.length, found.times
    length, size = plan["length"], plan["batch_size"]
    steps = length // size if plan["drop_last"] else -(-length // size)
    return steps, min(length, steps * size), 1


def _wrong_in_epoch(used: list[int], once: int, length: int, *, is_over: bool) -> str:
    own, filled = used[:once], used[once:]
    often = Counter(own)
    sample, times = max(often.items(), key=lambda item: item[1], default=(0, 0))
    if times > 1:
        return f"sample {sample} was used {times} times"
    if is_over and len(own) < once:
        return f"only {len(own)} of {once} samples were used"
    if is_over and once == length and (missing := set(range(length)) - often.keys()):
        return f"sample {min(missing)} was not used"
    if filled != [own[place % len(own)] for place in range(len(filled))]:
        return "the last batch was not filled up from the beginning"
    return ""


def of_sampler(
    quiet: Mapping[int, TraceEntry], faulty: Mapping[int, TraceEntry], entries: Iterable[TraceEntry], length: int
) -> tuple[str, str]:
    """What is wrong, or else what is to be said, where a sampler gives an epoch's samples, and all wrote them down.

    `entries`: of everybody whose word counts.
    """
    for entry in entries:
        mine = faulty[entry.step]
        if (entry.epoch, entry.samples) != (mine.epoch, mine.samples):
            return f"{entry.worker} and {mine.worker} took other samples for step {entry.step}", ""
    epochs: dict[int, list[tuple[int, ...]]] = {}
    for step, entry in sorted(faulty.items()):
        if step in quiet and quiet[step].samples != entry.samples:
            return f"step {step} has other samples than in the quiet run", ""
        epochs.setdefault(entry.epoch, []).append(entry.samples)
    text = "with the samples that it has in the quiet run"
    whole = max(map(len, epochs.values()))
    counts = {epoch: Counter(one for step in found for one in step) for epoch, found in epochs.items()}
    if any(times > 1 for often in counts.values() for times in often.values()):
        return "", f"{text}, some several times in an epoch as the sampler gives them"
    left_out = max(length - len(often) for epoch, often in counts.items() if len(epochs[epoch]) == whole)
    rest = "none is left out" if not left_out else f"{left_out} are left out"
    return "", f"{text}: no sample is twice in an epoch, and {rest}"
