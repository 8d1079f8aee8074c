"""holdfast.data.Mixture: several streams at once, each as often as its weight says.

The mixture goes in cycles, in which each stream has a fixed number of places; where these are is drawn anew in each
cycle. A stream has its own epochs: when all its samples have come once, it begins anew in another order. So what is in
any place follows from how many places the stream has had, which is arithmetic. Owns a cache of cycles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import Dataset

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.arrangement import Arranged, Arrangement
from holdfast.data.seeding import derive_seed
from holdfast.data.streams.block_order import Numbers

_CYCLE = 1000  # places, where weights are no integers
_CYCLE_MAX = 100_000
_CACHED_CYCLES = 8
_CALL = "holdfast.data.Mixture([(stream, 0.7), (other, 0.3)])"


class Mixture(Dataset[Any], Arranged):
    """`parts`: streams and their weights. `samples` of an epoch: if nothing is said, as many as all streams have.

    Weights that are integers are kept to exactly, others are rounded to thousandths of their sum.
    """

    def __init__(self, parts: Iterable[tuple[Any, float]], *, samples: int | None = None) -> None:
        self._parts = list(parts)
        for part in self._parts:
            if not isinstance(part, Sequence) or len(part) != 2 or not isinstance(part[0], Arranged):
                raise ConfigError(f"a part of the mixture is {a_kind(part)}, not a stream and its weight", hint=_CALL)
            if isinstance(part[1], bool) or not isinstance(part[1], int | float) or not 0 < part[1] < float("inf"):
                raise ConfigError(f"a weight is {part[1]!r:.40}", hint="a weight is a number above 0")
            if not len(part[0]):  # type: ignore[arg-type]
                raise ConfigError("a stream of the mixture is empty", hint="leave it out")
        if not self._parts:
            raise ConfigError("the mixture has no parts", hint=_CALL)
        if samples is not None and (type(samples) is not int or samples < 1):
            raise ConfigError(f"samples is {samples!r:.40}", hint="samples counts those of an epoch")
        self.counts = _counts([weight for _, weight in self._parts])
        self._samples = sum(len(part) for part, _ in self._parts) if samples is None else samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> Any:
        """Sample `number` of the mixture in its first epoch, if nothing is shuffled."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        arranged = self.arranged(0, shuffle=False)
        return arranged[arranged.numbers(0, number, number + 1)[0]]

    def arranged(self, seed: int, *, shuffle: bool) -> Arrangement:
        streams = [
            part.arranged(derive_seed(seed, "part", place), shuffle=shuffle)
            for place, (part, _) in enumerate(self._parts)
        ]
        return _Mixed(streams, self.counts, self._samples, seed if shuffle else None)


class _Mixed(Arrangement):
    """Number n of stream i of s is n * s + i."""

    def __init__(self, streams: list[Arrangement], counts: list[int], samples: int, seed: int | None) -> None:
        self._streams, self._counts, self._samples, self._seed = streams, counts, samples, seed
        self._cycle = sum(counts)
        self._cycles: dict[int, Numbers] = {}
        words = repr(([one.digest for one in streams], counts, samples))
        self.digest = xxhash.xxh3_128_hexdigest(words.encode())

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> Any:
        number, stream = divmod(number, len(self._streams))
        return self._streams[stream][number]

    def numbers(self, epoch: int, start: int, stop: int) -> list[int]:
        first, last = epoch * self._samples + start, epoch * self._samples + stop
        cycle, skipped = divmod(first, self._cycle)
        drawn = numpy.concatenate(
            [self._drawn(one) for one in range(cycle, -(-last // self._cycle) or 1)] or [_NOTHING]
        )
        before, wanted = drawn[:skipped], drawn[skipped : skipped + stop - start]
        found = numpy.empty(len(wanted), dtype=numpy.int64)
        for stream, count in enumerate(self._counts):
            places = numpy.flatnonzero(wanted == stream)
            had = cycle * count + int((before == stream).sum())
            found[places] = self._of_stream(stream, had, had + len(places))
        numbers: list[int] = found.tolist()
        return numbers

    def _of_stream(self, stream: int, first: int, last: int) -> Numbers:
        """Of a stream, what comes after it has had `first` places, through its own epochs."""
        arrangement, found = self._streams[stream], []
        while first < last:
            epoch, start = divmod(first, len(arrangement))
            stop = min(len(arrangement), start + last - first)
            found += arrangement.numbers(epoch, start, stop)
            first += stop - start
        return numpy.array(found, dtype=numpy.int64) * len(self._streams) + stream

    def _drawn(self, cycle: int) -> Numbers:
        """Whose each place of a cycle is."""
        found = self._cycles.get(cycle)
        if found is None:
            streams = numpy.repeat(numpy.arange(len(self._counts)), self._counts)
            if self._seed is None:  # evenly spread
                order = numpy.argsort(
                    numpy.concatenate([(numpy.arange(n) + 0.5) / n for n in self._counts]), kind="stable"
                )
            else:
                generator = torch.Generator().manual_seed(derive_seed(self._seed, "cycle", cycle))
                order = torch.randperm(self._cycle, generator=generator).numpy()
            found = streams[order]
            while len(self._cycles) >= _CACHED_CYCLES:
                self._cycles.pop(next(iter(self._cycles)))
            self._cycles[cycle] = found
        return found


_NOTHING = numpy.empty(0, dtype=numpy.int64)


def _counts(weights: list[float]) -> list[int]:
    """Places of each stream in a cycle."""
    if all(isinstance(weight, int) for weight in weights) and sum(weights) <= _CYCLE_MAX:
        return [int(weight) for weight in weights]
    exact = [weight * _CYCLE / sum(weights) for weight in weights]
    counts = [int(one) for one in exact]
    by_rest = sorted(range(len(exact)), key=lambda place: (counts[place] - exact[place], place))
    for place in by_rest[: _CYCLE - sum(counts)]:
        counts[place] += 1
    if min(counts) < 1:
        raise ConfigError(
            f"the weight {weights[counts.index(0)]!r} is less than a thousandth of the mixture",
            hint="give integers, which are kept to exactly, such as 1 and 5000",
        )
    return counts
