"""The compiled kernels: columns are cut among threads, and each calls columns.c for its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from holdfast.byzantine.kernels.networks import Comparator, sorting_network
from holdfast.byzantine.kernels.port import (
    COUNTED_EVERY,
    GROUP,
    PAGE,
    Counts,
    Flags,
    Matrix,
    Order,
    Ordered,
)
from holdfast.native import compiling

SOURCE = Path(__file__).with_name("columns.c")
REALS = {torch.float32: "float", torch.float64: "double"}
ALONE_COLUMNS = 1 << 14  # fewer are not worth a thread


def available(dtype: torch.dtype) -> bool:
    return _library(dtype) is not None


class NativeKernels:
    """columns.c, with as many threads as torch has."""

    def order(
        self,
        rows: Sequence[torch.Tensor],
        mix: Matrix | None,
        weights: Matrix | None,
        order: Order,
        offset: int,
        out: torch.Tensor,
    ) -> Ordered:
        width, network = len(out), _numbers(order.network(weights is not None))
        shares = _shares(width, GROUP)
        bad = np.zeros((len(shares), len(rows)), dtype=np.uint8)
        outside = np.zeros((len(shares), order.rows + 1), dtype=np.int64)

        def call(number: int, start: int, stop: int) -> int:
            return int(
                _loaded(out.dtype).order_columns(
                    *_given(rows, start, stop, mix),
                    _pointer(weights),
                    *network.arguments,
                    int(order.kind),
                    order.kept,
                    order.trim,
                    ctypes.c_int64(offset + start),
                    COUNTED_EVERY,
                    _address(out, start),
                    _pointer(bad[number]),
                    _pointer(outside[number]),
                )
            )

        _all(call, shares)
        counts: Counts = outside.sum(axis=0)
        return Ordered(_any(bad), counts[:-1], int(counts[-1]))

    def gram(self, rows: Sequence[torch.Tensor], mix: Matrix | None, origin: bool) -> tuple[Matrix, Flags]:
        width, updates = len(rows[0]), (len(rows) if mix is None else len(mix)) + int(origin)
        network = _numbers(sorting_network(updates, frozenset({(updates - 1) // 2})))
        pages = np.zeros((-(-width // PAGE), updates, updates), dtype=np.float64)
        shares = _shares(width, PAGE)
        bad = np.zeros((len(shares), len(rows)), dtype=np.uint8)

        def call(number: int, start: int, stop: int) -> int:
            return int(
                _loaded(rows[0].dtype).gram_columns(
                    *_given(rows, start, stop, mix),
                    int(origin),
                    *network.arguments,
                    _pointer(pages[start // PAGE :]),
                    _pointer(bad[number]),
                )
            )

        _all(call, shares)
        return pages, _any(bad)

    def combine(self, rows: Sequence[torch.Tensor], factors: Matrix, out: torch.Tensor) -> Flags:
        shares = _shares(len(out), GROUP)
        bad = np.zeros((len(shares), len(rows)), dtype=np.uint8)

        def call(number: int, start: int, stop: int) -> int:
            given = _given(rows, start, stop, None)[:3]
            places = _pointer(factors), _address(out, start), _pointer(bad[number])
            return int(_loaded(out.dtype).combine_columns(*given, *places))

        _all(call, shares)
        return _any(bad)


class _numbers:
    """A network as C takes it; keeps the numbers alive as long as the call lasts."""

    def __init__(self, network: tuple[Comparator, ...]) -> None:
        self._flat = np.array(network, dtype=np.int32).reshape(-1)
        self.arguments = (ctypes.c_void_p(self._flat.ctypes.data), ctypes.c_int64(len(network)))


def _any(bad: npt.NDArray[np.uint8]) -> Flags:
    found: Flags = bad.max(axis=0) > 0
    return found


def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    return compiling.library(SOURCE, f"REAL={REALS[dtype]}")


def _loaded(dtype: torch.dtype) -> ctypes.CDLL:
    found = _library(dtype)
    assert found is not None, "asked only where it is available"
    return found


def _shares(width: int, unit: int) -> list[tuple[int, int]]:
    """Columns for each thread, cut at multiples of the unit."""
    threads = max(1, min(torch.get_num_threads(), width // ALONE_COLUMNS))
    units = -(-width // unit)
    cuts = [min(width, units * number // threads * unit) for number in range(threads + 1)]
    return [(start, stop) for start, stop in pairwise(cuts) if stop > start]


def _all(call: Callable[[int, int, int], int], shares: list[tuple[int, int]]) -> None:
    if len(shares) == 1:
        results = [call(0, *shares[0])]
    else:
        with ThreadPoolExecutor(len(shares)) as threads:
            asked = [threads.submit(call, number, *share) for number, share in enumerate(shares)]
            results = [one.result() for one in asked]
    if any(results):
        raise MemoryError("no memory for a tile of columns")


def _given(
    rows: Sequence[torch.Tensor], start: int, stop: int, mix: Matrix | None
) -> tuple[ctypes.Array[ctypes.c_void_p], int, ctypes.c_int64, ctypes.c_void_p | None, int]:
    size = rows[0].element_size()
    pointers = (ctypes.c_void_p * len(rows))(*(row.data_ptr() + start * size for row in rows))
    return pointers, len(rows), ctypes.c_int64(stop - start), _pointer(mix), 0 if mix is None else len(mix)


def _pointer(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None) -> ctypes.c_void_p | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _address(tensor: torch.Tensor, start: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() + start * tensor.element_size())
