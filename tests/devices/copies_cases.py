"""What comes down from a device, and what is made of it: the same as if it had been here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import nn

from holdfast.data.alignment import pin_batch
from holdfast.devices.copies import Downloads, as_of, here, mark_on, send
from holdfast.devices.laps import DeviceLap
from holdfast.engine.recovery.shard_digests import ShardOnDevice, shard_digest
from holdfast.modes.buffers import Buffers
from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout
from holdfast.reduce.slots import Deferred, DeviceSlots
from holdfast.reduce.sums import Sums
from holdfast.state.slices import Portion, slice_digest
from holdfast.state.snapshot import Holder
from tests.harness import device as simulated

pytestmark = pytest.mark.parametrize("when", ["late", "early"])


@pytest.fixture(autouse=True)
def in_mode(device: torch.device, when: str) -> None:
    simulated.native().set_early(when == "early")


def arrived(downloads: Downloads) -> None:
    for _ in range(10_000):
        if downloads.is_idle():
            return
    raise AssertionError("it does not come")


def test_whoever_asks_for_a_copy_may_forget_it(device: torch.device) -> None:
    downloads = Downloads(device)
    x = torch.ones(1000, device=device)
    downloads.begin([x, x + 1])
    del x
    torch.ones(1, device=device).add_(1).cpu()  # whatever the stream that computes does meanwhile
    kept = downloads.begin([torch.full((3,), 5.0, device=device)])
    before = simulated.blocked_here()
    arrived(downloads)
    assert kept.tensors[0].tolist() == [5.0] * 3 and kept.tensors[0].is_pinned()
    assert simulated.blocked_here() == before


def test_a_state_is_read_as_it_was_at_its_mark(device: torch.device) -> None:
    x = torch.zeros(100, device=device)
    x.add_(1)
    mark = mark_on(device)
    assert as_of(mark, [x, torch.ones(2)])[0].tolist() == [1.0] * 100
    assert here([x.add_(1), torch.ones(2)])[0][0] == 2


def test_what_was_sent_may_be_overwritten_at_once(device: torch.device) -> None:
    memory = torch.full((100,), 3, dtype=torch.uint8)
    before = simulated.blocked_here()
    there = send(memory, device)
    memory.fill_(4)
    assert simulated.blocked_here() == before
    assert there.cpu().tolist() == [3] * 100


def test_batches_are_in_pinned_memory(device: torch.device) -> None:
    x, y = pin_batch([torch.ones(3), {"y": torch.zeros(2)}])
    assert x.is_pinned() and y["y"].is_pinned() and x.tolist() == [1.0] * 3


def test_a_lap_is_what_the_device_took(device: torch.device) -> None:
    lap = DeviceLap(device)
    x = torch.ones(200, 200, device=device)
    for _ in range(5):
        x = x @ x
    lap.end()
    torch.accelerator.synchronize()
    assert float(lap) > 0


class Collected:
    def __init__(self) -> None:
        self.present: Iterable[int] = ()

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None:
        self.present = present


def test_buffers_that_a_shard_has_changed_are_known_later(device: torch.device) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)).to(device)
    model[1].register_buffer("mask", torch.tensor([float("nan"), 0.0], device=device))
    buffers = Buffers(model)
    before = simulated.blocked_here()
    model[0](torch.randn(8, 4).pin_memory().to(device, non_blocking=True))
    model[1].mask[1] = -0.0  # other bits
    sums, flags = buffers.collect()
    assert isinstance(flags, torch.Tensor) and simulated.blocked_here() == before
    names = [name for name, _ in model.named_buffers()]
    changed = [names[number - 5] for number in Deferred([], 5, flags)]
    assert changed == ["0.running_mean", "0.running_var", "0.num_batches_tracked", "1.mask"]
    buffers.start_again()
    assert model[0].num_batches_tracked.item() == 0
    buffers.load([one * 2 if one.dtype != torch.int64 else one for one in sums], [0, 2])
    assert model[0].num_batches_tracked.item() == 1


def test_a_shard_has_the_digest_that_it_has_here(device: torch.device) -> None:
    here_ones = [torch.randn(5, 3), None, torch.arange(6).view(2, 3).T, torch.ones(2, dtype=torch.bool)]
    there = [None if one is None else one.to(device) for one in here_ones]
    downloads = Downloads(device)
    flags = torch.tensor([True, False]).to(device)
    loss = torch.tensor(0.5, dtype=torch.float64).to(device)
    shard = ShardOnDevice(there, Deferred([0, 1], 2, flags), {"loss": loss, "more": 2.0}, downloads)
    for one in there:
        if one is not None:
            one.zero_()  # the next shard writes there
    arrived(downloads)
    assert shard.digest() == shard_digest(here_ones, [0, 1, 2], {"loss": 0.5, "more": 2.0})


def test_a_portion_of_a_state_has_the_digest_that_it_has_here(device: torch.device) -> None:
    model = nn.Linear(33, 17)
    twin = nn.Linear(33, 17)
    twin.load_state_dict(model.state_dict())
    twin.to(device)
    holders = [Holder(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (model, twin)]
    downloads = Downloads(device)
    for number in range(3):
        portion = Portion(holders[1].refer(4), number, 3, downloads)
        before = simulated.blocked_here()
        arrived(downloads)
        assert portion.digest() == slice_digest(holders[0].refer(4), number, 3)
        assert simulated.blocked_here() == before
    assert holders[0].capture(4).digest() == holders[1].capture(4).digest()


def test_a_snapshot_is_what_it_was_taken_of(device: torch.device) -> None:
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    holder = Holder(model, optimizer)
    before = simulated.blocked_here()
    snapshot = holder.capture(1)
    assert simulated.blocked_here() == before
    copied = snapshot.copied()
    digest = snapshot.digest()
    (model(torch.ones(1, 8, device=device)).sum()).backward()
    optimizer.step()
    assert copied.digest() == digest != holder.capture(1).digest()
    holder.restore(copied.on_host())
    optimizer.state.clear()
    assert holder.capture(1).digest() == digest


def test_sums_grow_on_the_device_and_are_copied_once(device: torch.device) -> None:
    shards, shapes = 6, [(7, 3), (5,)]
    arena = Arena.create(shards, Layout([torch.empty(shape) for shape in shapes]).slot_bytes)
    downloads = Downloads(device)
    slots = DeviceSlots(arena, downloads)
    layout = Layout([torch.empty(shape) for shape in shapes])
    sums = Sums(arena, shards, parities=1, slots=slots)
    plain = Sums(Arena.create(shards, layout.slot_bytes), shards, parities=1)
    for one in (sums, plain):
        one.begin(0, layout)
    for shard in range(4):
        tensors = [torch.randn(shape) * 3.0**shard for shape in shapes]
        plain.add(shard, tensors, range(2))
        sums.add(shard, [tensor.to(device) for tensor in tensors], range(2))
    assert sums.held == plain.held and len(sums.held) == 1
    ((_, slot),) = sums.nodes()
    coming = slots.bring([slot], [])
    arrived(downloads)
    slots.put(slot, layout, coming.tensors[0])
    for mine, right in zip(arena.slot(slot, layout), plain.arena.slot(slot, layout), strict=True):
        assert mine == right
