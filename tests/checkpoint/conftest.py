"""States with everything that a state can have, and parts so small that they have many of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format import manifest, parts
from holdfast.state.codec import flatten, pack_tree
from holdfast.state.layout import DTYPES
from holdfast.state.snapshot import Snapshot

torch.set_num_threads(1)

with warnings.catch_warnings():
    # torch says once in a process that complex32 is experimental: not in the middle of a test, as an error.
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)


def every_kind(seed: int = 0) -> dict[str, Any]:
    """All dtypes, memory orders, empty, 0-dim, with gaps, shared, and one that is cut."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shared = random(3, 5)
    raw = torch.randint(0, 2, (48,), generator=generator, dtype=torch.uint8)
    return {
        "model": {"fc.weight": random(7, 11), "fc.bias": random(7), "conv": random(2, 3, 4, 5)},
        "channels_last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": random(4, 6).t(),
        "gaps": random(10, 10)[::2, 1::3],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "shared": [shared, shared],
        "large": random(40_000),
        "dtypes": {name: raw.view(dtype) if name != "bool" else raw.bool() for name, dtype in DTYPES.items()},
        "step": 17,
        "nested": (1, None, {"3": [True, float("inf")], 3: "three"}),
    }


def snapshot_of(state: Any, step: int) -> Snapshot:
    tree, tensors = flatten(state)
    return Snapshot(step, pack_tree(tree), tuple(tensors))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Parts and pieces of 16 KiB: a small state then has several parts, and tensors that are cut."""
    size = 4 * parts.PAGE_BYTES
    monkeypatch.setattr(parts, "PART_BYTES", size)
    monkeypatch.setattr(parts, "PIECE_BYTES_MAX", size)
    monkeypatch.setattr(manifest, "PART_BYTES", size)
    yield size
