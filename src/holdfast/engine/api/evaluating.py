"""An evaluation cut into chunks: what each of them gives, and how they are put together. No word passes here.

A chunk is a fixed piece of the dataset, `batch_size` samples in their order, whoever computes it: the generators are
seeded from the run's seed and its number, the model is in eval mode, and it is fetched and computed by itself. Its
results are therefore the same bits on every worker, as those of a shard are. Put together they are sums that are
rounded once (`math.fsum`), so that neither the order nor the number of workers is in the result.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from holdfast.core.errors import ConfigError
from holdfast.data.alignment import align_batch
from holdfast.data.fetching import ShardFetcher
from holdfast.data.seeding import derive_seed, device_generators, seed_everything
from holdfast.engine.api.inputs import length_of

Weighed: TypeAlias = dict[str, tuple[float, float]]  # metric -> sum, and the weight that the sum is over
CHUNKS_MAX = 1 << 20
METRICS_MAX = 256
_FN_HINT = (
    "let it return a dict of numbers, each the mean over the batch's samples, as in {'loss': F.cross_entropy(...)}, "
    "or (sum, count) where something else than samples is counted"
)


class Chunks:
    """A dataset in pieces, and the function that measures one of them."""

    def __init__(
        self,
        dataset: Any,
        fn: Callable[[Any], Any],
        *,
        batch_size: int,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        modules: Sequence[torch.nn.Module],
    ) -> None:
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(
                f"batch_size is {batch_size!r:.40}", hint="give the number of samples that fit into memory"
            )
        if not callable(fn):
            raise ConfigError(f"evaluate got a {type(fn).__name__} to measure with", hint=_FN_HINT)
        self._length = _length(dataset)
        self._fn = fn
        self._size = batch_size
        self._seed = derive_seed(seed, "evaluate")
        self._fetcher = ShardFetcher(dataset, self._seed, collate_fn)
        self._modules = modules
        self._buffers: list[_Buffer] = []
        self.count = -(-self._length // batch_size)
        if self.count > CHUNKS_MAX:
            raise ConfigError(f"{self.count} pieces are too many for an evaluation", hint="give a larger batch_size")

    def measure(self, chunk: int) -> Weighed:
        """The results of one. Call it in `evaluation`."""
        first = chunk * self._size
        indices = list(range(first, min(first + self._size, self._length)))
        batch = align_batch(self._fetcher.fetch(0, chunk, indices))
        seed_everything(derive_seed(self._seed, 0, chunk))
        found = _weighed(self._fn(batch), len(indices))
        for buffer in self._buffers:
            buffer.put_back()
        return found

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Eval mode, no gradients; afterwards every module, buffer and generator is as it was."""
        training = [(module, module.training) for root in self._modules for module in root.modules()]
        parameters = [(name, one, one._version) for root in self._modules for name, one in root.named_parameters()]
        generators = _generators()
        for root in self._modules:
            root.eval()
        try:
            with torch.no_grad():
                self._buffers = [_Buffer(module, key) for module, key in _buffers_of(self._modules)]
                yield
        finally:
            self._buffers = []
            for module, was in training:
                module.training = was
            for restore in generators:
                restore()
        changed = next((name for name, parameter, version in parameters if parameter._version != version), None)
        if changed is not None:
            raise ConfigError(
                f"the evaluation has changed the parameter {changed!r}, so workers would differ by their part in it",
                hint="an evaluation only looks at the model: change it in the lines after it, on every worker",
            )


class _Buffer:
    """A buffer of a module as it was before the first chunk. What a chunk makes of it is no part of the next."""

    def __init__(self, module: torch.nn.Module, key: str) -> None:
        tensor = module._buffers[key]
        assert tensor is not None
        self._module, self._key, self._tensor, self._version = module, key, tensor, tensor._version
        self._values = tensor.clone()

    def put_back(self) -> None:
        self._module._buffers[self._key] = self._tensor
        if self._tensor._version != self._version:
            self._tensor.copy_(self._values)
            self._version = self._tensor._version


def _buffers_of(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Those that are state. Others are caches, which follow from what comes, and are left alone."""
    for root in modules:
        for module in root.modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    yield module, key


def _length(dataset: Any) -> int:
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise ConfigError(
            "evaluate got a DataLoader, which cuts the data in its own way",
            hint="give the dataset itself and batch_size: run.evaluate(loader.dataset, fn, batch_size=...)",
        )
    length = length_of(dataset)
    if not length:
        raise ConfigError("the dataset to evaluate is empty", hint="give one with at least one sample")
    return length


def _weighed(result: Any, samples: int) -> Weighed:
    if not isinstance(result, Mapping) or not result or len(result) > METRICS_MAX:
        raise ConfigError(f"the evaluation's function returned a {type(result).__name__}", hint=_FN_HINT)
    found: Weighed = {}
    for name, value in result.items():
        if not isinstance(name, str):
            raise ConfigError(f"the evaluation's function returned the name {name!r:.40}", hint=_FN_HINT)
        if isinstance(value, tuple):
            if len(value) != 2:
                raise ConfigError(f"{name!r} is {len(value)} values", hint=_FN_HINT)
            found[name] = (_number(name, value[0]), _number(name, value[1]))
        else:
            found[name] = (_number(name, value) * samples, float(samples))
    return found


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ConfigError(f"the evaluation's function returned {what} for {name!r}", hint=_FN_HINT) from error


def put_together(chunks: Iterable[Weighed]) -> dict[str, float]:
    """The means over all chunks. Each sum is exact and rounded once, so the order does not matter."""
    every = list(chunks)
    names = set(every[0])
    for one in every:
        if set(one) != names:
            some = ", ".join(sorted(names ^ set(one)))
            raise ConfigError(
                f"the evaluation's function returned {some} for some batches and not for others",
                hint="return the same names for every batch, with (0.0, 0) where there is nothing to count",
            )
    found = {}
    for name in sorted(names):
        total, weight = _sum(one[name][0] for one in every), _sum(one[name][1] for one in every)
        found[name] = total / weight if weight else math.nan
    return found


def _sum(values: Iterable[float]) -> float:
    every = list(values)
    odd = [value for value in every if not math.isfinite(value)]
    if odd:
        return odd[0] if all(value == odd[0] for value in odd) else math.nan
    try:
        return math.fsum(every)
    except OverflowError:
        return math.nan


def _generators() -> list[Callable[[], object]]:
    """What puts every generator back to where it is now."""
    state = random.getstate()
    found: list[Callable[[], object]] = [lambda: random.setstate(state)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numbers = numpy.random.get_state()
        found.append(lambda: numpy.random.set_state(numbers))
    torch_state = torch.get_rng_state()
    found.append(lambda: torch.set_rng_state(torch_state))
    return [*found, *device_generators()]
