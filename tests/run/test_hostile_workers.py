"""holdfast.join(aggregate=...): one of five real workers sends hostile gradients, does no harm, and is evicted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.byzantine import Krum, MultiKrum, NearestNeighbourMixing, Rule, TrimmedMean, parse
from holdfast.core.errors import EXIT_EVICTED
from holdfast.events.reading import read_events
from holdfast.placement.environment import WorkerEnvironment
from tests.harness.forked import Outcome, agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
WORKERS, SHARDS, STEPS = 5, 10, 80
HOSTILE = "w3.1"
RULE = NearestNeighbourMixing(TrimmedMean(), f=3)  # two shards each, three if one is gone
Attack = Callable[[nn.Module, int], None]


def opposite(model: nn.Module, step: int) -> None:
    for one in model.parameters():
        assert one.grad is not None
        one.grad.mul_(-20.0)


def not_a_number(model: nn.Module, step: int) -> None:
    for one in model.parameters():
        assert one.grad is not None
        one.grad.fill_(float("nan"))


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16.0, torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[:1400], y[:1400]), x[1400:], y[1400:]


def train(
    aggregate: Rule | None = RULE,
    *,
    attack: Attack | None = None,
    dies_at: tuple[int, int] | None = None,
    steps: int = STEPS,
    width: int = 32,
    mode: Any = None,
    start: Barrier | None = None,
) -> dict[str, Any]:
    """`start`: all join at once, so that the hostile one is there from the first step on."""
    torch.manual_seed(5)
    data, x_test, y_test = digits()
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if start is not None:
        start.wait(60)
    run = holdfast.join(
        model, optimizer, data, batch_size=200, shards=SHARDS, seed=2, aggregate=aggregate, mode=mode, drop_last=True
    )
    for step in run.steps(steps):
        for number, (x, y) in enumerate(step):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            step.record(loss=loss)
            if attack is not None:
                attack(model, step.number)
            if (step.number, number) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    run.close()
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(dim=1) == y_test).float().mean())
    environment = WorkerEnvironment.from_variables()
    events = read_events(environment.run_dir / "events") if environment is not None else []
    told = [event for event in events if event["kind"] in ("distrusted", "left_out") and event["who"] == run.id]
    return {"digest": run.digest(), "accuracy": accuracy, "told": told}


def five(attack: Attack, **settings: Any) -> dict[str, Outcome]:
    """Five workers, one of them hostile."""
    start = get_context("fork").Barrier(WORKERS)
    bodies = {f"w{slot}.1": (lambda: train(start=start, **settings)) for slot in range(WORKERS)}
    bodies[HOSTILE] = lambda: train(start=start, attack=attack, **settings)
    return forked(bodies)


def accuracies(outcomes: dict[str, Any]) -> list[float]:
    return [one.value["accuracy"] for one in outcomes.values() if isinstance(one.value, dict)]


def assert_evicted(outcome: Outcome) -> None:
    assert "is distrusted by" in str(outcome.value) and outcome.code == EXIT_EVICTED, outcome


@pytest.mark.parametrize(
    ("attack", "rule"),
    [(opposite, RULE), (not_a_number, RULE), (opposite, TrimmedMean(f=3)), (opposite, MultiKrum(f=3))],
    ids=["opposite", "nan", "trimmed-mean", "multi-krum"],
)
def test_a_hostile_worker_does_no_harm_is_named_and_is_evicted(attack: Attack, rule: Rule) -> None:
    clean = accuracies(forked(lambda: train(None), workers=2))[0]
    outcomes = five(attack, aggregate=rule)
    honest = {worker: one for worker, one in outcomes.items() if worker != HOSTILE}
    assert all(not one.error for one in honest.values()), outcomes
    assert_evicted(outcomes[HOSTILE])
    assert len({one.value["digest"] for one in honest.values()}) == 1
    assert min(accuracies(honest)) > clean - 0.03 > 0.8, (clean, accuracies(honest))
    for one in honest.values():
        named = [event for event in one.value["told"] if event["kind"] == "distrusted"]
        assert [event["worker"] for event in named] == [HOSTILE], named
        assert named[0]["step"] < STEPS // 2 and named[0]["left_out"] > 0
    told = [event for one in honest.values() for event in one.value["told"] if event["kind"] == "left_out"]
    assert told and all(set(event["shards"]) == set(event["left_out"]) for event in told)


def test_the_mean_falls_to_the_same_worker() -> None:
    """So that the test before can fail."""
    assert max(accuracies(five(opposite, aggregate=None)), default=0.0) < 0.5  # if it has not stopped itself before


def digest(**settings: Any) -> str:
    return str(train(steps=8, **settings)["digest"])


@pytest.mark.parametrize(
    ("path", "width", "words"),
    [
        ("shared-memory", 8, "nnm+trimmed-mean"),
        ("shared-memory", 3000, "nnm+trimmed-mean"),
        ("shared-memory", 3000, "centered-clipping"),
        ("network", 3000, "geometric-median"),
        ("shared-memory", 3000, "bucketing:2+mean"),  # dealt anew in each step, on all alike
    ],
)
def test_without_attackers_the_bits_are_the_same_for_any_workers_and_under_kills(
    path: str, width: int, words: str
) -> None:
    rule = replace(parse(words), f=3)
    alone = agreed(forked(lambda: digest(aggregate=rule, width=width), workers=1, path=path))
    bodies = {f"w{slot}.1": (lambda: digest(aggregate=rule, width=width)) for slot in range(4)}
    bodies["w1.1"] = lambda: digest(aggregate=rule, width=width, dies_at=(3, 1))
    outcomes = forked(bodies, path=path)
    assert outcomes["w1.1"].signal == signal.SIGKILL
    assert agreed(outcomes) == alone


def test_what_a_rule_draws_follows_from_the_run_s_seed() -> None:
    def drawn(seed: int) -> list[int]:
        model = nn.Linear(3, 1)
        data = TensorDataset(torch.ones(SHARDS, 3))
        rule = parse("bucketing:2+mean")
        run = holdfast.join(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            batch_size=SHARDS,
            shards=SHARDS,
            seed=seed,
            aggregate=replace(rule, f=3),
        )
        aggregator, draws = run._worker.gradients._aggregator, []
        reduce = aggregator.reduce
        aggregator.reduce = lambda work: (draws.append(work.draw), reduce(work))[1]  # type: ignore[method-assign]
        for step in run.steps(2):
            for (x,) in step:
                model(x).sum().backward()
        run.close()
        return draws

    found = {seed: agreed(forked(lambda seed=seed: drawn(seed), workers=1)) for seed in (1, 2)}  # type: ignore[misc]
    assert len(set(found[1])) == 2 and set(found[1]).isdisjoint(found[2])


def test_hosts_come_to_the_same_bits_and_all_know_who_was_left_out() -> None:
    alone = agreed(forked(lambda: digest(width=3000), workers=1))
    outcomes = forked(dict.fromkeys(("w0.1@a", "w1.1@a", "w0.1@b"), lambda: train(steps=8, width=3000)))
    assert {one.value["digest"] for one in outcomes.values()} == {alone}
    counts = [event["left_out"] for one in outcomes.values() for event in one.value["told"]]
    assert counts


def test_elastic_steps_are_combined_robustly_too() -> None:
    outcomes = five(opposite, mode=holdfast.Elastic())
    assert_evicted(outcomes[HOSTILE])
    assert min(accuracies({worker: one for worker, one in outcomes.items() if worker != HOSTILE})) > 0.8


@pytest.mark.parametrize(
    ("rule", "mode", "said"),
    [
        (TrimmedMean(), None, "was not told how many shards"),
        (Krum(f=4), None, "needs at least 11 shards, and a step has 10"),
        (MultiKrum(f=1), None, "one hostile worker would be too many"),
        ("krum", None, "not a rule"),
        (RULE, holdfast.Exact(aggregate=RULE), "each given a rule"),
    ],
)
def test_what_cannot_protect_is_refused_in_one_sentence(rule: Any, mode: Any, said: str) -> None:
    outcomes = forked(lambda: train(rule, steps=1, mode=mode), workers=5)
    assert any(said in one.error for one in outcomes.values()), outcomes
