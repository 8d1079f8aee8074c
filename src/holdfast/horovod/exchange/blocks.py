"""Which parts of a run of memory are taken: first fit, and neighbours that are free become one again. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ALIGNMENT = 4096  # blocks begin on pages, so that no two of them share one


@dataclass
class Blocks:
    """Over `size` bytes. Offsets are from 0 on."""

    size: int
    _free: list[tuple[int, int]] = field(default_factory=list)  # (start, stop), in order
    _taken: dict[int, int] = field(default_factory=dict)  # start -> stop

    def __post_init__(self) -> None:
        self._free = [(0, self.size)]

    def take(self, length: int) -> int | None:
        """The offset of a block of so many bytes; None if there is no room."""
        length = max(ALIGNMENT, -(-length // ALIGNMENT) * ALIGNMENT)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= length:
                if stop - start == length:
                    del self._free[index]
                else:
                    self._free[index] = (start + length, stop)
                self._taken[start] = start + length
                return start
        return None

    def give_back(self, offset: int) -> None:
        start, stop = offset, self._taken.pop(offset)
        index = bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
        insort(self._free, (start, stop))
