"""Datasets that bring their own order of an epoch, because only they know which samples are read well together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Arrangement(ABC):
    """A dataset of `len()` samples an epoch, in the order that a seed gives them.

    `numbers` says what is in which place of an epoch, and depends on nothing but what it was made from; `dataset[n]` is
    then what a number stands for. Which numbers there are is the arrangement's own affair.
    """

    digest: str  # the same in workers whose data and order are the same

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


class Arranged(ABC):
    """A dataset that knows its order, given to join."""

    @abstractmethod
    def arranged(self, seed: int, *, shuffle: bool) -> Arrangement: ...
