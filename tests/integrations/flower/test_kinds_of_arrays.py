"""What of a model goes into a rule's distances: parameters; buffers and counters are combined by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import pytest
import torch
from flwr.app import MetricRecord
from flwr.common.serde import metric_record_from_proto, metric_record_to_proto

from holdfast.byzantine import parse
from holdfast.integrations.flower import ByRule, RoundOutcome
from holdfast.integrations.flower.combining import Answers
from holdfast.integrations.flower.model_record import Model
from holdfast.integrations.flower.replies import EXAMPLES_MAX, Update
from holdfast.integrations.flower.reputation import Conduct
from tests.harness.flower_grid import example_app

HOSTILE = 3
CLIENTS = 7
ODD = torch.tensor([3.0, -3.0] * 20)


def normed(scale: float, seen: int) -> dict[str, torch.Tensor]:
    return {
        "net.0.weight": torch.zeros(40),
        "net.1.running_mean": torch.full((2,), scale),
        "net.1.running_var": torch.full((2,), scale),
        "net.1.num_batches_tracked": torch.tensor(seen),
        "nothing": torch.empty(0, 3, dtype=torch.int64),
    }


def sent(client: int) -> dict[str, torch.Tensor]:
    """Statistics and counters that differ by hundreds; the hostile client's are those in the middle."""
    away = client - HOSTILE
    found = normed(300.0 * away, 200 * away + 1000)
    found["net.0.weight"] += ODD if client == HOSTILE else 0.01 * client
    return found


def outcome(combiner: ByRule, updates: Sequence[Mapping[str, torch.Tensor]], number: int = 1) -> RoundOutcome:
    good = {client: Update(dict(update), 10.0, {}) for client, update in enumerate(updates)}
    found = combiner.combine(Model(normed(0.0, 5)), Answers(good, {}), number)
    assert found.model is not None, found.reason
    return found


@pytest.mark.parametrize("word", ["krum", "multi-krum", "bulyan", "mda", "caf", "nnm+median", "geometric-median"])
def test_counters_and_statistics_are_no_part_of_distances(word: str) -> None:
    found = outcome(ByRule(parse(word), f=1), [sent(client) for client in range(CLIENTS)])
    assert found.conducts[HOSTILE] is Conduct.LEFT_OUT and found.model is not None
    state = found.model.state
    assert state["net.0.weight"].abs().max() < 1.0
    assert state["net.1.running_mean"].tolist() == [0.0, 0.0] == state["net.1.running_var"].tolist()
    assert state["net.1.num_batches_tracked"].item() == 1005 and state["nothing"].shape == (0, 3)


def test_of_whole_numbers_the_lower_median_is_taken_and_not_a_mixture() -> None:
    updates = [sent(client) for client in (0, 1, 5, 6)]
    found = outcome(ByRule(parse("trimmed-mean"), f=1), updates)
    assert found.model is not None and found.model.state["net.1.num_batches_tracked"].item() == 600 + 5


def test_hostile_statistics_are_withstood_also_by_rules_with_few_updates() -> None:
    updates = [normed(1.0, 1) for _ in range(3)]
    updates[1]["net.1.running_var"] += 1e30
    found = outcome(ByRule(parse("mean"), f=2), updates)
    assert found.model is not None and found.model.state["net.1.running_var"].tolist() == [1.0, 1.0]


def test_buffers_of_other_names_can_be_named() -> None:
    def renamed(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("running", "smoothed"): one for name, one in state.items()}

    updates, like = [renamed(sent(client)) for client in range(CLIENTS)], Model(renamed(normed(0.0, 5)))
    good = {client: Update(update, 10.0, {}) for client, update in enumerate(updates)}
    conducts = [
        ByRule(parse("multi-krum"), f=1, **more).combine(like, Answers(good, {}), 1).conducts[HOSTILE]
        for more in ({}, {"buffers": ["*.smoothed_*"]})
    ]
    assert conducts == [Conduct.TRUSTED, Conduct.LEFT_OUT], "the first says that the test could fail"


def test_a_model_of_nothing_but_whole_numbers_is_combined_by_the_rule() -> None:
    good = {client: Update({"table": torch.tensor([client, 2 * client])}, 1.0, {}) for client in range(5)}
    found = ByRule(parse("trimmed-mean"), f=1).combine(Model({"table": torch.tensor([0, 0])}), Answers(good, {}), 1)
    assert found.model is not None and found.model.state["table"].tolist() == [2, 4]


def test_buckets_are_dealt_by_the_seed_and_the_round() -> None:
    generator = torch.Generator().manual_seed(1)
    updates = [{**sent(client), "net.0.weight": torch.randn(40, generator=generator)} for client in range(CLIENTS)]

    def dealt(seed: int, number: int) -> torch.Tensor:
        found = outcome(ByRule(parse("bucketing:2+median"), f=1, seed=seed), updates, number)
        assert found.model is not None
        return found.model.state["net.0.weight"]

    assert torch.equal(dealt(0, 1), dealt(0, 1))
    assert not torch.equal(dealt(0, 1), dealt(0, 2)) and not torch.equal(dealt(0, 1), dealt(1, 1))


def test_absurdly_many_examples_of_the_example_s_attack_travel() -> None:
    class Reply:
        def __init__(self) -> None:
            self.content: dict[str, MetricRecord] = {}

    with example_app():
        made = import_module("digits.hostile").many_examples(None, Reply()).content["metrics"]
    there = metric_record_from_proto(metric_record_to_proto(made))
    assert there["num-examples"] == made["num-examples"] and there["num-examples"] > EXAMPLES_MAX
