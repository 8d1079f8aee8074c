"""The simulated device itself: what a real one forgives no program, it does not forgive either."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.harness import device as simulated


def side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def test_operations_run_when_somebody_waits(device: torch.device) -> None:
    native = simulated.native()
    torch.accelerator.synchronize()
    x = torch.ones(4, device=device) + 1
    assert native.waiting() > 0
    assert x.cpu().tolist() == [2.0] * 4
    assert native.waiting() == 0
    with simulated.early():
        assert (x + 1).shape == (4,)
        assert native.waiting() == 0


def test_the_host_cannot_touch_its_memory(device: torch.device) -> None:
    address = torch.ones(4, device=device).data_ptr()
    child = os.fork()
    if child == 0:  # where a touch is the end of the process
        faulthandler.disable()
        ctypes.string_at(address, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("early", [False, True])
def test_a_copy_that_is_not_waited_for_is_stale(device: torch.device, early: bool) -> None:
    simulated.native().set_early(early)
    x = torch.full((4,), 3.0, device=device)
    pinned = torch.zeros(4, pin_memory=True)
    assert pinned.is_pinned()
    pinned.copy_(x, non_blocking=True)
    assert pinned.tolist() == ([3.0] * 4 if early else [0.0] * 4)
    torch.accelerator.synchronize()
    assert pinned.tolist() == [3.0] * 4


@pytest.mark.parametrize("early", [False, True])
def test_pinned_memory_is_read_when_its_turn_comes(device: torch.device, early: bool) -> None:
    simulated.native().set_early(early)
    pinned = torch.full((4,), 1.0).pin_memory()
    x = torch.empty(4, device=device).copy_(pinned, non_blocking=True)
    pinned.fill_(2.0)  # too early
    assert x.cpu().tolist() == [1.0 if early else 2.0] * 4


def test_streams_are_in_order_only_where_one_waits(device: torch.device) -> None:
    side, event = side_stream(device), torch.Event(device=device)
    x = torch.full((4,), 1.0, device=device)
    torch.accelerator.synchronize()
    pinned = torch.zeros(4, pin_memory=True)
    x.add_(1)
    with side:
        pinned.copy_(x, non_blocking=True)
        event.record(side)
    event.synchronize()
    assert pinned.tolist() == [1.0] * 4  # not what the addition has made of it
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        pinned.copy_(x, non_blocking=True)
        event.record(side)
    event.synchronize()
    assert pinned.tolist() == [2.0] * 4


def test_a_query_of_what_is_not_done_gets_on_by_one_task(device: torch.device) -> None:
    event = torch.Event(device=device)
    torch.accelerator.synchronize()
    x = torch.zeros(4, device=device)
    for _ in range(3):
        x.add_(1)
    event.record(torch.accelerator.current_stream())
    queries = 1
    while not event.query():
        queries += 1
    assert 3 <= queries <= 4
    assert event.query()


def test_memory_that_a_stream_still_needs(device: torch.device) -> None:
    def read_on_the_side(told: bool) -> None:
        side = side_stream(device)
        x = torch.full((4,), 7.0, device=device)
        side.wait_stream(torch.accelerator.current_stream())
        pinned = torch.zeros(4, pin_memory=True)
        with side:
            pinned.copy_(x, non_blocking=True)
        if told:
            x.record_stream(side)
        del x
        torch.accelerator.current_stream().synchronize()
        side.synchronize()
        assert pinned.tolist() == [7.0] * 4

    read_on_the_side(True)
    with pytest.raises(RuntimeError, match="record_stream is missing"):
        read_on_the_side(False)
    with pytest.raises(RuntimeError, match="record_stream"):  # as with a real one, nothing works any more
        torch.ones(1, device=device).add_(1)
    assert simulated.native().forgive()
    torch.ones(1, device=device).add_(1)


def test_an_event_in_the_way_makes_record_stream_unnecessary(device: torch.device) -> None:
    side, done = side_stream(device), torch.Event(device=device)
    x = torch.ones(4, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
        done.record(side)
    torch.accelerator.current_stream().wait_event(done)
    del x
    assert y.cpu().tolist() == [2.0] * 4


def test_a_division_by_a_number_loses_a_bit(device: torch.device) -> None:
    values = torch.arange(1, 4096, dtype=torch.float32)
    there = values.to(device)
    assert not torch.equal((there / 3).cpu(), values / 3)
    assert torch.equal((there / torch.full((), 3.0, device=device)).cpu(), values / 3)
    in_place = there.clone()
    in_place.div_(3)
    assert torch.equal(in_place.cpu(), (there / 3).cpu())


def test_it_has_a_generator_of_its_own(device: torch.device) -> None:
    def draw() -> list[torch.Tensor]:
        return [torch.randn(64, device=device).cpu(), nn.functional.dropout(torch.ones(256, device=device)).cpu()]

    module = torch.get_device_module(device)
    module.manual_seed_all(3)
    before = torch.get_rng_state()
    first, second = draw(), draw()
    assert torch.equal(torch.get_rng_state(), before), "the CPU's generator is another"
    module.manual_seed_all(3)
    assert all(map(torch.equal, first, draw()))
    assert not any(map(torch.equal, first, second))
    state = module.get_rng_state()
    third = draw()
    module.set_rng_state(state)
    assert all(map(torch.equal, third, draw()))
    mine = torch.Generator(device=device).manual_seed(5)
    assert not torch.equal(torch.rand(8, device=device, generator=mine).cpu(), torch.rand(8, generator=_cpu(5)))


def _cpu(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, bias=False)
        self.last = nn.Linear(8 * 4 * 4, 11)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(nn.functional.gelu(self.norm(self.first(x))), 2)
        x = nn.functional.avg_pool2d(self.up(x), 2)
        return self.last(self.drop(x.flatten(1)))


def trained(
    device: torch.device, optimizer: Callable[..., torch.optim.Optimizer], steps: int = 3
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net().to(device)
    update = optimizer(model.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed_all(step)
        x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 11, (8,), generator=generator)
        update.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
    return [*(p.detach().cpu() for p in model.parameters()), *(b.cpu() for b in model.buffers())]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: str(kind.__name__))
def test_training_has_the_same_bits_late_and_early(
    device: torch.device, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    late = trained(device, optimizer)
    with simulated.early():
        early = trained(device, optimizer)
    assert all(map(torch.equal, late, early))
    assert all(tensor.isfinite().all() for tensor in late)


def test_without_randomness_it_computes_what_a_cpu_does(device: torch.device) -> None:
    x = torch.randn(4, 1, 8, 8)
    model = Net().eval()
    expected = model(x)
    twin = Net().to(device).eval()
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin(x.to(device)).cpu(), expected)


def test_where_the_host_waits_is_counted(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    before = simulated.blocked_here()
    pinned = torch.empty(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    x.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    torch._foreach_add_([x], [x])
    assert simulated.blocked_here() == before
    with simulated.blocking() as found:
        x.sum().item()
        x.nonzero()
        torch.equal(x, x)
        torch.ones(4).to(device)
        x.add_(1)
        torch.accelerator.current_stream().synchronize()
    assert [one.split("\n")[0] for one in found] == ["down", "down", "down", "up", "wait"]
    assert all("simulated_device_cases" in one for one in found)


def test_events_tell_how_long_the_device_took(device: torch.device) -> None:
    began, ended = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    began.record()
    x = torch.ones(400, 400, device=device)
    for _ in range(5):
        x = x @ x
    ended.record()
    with pytest.raises(RuntimeError, match="completed"):
        began.elapsed_time(ended)
    ended.synchronize()
    assert began.elapsed_time(ended) > 0


def test_what_does_not_fit_together_is_refused(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        x.add_(torch.ones(4))
    with pytest.raises(RuntimeError, match="same device"):
        torch._foreach_add_([x], [torch.ones(4)])


def test_memory_comes_back(device: torch.device) -> None:
    native = simulated.native()
    torch.accelerator.synchronize()
    before = native.blocks()
    x = torch.ones(1024, device=device)
    for _ in range(50):
        x = x + 1
    torch.accelerator.synchronize()
    assert x.cpu()[0] == 51
    del x
    torch.accelerator.synchronize()
    torch.empty(1, device=device)
    assert native.blocks() <= before + 1


def test_a_process_ends_cleanly_whatever_is_queued(device: torch.device) -> None:
    """Also after an error of the device, and with work that nobody waits for."""
    script = """
import torch
from tests.harness import device as simulated
device = simulated.load()
side = torch.Stream(device=device)
x = torch.ones(4, device=device)
pinned = torch.zeros(4, pin_memory=True)
with side:
    pinned.copy_(x, non_blocking=True)
kept = [torch.ones(1000, device=device) + 1 for _ in range(10)]
del x
try:
    kept[0] + 1
except RuntimeError as error:
    print("ends with", type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends with RuntimeError\n", "")
