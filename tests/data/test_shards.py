"""The plan of shards: every sample once per epoch, a pure function of its arguments, one sentence for what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError
from holdfast.data.shards import ShardPlan


@st.composite
def plans(draw: st.DrawFn) -> ShardPlan:
    shards = draw(st.integers(1, 6))
    batch = shards * draw(st.integers(1, 5))
    drop_last = draw(st.booleans())
    length = draw(st.integers(batch if drop_last else 1, 120))
    return ShardPlan(length, batch, shards, draw(st.integers(-5, 2**70)), drop_last, draw(st.booleans())).validate()


def epoch(plan: ShardPlan, number: int) -> list[int]:
    steps = range(number * plan.steps_per_epoch, (number + 1) * plan.steps_per_epoch)
    return [i for step in steps for shard in range(plan.shards) for i in plan.indices(step, shard)]


@given(plans(), st.integers(0, 5))
def test_every_sample_is_used_once_per_epoch(plan: ShardPlan, number: int) -> None:
    used = Counter(epoch(plan, number))
    total = plan.steps_per_epoch * plan.batch_size
    assert sum(used.values()) == total
    assert set(used) <= set(range(plan.length))
    if plan.drop_last:
        assert set(used.values()) == {1} and plan.length - total < plan.batch_size
    else:
        assert len(used) == plan.length and max(used.values()) - min(used.values()) <= 1


@given(plans(), st.integers(0, 50), st.data())
def test_indices_do_not_depend_on_what_was_asked_before(plan: ShardPlan, step: int, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, plan.shards - 1))
    fresh = ShardPlan(plan.length, plan.batch_size, plan.shards, plan.seed, plan.drop_last, plan.shuffle)
    for other in data.draw(st.lists(st.integers(0, 50), max_size=5)):
        plan.indices(other, 0)
    assert plan.indices(step, shard) == fresh.indices(step, shard)
    assert len(plan.indices(step, shard)) == plan.samples_per_shard
    assert len(plan._cache) <= 2


def test_padding_wraps_around_to_the_beginning_of_the_same_permutation() -> None:
    plan = ShardPlan(10, 4, 2, seed=3, drop_last=False).validate()
    used = epoch(plan, 0)
    assert used[10:] == used[:2]


def test_epochs_and_seeds_have_permutations_of_their_own() -> None:
    plan, other = ShardPlan(1000, 10, 2, seed=1), ShardPlan(1000, 10, 2, seed=2)
    assert epoch(plan, 0) != epoch(plan, 1) != epoch(other, 1)
    assert plan.epoch_of(99) == 0 and plan.epoch_of(100) == 1
    assert epoch(ShardPlan(8, 4, 2, seed=1, shuffle=False), 3) == list(range(8))


def test_the_permutation_does_not_change_between_versions() -> None:
    assert ShardPlan(10, 5, 1, seed=7).indices(0, 0) == [7, 5, 8, 4, 1]


@pytest.mark.parametrize(
    ("change", "sentence", "hint"),
    [
        ({"batch_size": 10}, "a batch of 10 cannot be cut into 4 equal shards", "batch_size=8 or 12"),
        ({"batch_size": 3}, "a batch of 3 cannot be cut into 4 equal shards", "batch_size=4"),
        ({"length": 7, "drop_last": True}, "the dataset has 7 samples, fewer than one batch of 8", "drop_last=False"),
        ({"length": 0}, "the dataset is empty", "at least one"),
        ({"shards": 0}, "shards is 0", "at least 1"),
        ({"batch_size": -8}, "batch_size is -8", "samples"),
        ({"drop_last": "pad"}, "drop_last is 'pad'", "drop_last=True"),
        ({"seed": 1.5}, "seed is 1.5, not an integer", "integer"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_one_sentence(change: dict, sentence: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ShardPlan(**{"length": 100, "batch_size": 8, "shards": 4, "seed": 0, **change}).validate()
    assert caught.value.message == sentence
    assert hint in caught.value.hint
