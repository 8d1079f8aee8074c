"""The two `for`s of a script: which steps and shards there are, what the data look like, and what is said to misuse."""

from __future__ import annotations

import gc
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
import torch
from cases import Training, dataset, mlp, sgd
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import holdfast
from holdfast.byzantine import MultiKrum
from holdfast.core.errors import ConfigError, DivergedError

Join = Callable[..., holdfast.Run]


def start(join: Join, data: Any = None, **options: Any) -> tuple[holdfast.Run, Training]:
    torch.manual_seed(0)
    training = sgd(mlp())
    arguments = {"batch_size": 8, "shards": 4, **options}
    return join(training.model, training.optimizer, data or dataset(), **arguments), training


def train(run: holdfast.Run, training: Training, steps: Iterator[holdfast.Step]) -> None:
    for step in steps:
        for x, y in step:
            loss = F.cross_entropy(training.model(x), y)
            loss.backward()
            step.record(loss=loss)
        training.optimizer.step()


class Numbers(Dataset[int]):
    """Sample n is n."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def seen(run: holdfast.Run, steps: Iterator[holdfast.Step]) -> list[list[int]]:
    """The samples of each step."""
    return [[int(n) for shard in step for n in shard] for step in steps]


# ---- steps, epochs and samples


def test_an_epoch_uses_every_sample_once_and_its_last_step_says_so(joined: Join) -> None:
    run, _ = start(joined, Numbers(27), drop_last=True)
    steps: list[tuple[int, int, bool]] = []
    samples: list[list[int]] = [[], []]
    for step in run.epochs(2):
        steps.append((step.number, step.epoch, step.ends_epoch))
        samples[step.epoch] += [int(n) for shard in step for n in shard]
    assert steps == [(0, 0, False), (1, 0, False), (2, 0, True), (3, 1, False), (4, 1, False), (5, 1, True)]
    for epoch in samples:
        assert len(epoch) == len(set(epoch)) == 24  # three are dropped, others in each epoch
    assert samples[0] != samples[1]
    assert run.step == 6


def test_a_padded_epoch_uses_all_samples_and_fills_up_from_its_beginning(joined: Join) -> None:
    run, _ = start(joined, Numbers(27))  # drop_last=False, as in PyTorch
    samples = [n for step in seen(run, run.epochs(1)) for n in step]
    assert samples[:27] != list(range(27))
    assert sorted(samples[:27]) == list(range(27))
    assert samples[27:] == samples[:5]


def test_a_dataset_that_is_smaller_than_a_batch_can_be_padded(joined: Join) -> None:
    run, _ = start(joined, Numbers(3), drop_last=False, shuffle=False)
    assert seen(run, run.epochs(2)) == [[0, 1, 2, 0, 1, 2, 0, 1]] * 2


def test_unshuffled_samples_come_in_order(joined: Join) -> None:
    run, _ = start(joined, Numbers(16), shuffle=False)
    assert seen(run, run.steps(3)) == [list(range(8)), list(range(8, 16)), list(range(8))]


def test_the_seed_decides_the_order(joined: Join) -> None:
    orders = []
    for seed in (1, 1, 2, -5, 2**63 - 1):
        run, _ = start(joined, Numbers(64), seed=seed)
        orders.append(seen(run, run.epochs(1)))
        run.close()
    assert orders[0] == orders[1]
    assert len({str(order) for order in orders}) == 4


def test_consecutive_loops_are_one_training(joined: Join) -> None:
    run, training = start(joined)
    train(run, training, run.steps(10))
    whole = run.digest()
    run.close()
    run, training = start(joined)
    train(run, training, run.steps(4))
    train(run, training, run.steps(4))  # nothing left to do
    train(run, training, run.steps(0))
    assert run.step == 4
    train(run, training, run.epochs(1))  # 12 steps, of which 8 are left
    assert run.step == 12
    run.close()
    again, training = start(joined)
    train(again, training, again.steps(10))
    assert again.digest() == whole


def test_what_a_run_of_one_says_of_itself(joined: Join) -> None:
    run, training = start(joined)
    assert (run.workers, run.leader, run.step) == ((), False, 0)
    for step in run.steps(1):
        assert (run.workers, run.leader, run.id) == ((run.id,), True, "w0.1")
        for x, y in step:
            F.cross_entropy(training.model(x), y).backward()
    assert run.optimizer is training.optimizer
    run.close()
    run.close()


def test_the_outer_loop_may_be_left_early(joined: Join) -> None:
    run, training = start(joined)
    for step in run.steps(100):
        for x, y in step:
            F.cross_entropy(training.model(x), y).backward()
        training.optimizer.step()
        if step.number == 3:
            break
    assert run.step == 4  # the step in which it was left is applied
    run.close()


# ---- data


class Augmented(Dataset[Any]):
    """Random in every generator that people use."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.randn(6) * random.random() * float(np.random.uniform(0.5, 1))
        return {"x": torch.full((6,), index / 64) + noise, "meta": (index, str(index))}


class InOneGo(Augmented):
    asked: list[list[int]]

    def __init__(self) -> None:
        self.asked = []

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.asked.append(indices)
        return [self[index] for index in indices]


def newest_first(samples: list[dict[str, Any]]) -> dict[str, Any]:
    ordered = sorted(samples, key=lambda sample: -sample["meta"][0])
    return {"x": torch.stack([sample["x"] for sample in ordered]), "names": [s["meta"][1] for s in ordered]}


def batches_of(run: holdfast.Run, model: nn.Module, steps: int) -> list[str]:
    """Every batch and what the model makes of it, to the last bit."""
    found = []
    for step in run.steps(steps):
        for batch in step:
            loss = F.dropout(model(batch["x"]), 0.5).square().mean()
            loss.backward()
            found.append(f"{batch.get('names') or batch['meta']} {reference.raw(batch['x']).hex()} {loss.item()!r}")
        run.optimizer.step()
    return found


@pytest.mark.parametrize("collate", [None, newest_first])
def test_loader_processes_change_no_bit(joined: Join, collate: Any) -> None:
    found = []
    for loaders, data in ((0, Augmented()), (2, Augmented()), (0, InOneGo()), (1, InOneGo())):
        run, training = start(
            joined, data, collate_fn=collate, num_workers=loaders, prefetch_factor=3 if loaders else None
        )
        found.append(batches_of(run, training.model, 10))
        found[-1].append(run.digest())
        run.close()
    assert found[0] == found[1] == found[2] == found[3]
    assert len(set(found[0])) == len(found[0])


def test_samples_are_fetched_a_shard_at_a_time(joined: Join) -> None:
    data = InOneGo()
    run, training = start(joined, data, collate_fn=newest_first)
    batches_of(run, training.model, 2)
    assert [len(indices) for indices in data.asked] == [2] * 8


def test_an_exception_of_the_dataset_reaches_the_script(joined: Join) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise KeyError("sample 13")

    for loaders in (0, 1):
        run, _ = start(joined, Broken(16), num_workers=loaders)
        with pytest.raises(KeyError, match="sample 13"):
            seen(run, run.steps(1))
        run.close()


# ---- metrics


def test_metrics_are_means_over_the_shards_added_in_their_order(joined: Join) -> None:
    run, training = start(joined, shards=4)
    values = iter([0.1, 0.2, 0.3, 1e16])
    for step in run.steps(1):
        for number, (x, y) in enumerate(step):
            loss = F.cross_entropy(training.model(x), y)
            loss.backward()
            value = next(values)
            step.record(early=0.0)
            step.record(plain=value, tensor=torch.tensor(value), early=float(number))
            if number == 2:
                step.record(rare=7)
        assert step.metrics == {
            "plain": (0.1 + 0.2 + 0.3 + 1e16) / 4,
            "tensor": sum(float(torch.tensor(value)) for value in (0.1, 0.2, 0.3, 1e16)) / 4,
            "early": 1.5,
            "rare": 7.0,  # of the shards that recorded it
        }


def test_no_metrics_are_no_metrics(joined: Join) -> None:
    run, training = start(joined)
    for step in run.steps(1):
        for x, y in step:
            F.cross_entropy(training.model(x), y).backward()
        assert step.metrics == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_stops_the_training_unless_told_otherwise(joined: Join, value: float) -> None:
    def steps(**options: Any) -> int:
        run, training = start(joined, **options)
        for step in run.steps(4):
            for number, (x, y) in enumerate(step):
                F.cross_entropy(training.model(x), y).backward()
                step.record(loss=value if (step.number, number) == (2, 1) else 1.0)
            training.optimizer.step()
        return run.step

    with pytest.raises(DivergedError, match=r"the metric 'loss' is (nan|-?inf) at step 2") as caught:
        steps()
    assert "non_finite='ignore'" in caught.value.hint
    assert steps(non_finite="ignore") == 4


# ---- misuse


def misused(run: holdfast.Run, training: Training, how: str) -> None:
    model, optimizer = training.model, training.optimizer
    for step in run.steps(3):
        if how == "record before":
            step.record(loss=1.0)
        if how == "not iterated":
            continue
        if how == "collected":
            for x, y in list(step):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if how == "step before":
            optimizer.step()
        for number, (x, y) in enumerate(step):
            F.cross_entropy(model(x), y).backward()
            if how == "step inside":
                optimizer.step()
            if how == "closed":
                run.close()
            if how == "vector":
                step.record(loss=x.new_ones(3))
            if how == "break" and number == 1:
                break
        if how == "twice":
            for _ in step:
                pass
        if how == "record after":
            step.record(loss=1.0)
        if how == "new parameter":
            optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        optimizer.step()


@pytest.mark.parametrize(
    ("how", "sentence", "hint"),
    [
        ("break", "the loop over the shards of step 0 was left early", "without a break"),
        ("not iterated", "the loop over the shards of step 0 was left early", "for batch in step"),
        ("step before", "the loop over the shards of step 0 was left early", "for batch in step"),
        ("twice", "the shards of step 0 were asked for twice", "go through them once"),
        ("collected", "the gradients do not come from the loop over the step's shards", "backward inside"),
        ("step inside", "optimizer.step() was called inside the loop over a step's shards", "one level out"),
        ("record before", "step.record was called outside the loop over the step's shards", "step.metrics"),
        ("record after", "step.record was called outside the loop over the step's shards", "step.metrics"),
        ("closed", "the run was closed in the middle of step 0, and the step goes on", "after the loops"),
        ("vector", "step.record(loss=…) was given a Tensor of shape (3,), and takes one number", "loss.mean()"),
        ("new parameter", "the optimizer trains 2 of 6 parameters that are not in the model", "nn.ModuleList"),
    ],
)
def test_misuse_of_the_loop_is_answered_by_a_sentence(joined: Join, how: str, sentence: str, hint: str) -> None:
    run, training = start(joined)
    with pytest.raises(ConfigError) as caught:
        misused(run, training, how)
    assert caught.value.message.startswith(sentence)
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


def test_a_step_cannot_be_taken_by_two_loops_at_once(joined: Join) -> None:
    run, _ = start(joined)
    with pytest.raises(ConfigError, match="asked for twice"):
        for step in run.steps(1):
            for _ in zip(step, step, strict=False):
                pass


def test_steps_are_handed_out_one_at_a_time(joined: Join) -> None:
    run, _ = start(joined)
    with pytest.raises(ConfigError, match="step 0 was left early"):
        list(run.steps(3))


class Sparse(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=True)
        self.unused = nn.Parameter(torch.zeros(3)) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding((x[:, 0] > 0).long())


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.register_buffer("kept", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.cat([self.kept, x[:1, 0]])
        return self.body(x)


def thaw_inside(model: nn.Module) -> None:
    model[0].requires_grad_(True)


@pytest.mark.parametrize(
    ("model", "inside", "sentence"),
    [
        (lambda: Sparse(False), None, "a gradient is sparse"),
        (lambda: Sparse(True), None, "a gradient is sparse"),
        (Reshaped, None, "the buffer kept got another shape"),
        (lambda: mlp().requires_grad_(False), thaw_inside, "a parameter that was frozen when the step began"),
    ],
)
def test_models_that_cannot_be_exact_are_refused(joined: Join, model: Any, inside: Any, sentence: str) -> None:
    training = sgd(model())
    run = joined(training.model, training.optimizer, dataset(), batch_size=8, shards=4)
    with pytest.raises(ConfigError, match=sentence) as caught:
        for step in run.steps(1):
            for x, y in step:
                if inside:
                    inside(training.model)
                F.cross_entropy(training.model(x), y).backward()
    assert caught.value.hint


def test_a_nondeterministic_operation_is_refused(joined: Join) -> None:
    run, training = start(joined)
    with pytest.raises(RuntimeError, match="deterministic implementation"):
        for step in run.steps(1):
            for x, y in step:
                x.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
                F.cross_entropy(training.model(x), y).backward()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Opaque:
    def state_dict(self) -> dict[str, Any]:
        return {"what": object()}

    def load_state_dict(self, state: Any) -> None:
        pass


class Elsewhere(torch.Generator):
    """One of a device that this machine need not have."""

    device = torch.device("cuda:0")


class LazyModel(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 10}, "a batch of 10 cannot be cut into 4 equal shards"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -8}, "batch_size is -8"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": 8.0}, "batch_size is 8.0"),
        ({"batch_size": True, "shards": 1}, "batch_size is True"),
        ({"shards": 0}, "shards is 0"),
        ({"shards": 8192, "batch_size": 8192}, "shards is 8192"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": 1 << 70}, "seed is 1180591620717411303424"),
        ({"drop_last": "pad"}, "drop_last is 'pad'"),
        ({"threads": -1}, "threads is -1"),
        ({"non_finite": "maybe"}, "non_finite is 'maybe'"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"collate_fn": 3}, "collate_fn is an int, not a function"),
        ({"prefetch_factor": 2}, "prefetch_factor is 2, and num_workers is 0: nobody fetches ahead"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"num_workers": 1, "worker_init_fn": "print"}, "worker_init_fn is a str, not a function"),
        ({"generator": 3}, "generator is an int, not a torch.Generator"),
        ({"generator": Elsewhere()}, "the generator is on cuda:0, and the order of samples is drawn on the CPU"),
        ({"checkpoint": 3}, "checkpoint is an int, not a place"),
        ({"checkpoint": holdfast.Checkpoints("x", keep=0)}, "keep is 0, but must be from 1"),
        ({"checkpoint": holdfast.Checkpoints("x", every="soon")}, "a checkpoint every 'soon' makes no sense"),
        ({"dataset": []}, "the dataset is empty"),
        ({"dataset": Numbers(4), "drop_last": True}, "the dataset has 4 samples, fewer than one batch of 8"),
        ({"dataset": Stream(), "num_workers": 1}, "join got num_workers=1, and a Stream is read by one worker"),
        ({"dataset": Stream(), "sampler": [1]}, "a Stream gives its samples in its own order"),
        ({"dataset": Stream(), "mode": holdfast.Elastic()}, "the dataset is an iterable, which is handed on"),
        (
            {"dataset": DataLoader(Stream(), batch_size=4)},
            "the DataLoader makes batches of 4, and join got batch_size=8",
        ),
        (
            {"dataset": Stream(), "aggregate": MultiKrum(f=2), "shards": 8},
            "aggregate= expects workers that may be hostile",
        ),
        ({"dataset": Stream(), "batch_size": None, "collate_fn": len}, "join got a collate_fn and no batch_size"),
        ({"dataset": {1, 2, 3, 4, 5, 6, 7, 8}}, "the dataset is a set, which gives its samples once"),
        ({"extras": {"thing": 3}}, "extras['thing'] is an int without state_dict"),
        ({"extras": {"thing": Opaque()}}, "extras['thing']['state']['what'] is a object"),
        ({"model": 3}, "the model is an int, not a torch.nn.Module"),
        ({"optimizer": None}, "the optimizer is a NoneType, not a torch.optim.Optimizer"),
        ({"model": nn.ReLU()}, "the model has no parameters"),
        ({"model": LazyModel()}, "the model has lazy parameters"),
        ({"model": nn.Linear(2, 2)}, "the optimizer trains 4 of 4 parameters that are not in the model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "with",  # an address in it would differ between processes
)
def test_bad_arguments_of_join_are_answered_by_a_sentence(joined: Join, options: dict[str, Any], sentence: str) -> None:
    training = sgd(mlp())
    arguments: dict[str, Any] = {"batch_size": 8, "shards": 4, **options}
    model = arguments.pop("model", training.model)
    optimizer = arguments.pop("optimizer", training.optimizer)
    data = arguments.pop("dataset", None)
    with pytest.raises(ConfigError) as caught:
        joined(model, optimizer, dataset() if data is None else data, **arguments)
    assert caught.value.message.startswith(sentence)
    assert caught.value.hint
    assert "\n" not in str(caught.value).partition("\n  hint: ")[0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda run: run.steps(-1),
        lambda run: run.steps(2.5),
        lambda run: run.steps("3"),
        lambda run: run.steps(True),
        lambda run: run.epochs(-1),
        lambda run: run.epochs(1.5),
        lambda run: run.epochs(True),
    ],
)
def test_a_wrong_number_of_steps_is_answered_at_once(joined: Join, ask: Any) -> None:
    run, _ = start(joined)
    with pytest.raises(ConfigError, match=r"(steps|epochs)\(") as caught:
        ask(run)
    assert caught.value.hint


def test_a_run_leaves_no_threads_behind(joined: Join) -> None:
    before = set(threading.enumerate())
    run, training = start(joined)
    train(run, training, run.steps(2))
    run.close()
    gc.collect()
    assert not {t.name for t in set(threading.enumerate()) - before if t.name.startswith("holdfast")}


def test_join_with_a_tensor_dataset_of_one_column(joined: Join) -> None:
    run, _ = start(joined, TensorDataset(torch.arange(16)))
    assert sum(len(shard[0]) for step in run.epochs(1) for shard in step) == 16
