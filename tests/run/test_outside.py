"""What scripts ask outside the shards: evaluations with the same bits, values that all have, one end for all."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Assigning, dataset, mlp, sgd
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import holdfast
from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest
from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.core.errors import ConfigError
from holdfast.events import read_events
from holdfast.placement.environment import RUN_DIR, variable
from tests.harness.forked import Outcome, forked

Join = Callable[..., holdfast.Run]
Script = Callable[[holdfast.Run, nn.Module], Any]
STEPS = 6
VALIDATION = TensorDataset(*(tensor[:41] for tensor in dataset(82).tensors))


def measured(model: nn.Module) -> Callable[[Any], dict[str, Any]]:
    """With noise from every generator, and both ways to say a metric."""

    def measure(batch: list[torch.Tensor]) -> dict[str, Any]:
        x, y = batch
        x = x + torch.randn_like(x) + random.random() + float(np.random.rand())
        out = model(x)
        right = (out.argmax(1) == y).sum()
        return {"loss": F.cross_entropy(out, y), "accuracy": (right, len(y))}

    return measure


def start(join: Join = holdfast.join, model: nn.Module | None = None, **options: Any) -> tuple[holdfast.Run, nn.Module]:
    torch.manual_seed(5)
    training = sgd(model or mlp(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    return join(training.model, training.optimizer, dataset(), batch_size=24, shards=6, **options), training.model


def train(run: holdfast.Run, model: nn.Module, after: Callable[[holdfast.Step], Any], steps: int = STEPS) -> None:
    for step in run.steps(steps):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.record(loss=loss)
        run.optimizer.step()
        after(step)


def values(outcomes: dict[str, Outcome]) -> list[Any]:
    for outcome in outcomes.values():
        assert not outcome.error, outcome.error
    return [outcome.value for outcome in outcomes.values()]


def body_of(script: Script) -> Callable[[], Any]:
    def body() -> Any:
        run, model = start()
        found = script(run, model)
        run.close()
        return found

    return body


def ran(script: Script, workers: int, **options: Any) -> list[Any]:
    """What the script returns on each of so many workers."""
    return values(forked(body_of(script), workers=workers, **options))


def dies_once(place: Path) -> None:
    """Whoever comes here first ends at once."""
    try:
        place.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def warnings_here() -> list[str]:
    events = read_events(Path(os.environ[RUN_DIR]) / "events")
    return [event["text"] for event in events if event["kind"] == "warning"]


def keeps_best(place: Path, criterion: str) -> None:
    """What an agent that was given --keep-best tells its workers."""
    settings = CheckpointSettings(uri=str(place), every="1000", keep=1, keep_best=criterion)
    os.environ[variable("checkpoint")] = settings.encode()


# ---- evaluate


def evaluated(run: holdfast.Run, model: nn.Module) -> Any:
    """Before, in, between and after loops."""
    measure, found = measured(model), []
    found.append(run.evaluate(VALIDATION, measure))
    train(run, model, lambda step: found.append(run.evaluate(VALIDATION, measure, prefix="val_", batch_size=3)))
    found.append(run.evaluate(VALIDATION, measure, prefix="val_"))
    train(run, model, lambda step: None, 2 * STEPS)
    found.append(run.evaluate(VALIDATION, measure, batch_size=1000))
    return [found, dict(run.metrics), list(run.best("val_loss:min")), run.digest()]


@pytest.mark.processes
def test_any_number_of_workers_gives_the_same_bits() -> None:
    """Two, three, over the network, and on two hosts."""
    (alone,) = ran(evaluated, 1)
    assert len({str(one) for one in alone[0]}) == STEPS + 3, "it does change with the model"
    assert ran(evaluated, 2) == [alone] * 2
    assert ran(evaluated, 3, path="network") == [alone] * 3
    assert values(forked(dict.fromkeys(("w0.1@a", "w1.1@a", "w0.1@b"), body_of(evaluated)))) == [alone] * 3


@pytest.mark.processes
def test_whoever_dies_in_an_evaluation_its_part_is_done_by_the_others(tmp_path: Path) -> None:
    def script(run: holdfast.Run, model: nn.Module) -> Any:
        measure, calls = measured(model), 0

        def dies(batch: Any) -> dict[str, Any]:
            nonlocal calls
            calls += 1
            if run.step == 2 and calls == 2 and run.workers[1:] and run.id != run.workers[1]:
                os.kill(os.getpid(), signal.SIGKILL)
            return measure(batch)

        found = []

        def after(step: holdfast.Step) -> None:
            nonlocal calls
            calls = 0
            found.append(run.evaluate(VALIDATION, dies, prefix="val_", batch_size=2))

        train(run, model, after)
        return [found, run.digest()]

    (alone,) = ran(script, 1)
    found = list(forked_values(script, 3).values())
    assert sum(one.signal == signal.SIGKILL for one in found) == 2
    assert [one.value for one in found if one.signal is None] == [alone]


def forked_values(script: Script, workers: int, **options: Any) -> dict[str, Outcome]:
    return forked(body_of(script), workers=workers, **options)


@pytest.mark.processes
def test_nobody_waits_for_long_for_one_that_is_slow() -> None:
    def script(run: holdfast.Run, model: nn.Module) -> Any:
        computed = 0

        def slow(batch: Any) -> dict[str, Any]:
            nonlocal computed
            computed += 1
            if not run.leader:
                time.sleep(0.6)
            return {"loss": batch[0].sum()}

        found: list[float] = []
        train(run, model, lambda step: found.append(run.evaluate(VALIDATION, slow, batch_size=2)["loss"]), 1)
        return [found, computed]

    (first, one), (second, other) = ran(script, 2)
    assert first == second and min(one, other) < 10 < max(one, other), "21 pieces, of which it was to do 10"


@pytest.mark.processes
def test_one_worker_may_evaluate_alone_and_only_some_may_not_record() -> None:
    def alone(run: holdfast.Run, model: nn.Module) -> Any:
        found: list[Any] = []
        train(
            run, model, lambda step: found.append(run.evaluate(VALIDATION, measured(model))) if run.leader else None, 2
        )
        return [len(found), run.digest()]

    first, second = ran(alone, 2)
    assert {first[0], second[0]} == {2, 0} and first[1] == second[1]

    def recorded(run: holdfast.Run, model: nn.Module) -> Any:
        train(run, model, lambda step: run.record(val_loss=1.0) if run.leader else None)

    errors = [outcome.error for outcome in forked_values(recorded, 2).values()]
    assert sum("ConfigError: run.record was called at step 0 on w" in error for error in errors) == 1, errors


class Odd(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index


def test_an_evaluation_leaves_everything_as_it_was_and_weighs_by_samples(joined: Join) -> None:
    run, model = start(joined, nn.Sequential(Assigning(), nn.Dropout(0.5)))
    model[0].eval()
    seen: list[Any] = []

    def measure(batch: Any) -> dict[str, Any]:
        seen.append((len(batch), model.training, model[1].training, torch.is_grad_enabled(), torch.rand(1).item()))
        model[0](torch.randn(4, 6))  # which changes its buffers
        return {"mean": batch.double().mean(), "sum": (batch.sum(), 1)}

    before = random.getstate(), torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    assert run.evaluate(Odd(), measure, batch_size=2) == {"mean": 2.0, "sum": 10 / 3}
    assert [len_ for len_, *_ in seen] == [2, 2, 1] and all(one[1:4] == (False, False, False) for one in seen)
    assert len({one[4] for one in seen}) == 3, "every piece has a seed of its own"
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(a, b) for a, b in zip(before[2], model.buffers(), strict=True))
    assert model.training and model[1].training and not model[0].training
    again = [one[4] for one in seen]
    seen.clear()
    run.evaluate(Odd(), measure, batch_size=2)
    assert [one[4] for one in seen] == again, "and the same every time"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: run.evaluate(DataLoader(Odd()), len), "evaluate got a DataLoader"),
        (lambda run: run.evaluate(iter([1]), len), "gives its samples once"),
        (lambda run: run.evaluate([], len), "is empty"),
        (lambda run: run.evaluate(Odd(), len), "the evaluation's function returned a int"),
        (lambda run: run.evaluate(Odd(), 3), "evaluate got a int to measure with"),
        (lambda run: run.evaluate(Odd(), len, batch_size=0), "batch_size is 0"),
        (lambda run: run.evaluate(Odd(), lambda batch: {"a": batch}), "returned a tensor of [4] for 'a'"),
        (lambda run: run.evaluate(Odd(), lambda batch: {"a": "b"}), "returned a str for 'a'"),
        (lambda run: run.evaluate(Odd(), lambda batch: {3: 1.0}), "returned the name 3"),
        (lambda run: run.evaluate(Odd(), lambda b: {str(len(b)): 1.0}), "for some batches and not for others"),
        (lambda run: run.evaluate(Odd(), lambda b: {"a": run.model[0].weight.zero_().sum()}), "changed the parameter"),
        (lambda run: run.record(), "called with nothing"),
        (lambda run: run.record(loss="low"), "loss is a str, not a number"),
        (lambda run: run.record(loss=torch.ones(2)), "loss is a Tensor, not a number"),
        (lambda run: run.best("val_loss"), "does not say which value is the best"),
        (lambda run: run.best("val_loss:min"), "was not recorded yet"),
        (lambda run: run.stop(""), "run.stop('')"),
        (lambda run: run.gather(object()), "cannot travel"),
        (lambda run: run.gather(torch.zeros(20_000_000)), "at most"),
    ],
)
def test_what_cannot_be_is_said(joined: Join, call: Callable[[holdfast.Run], Any], said: str) -> None:
    run, _ = start(joined)
    with pytest.raises(ConfigError) as caught:
        call(run)
    assert said in str(caught.value)


def test_in_the_shards_nothing_of_it_may_be_asked(joined: Join) -> None:
    run, _ = start(joined)
    for step in run.steps(1):
        with pytest.raises(ConfigError, match=r"run.evaluate was called before the loop over the shards of step 0"):
            run.evaluate(Odd(), len)
        for _ in step:
            with pytest.raises(ConfigError, match=r"run.record was called before the loop over the shards"):
                run.record(loss=1.0)
            with pytest.raises(ConfigError, match=r"run.stop was called before"):
                run.stop()


# ---- record


@pytest.mark.processes
def test_the_first_ones_value_is_everybodys_and_a_function_is_called_once() -> None:
    def script(run: holdfast.Run, model: nn.Module) -> Any:
        called = 0

        def compute() -> float:
            nonlocal called
            called += 1
            return 0.25 + called

        found: list[Any] = []

        def after(step: holdfast.Step) -> None:
            found.append(dict(run.record(own=run.workers.index(run.id) / 3, computed=compute, some=None)))

        train(run, model, after, 2)
        return [found, called, dict(run.metrics)]

    found = ran(script, 3)
    taken = [{"own": 0.0, "computed": 1.25}, {"own": 0.0, "computed": 2.25}]
    assert [one[0] for one in found] == [taken] * 3 and [one[2] for one in found] == [taken[1]] * 3
    assert sorted(one[1] for one in found) == [0, 0, 2]


@pytest.mark.processes
def test_the_next_one_computes_what_the_first_died_of(tmp_path: Path) -> None:
    def script(run: holdfast.Run, model: nn.Module) -> Any:
        def compute() -> float:
            if run.step == 2 and run.workers[1:]:
                dies_once(tmp_path / "died")
            return run.best("loss:min").value if "loss" in run.metrics else 0.5

        def after(step: holdfast.Step) -> None:
            run.record(score=compute)
            run.record(loss=1.0 / (1 + step.number))

        train(run, model, after)
        return [list(run.best("score:min")), dict(run.metrics), run.digest()]

    (alone,) = ran(script, 1)
    found = list(forked_values(script, 3).values())
    assert sum(one.signal == signal.SIGKILL for one in found) == 1
    assert [one.value for one in found if one.signal is None] == [alone] * 2


@pytest.mark.processes
def test_different_values_are_told_once() -> None:
    def script(run: holdfast.Run, model: nn.Module) -> Any:
        train(run, model, lambda step: run.record(loss=float(run.workers.index(run.id))), 3)
        return [run.metrics["loss"], run.leader, warnings_here()]

    (first, *_), (second, *_) = found = ran(script, 2)
    assert first == second == 0.0
    told = str(next(texts for _, leader, texts in found if leader))
    assert told.count("run.record(loss=...) got 0.0 here and 1.0 on w") == 1


def test_the_best_is_counted_from_the_first_of_equals(joined: Join) -> None:
    run, model = start(joined)
    losses = [3.0, 2.0, 2.0, math.nan, 5.0, 2.5]
    train(run, model, lambda step: run.record(loss=losses[step.number]))
    assert run.best("loss:min") == (2.0, 2, 4) and run.best("loss:max") == (5.0, 5, 1)
    assert run.metrics == {"loss": 2.5} and run.best("loss:max").since == 1


# ---- stop


@pytest.mark.processes
@pytest.mark.parametrize(("who", "ends"), [("all", 3), ("leader", 5), ("another", 5)])
def test_all_end_after_the_same_step(who: str, ends: int) -> None:
    """Called by all, after this step; by some, two steps later; and later loops have no steps."""

    def script(run: holdfast.Run, model: nn.Module) -> Any:
        steps: list[int] = []

        def after(step: holdfast.Step) -> None:
            steps.append(step.number)
            if step.number == 2 and (who == "all" or run.leader == (who == "leader")):
                run.stop("enough")
            run.record(loss=1.0)

        train(run, model, after)
        train(run, model, after, 2 * STEPS)
        return [steps, run.step, run.stopped, run.digest(), warnings_here()]

    found = ran(script, 3)
    assert len({str(one[:4]) for one in found}) == 1
    assert found[0][:3] == [list(range(ends)), ends, "enough"]
    told = "not called on every worker" in str([one[4] for one in found])
    assert told == (who != "all")


# ---- gather


@pytest.mark.processes
@pytest.mark.parametrize("path", ["auto", "network"])
def test_what_shards_give_is_the_same_for_any_number_of_workers(path: str, tmp_path: Path) -> None:
    """In the order of shards; also on a worker that is sent the step, and whoever dies in it."""

    def script(run: holdfast.Run, model: nn.Module) -> Any:
        found: list[Any] = []
        for step in run.steps(4):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
                if step.number == 2 and run.workers[2:]:
                    dies_once(tmp_path / "died")
                step.gather("not this one")
                step.gather({"x": x[0], "seen": [int(one) for one in y], "noise": torch.rand(1)})
            run.optimizer.step()
            found.append([[one["x"].tolist(), one["seen"], one["noise"].item()] for one in step.gathered])
            assert [len(shards) for shards in found] == [6] * len(found)
        return found

    (alone,) = ran(script, 1)
    found = list(forked_values(script, 3, path=path).values())
    assert sum(one.signal == signal.SIGKILL for one in found) == 1
    assert [one.value for one in found if one.signal is None] == [alone] * 2


def test_what_shards_cannot_give(joined: Join) -> None:
    run, _ = start(joined)
    for step in run.steps(1):
        with pytest.raises(ConfigError, match="outside the loop over the step's shards"):
            step.gather(1)
        for _ in step:
            with pytest.raises(ConfigError, match="cannot travel"):
                step.gather(object())
            with pytest.raises(ConfigError, match="at most"):
                step.gather(torch.zeros(100_000))
            with pytest.raises(ConfigError, match="was left early"):
                step.gathered  # noqa: B018
        assert step.gathered == []


# ---- the best checkpoint


@pytest.mark.processes
def test_a_value_known_after_the_loop_is_in_the_checkpoint_of_its_end(tmp_path: Path) -> None:
    """A loop for each epoch, and a worker that dies right after the evaluation: the best checkpoint stays."""
    losses = [0.9, 0.4, 0.7, 0.8]

    def body() -> Any:
        keeps_best(tmp_path / "place", "val_loss:min")
        run, model = start()
        for epoch, loss in enumerate(losses):
            train(run, model, lambda step: None, 4 * (epoch + 1))
            run.record(val_loss=loss)
            if epoch == 1 and run.leader:
                dies_once(tmp_path / "died")
        run.close()
        return [run.best("val_loss:min").step, dict(run.metrics)]

    found = [one.value for one in forked(body, workers=3).values() if one.signal is None]
    assert found == [[8, {"val_loss": 0.8}]] * 2
    storage = LocalStorage(tmp_path / "place")
    kept = {entry.step: read_manifest(storage, entry.step).metrics for entry in list_checkpoints(storage)}
    assert {step: metrics["val_loss"] for step, metrics in kept.items()} == {8: 0.4, 16: 0.8}


@pytest.mark.processes
def test_the_last_state_is_saved_by_those_who_are_left(tmp_path: Path) -> None:
    """One dies in the last step, which the others notice in their evaluation, and another after the loop."""

    def body() -> Any:
        keeps_best(tmp_path / "place", "val_loss:min")
        run, model = start()
        place: list[int] = []

        def after(step: holdfast.Step) -> None:
            place.append(run.workers.index(run.id))
            if step.number == 2 and not place[-1]:
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number == 2:
                run.evaluate(VALIDATION, measured(model))
                while len(run._worker.sharing.others()) == 2:
                    run._worker.listen()

        train(run, model, after, 3)
        if place[-1] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.close()

    found = list(forked(body, workers=3).values())
    assert sum(one.signal == signal.SIGKILL for one in found) == 2 and not any(one.error for one in found)
    assert [entry.step for entry in list_checkpoints(LocalStorage(tmp_path / "place")) if entry.committed] == [3]


@pytest.mark.processes
def test_a_best_by_what_nobody_records_is_told(tmp_path: Path) -> None:
    def body() -> Any:
        keeps_best(tmp_path / "place", "val_los:min")
        run, model = start()
        train(run, model, lambda step: run.record(val_loss=1.0), 2)
        run.close()
        return warnings_here()

    (told,) = values(forked(body, workers=1))
    assert (
        "--keep-best val_los:min has kept nothing: the script has not recorded 'val_los', only loss, val_loss" in told
    )


@pytest.mark.processes
def test_all_values_in_the_order_of_workers() -> None:
    def script(run: holdfast.Run, model: nn.Module) -> Any:
        found: list[Any] = []

        def after(step: holdfast.Step) -> None:
            mine = {"id": run.id, "data": torch.arange(int(run.id[1]) + 1), "big": torch.zeros(700_000), 3: (None, 1.5)}
            for one in run.gather(mine):
                assert one["big"].shape == (700_000,)
                found.append([one["id"], one["data"].tolist(), one[3] == (None, 1.5)])
            assert [one[0] for one in found] == list(run.workers)

        train(run, model, after, 1)
        return found

    first, *others = ran(script, 3)
    assert sorted(first) == [["w0.1", [0], True], ["w1.1", [0, 1], True], ["w2.1", [0, 1, 2], True]]
    assert others == [first] * 2


@pytest.mark.processes
def test_the_last_values_reach_one_that_comes_late_and_reads_slowly() -> None:
    """The others have what it said long before it has read what they said, and leave: their words come first."""

    def script(run: holdfast.Run, model: nn.Module) -> Any:
        found: list[Any] = []

        def after(step: holdfast.Step) -> None:
            if run.id == "w0.1":
                time.sleep(1.0)  # the others' values do not fit into what a socket holds
            found.extend(one["id"] for one in run.gather({"id": run.id, "big": torch.zeros(2_000_000)}))

        train(run, model, after, 1)
        return found

    outcomes = ran(script, 3)
    assert [sorted(found) for found in outcomes] == [["w0.1", "w1.1", "w2.1"]] * 3


@pytest.mark.parametrize("leaders", ["gather", "evaluate"])
def test_workers_at_different_calls_say_so_instead_of_waiting(leaders: str) -> None:
    """A script that asks its leader for something else would wait for itself for ever."""

    def script(run: holdfast.Run, model: nn.Module) -> Any:
        def after(step: holdfast.Step) -> None:
            if not run.leader:
                run.record(val_loss=1.0)
            elif leaders == "gather":
                run.gather(1)
            else:
                run.evaluate(VALIDATION, measured(model), prefix="val_")

        train(run, model, after, 2)

    errors = [outcome.error for outcome in forked_values(script, 2).values()]
    said = [error for error in errors if f"run.{leaders}" in error and "called run.record" in error]
    assert said and "ConfigError: at step 0 w" in said[0], errors
