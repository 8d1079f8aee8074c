"""What rows in memory offer, and the parts of it that both implementations share.

A record is one row: 64 bits of id, a mark, values, and what the optimizer keeps, all float32. A mark says which update
changed it last (40 bits) and how many have (24 bits, and no more after the most that fit). Marks of ids that are not
admitted yet say the same of sightings. The order of records in memory is nobody's business: it follows from the order
of updates, and nothing else follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.tables.settings import Adam, Optimizer, TableSettings, Uniform

Ids: TypeAlias = npt.NDArray[np.uint64]
MarkValues: TypeAlias = npt.NDArray[np.uint64]
Counts: TypeAlias = npt.NDArray[np.uint32]
Values: TypeAlias = npt.NDArray[np.float32]
Records: TypeAlias = npt.NDArray[np.uint32]
Places: TypeAlias = npt.NDArray[np.int32]

HEADER_WORDS = 4
USES_BITS = 24
USES_MAX = (1 << USES_BITS) - 1
UPDATES_MAX = (1 << 40) - 1
CORRECTIONS_MAX = 1 << 20  # after so many updates of a row its bias is taken for corrected
KINDS = ("sgd", "adagrad", "rowwise-adagrad", "adam", "adamw")  # their numbers in rows.c
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Layout:
    """Of a record, in words of 32 bits."""

    dim: int
    state: int  # elements that the optimizer keeps

    @property
    def words(self) -> int:
        return HEADER_WORDS + self.dim + self.state + (self.dim + self.state) % 2  # ids lie on 8 bytes

    @property
    def nbytes(self) -> int:
        return 4 * self.words

    @staticmethod
    def of(settings: TableSettings) -> Layout:
        return Layout(settings.dim, settings.optimizer.state_elements(settings.dim))


@dataclass(frozen=True)
class Rule:
    """An optimizer as numbers. Everything that both implementations must round alike is rounded here."""

    kind: str
    lr: np.float32
    decay: np.float32
    eps: np.float32
    betas: tuple[np.float32, np.float32]
    rests: tuple[np.float32, np.float32]
    corrections: tuple[Values, Values]  # by the number of the row's update

    @staticmethod
    def of(optimizer: Optimizer, lr: float) -> Rule:
        decay, eps = getattr(optimizer, "weight_decay", 0.0), getattr(optimizer, "eps", 0.0)
        betas = optimizer.betas if isinstance(optimizer, Adam) else (0.0, 0.0)
        one = np.float64(1.0)
        return Rule(
            optimizer.kind,
            np.float32(lr),
            np.float32(decay),
            np.float32(eps),
            (np.float32(betas[0]), np.float32(betas[1])),
            (np.float32(one - betas[0]), np.float32(one - betas[1])),
            corrections(*betas),
        )


@lru_cache(maxsize=16)
def corrections(first: float, second: float) -> tuple[Values, Values]:
    """1 / (1 - first^t) and 1 / sqrt(1 - second^t). By multiplications only: libraries differ in their powers."""
    found = []
    for beta in (first, second):
        powers = [1.0]
        while powers[-1] > 2.0**-54 and len(powers) < CORRECTIONS_MAX:
            powers.append(powers[-1] * beta)
        found.append(1.0 - np.array(powers, dtype=np.float64))
    length = max(len(one) for one in found)
    ones, twos = (np.concatenate([one, np.full(length - len(one), one[-1])]) for one in found)
    ones[0] = twos[0] = 1.0  # there is no update with the number 0
    return (1.0 / ones).astype(np.float32), (1.0 / np.sqrt(twos)).astype(np.float32)


@dataclass(frozen=True)
class FirstValues:
    """What a row begins with: a pure function of the seed and the id."""

    seed: int  # mixed
    uniform: bool
    scale: np.float32

    @staticmethod
    def of(settings: TableSettings) -> FirstValues:
        uniform = isinstance(settings.first, Uniform)
        # The sum of four numbers from 0 to 65535 has the variance (65536² - 1) / 3.
        scale = settings.first.scale if uniform else settings.first.scale / ((65536.0**2 - 1.0) / 3.0) ** 0.5
        return FirstValues(mixed(settings.seed + 1), uniform, np.float32(scale))


def mixed(number: int) -> int:
    """A hash of 64 bits that has an inverse: different numbers stay different."""
    number &= _MASK
    number = (number ^ (number >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    number = (number ^ (number >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return number ^ (number >> 33)


@dataclass(frozen=True)
class United:
    """Ids, each once and in the order of first occurrence; which of them each given one is; how often each occurs."""

    ids: Ids
    which: Places
    seen: Counts


class Marks(Protocol):
    """Marks by id. No mark is 0: that is how an id without one reads."""

    def __len__(self) -> int: ...

    def get(self, ids: Ids) -> MarkValues: ...

    def put(self, ids: Ids, marks: MarkValues) -> None:
        """Ids, each once."""

    def remove(self, ids: Ids) -> None: ...

    def all(self) -> tuple[Ids, MarkValues]:
        """In any order."""

    @property
    def nbytes(self) -> int: ...


class Rows(Protocol):
    layout: Layout

    @property
    def candidates(self) -> Marks:
        """Of ids that are not admitted yet."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory in use."""

    def records(self) -> Records:
        """All, by reference: they change with the next call."""

    def look_up(self, ids: Ids) -> Values:
        """Values of rows, and the first values where there is no row."""

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """The number of each record; -1: there is none."""

    def step(self, united: United, sums: Values, rule: Rule, *, update: int, admit: int) -> None:
        """Admit those that have been seen often enough, and one step of each row. `sums` is written over."""

    def put(self, records: Records) -> None:
        """Ids, each once; a record that is there is written over."""

    def remove(self, ids: Ids) -> int:
        """How many of them were there."""

    def clear(self) -> None:
        """No rows and no candidates."""


class Kernels(Protocol):
    """One implementation."""

    def unite(self, ids: Ids, times: Counts | None) -> United:
        """`times`: how often each one counts; once, if nothing is said."""

    def add_up(self, united: United, gradients: Values) -> Values:
        """The sum for each id, in the order in which they come."""

    def rows(self, settings: TableSettings) -> Rows: ...

    def marks(self) -> Marks: ...


def ids_of(records: Records) -> Ids:
    return np.ascontiguousarray(records[:, 0:2]).view(np.uint64).reshape(-1)


def marks_of(records: Records) -> MarkValues:
    return np.ascontiguousarray(records[:, 2:4]).view(np.uint64).reshape(-1)
