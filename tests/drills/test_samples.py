"""Which samples were used how often: what is missing, twice or another is found, wherever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.shards import ShardPlan
from holdfast.data.streams.stream import order_alone
from holdfast.drills.checking import Outcome, check
from holdfast.drills.samples import uneven
from holdfast.drills.trace import Trace, TraceEntry, TraceReader, trace_path

SHARDS = 2
CUT = {"length": 14, "size": 4, "shards": SHARDS, "times": 1}
STREAM = {"sizes": [14], "block": 2, "window": 4, "shuffle": True}
PLANS: dict[str, dict[str, Any]] = {
    "filled": {"length": 13, "batch_size": 4, "drop_last": False},  # 3 samples of 16 places come again
    "dropped": {"length": 14, "batch_size": 4, "drop_last": True},
    "cut": {"length": 14, "batch_size": 4, "drop_last": False, "stream": {**STREAM, "cut": CUT}},
    "twice": {"length": 14, "batch_size": 4, "drop_last": False, "stream": {**STREAM, "cut": {**CUT, "times": 2}}},
}


def planned(name: str) -> tuple[dict[str, Any], Callable[[int, int], list[int]], int]:
    """The plan's words, its samples, and the steps of its epoch."""
    words = {**PLANS[name], "shards": SHARDS, "seed": 3, "shuffle": True, "order_seed": None}
    fields = {key: value for key, value in words.items() if key != "stream"}
    if "stream" in words:
        fields["arrangement"] = order_alone(words["stream"], 3)
    plan = ShardPlan(**fields).validate()
    return words, plan.indices, plan.steps_per_epoch


@pytest.mark.parametrize("name", PLANS)
def test_what_a_plan_gives_is_even(name: str) -> None:
    words, indices, per_epoch = planned(name)
    for end in range(1, 3 * per_epoch + 1):
        assert uneven(range(end), indices, words) == ""


@pytest.mark.parametrize("name", PLANS)
def test_one_other_sample_anywhere_is_found(name: str) -> None:
    """Where samples of a filled batch come twice, one more that does hides one that never comes."""
    words, indices, per_epoch = planned(name)
    for step in range(per_epoch):
        for shard in range(SHARDS):
            for place, right in enumerate(indices(step, shard)):
                for wrong in {0, 5, 12} - {right}:  # among them one that has its place elsewhere

                    def changed(
                        at: int,
                        of: int,
                        here: tuple[int, int] = (step, shard),
                        place: int = place,
                        wrong: int = wrong,
                    ) -> list[int]:
                        found = list(indices(at, of))
                        if (at, of) == here:
                            found[place] = wrong
                        return found

                    dropped = name == "dropped" and wrong not in _used(indices, per_epoch)
                    assert uneven(range(per_epoch), changed, words) or dropped, (step, shard, place, wrong)


def _used(indices: Callable[[int, int], list[int]], per_epoch: int) -> set[int]:
    return {number for step in range(per_epoch) for shard in range(SHARDS) for number in indices(step, shard)}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_that_is_not_there_is_found(name: str) -> None:
    words, indices, per_epoch = planned(name)
    for missing in range(per_epoch):
        assert uneven(set(range(2 * per_epoch)) - {missing}, indices, words), missing


def outcome(samples: Callable[[str, int], tuple[int, ...]], *, length: int = 8) -> Outcome:
    """Of two workers and a sampler, two steps an epoch."""
    counted = (("w0.1", (0,)), ("w1.1", (1,)))
    entries = [
        TraceEntry(worker, step, 100.0 + step, 1, "0" * 16, counted, "", step // 2, samples(worker, step))
        for worker in ("w0.1", "w1.1")
        for step in range(6)
    ]
    plan = {"length": length, "batch_size": 4, "shards": 2, "sampler": True}
    return Outcome(Trace(("weight",), plan, entries), [], 0, {"w0.1": "d", "w1.1": "d"})


def usual(_worker: str, step: int) -> tuple[int, ...]:
    return tuple((7 * place + step // 2) % 8 for place in range(4 * (step % 2), 4 * (step % 2) + 4))


def verdict(faulty: Outcome, quiet: Outcome) -> tuple[bool | None, str]:
    (found,) = [one for one in check(quiet, faulty, [], None) if one.promise == "every sample once"]
    return found.held, found.text


def test_what_a_sampler_gives_is_looked_at_sample_by_sample() -> None:
    quiet = outcome(usual)
    held, text = verdict(outcome(usual), quiet)
    assert held and "no sample is twice in an epoch, and none is left out" in text
    held, text = verdict(outcome(usual, length=9), outcome(usual, length=9))
    assert held and "no sample is twice in an epoch, and 1 are left out" in text
    weighted = outcome(lambda worker, step: (step, step, 1, 2))
    held, text = verdict(weighted, weighted)
    assert held and "some several times in an epoch as the sampler gives them" in text


def test_other_samples_than_in_the_quiet_run_or_on_another_worker_are_found() -> None:
    quiet = outcome(usual)
    held, text = verdict(outcome(lambda worker, step: (0, 1, 2, 3) if step == 3 else usual(worker, step)), quiet)
    assert held is False and "step 3 has other samples than in the quiet run" in text
    joined = outcome(lambda worker, step: (0, 1, 2, 3) if (worker, step) == ("w1.1", 4) else usual(worker, step))
    held, text = verdict(joined, quiet)
    assert held is False and "took other samples for step 4" in text


def test_samples_are_read_from_a_trace(tmp_path: Path) -> None:
    record = {"s": 3, "t": 1.0, "v": 1, "d": "0" * 16, "c": [["w0.1", [0, 1]]], "e": 1, "i": [5, 2]}
    trace_path(tmp_path, "w0.1").write_text(json.dumps(record) + "\n")
    (entry,) = TraceReader(tmp_path).look()
    assert (entry.epoch, entry.samples) == (1, (5, 2)) and replace(entry, samples=()) != entry
