"""Datasets that bring their own order of an epoch, because only they know which samples are read well together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import xxhash

from holdfast.data.epoch_cut import EpochCut


class Arrangement(ABC):
    """A dataset of `len()` samples an epoch, in the order that a seed gives them.

    `numbers` says what is in which place of an epoch, and depends on nothing but what it was made from; `dataset[n]` is
    then what a number stands for. Which numbers there are is the arrangement's own affair.
    """

    digest: str  # the same in workers whose data and order are the same
    cut: EpochCut | None = None  # how an epoch is cut into steps; None: in equal ones, as the run says

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> Any: ...

    @abstractmethod
    def numbers(self, epoch: int, start: int, stop: int) -> list[int]:
        """What is in the places `start` to `stop` of an epoch, of which there are `len()`."""

    def words(self) -> dict[str, Any] | None:
        """From what somebody without the data can say which samples are where; None: from nothing."""
        return None

    def wrapped(self, epoch: int, start: int, stop: int) -> list[int]:
        """As `numbers`. After the last place of the epoch comes its first again."""
        found: list[int] = []
        while start < stop:
            first = start % len(self)
            last = min(len(self), first + stop - start)
            found += self.numbers(epoch, first, last)
            start += last - first
        return found


class CutArrangement(Arrangement):
    """Another one, whose epochs are cut into steps that need not be equal."""

    def __init__(self, arrangement: Arrangement, cut: EpochCut) -> None:
        self._arrangement, self.cut = arrangement, cut
        self.digest = xxhash.xxh3_128_hexdigest(repr((arrangement.digest, cut.words())).encode())

    def __len__(self) -> int:
        return len(self._arrangement)

    def __getitem__(self, number: int) -> Any:
        return self._arrangement[number]

    def numbers(self, epoch: int, start: int, stop: int) -> list[int]:
        return self._arrangement.numbers(epoch, start, stop)

    def words(self) -> dict[str, Any] | None:
        words = self._arrangement.words()
        assert self.cut is not None
        return None if words is None else {**words, "cut": self.cut.words()}


class Arranged(ABC):
    """A dataset that knows its order, given to join."""

    comes_in_steps = False  # its arrangement says how large each step is

    @abstractmethod
    def arranged(self, seed: int, *, shuffle: bool) -> Arrangement: ...
