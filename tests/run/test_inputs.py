"""What people give to join by mistake: each is said as what it is, with the line to write instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import dataset, gan, mlp, sgd
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import holdfast
from holdfast.core.errors import ConfigError

Join = Callable[..., holdfast.Run]


class DataFrame:
    """Stands in for pandas' own, whose length is its rows and whose items are its columns."""

    __module__ = "pandas.core.frame"

    def __len__(self) -> int:
        return 64

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


def pairs(samples: Any) -> Any:
    return data.default_collate(samples)


def refused(join: Join, *arguments: Any, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        join(*arguments, **{"batch_size": 8, "shards": 4, **options})
    error = caught.value
    assert error.hint and "\n" not in error.message + error.hint
    return error


x, y = torch.randn(64, 6), torch.randint(0, 4, (64,))


@pytest.mark.parametrize(
    ("given", "sentence", "hint"),
    [
        ((x, y), "the dataset is a tuple of 2 tensors or arrays", "TensorDataset(x, y)"),
        ([x.numpy(), y.numpy()], "the dataset is a list of 2 tensors or arrays", "TensorDataset(x, y)"),
        ("data/train", "the dataset is a path or a name, 'data/train', and join opens nothing", "ImageFolder(path)"),
        (Path("data.csv"), "the dataset is a path or a name, 'data.csv'", "__getitem__"),
        (data.TensorDataset, "the dataset is the class TensorDataset", "TensorDataset(...)"),
        ({"train": [1], "test": [2]}, "the dataset is a dict with the keys 'train', 'test'", "dataset['train']"),
        ({"x": x, "y": y}, "the dataset is a dict with the keys 'x', 'y'", "entry n of each key"),
        (None, "the dataset, a NoneType, has no length", "__len__"),
        (torch.tensor(3.0), "the dataset, a Tensor, has no length", "__len__"),
        (DataFrame(), "the dataset is a DataFrame, which is a sequence of columns", "TensorDataset("),
    ],
    ids=["tuple", "list", "str", "path", "class", "splits", "columns", "none", "scalar", "frame"],
)
def test_what_is_no_dataset(joined: Join, given: Any, sentence: str, hint: str) -> None:
    training = sgd(mlp())
    error = refused(joined, training.model, training.optimizer, given)
    assert error.message.startswith(sentence)
    assert hint in str(error.hint)
    run = joined(training.model, training.optimizer, dataset(), batch_size=8, shards=4)
    with pytest.raises(ConfigError) as caught:
        run.evaluate(given, lambda batch: {})
    assert caught.value.message == error.message


@pytest.mark.parametrize("given", [x, x.numpy(), list(x), tuple(range(64)), np.arange(64)], ids=lambda v: str(type(v)))
def test_what_simply_works_as_a_dataset(joined: Join, given: Any) -> None:
    training = sgd(mlp())
    run = joined(training.model, training.optimizer, given, batch_size=8, shards=4)
    assert [len(batch) for step in run.steps(1) for batch in step] == [2] * 4


def test_a_loader_is_answered_with_its_own_values(joined: Join) -> None:
    training = sgd(mlp())

    def answer(loader: Any, **options: Any) -> str:
        error = refused(joined, training.model, training.optimizer, loader, **options)
        assert error.message == "the dataset is a DataLoader, and join makes the batches itself"
        return str(error.hint)

    given = dataset()
    begin = "holdfast.join(model, optimizer, loader.dataset, "
    assert answer(data.DataLoader(given, 32, shuffle=True)) == f"{begin}batch_size=32)"
    assert answer(data.DataLoader(given, 32), shards=8) == f"{begin}batch_size=32, shuffle=False)"
    some = data.DataLoader(given, 12, sampler=data.SubsetRandomSampler(range(9)), collate_fn=pairs, num_workers=2)
    expected = f"{begin}batch_size=12, shards=6, sampler=loader.sampler, collate_fn=loader.collate_fn, num_workers=2)"
    assert answer(some, shards=8) == expected
    split = data.DataLoader(given, 8, sampler=data.DistributedSampler(given, num_replicas=2, rank=0))
    assert answer(split) == f"{begin}batch_size=8)"  # join spreads the samples itself
    batches = data.BatchSampler(data.RandomSampler(given), 8, drop_last=True)
    assert answer(data.DataLoader(given, batch_sampler=batches)) == f"{begin}batch_sampler=loader.batch_sampler)"


def wrapped_in_ddp(model: nn.Module) -> nn.Module:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Linear, "the model is the class Linear"),
        (lambda: torch.optim.SGD(mlp().parameters(), lr=0.1), "join got the optimizer, an SGD, in place of the model"),
        (lambda: [mlp(), mlp()], "join got a list of 2 models"),
        (lambda: {"keys": mlp()}, "the models are named 'keys', and a module cannot have such parts"),
        (lambda: wrapped_in_ddp(mlp()), "the model is wrapped in DistributedDataParallel, which averages"),
        (lambda: nn.Sequential(nn.DataParallel(mlp())), "model.0 is wrapped in DataParallel"),
    ],
)
def test_what_is_no_model(joined: Join, model: Any, sentence: str) -> None:
    given = model if isinstance(model, type) else model()
    error = refused(joined, given, sgd(mlp()).optimizer, dataset())
    assert error.message.startswith(sentence)


def test_what_is_no_optimizer(joined: Join) -> None:
    training = sgd(mlp())
    model, optimizer = training.model, training.optimizer

    def said(given: Any) -> str:
        return refused(joined, model, given, dataset()).message

    assert said(torch.optim.AdamW) == "the optimizer is the class AdamW"
    assert said(torch.optim.lr_scheduler.StepLR(optimizer, 1)) == "the optimizer is a scheduler, a StepLR"
    assert said(model) == "join got a model, a Sequential, in place of the optimizer"
    assert said([optimizer, optimizer]) == "join got a list of 2 optimizers"
    assert said({}) == "there is no optimizer in what join was given"
    assert said({"": optimizer}) == "an optimizer is named ''"
    assert said({"a/b": optimizer}) == "an optimizer is named 'a/b'"
    assert said({"a": optimizer, "b": optimizer}) == "'a' and 'b' are one optimizer"
    assert said({"a": optimizer, "b": 3}) == "the optimizer 'b' is an int, not a torch.optim.Optimizer"
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    error = refused(joined, model, {"a": optimizer, "b": other}, dataset())
    assert error.message == "the optimizer 'b' trains 4 of 4 parameters that are not in the model given to join"
    assert "build the optimizer from model.parameters()" in str(error.hint)


def test_what_is_no_extra(joined: Join) -> None:
    training = sgd(mlp())
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)

    def said(extras: Any) -> str:
        return refused(joined, training.model, training.optimizer, dataset(), extras=extras).message

    assert said(scheduler) == "extras is a StepLR, and is to be a dict of names and things"
    assert said([scheduler]) == "extras is a list, and is to be a dict of names and things"
    assert said({"s": torch.optim.lr_scheduler.StepLR}) == "extras['s'] is the class StepLR"
    assert said({"m": training.model}) == "extras['m'] is what join was given already"
    assert said({"o": training.optimizer}) == "extras['o'] is what join was given already"
    assert said({"o": sgd(mlp()).optimizer}).startswith("extras['o'] is an optimizer, and optimizers are given by name")
    strange = torch.optim.lr_scheduler.StepLR(sgd(mlp()).optimizer, 1)
    assert said({"s": strange}) == "the scheduler extras['s'] is of an optimizer that join was not given"


def compiled(training: Any, how: str) -> Any:
    if how == "parts":
        return {name: torch.compile(module, backend="eager") for name, module in training.model.items()}
    return torch.compile(training.model, backend="eager") if how == "whole" else training.model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.parametrize(("first", "then"), [("whole", "plain"), ("plain", "parts"), ("parts", "whole")])
def test_a_run_resumes_with_and_without_compile(joined: Join, tmp_path: Path, first: str, then: str) -> None:
    """backend="eager" computes the same bits as no compilation, so that the digests can be compared."""

    def train(how: str, steps: int, place: Path | None) -> str:
        torch.manual_seed(0)
        training = gan()
        model = compiled(training, how)
        where = str(place) if place else None
        run = joined(model, training.optimizer, dataset(), batch_size=8, shards=4, checkpoint=where)
        g, d = (run.model[name] for name in "gd") if isinstance(run.model, nn.ModuleDict) else training.model.values()
        for step in run.steps(steps):
            for inputs, _ in step:
                F.softplus(d(g(inputs))).mean().backward()
            for optimizer in run.optimizer.values():
                optimizer.step()
        run.close()
        return run.digest()

    train(first, 2, tmp_path)
    assert train(then, 4, tmp_path) == train("plain", 4, None)
    stored = holdfast.checkpoint.load(str(tmp_path))
    assert set(stored["parameters"]) == set(OrderedDict(gan().model.named_parameters()))
    assert not [name for name in [*stored["parameters"], *stored["buffers"]] if "_orig_mod" in name]
