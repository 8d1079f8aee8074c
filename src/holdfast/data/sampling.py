"""The order of an epoch's samples as a user's sampler gives it: drawn whole, once an epoch, the same in every worker.

A sampler is an iterable of indices with a length, or a function from the epoch's number to indices; a batch sampler
gives lists of indices. Before it is asked, every generator that it can reach is seeded from (seed, epoch), so that an
epoch's order is a function of these. What it leaves behind in the process's generators is undone.

Invariants: `order(epoch)` depends on nothing but what was given, the seed and the epoch; a sampler for which that does
not hold is refused when it is first seen. Owns a cache of two orders, as tensors, which changes no result.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import Sampler

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.seeding import derive_seed, seed_everything

_CACHED_EPOCHS = 2  # a prefetching loader looks into the next epoch while this one ends
_AT_ONCE = 1 << 16  # indices that are taken out of a sampler at a time
_PARTS_MAX = 64  # samplers in samplers
_QUICK = 1_000_000  # so many indices are drawn once more when the run begins


@dataclass(frozen=True)
class Order:
    """An epoch's samples. `ends`: where each of its batches ends, if the batches come from a batch sampler."""

    indices: torch.Tensor
    ends: torch.Tensor | None = None

    @cached_property
    def as_array(self) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
        """The same memory. A few numbers of it are taken several times as fast as from a tensor."""
        return self.indices.numpy()

    def batch(self, position: int) -> tuple[int, int]:
        """Where a batch begins and ends."""
        assert self.ends is not None
        return int(self.ends[position - 1]) if position else 0, int(self.ends[position])

    def same_as(self, other: Order) -> bool:
        if (self.ends is None) != (other.ends is None) or not torch.equal(self.indices, other.indices):
            return False
        return self.ends is None or other.ends is None or torch.equal(self.ends, other.ends)

    def digest(self) -> str:
        hasher = xxhash.xxh3_128()
        for tensor in (self.indices, self.ends):
            hasher.update(b"" if tensor is None else tensor.numpy().data)
        return hasher.hexdigest()


class Sampling:
    """What a sampler (with `batches`, a batch sampler) makes of each epoch of a dataset of `length` samples."""

    def __init__(self, given: Any, *, length: int, seed: int, shards: int, batches: bool = False) -> None:
        self._name = "batch_sampler" if batches else "sampler"
        self._given = given
        self._length = length
        self._seed = seed
        self._shards = shards
        self.batches = batches
        self.is_function = callable(given) and not hasattr(given, "__iter__")
        self._cache: dict[int, Order] = {}
        self._check_kind()
        first = self.order(0)
        self.digest = first.digest()
        self.size = len(first.indices if first.ends is None else first.ends)  # samples, or batches, of the first epoch
        sizes = torch.diff(first.ends, prepend=torch.zeros(1, dtype=torch.int64)) if first.ends is not None else None
        self.largest = int(sizes.max()) if sizes is not None else 0  # batch of the first epoch
        self._check_repeats(first)

    def order(self, epoch: int) -> Order:
        found = self._cache.get(epoch)
        if found is None:
            found = self._draw(epoch)
            size = len(found.indices if found.ends is None else found.ends)
            if epoch and not self.is_function and size != self.size:
                things = "batches" if self.batches else "samples"
                raise ConfigError(
                    f"the {self._name} gives {size} {things} in epoch {epoch}, and {self.size} in epoch 0",
                    hint=f"for epochs of different length give a function: {self._name}=lambda epoch: ...",
                )
            while len(self._cache) >= _CACHED_EPOCHS:
                self._cache.pop(next(iter(self._cache)))
            self._cache[epoch] = found
        return found

    def _draw(self, epoch: int) -> Order:
        seed = derive_seed(self._seed, "sampler", epoch)
        with _seeded(seed):
            source = self._given(epoch) if self.is_function else self._given
            for part in _parts_of(source):
                prepare(part, epoch, seed)
            return self._batches(source, epoch) if self.batches else self._samples(source, epoch)

    def _samples(self, source: Iterable[Any], epoch: int) -> Order:
        indices = self._numbers(source)
        if not len(indices):
            raise ConfigError(f"the {self._name} gives nothing in epoch {epoch}", hint="give at least one batch")
        return Order(indices)

    def _batches(self, source: Iterable[Any], epoch: int) -> Order:
        found: list[torch.Tensor] = []
        for batch in source:
            if not hasattr(batch, "__iter__") or getattr(batch, "ndim", 1) == 0:
                raise ConfigError(
                    f"the batch_sampler gives {a_kind(batch)}, and is to give lists of indices",
                    hint="give it as sampler=, with batch_size=...",
                )
            indices = self._numbers(batch)
            if len(indices) < self._shards:
                raise ConfigError(
                    f"batch {len(found)} of epoch {epoch} has {len(indices)} samples, fewer than the "
                    f"{self._shards} shards",
                    hint=f"leave it out (drop_last=True), or use at most {max(1, len(indices))} shards",
                )
            found.append(indices)
        if not found:
            raise ConfigError(f"the batch_sampler gives nothing in epoch {epoch}", hint="give at least one batch")
        return Order(torch.cat(found), torch.tensor([len(batch) for batch in found]).cumsum(0))

    def _numbers(self, source: Iterable[Any]) -> torch.Tensor:
        """The indices as one tensor, in few bytes also while it is made."""
        if isinstance(source, torch.Tensor | numpy.ndarray):
            pieces = [self._checked(numpy.asarray(source))]
        else:
            iterator = iter(source)
            pieces = []
            while chunk := list(islice(iterator, _AT_ONCE)):
                pieces.append(self._checked(self._array(chunk)))
        return torch.from_numpy(numpy.concatenate(pieces) if pieces else numpy.empty(0, dtype=numpy.int64))

    def _array(self, chunk: list[Any]) -> Any:
        if all(type(index) is int for index in chunk):
            return numpy.array(chunk)
        try:
            return numpy.array([operator.index(index) for index in chunk])
        except TypeError as error:
            wrong = next(index for index in chunk if not _is_index(index))
            several = isinstance(wrong, list | tuple) and not self.batches
            raise ConfigError(
                f"the {self._name} gives {a_kind(wrong)}, and is to give the numbers of samples",
                hint="give it as batch_sampler=, without batch"
                if several
                else "give integers from 0 to len(dataset)-1",
            ) from error

    def _checked(self, found: Any) -> Any:
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ConfigError(
                f"the {self._name} gives an array of {found.dtype} with {found.ndim} dimensions",
                hint="give integers from 0 to len(dataset)-1",
            )
        wrong = found[(found < 0) | (found >= self._length)]
        if len(wrong):
            raise ConfigError(
                f"the {self._name} gives the index {wrong[0]}, and the dataset has {self._length} samples",
                hint="give integers from 0 to len(dataset)-1",
            )
        return found.astype(numpy.int64)

    def _check_kind(self) -> None:
        given, name = self._given, self._name
        if isinstance(given, type):
            raise ConfigError(f"{name} is the class {given.__name__}", hint=f"make one: {given.__name__}(...)")
        if self.is_function:
            return
        if not hasattr(given, "__iter__"):
            raise ConfigError(
                f"{name} is {a_kind(given)}", hint="give a sampler, indices, or a function: lambda epoch: ..."
            )
        if not isinstance(given, Sized) or hasattr(given, "__next__"):
            raise ConfigError(
                f"the {name}, {a_kind(given)}, has no length",
                hint=f"give it __len__ and an __iter__ that begins anew, or a function: {name}=lambda epoch: ...",
            )
        for part in _parts_of(given):
            if getattr(part, "num_replicas", 1) != 1:
                raise ConfigError(
                    f"the {name} has {a_kind(part)}, which gives each of {part.num_replicas} processes a part "
                    "of the samples, and the others would not be used",
                    hint="leave it out: join shuffles (shuffle=True), and spreads the samples over the workers itself",
                )

    def _check_repeats(self, first: Order) -> None:
        """A worker that comes later draws an order again: a sampler that then gives another is of no use."""
        if len(first.indices) <= _QUICK and not self.is_function:  # which may know of no second epoch
            self._draw(1)
        if not self._draw(0).same_as(first):
            raise ConfigError(
                f"the {self._name} gives another order when it is asked again for the same epoch",
                hint="shuffle a copy; count epochs in set_epoch(epoch); draw from the global generators or from one in "
                f"an attribute, which are seeded before; or give a function: {self._name}=lambda epoch: ...",
            )


def _is_index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def tell_epoch(thing: Any, epoch: int) -> None:
    if callable(set_epoch := getattr(thing, "set_epoch", None)):
        set_epoch(epoch)


def prepare(part: Any, epoch: int, seed: int) -> None:
    """Tell a sampler the epoch, and seed the generators that it holds."""
    tell_epoch(part, epoch)
    for held in list(getattr(part, "__dict__", {}).values()):
        if isinstance(held, torch.Generator):
            held.manual_seed(seed)
        elif isinstance(held, random.Random):
            held.seed(seed)
        elif isinstance(held, numpy.random.RandomState):
            held.seed(seed & 0xFFFF_FFFF)
        elif isinstance(held, numpy.random.Generator):
            bits: Any = held.bit_generator
            bits.state = type(bits)(seed).state


def _parts_of(given: Any) -> list[Any]:
    """A sampler, and those that it holds: a batch sampler has one."""
    parts = [given]
    for part in parts:
        for name, held in getattr(part, "__dict__", {}).items():
            for one in held if isinstance(held, list | tuple) and len(held) <= _PARTS_MAX else (held,):
                is_sampler = isinstance(one, Sampler) or (name.endswith("sampler") and hasattr(one, "__iter__"))
                if is_sampler and not any(one is other for other in parts) and len(parts) < _PARTS_MAX:
                    parts.append(one)
    return parts


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The process's generators begin at `seed`, and go on afterwards as if nothing had been."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    seed_everything(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


Given = Iterable[Any] | Callable[[int], Iterable[Any]]  # what join takes as a sampler
