"""The forms in which updates come, and the form of a result: a stack, rows, state dicts, a stream of blocks.

All of them are read in pieces: some columns of every update, in one fixed order, as often as a rule asks. Nothing is
copied but what must be converted, and of that one block at a time. A result has the form of one update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.errors import ConfigError

State: TypeAlias = Mapping[str, torch.Tensor]
Numbers: TypeAlias = "npt.NDArray[np.float64]"
Value: TypeAlias = "torch.Tensor | dict[str, torch.Tensor]"


@dataclass(frozen=True)
class Blocks:
    """Updates that are read block by block, each time anew: `read()` gives tensors (n, some columns), all d of them
    in order.

    For updates that are not in memory. Blocks may have any widths; the result does not depend on them.
    """

    n: int
    d: int
    read: Callable[[], Iterable[torch.Tensor]]
    dtype: torch.dtype = torch.float32


UpdatesLike: TypeAlias = "torch.Tensor | Sequence[torch.Tensor] | Sequence[State] | Blocks"


def mapped(paths: Sequence[str | Path], d: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One update a file of d plain numbers, mapped into memory: the kernel reads pages of it as they are needed."""
    size = torch.empty((), dtype=dtype).element_size() * d
    for path in paths:
        if Path(path).stat().st_size != size:
            raise ConfigError(
                f"{path} has {Path(path).stat().st_size} bytes, and {d} numbers of {dtype} take {size}",
                hint="give every update as one file of plain numbers of the same model",
            )
    return [torch.from_file(str(path), shared=False, size=d, dtype=dtype) for path in paths]


@dataclass(frozen=True)
class Piece:
    """Some columns of all updates: one-dimensional tensors of one dtype, and where they stand."""

    rows: Sequence[torch.Tensor]
    start: int
    key: str = ""
    key_start: int = 0  # where this key's columns begin


class Updates(ABC):
    """What a rule reads: `count` updates, in pieces."""

    count: int
    wide: bool  # some of it needs float64: float64 itself, and whole numbers

    @abstractmethod
    def pieces(self) -> Iterator[Piece]: ...

    def blocks(self) -> Iterator[Iterator[Piece]]:
        """The same in runs whose inner products are added up by themselves first."""
        yield self.pieces()

    def among_all(self, mine: Numbers, blocks: bool = False) -> list[Numbers]:
        """Where several read different columns of these updates, what each of them found; all come to the same then.
        `blocks`: one row for each block, and the rows come in the order of blocks, as one table."""
        return [mine]

    @abstractmethod
    def result(self, out: Value | None) -> Result:
        """Where the result goes; `out` is used if it fits, else refused."""


class Result:
    """One update's worth of memory, written piece by piece."""

    def __init__(self, value: Value, flat: Mapping[str, torch.Tensor]) -> None:
        self.value = value
        self._flat = flat

    def span(self, piece: Piece) -> torch.Tensor:
        start = piece.start - piece.key_start
        return self._flat[piece.key][start : start + len(piece.rows[0])]


class Rows(Updates):
    """A stack (n, ...) or n tensors of one shape."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._like = rows[0]
        _same_shapes([(row.dtype, tuple(row.shape)) for row in rows])
        _numbers(self._like.dtype, "an update")
        self._rows = [row.detach().reshape(-1) for row in rows]
        self.count, self.wide = len(rows), _wide(self._like.dtype)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(self._rows, 0)

    def result(self, out: Value | None) -> Result:
        return _tensor_result(out, self._like.shape, self._like.dtype, self._like.device)


class States(Updates):
    """State dicts with the same names, shapes and dtypes."""

    def __init__(self, states: Sequence[State]) -> None:
        first = states[0]
        for number, state in enumerate(states):
            odd = sorted(set(state) ^ set(first))
            if odd:
                side = "has no" if odd[0] in first else "alone has"
                raise ConfigError(f"update {number} {side} {odd[0]!r}", hint="all updates must be of the same model")
        for name, tensor in first.items():
            _same_shapes([(state[name].dtype, tuple(state[name].shape)) for state in states], name)
            _numbers(tensor.dtype, repr(name))
        self._states, self._first = states, first
        self.count, self.wide = len(states), any(_wide(tensor.dtype) for tensor in first.values())

    def pieces(self) -> Iterator[Piece]:
        start = 0
        for name, tensor in self._first.items():
            if tensor.numel():
                yield Piece([state[name].detach().reshape(-1) for state in self._states], start, name, start)
            start += tensor.numel()

    def result(self, out: Value | None) -> Result:
        if out is None:
            value = {name: torch.empty_like(tensor).contiguous() for name, tensor in self._first.items()}
        elif isinstance(out, Mapping) and list(out) == list(self._first):
            value = dict(out)
        else:
            raise ConfigError(
                "out is not a state dict with the updates' names", hint="leave it away, or give a copy of one"
            )
        flat = {}
        for name, tensor in value.items():
            like = self._first[name]
            flat[name] = _flat(tensor, like.shape, like.dtype, f"out[{name!r}]")
        return Result(value, flat)


class Streamed(Updates):
    """Blocks that are read anew for every pass."""

    def __init__(self, blocks: Blocks) -> None:
        _numbers(blocks.dtype, "a block")
        self._blocks = blocks
        self.count, self.wide = blocks.n, _wide(blocks.dtype)

    def pieces(self) -> Iterator[Piece]:
        given, start = self._blocks, 0
        for block in given.read():
            if block.ndim != 2 or block.shape[0] != given.n or block.dtype != given.dtype:
                said = f"{tuple(block.shape)} of {block.dtype}"
                raise ConfigError(f"a block is {said}, not ({given.n}, columns) of {given.dtype}", hint="see Blocks")
            if block.shape[1]:
                yield Piece(list(block.detach()), start)
            start += block.shape[1]
        if start != given.d:
            raise ConfigError(
                f"the blocks have {start} columns together, not {given.d}", hint="read() must give all, always"
            )

    def result(self, out: Value | None) -> Result:
        return _tensor_result(out, torch.Size([self._blocks.d]), self._blocks.dtype, torch.device("cpu"))


def as_updates(given: UpdatesLike) -> Updates:
    """The form that was given, checked; ConfigError with one sentence for anything else."""
    if isinstance(given, Blocks):
        if given.n < 1:
            raise ConfigError("there are no updates", hint="give at least one")
        return Streamed(given)
    if isinstance(given, torch.Tensor):
        if given.ndim < 2:
            raise ConfigError(f"a stack of updates is (n, ...), not {tuple(given.shape)}", hint="use torch.stack")
        given = list(given)
    rows = list(given)
    if not rows:
        raise ConfigError("there are no updates", hint="give at least one")
    if all(isinstance(row, torch.Tensor) for row in rows):
        return Rows([row for row in rows if isinstance(row, torch.Tensor)])
    if all(isinstance(row, Mapping) and all(isinstance(one, torch.Tensor) for one in row.values()) for row in rows):
        return States([row for row in rows if isinstance(row, Mapping)])
    raise ConfigError(
        "updates are neither tensors nor state dicts of tensors",
        hint="give a tensor (n, ...), a list of tensors, a list of state dicts, or Blocks",
    )


def as_result(updates: Updates, value: Value) -> Result:
    """A value that is there already, such as the last round's, in pieces like the updates'."""
    return updates.result(value)


def _tensor_result(out: Value | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Result:
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(out, torch.Tensor):
        raise ConfigError("out is not a tensor like one update", hint="leave it away, or give a tensor")
    return Result(out, {"": _flat(out, shape, dtype, "out")})


def _flat(out: torch.Tensor, shape: torch.Size, dtype: torch.dtype, name: str) -> torch.Tensor:
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        said = f"{tuple(out.shape)} of {out.dtype}"
        raise ConfigError(
            f"{name} is {said}, not a contiguous {tuple(shape)} of {dtype}", hint="make it like one update"
        )
    return out.detach().view(-1)


def _same_shapes(found: Sequence[tuple[torch.dtype, tuple[int, ...]]], name: str = "") -> None:
    for number, one in enumerate(found):
        if one != found[0]:
            of = f" in {name!r}" if name else ""
            said = f"{one[1]} of {one[0]}{of}, and update 0 {found[0][1]} of {found[0][0]}"
            raise ConfigError(f"update {number} has {said}", hint="all updates must be of the same model")


def _numbers(dtype: torch.dtype, name: str) -> None:
    if dtype.is_complex or dtype.itemsize > 8 or dtype in (torch.quint8, torch.qint8, torch.qint32):
        raise ConfigError(f"{name} is of {dtype}", hint="updates are of floating-point or whole numbers")


def _wide(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or dtype == torch.float64
