"""The servers' port, on its twin in memory: workers that push, pull, wait for each other, and begin from a capture."""

from __future__ import annotations

import threading

import pytest
import torch

from holdfast.core.errors import ConfigError, DivergedError, Evicted
from holdfast.servers.memory import MemoryServers, MemorySlices
from holdfast.servers.port import Layout, Piece, initial_of, layout_of
from holdfast.servers.recipe import settings_of
from holdfast.servers.slicing import Segment


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 3).to(torch.float64))


class Worker:
    """A model with its optimizer, and its way to the servers."""

    def __init__(self, slices: MemorySlices, name: str, momentum: float = 0.9) -> None:
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5, momentum=momentum)
        self.parameters = [one.data for one in self.model.parameters()]
        self.servers = MemoryServers(slices, name)

    @property
    def layout(self) -> Layout:
        return layout_of(dict(self.model.named_parameters()), self.optimizer)

    def open(self) -> bool:
        return self.servers.open(self.layout, initial_of(self.parameters), timeout_s=1)

    def push(self, value: float, clock: int) -> tuple[int, ...]:
        gradients = [torch.full_like(one, value) for one in self.parameters]
        settings = [settings_of(group) for group in self.optimizer.param_groups]
        return self.servers.push(gradients, settings, clock=clock).wait(1)

    def pulled(self) -> list[torch.Tensor]:
        into = [torch.empty_like(one) for one in self.parameters]
        self.servers.pull(into).wait(1)
        return into


def test_updates_do_what_the_optimizer_would_have_done() -> None:
    slices = MemorySlices(3)
    one, other = Worker(slices, "w0"), Worker(slices, "w1")
    assert one.open() and not other.open()
    for clock, value in enumerate((1.0, 2.0, -3.0), start=1):
        assert (one if clock % 2 else other).push(value, clock) == (clock,) * 3
        for parameter in one.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        one.optimizer.step()
    for mine, theirs in zip(one.parameters, other.pulled(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_pull_waits_for_the_slowest_and_not_for_the_retired() -> None:
    slices = MemorySlices()
    one, other = Worker(slices, "w0"), Worker(slices, "w1")
    one.open()
    assert one.servers.join() == 0 and other.open() is False and other.servers.join() == 0
    one.push(1.0, 1)
    pull = one.servers.pull(one.parameters, clock_floor=1)
    assert not pull.done
    with pytest.raises(TimeoutError):
        pull.wait(0.01)
    thread = threading.Thread(target=other.push, args=(1.0, 1))
    thread.start()
    assert pull.wait(10) == (2, 2)
    thread.join()
    one.push(1.0, 2)
    one.servers.retire("w1", 1)
    assert one.servers.pull(one.parameters, clock_floor=2).wait(10) == (3, 3)
    assert one.servers.clocks() == {"w0": 2}
    with pytest.raises(Evicted):
        other.push(1.0, 2)


def test_an_update_that_is_not_finite_is_refused_and_changes_nothing() -> None:
    slices = MemorySlices()
    worker = Worker(slices, "w0")
    worker.open()
    before = worker.pulled()
    with pytest.raises(DivergedError, match=r"w0\.1 has a gradient of parameter 0"):
        worker.push(float("nan"), 1)
    assert all(torch.equal(was, now) for was, now in zip(before, worker.pulled(), strict=True))


def test_a_run_begins_from_a_capture_in_another_number_of_slices() -> None:
    first, second = MemorySlices(2), MemorySlices(5)
    one, other = Worker(first, "w0"), Worker(second, "w0")
    one.open()
    one.push(1.0, 1)
    captured = one.servers.capture(timeout_s=1)
    assert captured.versions == (1, 1)
    pieces = list(captured.pieces())
    captured.close()

    def initial(segment: Segment) -> Piece:
        """Put together from the pieces, wherever they were cut."""
        values, state = [], dict[str, list[torch.Tensor]]()
        for theirs, piece in pieces:
            low, high = max(theirs.start, segment.start), min(theirs.stop, segment.stop)
            if theirs.parameter == segment.parameter and low < high:
                inside = slice(low - theirs.start, high - theirs.start)
                values.append(piece.values[inside])
                for name, value in piece.optimizer.items():
                    state.setdefault(name, []).append(value[inside] if value.dim() else value)
        joined = {name: torch.cat(parts) if parts[0].dim() else parts[0] for name, parts in state.items()}
        return Piece(torch.cat(values), joined)

    assert other.servers.open(other.layout, initial, timeout_s=1)
    for worker, clock in ((one, 2), (other, 2)):
        worker.push(-2.0, clock)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.pulled(), other.pulled(), strict=True))


def test_a_worker_with_another_model_is_told_so() -> None:
    slices = MemorySlices()
    Worker(slices, "w0").open()
    other = Worker(slices, "w1")
    other.optimizer = torch.optim.Adam(other.model.parameters())  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="other parameters or optimizers"):
        other.open()
