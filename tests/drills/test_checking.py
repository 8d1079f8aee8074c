"""The checker, against runs that are made up: each promise holds for a good one, and is broken by what breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.drills.checking import Outcome, PromiseVerdict, check, first_difference
from holdfast.drills.conduct import _indices
from holdfast.drills.figures import measure, recovered_at
from holdfast.drills.schedule import DoneFault, Planned
from holdfast.drills.trace import DIGITS, Trace, TraceEntry, TraceReader, trace_path

NAMES = ("first.weight", "first.bias", "last.weight")
PLAN = {"length": 16, "batch_size": 8, "shards": 4, "seed": 0, "drop_last": True, "shuffle": False}
STEPS = 6
STEP_S = 0.5


def indices(step: int, shard: int) -> list[int]:
    start = step % 2 * 8 + shard * 2
    return [start, start + 1]


def bits(step: int, *, wrong: str = "") -> str:
    return "".join(f"{hash((name, step, name == wrong)) % 16**DIGITS:0{DIGITS}x}" for name in NAMES)


def entry(worker: str, step: int, *, at: float | None = None, view: int = 1, wrong: str = "") -> TraceEntry:
    counted = (("w0.1", (0, 1)), ("w1.1", (2, 3)))
    return TraceEntry(worker, step, 100 + step * STEP_S if at is None else at, view, bits(step, wrong=wrong), counted)


def outcome(entries: list[TraceEntry] | None = None, **changes: Any) -> Outcome:
    made = entries if entries is not None else [entry(w, step) for w in ("w0.1", "w1.1") for step in range(STEPS)]
    events = [{"t": 99.0, "who": "w0.1", "kind": "view", "view": 1, "members": ["w0.1", "w1.1"]}]
    whole = Outcome(Trace(NAMES, PLAN, made), events, 0, {"w0.1": "d1", "w1.1": "d1"}, damaged="")
    return replace(whole, **changes)


def kill(at: float = 101.2) -> DoneFault:
    return DoneFault(Planned(1.2, "kill", 1), at, "kill -9 w1.1", 2, 1, ("w1.1",))


def verdicts(
    faulty: Outcome, done: list[DoneFault] | None = None, quiet: Outcome | None = None
) -> dict[str, PromiseVerdict]:
    found = check(quiet or outcome(), faulty, done if done is not None else [kill()], indices)
    return {verdict.promise: verdict for verdict in found}


def broken(faulty: Outcome, done: list[DoneFault] | None = None) -> dict[str, str]:
    return {name: verdict.text for name, verdict in verdicts(faulty, done).items() if verdict.held is False}


def changed(change: Callable[[TraceEntry], TraceEntry | None]) -> Outcome:
    made = [change(one) for one in outcome().trace.entries]
    return outcome([one for one in made if one is not None])


def test_a_good_run_holds_every_promise() -> None:
    found = verdicts(outcome())
    assert [name for name, verdict in found.items() if verdict.held is not True] == []
    assert {"exact", "every step once", "every sample once", "no split brain", "whole checkpoints"} <= found.keys()


def test_the_first_step_and_tensor_that_differ_are_named() -> None:
    faulty = changed(lambda one: replace(one, digests=bits(one.step, wrong="last.weight")) if one.step >= 3 else one)
    faulty.digests = {"w0.1": "d2", "w1.1": "d2"}
    text = broken(faulty)["exact"]
    assert "first different after step 3, in last.weight" in text and "before the first fault" not in text
    assert "before the first fault" in broken(faulty, [kill(at=150.0)])["exact"]
    found = first_difference(outcome(), faulty)
    assert found is not None and (found.step, found.tensors) == (3, ("last.weight",))


def test_weights_that_differ_only_at_the_end() -> None:
    assert "after the last step" in broken(outcome(digests={"w0.1": "d2"}))["exact"]
    assert "different weights" in broken(outcome(digests={"w0.1": "d1", "w1.1": "d2"}))["exact"]


def test_a_run_that_did_not_finish() -> None:
    found = broken(outcome(exit_code=137, digests={}, last_words="one\nhe died"))
    assert found["training went on"] == "the run ended with exit code 137: he died" and "exact" in found


def test_a_step_twice_or_never() -> None:
    twice = outcome([*outcome().trace.entries, entry("w1.1", STEPS - 1, at=110.0)])
    assert "w1.1 applied step 5 after step 5" in broken(twice)["every step once"]
    never = changed(lambda one: None if one.step == 3 else one)
    assert "w0.1 applied step 4 after step 2" in broken(never)["every step once"]
    short = changed(lambda one: one if one.step < STEPS - 1 else None)
    assert "the first in one only is 5" in broken(short)["every step once"]


def test_who_was_left_behind_and_came_back_has_left_out_no_step() -> None:
    others = [entry("w0.1", step, view=1 if step < 2 else 3) for step in range(STEPS)]
    late = [entry("w1.1", step, view=1 if step < 2 else 3) for step in (0, 1, 4, 5)]
    went_on = {"t": 101.0, "who": "w0.1", "kind": "view", "view": 2, "members": ["w0.1"]}
    back = {**went_on, "view": 3, "members": ["w0.1", "w1.1"]}
    events = [*outcome().events, went_on, back]
    assert "every step once" not in broken(outcome([*others, *late], events=events))
    stayed = [*outcome().events, {**went_on, "members": ["w0.1", "w1.1"]}, back]
    assert "w1.1 applied step 4 after step 1" in broken(outcome([*others, *late], events=stayed))["every step once"]


def test_workers_that_disagree() -> None:
    apart = changed(
        lambda one: replace(one, digests=bits(one.step, wrong="first.bias")) if one.worker == "w1.1" else one
    )
    assert "differ after step 0, in first.bias" in broken(apart)["every step once"]


@pytest.mark.parametrize(
    ("counted", "says"),
    [
        ((("w0.1", (0, 1)), ("w1.1", (1, 2, 3))), "shards [0, 1, 1, 2, 3] were added up"),
        ((("w0.1", (0, 1)), ("w1.1", (3,))), "shards [0, 1, 3] were added up"),
        ((), "nobody says"),
    ],
    ids=["twice", "lost", "unknown"],
)
def test_shards_that_were_not_added_up_once(counted: Any, says: str) -> None:
    found = broken(changed(lambda one: replace(one, counted=counted) if one.step == 2 else one))
    assert says in found["every sample once"] and "step 2" in found["every sample once"]


def test_members_that_added_up_different_shards() -> None:
    other = (("w0.1", (0, 1, 2)), ("w1.1", (3,)))
    apart = changed(lambda one: replace(one, counted=other) if (one.worker, one.step) == ("w1.1", 4) else one)
    assert "different shards" in broken(apart)["every sample once"]


def test_who_is_left_behind_may_finish_the_step_with_the_members_of_its_old_view() -> None:
    """It had heard from all, and they not from it: the same bits on both sides, each shard once on either."""
    others = (("w0.1", (0, 1, 2, 3)),)
    went_on = changed(
        lambda one: replace(one, view=2, counted=others) if one.step == 4 and one.worker == "w0.1" else one
    )
    assert "every sample once" not in broken(went_on)
    lost = changed(
        lambda one: replace(one, view=2, counted=(("w0.1", (0, 1)),)) if one.step == 4 and one.worker == "w0.1" else one
    )
    assert "shards [0, 1] were added up" in broken(lost)["every sample once"]


def test_samples_that_come_twice_in_an_epoch() -> None:
    found = check(outcome(), outcome(), [kill()], lambda step, shard: [0, 1])
    assert any("sample 0 was used" in verdict.text for verdict in found if verdict.held is False)
    padded = outcome()
    padded.trace.plan = {**PLAN, "length": 15, "drop_last": False}
    filled = check(outcome(), padded, [kill()], lambda step, shard: [index % 15 for index in indices(step, shard)])
    assert all(verdict.held for verdict in filled)


def test_a_sampler_may_use_a_sample_as_often_as_it_likes() -> None:
    sampled = outcome()
    sampled.trace.plan = {**PLAN, "sampler": True}
    assert all(verdict.held for verdict in check(outcome(), sampled, [kill()], None))
    assert "the sampler's word" in verdicts(sampled)["every sample once"].text
    assert _indices({**PLAN, "sampler": True}) is None and _indices({}) is None


def test_an_iterable_gives_each_step_the_samples_of_the_quiet_run() -> None:
    quiet = changed(lambda one: replace(one, ahead=f"samples of {one.step + 1}"))
    found = verdicts(quiet, quiet=quiet)["every sample once"]
    assert found.held and "with the samples that it has in the quiet run" in found.text
    other = changed(lambda one: replace(one, ahead=f"samples of {one.step + 1 + (one.step == 3)}"))
    found = verdicts(other, quiet=quiet)["every sample once"]
    assert found.held is False and "step 4 has other samples than in the quiet run" in found.text


def test_going_back_without_a_reason_is_a_loss() -> None:
    resumed = {"t": 101.0, "who": "w0.1", "kind": "resumed", "step": 2}
    assert "of step 2" in broken(outcome(events=[*outcome().events, resumed]))["nothing lost"]


def test_two_views_of_one_number() -> None:
    other = {"t": 99.5, "who": "w1.1", "kind": "view", "view": 1, "members": ["w1.1"]}
    assert "number 1" in broken(outcome(events=[*outcome().events, other]))["no split brain"]


def test_the_ledger_was_away_and_steps_went_on() -> None:
    planned = Planned(0.1, "ledger-down", duration_s=2.0)
    away = DoneFault(planned, 100.1, "kill -9 the agent", 0, 1, ended_at=102.3)
    assert verdicts(outcome(), [away])["static stability"].held is True
    stuck = changed(lambda one: replace(one, at=one.at + 3.0) if one.step > 1 else one)
    assert "static stability" in broken(stuck, [away])


def test_wrong_bits_must_be_named_and_only_theirs() -> None:
    flip = DoneFault(Planned(1.0, "corrupt", 1, 0.0, "gradient"), 101.0, "flip", 2, 1, ("w1.1",), note="step 3, bit 4")
    named = {"t": 101.6, "who": "w0.1", "kind": "corruption", "step": 3, "liars": ["w1.1"]}
    honest = [one for one in outcome().trace.entries if one.worker == "w0.1" or one.step < 3]
    liar = entry("w1.1", 3, at=101.55, wrong="last.weight")
    good = outcome([*honest, liar], events=[*outcome().events, named], digests={"w0.1": "d1"})
    assert not [one for one in verdicts(good, [flip]).values() if not one.held], "a liar's own trace does not count"
    assert "nobody was named" in broken(outcome(), [flip])["wrong bits named"]
    framed = {**named, "liars": ["w0.1"]}
    assert "w0.1 was named" in broken(outcome(events=[*outcome().events, framed]), [flip])["wrong bits named"]
    assert verdicts(outcome(), [replace(flip, note="")])["wrong bits named"].held is None


def test_validation_and_the_best_model() -> None:
    def validated(value: float, *, best: str = "step 4, weights a") -> Outcome:
        told = {"t": 100.0, "who": "w0.1", "kind": "recorded", "step": 4, "metrics": {"val_loss": value}, "best": True}
        made = outcome()
        return replace(made, events=[*made.events, told], best=best)

    quiet = validated(0.1 + 0.2)
    found = verdicts(validated(0.1 + 0.2), quiet=quiet)
    assert found["same validation"].held and found["same best model"].held
    found = verdicts(validated(0.3, best="step 5, weights b"), quiet=quiet)
    assert not found["same validation"].held and "0.3, and 0.30000000000000004" in found["same validation"].text
    assert not found["same best model"].held and "step 5" in found["same best model"].text
    assert not verdicts(replace(outcome(), best="no step"), quiet=quiet)["same validation"].held
    assert "same validation" not in verdicts(outcome())


def test_a_damaged_checkpoint() -> None:
    assert broken(outcome(damaged="part 3 is torn")) == {"whole checkpoints": "part 3 is torn"}


def test_an_interrupted_drill_is_not_judged() -> None:
    (verdict,) = check(outcome(), outcome(exit_code=None), [kill()], indices)
    assert verdict.held is None


def test_recovery_is_the_first_step_without_the_lost_one() -> None:
    views = {1: ("w0.1", "w1.1"), 2: ("w0.1", "w2.1")}
    entries = [entry("w0.1", 2, at=101.3), entry("w1.1", 3, at=101.4, view=2), entry("w0.1", 3, at=101.5, view=2)]
    assert recovered_at(kill(), entries, views) == 101.5
    assert recovered_at(kill(), entries[:2], views) is None
    storage = DoneFault(Planned(1.2, "storage-down", duration_s=2.0), 101.2, "away", 2, 1)
    assert recovered_at(storage, entries, views) == 101.3
    cut = replace(kill(), planned=Planned(1.2, "partition", 1, 0.1), ended_at=101.25)
    assert recovered_at(cut, entries, views) == 101.3, "it was over before anybody noticed"


def test_goodput_is_the_quiet_time_for_the_same_steps() -> None:
    slow = changed(lambda one: replace(one, at=100 + one.step * STEP_S * 2))
    figures = measure(outcome(), slow, [kill()], began=100.0, ended=103.0)
    assert figures.goodput == pytest.approx(0.5) and figures.goodput_of_all == pytest.approx(0.5)
    assert measure(outcome(), outcome(), [], began=0.0, ended=1.0).goodput is None
    late = changed(lambda one: replace(one, at=one.at + 5.0) if one.step > 4 else one)
    assert measure(outcome(), late, [kill()], began=100.0, ended=103.0).goodput == pytest.approx(1.0)


def test_a_trace_is_read_as_it_grows(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "w0.1")
    lines = [{"names": list(NAMES), "plan": PLAN}, {"s": 0, "t": 1.0, "v": 1, "d": bits(0), "c": [["w0.1", [0, 1]]]}]
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    reader = TraceReader(tmp_path)
    path.write_text(whole[:-5])
    assert reader.look() == [] and reader.trace.names == NAMES
    path.write_text(whole + "not json\n[]\n" + '{"s": 1}\n')
    (found,) = reader.look()
    assert (found.worker, found.step, found.counted) == ("w0.1", 0, (("w0.1", (0, 1)),))
    assert reader.begun == {"w0.1"} and reader.step == 0 and reader.look() == []


# ---- what is suspected


def joined_at(step: int, worker: str = "w1.2") -> dict[str, Any]:
    return {"t": 100 + step * STEP_S, "who": worker, "kind": "joined", "view": 3, "step": step}


def test_a_joiner_that_differs_first_has_been_given_too_little() -> None:
    """It differs in its first step; the others only when they have added up what it computed."""
    entries = [entry("w0.1", step, wrong="last.weight" if step > 4 else "") for step in range(STEPS)]
    entries += [entry("w1.2", step, wrong="last.weight") for step in (4, 5)]
    faulty = outcome(entries)
    faulty.events.append(joined_at(4))
    difference = first_difference(outcome(), faulty)
    assert difference is not None and (difference.step, difference.workers) == (4, ("w1.2",))
    text = check(outcome(), faulty, [kill()], indices, ["train.py:31 (scale *= 0.9)"])[1].text
    assert "in the first step after w1.2 joined at step 4, so state that changes during training did not travel" in text
    assert text.endswith("look at train.py:31 (scale *= 0.9)")


def test_a_run_that_differs_after_it_resumed() -> None:
    entries = [entry("w0.1", step, wrong="first.bias" if step > 2 else "") for step in range(STEPS)]
    faulty = outcome(entries)
    faulty.events.append({"t": 101.0, "who": "w0.1", "kind": "resumed", "step": 2})
    text = verdicts(faulty)["exact"].text
    assert "1 step after the run resumed from a checkpoint at step 2" in text and "extras" in text


def test_a_difference_long_after_anybody_came_is_not_blamed_on_that() -> None:
    entries = [
        entry(worker, step, wrong="first.bias" if step > 4 else "")
        for worker in ("w0.1", "w1.1")
        for step in range(STEPS)
    ]
    faulty = outcome(entries)
    faulty.events.append(joined_at(0, "w2.1"))
    assert "did not travel" not in verdicts(faulty)["exact"].text


def test_a_run_that_ended_with_a_mistake_in_the_script_says_which() -> None:
    mistake = {"t": 101.0, "who": "w0.1", "kind": "script_mistake", "reason": "they differ in x", "hint": "look for y"}
    faulty = outcome(exit_code=2, digests={}, last_words="  hint: look for y")
    faulty.events.append(mistake)
    assert verdicts(faulty)["training went on"].text == "the script ended it: they differ in x; look for y"
