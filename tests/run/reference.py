"""The gold: what Holdfast promises to compute, as a plain PyTorch loop on one process. No view, no worker, no sums.

Each shard is computed by itself from the same start. Gradients are added in the shape that reduce/tree.py documents
and divided by the number of shards; so are the buffers that a shard has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from cases import Case, Training, dataset
from torch.utils.data import default_collate

from holdfast.data.seeding import derive_seed, seed_everything
from holdfast.state.optimizer import by_name

SEED = 9


def tree_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Cut at the largest power of two below the length."""
    if len(values) == 1:
        return values[0]
    middle = 1
    while middle * 2 < len(values):
        middle *= 2
    return tree_sum(values[:middle]) + tree_sum(values[middle:])


def mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    if values[0].dtype == torch.bool:
        return torch.stack(list(values)).any(0)
    if not (values[0].dtype.is_floating_point or values[0].dtype.is_complex):
        return _floored(values)
    return tree_sum(values) / len(values)


def _floored(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """In Python's integers, which do not overflow."""
    columns = zip(*(value.flatten().tolist() for value in values), strict=True)
    means = [sum(column) // len(values) for column in columns]
    return torch.tensor(means, dtype=values[0].dtype).view(values[0].shape)


def buffer_mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Narrow numbers are added in float32, and rounded once, when they are written."""
    narrow = values[0].dtype.is_floating_point and values[0].element_size() < 4
    return mean([value.float() for value in values] if narrow else values)


def permutation(epoch: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_seed(SEED, "epoch", epoch))
    return torch.randperm(length, generator=generator).tolist()


def train(case: Case, *, shards: int, batch: int) -> tuple[Training, list[float]]:
    """The state after the case's steps, and the loss of each."""
    with case.around():
        return _train(case, shards=shards, batch=batch)


def _train(case: Case, *, shards: int, batch: int) -> tuple[Training, list[float]]:
    training, data = case.start(), dataset()
    model = training.model
    per_epoch = len(data) // batch
    losses = []
    for step in range(case.steps):
        seed_everything(derive_seed(SEED, step, "begin"))
        case.before(training, step)
        epoch, place = divmod(step, per_epoch)
        order = permutation(epoch, len(data))[place * batch :]
        size = batch // shards
        start = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        gradients: list[list[torch.Tensor | None]] = []
        buffers: list[dict[str, torch.Tensor]] = []
        recorded = []
        for shard in range(shards):
            for name, value in start.items():
                write(model, name, value)
            for parameter in model.parameters():
                parameter.grad = None
            torch.clear_autocast_cache()
            samples = default_collate([data[index] for index in order[shard * size : (shard + 1) * size]])
            seed_everything(derive_seed(SEED, step, shard))
            recorded.append(float(case.shard(training, samples, step).detach()))
            gradients.append([None if p.grad is None else p.grad.detach().clone() for p in model.parameters()])
            buffers.append({name: buffer.detach().clone() for name, buffer in model.named_buffers()})
        for parameter, values in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            there = [torch.zeros_like(parameter) if value is None else value for value in values]
            parameter.grad = None
            if not all(value is None for value in values):
                parameter.grad = torch.empty_like(parameter).copy_(mean(there))
        for name, value in start.items():
            values = [ended[name] for ended in buffers]
            if all(other.shape == value.shape for other in values):
                changed = any(raw(other) != raw(value) for other in values)
                write(model, name, buffer_mean(values) if changed else value)
        seed_everything(derive_seed(SEED, step, "apply"))
        torch.clear_autocast_cache()
        losses.append(sum(recorded) / shards)
        case.apply(training, step)
    return training, losses


def write(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, key = name.rpartition(".")
    module = dict(model.named_modules())[owner]  # a scripted model has no get_submodule
    if module._buffers[key].shape == value.shape:
        module._buffers[key] = value.to(module._buffers[key].dtype).clone()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def state_of(training: Training) -> dict[str, str]:
    """Every bit that training depends on, by name; of a tensor a short digest. Caches follow from their input."""
    found: dict[str, str] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = hashlib.blake2b(raw(value), digest_size=6).hexdigest()
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                walk(f"{name}[{index}]", item)
        elif isinstance(value, (int, float, str, type(None))):
            found[name] = repr(value)

    for name, parameter in training.model.named_parameters():
        walk(name, parameter)
    for name, buffer in training.model.named_buffers():
        if not name.endswith("cache"):
            walk(name, buffer)
    for name, optimizer in by_name(training.optimizer).items():
        walk(f"optimizer{name}", optimizer.state_dict())
    for name, extra in training.extras.items():
        walk(name, extra.state_dict())
    return found
