"""What people give to `holdfast.join`, looked at before anything is built: what it is, and the line to write instead.

Owns nothing. Each check returns what join goes on with, or raises a ConfigError whose hint is a line of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.iterables.reader import is_iterable
from holdfast.state.extras import Stateful
from holdfast.state.naming import named_parameters
from holdfast.state.optimizer import Optimizers, by_name, described

_CALL = "holdfast.join(model, optimizer, dataset, batch_size=...)"
_NAMES_SHOWN = 3
_WRAPPERS = {
    "DistributedDataParallel": "averages gradients over processes itself",
    "DataParallel": "spreads a batch over devices itself",
    "FullyShardedDataParallel": "leaves each process a part of the parameters",
    "DeepSpeedEngine": "averages gradients over processes itself",
}


def check_model(model: Any) -> torch.nn.Module:
    """The module that is trained; several by name become one."""
    if isinstance(model, Mapping) and model and all(isinstance(one, torch.nn.Module) for one in model.values()):
        try:
            model = torch.nn.ModuleDict(dict(model))
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"the models are named {', '.join(map(repr, model))}, and a module cannot have such parts ({error})",
                hint='name them with plain words: {"generator": g, "discriminator": d}',
            ) from error
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise ConfigError(f"the model is the class {model.__name__}", hint=f"make one: model = {model.__name__}(...)")
    if isinstance(model, torch.optim.Optimizer):
        raise ConfigError(f"join got the optimizer, {a_kind(model)}, in place of the model", hint=_CALL)
    if isinstance(model, list | tuple) and any(isinstance(one, torch.nn.Module) for one in model):
        raise ConfigError(
            f"join got {a_kind(model)} of {len(model)} models",
            hint='give them names: holdfast.join({"generator": g, "discriminator": d}, ...)',
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"the model is {a_kind(model)}, not a torch.nn.Module", hint=_CALL)
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _WRAPPERS and cls.__module__.partition(".")[0] in ("torch", "deepspeed"):
                where = f"model.{name}" if name else "the model"
                raise ConfigError(
                    f"{where} is wrapped in {cls.__name__}, which {_WRAPPERS[cls.__name__]}",
                    hint="give join the plain model (what is in its .module), and build the optimizer over that one",
                )
    return model


def check_optimizers(optimizer: Any, parameters: list[torch.nn.Parameter]) -> Optimizers:
    """One optimizer, or several by name, over parameters of the model."""
    several = isinstance(optimizer, Mapping)
    if several:
        _check_optimizer_names(optimizer)
    found: dict[str, torch.optim.Optimizer] = dict(optimizer) if several else {"": optimizer}
    for name, one in found.items():
        _check_optimizer_kind(one, described(name))
        count_trained(one, parameters, name)
    twins = [name for name, one in found.items() if sum(one is other for other in found.values()) > 1]
    if twins:
        raise ConfigError(
            f"{' and '.join(map(repr, twins))} are one optimizer", hint="give each optimizer to join once"
        )
    return found if several else found[""]


def _check_optimizer_names(optimizers: Mapping[Any, Any]) -> None:
    if not optimizers:
        raise ConfigError("there is no optimizer in what join was given", hint=_CALL)
    wrong = [name for name in optimizers if not isinstance(name, str) or not name or {".", "/"} & set(name)]
    if wrong:
        raise ConfigError(
            f"an optimizer is named {wrong[0]!r:.40}", hint='name them with plain words: {"g": opt_g, "d": opt_d}'
        )


def _check_optimizer_kind(optimizer: Any, what: str) -> None:
    kind = a_kind(optimizer)
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        name = optimizer.__name__
        raise ConfigError(
            f"the {what} is the class {name}", hint=f"make one: optimizer = torch.optim.{name}(model.parameters(), ...)"
        )
    if isinstance(optimizer, LRScheduler):
        raise ConfigError(
            f"the {what} is a scheduler, {kind}",
            hint='holdfast.join(model, optimizer, dataset, extras={"scheduler": scheduler}, ...)',
        )
    if isinstance(optimizer, torch.nn.Module):
        raise ConfigError(f"join got a model, {kind}, in place of the {what}", hint=_CALL)
    if isinstance(optimizer, list | tuple) and any(isinstance(one, torch.optim.Optimizer) for one in optimizer):
        raise ConfigError(
            f"join got {kind} of {len(optimizer)} optimizers",
            hint='give them names: holdfast.join(model, {"g": opt_g, "d": opt_d}, ...)',
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError(
            f"the {what} is {kind}, which leaves each process a part of its state",
            hint="build the optimizer that it wraps over model.parameters()",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"the {what} is LBFGS, which computes gradients several times in a step from what one worker has at hand",
            hint="use an optimizer whose step() takes no closure, such as AdamW or SGD with momentum",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the {what} is {kind}, not a torch.optim.Optimizer", hint=_CALL)


def count_trained(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], name: str = "") -> int:
    """How many parameters it trains. All must be the model's: the gradients of others are not reduced."""
    known = {id(parameter) for parameter in parameters}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in trained)
    if strangers:
        every = strangers == len(trained)
        raise ConfigError(
            f"the {described(name)} trains {strangers} of {len(trained)} parameters that are not in the model "
            "given to join",
            hint="build the optimizer from model.parameters() of the model that join gets, after the model was "
            "copied, loaded or moved"
            if every
            else "give join one module with everything that is trained, such as nn.ModuleList([encoder, head])",
        )
    return len(trained)


def doubts_about(model: torch.nn.Module, optimizers: Optimizers) -> Iterator[str]:
    """What may be meant, and often is not: parameters that no optimizer trains, and those that two do."""
    trainers: dict[int, list[str]] = {}
    for name, one in by_name(optimizers).items():
        for parameter in {id(parameter) for group in one.param_groups for parameter in group["params"]}:
            trainers.setdefault(parameter, []).append(name)
    named = named_parameters(model)
    idle = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in trainers]
    shared = [name for name, parameter in named.items() if len(trainers.get(id(parameter), ())) > 1]
    if idle:
        yield (
            f"{_counted(idle)} in no optimizer, so training does not change {'it' if len(idle) == 1 else 'them'}: "
            f"{_shown(idle)}; requires_grad_(False) says that this is meant, and saves the work"
        )
    if shared:
        by = " and ".join(map(repr, trainers[id(named[shared[0]])]))
        yield f"{_counted(shared)} in two optimizers, {by}, and each step of either changes it: {_shown(shared)}"


def _counted(names: list[str]) -> str:
    return "1 parameter of the model is" if len(names) == 1 else f"{len(names)} parameters of the model are"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def check_extras(extras: Any, model: torch.nn.Module, optimizers: Optimizers) -> dict[str, Stateful]:
    """By name, each with a state_dict that is its own."""
    if extras is None:
        return {}
    if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
        name = "scheduler" if isinstance(extras, LRScheduler) else "name"
        raise ConfigError(
            f"extras is {a_kind(extras)}, and is to be a dict of names and things",
            hint=f'give it a name: extras={{"{name}": {name if name == "scheduler" else "thing"}}}',
        )
    known = list(by_name(optimizers).values())
    for name, extra in extras.items():
        if isinstance(extra, type):
            raise ConfigError(f"extras[{name!r}] is the class {extra.__name__}", hint="give join the object itself")
        if extra is model or any(extra is one for one in known):
            raise ConfigError(
                f"extras[{name!r}] is what join was given already", hint="leave it out of extras: it travels anyway"
            )
        if not all(callable(getattr(extra, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"extras[{name!r}] is {a_kind(extra)} without state_dict and load_state_dict",
                hint="pass a scheduler, an AveragedModel, a GradScaler, or anything with these two methods",
            )
        if isinstance(extra, torch.optim.Optimizer):
            raise ConfigError(
                f"extras[{name!r}] is an optimizer, and optimizers are given by name beside each other",
                hint=f'holdfast.join(model, {{"first": optimizer, "{name}": {name}}}, ...)',
            )
        if isinstance(extra, LRScheduler) and not any(extra.optimizer is one for one in known):
            raise ConfigError(
                f"the scheduler extras[{name!r}] is of an optimizer that join was not given",
                hint="build it from the optimizer that is given to join",
            )
    return dict(extras)


def check_dataset(dataset: Any, *, shards: int) -> int:
    """How many samples it has, for join."""
    if is_iterable(dataset):
        return 0
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise ConfigError(
            "the dataset is a DataLoader, and join makes the batches itself", hint=_instead_of(dataset, shards)
        )
    return length_of(dataset)


def length_of(dataset: Any) -> int:
    """How many samples it has. Any worker must be able to fetch any sample of it, by its number."""
    kind = a_kind(dataset)
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"{kind} is an iterable dataset, whose samples have no numbers by which they could be spread over workers",
            hint="use a map-style dataset with __len__ and __getitem__, or holdfast.data.Stream over its files",
        )
    if isinstance(dataset, type):
        raise ConfigError(f"the dataset is the class {dataset.__name__}", hint=f"make one: {dataset.__name__}(...)")
    if isinstance(dataset, str | bytes | os.PathLike):
        raise ConfigError(
            f"the dataset is a path or a name, {str(dataset)!r:.80}, and join opens nothing",
            hint="open it first, as a dataset with __len__ and __getitem__: such as torchvision.datasets.ImageFolder"
            "(path), or datasets.load_dataset(name)['train']",
        )
    _check_columns(dataset)
    if not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"the dataset is {kind}, which gives its samples once and in one order",
            hint="make a list of it if it fits into memory: list(dataset); else a class with __len__ and __getitem__",
        )
    try:
        length = len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"the dataset, {kind}, has no length",
            hint="give it __len__ and __getitem__, so that any worker can fetch any sample",
        ) from error
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"the dataset, {kind}, has no samples by number", hint="give it __getitem__(index)")
    return length


def check_generator(generator: Any) -> int | None:
    """The seed of the order of samples that a generator stands for. It is not advanced."""
    if generator is None:
        return None
    if not isinstance(generator, torch.Generator):
        raise ConfigError(
            f"generator is {a_kind(generator)}, not a torch.Generator",
            hint="generator=torch.Generator().manual_seed(...), or a number as seed",
        )
    if generator.device.type != "cpu":
        raise ConfigError(
            f"the generator is on {generator.device}, and the order of samples is drawn on the CPU",
            hint="generator=torch.Generator().manual_seed(...)",
        )
    return generator.initial_seed()


def _check_columns(dataset: Any) -> None:
    """Things with a length that is not a number of samples: columns, splits, a pair of inputs and targets."""
    if isinstance(dataset, tuple | list) and _is_columns(dataset):
        names = ("x", "y", "z", "w")[: len(dataset)]
        raise ConfigError(
            f"the dataset is {a_kind(dataset)} of {len(dataset)} tensors or arrays, and not a sequence of samples",
            hint=f"torch.utils.data.TensorDataset({', '.join(names)}), with torch.as_tensor(...) around arrays",
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = [str(key) for key in list(dataset)[:8]]
        split = "train" if "train" in dataset else None
        raise ConfigError(
            f"the dataset is {a_kind(dataset)} with the keys {', '.join(map(repr, keys))}",
            hint=f"give join one of its parts: dataset[{split!r}]"
            if split
            else "make a dataset of it whose sample number n has entry n of each key",
        )
    if type(dataset).__name__ in ("DataFrame", "LazyFrame") and type(dataset).__module__.partition(".")[0] in (
        "pandas",
        "polars",
    ):
        raise ConfigError(
            "the dataset is a DataFrame, which is a sequence of columns",
            hint="torch.utils.data.TensorDataset(torch.as_tensor(frame[inputs].to_numpy()), ...)",
        )


def _is_columns(dataset: Any) -> bool:
    """A few tensors of one length that is larger than their number: (inputs, targets), not a list of samples."""
    if not 2 <= len(dataset) <= 4 or not all(hasattr(one, "shape") and hasattr(one, "dtype") for one in dataset):
        return False
    lengths = {one.shape[0] if len(one.shape) else 0 for one in dataset}
    return isinstance(dataset, tuple) or (len(lengths) == 1 and lengths.pop() > len(dataset))


def _instead_of(loader: torch.utils.data.DataLoader[Any], shards: int) -> str:
    """The call with the loader's own values."""
    data = torch.utils.data
    words = ["model", "optimizer", "loader.dataset"]
    if isinstance(loader.dataset, data.IterableDataset):
        return f"its dataset, {a_kind(loader.dataset)}, is iterable: write one with __len__ and __getitem__"
    if loader.batch_size is None:
        words.append("batch_sampler=loader.batch_sampler" if loader.batch_sampler is not None else "batch_size=...")
    else:
        words.append(f"batch_size={loader.batch_size}")
        if isinstance(shards, int) and shards > 0 and loader.batch_size % shards:
            words.append(f"shards={max(n for n in range(1, shards + 1) if loader.batch_size % n == 0)}")
        if loader.drop_last:
            words.append("drop_last=True")
        sampler: Any = loader.sampler
        shuffled = type(sampler) is data.RandomSampler and not sampler.replacement and sampler._num_samples is None
        if isinstance(sampler, data.SequentialSampler):
            words.append("shuffle=False")
        elif not shuffled and getattr(sampler, "num_replicas", 1) == 1:
            words.append("sampler=loader.sampler")
    if loader.collate_fn not in (data.default_collate, data.default_convert):
        words.append("collate_fn=loader.collate_fn")
    if loader.num_workers:
        words.append(f"num_workers={loader.num_workers}")
    if loader.num_workers and loader.prefetch_factor not in (None, 2):
        words.append(f"prefetch_factor={loader.prefetch_factor}")
    words += [f"{name}=loader.{name}" for name in ("worker_init_fn", "generator") if getattr(loader, name) is not None]
    return f"holdfast.join({', '.join(words)})"
