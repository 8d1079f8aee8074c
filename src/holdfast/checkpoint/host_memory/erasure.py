"""The erasure code: k fragments of data and m parities, of which any k give back the rest.

Bytes are elements of GF(256) (polynomial 0x11d), and a parity is a sum of the data's fragments, each times a factor.
The factors form a Cauchy matrix, every square part of which can be inverted: that is why any k fragments are enough.
With one parity all factors are 1, and torch adds; otherwise ISA-L does, at about the speed of a copy.

Every byte of a fragment depends on the bytes at the same place in the others only, so a range of them can be
recovered from the same range of k others. Owns nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import torch

from holdfast.checkpoint.host_memory import isal
from holdfast.checkpoint.host_memory.isal import FRAGMENTS_MAX

FRAGMENT_ALIGNMENT = 64  # so that fragments of aligned memory are aligned
_XOR_BYTES = 1 << 18  # at a time: what is added stays in the cache
_POLYNOMIAL = 0x11D

Row = tuple[int, ...]


def fragment_bytes(size: int, k: int) -> int:
    """The length of each fragment of `size` bytes, the last of which is filled up with zeros."""
    return -(-max(size, 1) // (k * FRAGMENT_ALIGNMENT)) * FRAGMENT_ALIGNMENT


class Code:
    """Fragments 0 to k-1 are the data, k to k+m-1 the parities. Buffers are uint8 tensors of one length."""

    def __init__(self, k: int, m: int) -> None:
        assert k >= 1 and m >= 1 and k + m <= FRAGMENTS_MAX, (k, m)
        self.k = k
        self.m = m
        self._plain = not isal.needs_library(k, m)

    @cached_property
    def generator(self) -> tuple[Row, ...]:
        """How each fragment is made of the data: k+m rows of k factors."""
        identity = tuple(tuple(int(row == column) for column in range(self.k)) for row in range(self.k))
        if self._plain:
            return (*identity, *((1,) * self.k for _ in range(self.m)))
        return (*identity, *(tuple(inverse((self.k + i) ^ j) for j in range(self.k)) for i in range(self.m)))

    def encode(self, data: Sequence[torch.Tensor], parities: Mapping[int, torch.Tensor]) -> None:
        """Computes those parities that are asked for (k to k+m-1), into the buffers given for them."""
        assert len(data) == self.k and all(self.k <= index < self.k + self.m for index in parities)
        self._combine([self.generator[index] for index in parities], data, list(parities.values()))

    def decode(self, fragments: Mapping[int, torch.Tensor], lost: Mapping[int, torch.Tensor]) -> None:
        """From any k fragments, computes those that are asked for, data or parity, into the buffers given for them."""
        assert len(fragments) == self.k, f"{len(fragments)} fragments instead of {self.k}"
        if not lost:
            return
        back = inverted([self.generator[index] for index in fragments])
        rows = [times(self.generator[index], back) for index in lost]
        self._combine(rows, list(fragments.values()), list(lost.values()))

    def _combine(self, rows: Sequence[Row], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for one in (*sources, *targets):
            assert one.dtype == torch.uint8 and one.is_contiguous() and len(one) == len(targets[0])
        if not rows or not len(targets[0]):
            return
        if self._plain:
            for row, target in zip(rows, targets, strict=True):
                _add([source for factor, source in zip(row, sources, strict=True) if factor], target)
            return
        library = isal.load()
        tables = _tables(tuple(rows))
        library.ec_encode_data(
            len(targets[0]), len(sources), len(targets), tables, _pointers(sources), _pointers(targets)
        )


@lru_cache(maxsize=256)
def _tables(rows: tuple[Row, ...]) -> bytes:
    k = len(rows[0])
    tables = ctypes.create_string_buffer(isal.TABLE_BYTES * k * len(rows))
    isal.load().ec_init_tables(k, len(rows), bytes(factor for row in rows for factor in row), tables)
    return tables.raw


def _pointers(buffers: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))


def _add(sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """In GF(256), adding is XOR."""
    for start in range(0, len(target), _XOR_BYTES):
        there = target[start : start + _XOR_BYTES]
        first, *others = (source[start : start + _XOR_BYTES] for source in sources)
        if not others:
            there.copy_(first)
        for other in others:
            first = torch.bitwise_xor(first, other, out=there)


# -- the field, for matrices of a few bytes


@lru_cache(maxsize=1)
def _logarithms() -> tuple[list[int], list[int]]:
    """Powers of 2, twice over so that no sum of two logarithms is outside, and the logarithm of each element."""
    powers, logarithms = [0] * 510, [0] * 256
    value = 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value <<= 1
        if value & 0x100:
            value ^= _POLYNOMIAL
    return powers, logarithms


def product(a: int, b: int) -> int:
    powers, logarithms = _logarithms()
    return powers[logarithms[a] + logarithms[b]] if a and b else 0


def inverse(a: int) -> int:
    powers, logarithms = _logarithms()
    assert a, "zero has no inverse"
    return powers[255 - logarithms[a]]


def times(row: Row, matrix: Sequence[Row]) -> Row:
    result = [0] * len(matrix[0])
    for factor, other in zip(row, matrix, strict=True):
        for column, value in enumerate(other):
            result[column] ^= product(factor, value)
    return tuple(result)


def inverted(matrix: Sequence[Row]) -> tuple[Row, ...]:
    """By elimination. Those of a code's fragments always have an inverse."""
    size = len(matrix)
    rows = [[*row, *(int(number == column) for column in range(size))] for number, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(number for number in range(column, size) if rows[number][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        factor = inverse(rows[column][column])
        rows[column] = [product(factor, value) for value in rows[column]]
        for number in range(size):
            if number != column and (factor := rows[number][column]):
                rows[number] = [
                    value ^ product(factor, other) for value, other in zip(rows[number], rows[column], strict=True)
                ]
    return tuple(tuple(row[size:]) for row in rows)
