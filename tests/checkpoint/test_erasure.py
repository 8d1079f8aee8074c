"""The erasure code against arithmetic that is written down a second time, bit by bit."""

from __future__ import annotations

import random
from importlib import metadata
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.host_memory import isal
from holdfast.checkpoint.host_memory.erasure import (
    FRAGMENTS_MAX,
    Code,
    fragment_bytes,
    inverse,
    inverted,
    product,
    times,
)
from holdfast.core.errors import ConfigError


def slow_product(a: int, b: int) -> int:
    """Russian peasants, modulo x^8 + x^4 + x^3 + x^2 + 1."""
    result = 0
    while b:
        if b & 1:
            result ^= a
        a <<= 1
        if a & 0x100:
            a ^= 0x11D
        b >>= 1
    return result


def slow_parity(row: tuple[int, ...], data: list[bytes]) -> bytes:
    result = bytearray(len(data[0]))
    for factor, fragment in zip(row, data, strict=True):
        for place, byte in enumerate(fragment):
            result[place] ^= slow_product(factor, byte)
    return bytes(result)


def tensors(data: list[bytes]) -> list[torch.Tensor]:
    return [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in data]


def empty(length: int) -> torch.Tensor:
    return torch.full((length,), 0xAA, dtype=torch.uint8)


def whole(k: int, m: int, data: list[bytes]) -> dict[int, torch.Tensor]:
    """All fragments of a code."""
    parities = {k + number: empty(len(data[0])) for number in range(m)}
    Code(k, m).encode(tensors(data), parities)
    return dict(enumerate(tensors(data))) | parities


def test_products_are_those_of_the_field() -> None:
    for a in range(256):
        assert [product(a, b) for b in range(256)] == [slow_product(a, b) for b in range(256)]
    assert all(slow_product(a, inverse(a)) == 1 for a in range(1, 256))


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 12),
    m=st.integers(1, 6),
    length=st.sampled_from([1, 31, 64, 257]),
    seed=st.integers(0, 2**32),
)
def test_any_k_fragments_give_back_all_others(k: int, m: int, length: int, seed: int) -> None:
    chance = random.Random(seed)
    data = [chance.randbytes(length) for _ in range(k)]
    fragments = whole(k, m, data)
    for index in range(k, k + m):
        assert bytes(fragments[index].tolist()) == slow_parity(Code(k, m).generator[index], data)
    there = chance.sample(range(k + m), k)
    lost = {index: empty(length) for index in range(k + m) if index not in there}
    Code(k, m).decode({index: fragments[index] for index in there}, lost)
    for index, found in lost.items():
        assert torch.equal(found, fragments[index]), f"fragment {index} from {there}"


@pytest.mark.parametrize(("k", "m"), [(1, 2), (2, 1), (3, 3), (4, 2), (5, 1)])
def test_every_choice_of_k_fragments(k: int, m: int) -> None:
    chance = random.Random(k * 100 + m)
    fragments = whole(k, m, [chance.randbytes(100) for _ in range(k)])
    for there in combinations(range(k + m), k):
        lost = {index: empty(100) for index in range(k) if index not in there}
        Code(k, m).decode({index: fragments[index] for index in there}, lost)
        assert all(torch.equal(found, fragments[index]) for index, found in lost.items()), there


def test_the_largest_code_can_lose_what_it_promises() -> None:
    k, m = FRAGMENTS_MAX - 24, 24
    chance = random.Random(7)
    fragments = whole(k, m, [chance.randbytes(64) for _ in range(k)])
    there = chance.sample(range(k + m), k)
    lost = {index: empty(64) for index in range(k) if index not in there}
    Code(k, m).decode({index: fragments[index] for index in there}, lost)
    assert lost and all(torch.equal(found, fragments[index]) for index, found in lost.items())


def test_a_range_can_be_recovered_by_itself() -> None:
    chance = random.Random(3)
    fragments = whole(4, 2, [chance.randbytes(4096) for _ in range(4)])
    found = empty(100)
    Code(4, 2).decode({index: fragments[index][1000:1100] for index in (1, 3, 4, 5)}, {2: found})
    assert torch.equal(found, fragments[2][1000:1100])


def test_an_inverse_is_one() -> None:
    matrix = Code(5, 4).generator[3:8]
    identity = [times(row, inverted(matrix)) for row in matrix]
    assert identity == [tuple(int(a == b) for b in range(5)) for a in range(5)]


@pytest.mark.parametrize(
    ("size", "k", "expected"), [(0, 2, 64), (1, 4, 64), (256, 4, 64), (257, 4, 128), (128, 1, 128)]
)
def test_fragments_cover_what_they_are_cut_from(size: int, k: int, expected: int) -> None:
    assert fragment_bytes(size, k) == expected


def test_a_missing_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(isal.metadata, "files", missing)
    monkeypatch.setattr(isal.ctypes.util, "find_library", lambda name: None)
    isal.load.cache_clear()
    try:
        with pytest.raises(ConfigError, match="ISA-L") as caught:
            isal.load()
        assert "holdfast[memory]" in caught.value.hint
    finally:
        isal.load.cache_clear()
