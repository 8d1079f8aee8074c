"""Portions of the state: together they cover it, each sees its own bytes, and all see what is not a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.state.slices import SLICE_BYTES, difference, slice_digest, slices_for
from holdfast.state.snapshot import Holder


def trained(extras: dict[str, nn.Module] | None = None) -> tuple[nn.Module, torch.optim.Optimizer, Holder]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer, Holder(model, optimizer, extras)


def digests(holder: Holder, slices: int, step: int = 4) -> list[str]:
    snapshot = holder.refer(step)
    return [slice_digest(snapshot, number, slices) for number in range(slices)]


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(0, 1 << 30))
def test_a_flipped_bit_is_seen_in_one_portion(slices: int, place: int) -> None:
    _, _, holder = trained()
    before = digests(holder, slices)
    tensors = [tensor for tensor in holder.refer(4).tensors if tensor.numel()]
    memory = tensors[place % len(tensors)].view(-1).view(torch.uint8)
    memory[(place // 7) % len(memory)] ^= 1 << (place % 8)
    changed = [number for number, (a, b) in enumerate(zip(before, digests(holder, slices), strict=True)) if a != b]
    assert len(changed) == 1


def test_twins_have_the_same_portions() -> None:
    assert digests(trained()[2], 5) == digests(trained()[2], 5)
    assert digests(trained()[2], 5) != digests(trained()[2], 5, step=5)


def test_a_setting_is_seen_in_every_portion() -> None:
    _, optimizer, holder = trained()
    before = digests(holder, 3)
    optimizer.param_groups[0]["lr"] *= 2
    assert all(a != b for a, b in zip(before, digests(holder, 3), strict=True))


def test_what_a_joiner_restores_has_the_portions_of_what_was_captured() -> None:
    extra, other_extra = nn.Linear(3, 3), nn.Linear(3, 3)
    _, _, holder = trained({"average": extra})
    _, _, joiner = trained({"average": other_extra})
    assert digests(holder, 6) != digests(joiner, 6)
    joiner.restore(holder.capture(4))
    assert digests(holder, 6) == digests(joiner, 6)


def test_nothing_is_copied() -> None:
    model, _, holder = trained()
    places = {tensor.data_ptr() for tensor in holder.refer(4).tensors}
    assert {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())} <= places


@pytest.mark.parametrize("megabytes, count", [(0, 1), (1, 1), (64, 1), (128, 3), (1280, 30)])
def test_large_states_have_more_portions(megabytes: int, count: int) -> None:
    assert slices_for(megabytes * 2**20) == count
    assert SLICE_BYTES == 128 * 2**20


def test_what_differs_is_named() -> None:
    model, optimizer, holder = trained()
    before = slice_digest(holder.refer(4), 0, 1)

    def found() -> str:
        snapshot = holder.refer(4)
        return difference(snapshot, 0, 1, before, slice_digest(snapshot, 0, 1))

    weight = model.get_parameter("0.weight").detach().view(torch.int32)
    weight[3, 2] ^= 1
    assert found() == "parameters.0.weight"
    weight[3, 2] ^= 1
    optimizer.param_groups[0]["lr"] *= 2
    assert found() == "settings"


def test_what_may_differ_is_named_from_first_to_last() -> None:
    _, _, holder = trained()
    snapshot = holder.refer(4)
    digest = slice_digest(snapshot, 0, 1)
    nothing_alike = "".join("0" if digit != "0" else "1" for digit in digest)
    everything = difference(snapshot, 0, 1, digest, nothing_alike)
    assert everything == "buffers.1.num_batches_tracked to parameters.2.weight"
