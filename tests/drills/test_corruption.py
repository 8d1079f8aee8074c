"""A bit that flips in a real run: found, named, undone. The drill judges; here it is only run."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from holdfast.testing.bit_flips import flip

pytestmark = pytest.mark.processes


@pytest.mark.timeout(240)
def test_a_flipped_parameter_is_found_named_and_undone() -> None:
    command = [sys.executable, "-m", "tests.soak.corruption", "--kind", "parameter", "--seed", "7"]
    size = ["--workers", "3", "--steps", "22", "--audit-every", "6"]
    done = subprocess.run([*command, *size], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact" in done.stdout and "gone back" in done.stdout


@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_a_flip_is_one_bit(bit: int) -> None:
    tensors = [torch.zeros(3), torch.randn(4, 5)]
    before = tensors[1].clone()
    assert f"bit {bit} of (4, 5)" in flip(tensors, "parameter", random.Random(1), bit)
    different = (tensors[1].view(torch.int32) ^ before.view(torch.int32)).unique().tolist()
    assert sorted(value % (1 << 32) for value in different) == [0, 1 << bit]
