"""The servers' port, on servers and on its twin: workers that push, pull, wait for each other, begin from a capture."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from holdfast.core.errors import ConfigError, DivergedError, Evicted
from holdfast.servers.port import Layout, ParameterServers, Piece, initial_of, layout_of
from holdfast.servers.recipe import settings_of
from holdfast.servers.slicing import Segment
from tests.servers.serving import Open, in_memory, in_threads

WAIT_S = 20.0


class Runs:
    """Opens servers, of one kind, with so many slices."""

    def __init__(self, kind: str, closing: ExitStack) -> None:
        self._kind = kind
        self._closing = closing

    def servers(self, slices: int = 2) -> Open:
        return self._closing.enter_context((in_memory if self._kind == "memory" else in_threads)(slices))


@pytest.fixture(params=["memory", "threads"])
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    with ExitStack() as closing:
        yield Runs(request.param, closing)


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 3).to(torch.float64))


class Worker:
    """A model with its optimizer, and its way to the servers."""

    def __init__(self, connect: Open, name: str, momentum: float = 0.9) -> None:
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5, momentum=momentum)
        self.parameters = [one.data for one in self.model.parameters()]
        self.servers: ParameterServers = connect(name)

    @property
    def layout(self) -> Layout:
        return layout_of(dict(self.model.named_parameters()), self.optimizer)

    def open(self) -> bool:
        return self.servers.open(self.layout, initial_of(self.parameters), timeout_s=WAIT_S)

    def push(self, value: float, clock: int) -> tuple[int, ...]:
        gradients = [torch.full_like(one, value) for one in self.parameters]
        settings = [settings_of(group) for group in self.optimizer.param_groups]
        return self.servers.push(gradients, settings, clock=clock).wait(WAIT_S)

    def pulled(self) -> list[torch.Tensor]:
        into = [torch.empty_like(one) for one in self.parameters]
        self.servers.pull(into).wait(WAIT_S)
        return into


def test_updates_do_what_the_optimizer_would_have_done(runs: Runs) -> None:
    slices = runs.servers(3)
    one, other = Worker(slices, "w0"), Worker(slices, "w1")
    assert one.open() and not other.open()
    for clock, value in enumerate((1.0, 2.0, -3.0), start=1):
        assert (one if clock % 2 else other).push(value, clock) == (clock,) * 3
        for parameter in one.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        one.optimizer.step()
    for mine, theirs in zip(one.parameters, other.pulled(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_pull_waits_for_the_slowest_and_not_for_the_retired(runs: Runs) -> None:
    slices = runs.servers()
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
    assert pull.wait(WAIT_S) == (2, 2)
    thread.join()
    one.push(1.0, 2)
    one.servers.retire("w1", 1)
    assert one.servers.pull(one.parameters, clock_floor=2).wait(WAIT_S) == (3, 3)
    assert one.servers.clocks() == {"w0": 2}
    with pytest.raises(Evicted):
        other.push(1.0, 2)


def test_an_update_that_is_not_finite_is_refused_and_changes_nothing(runs: Runs) -> None:
    slices = runs.servers()
    worker = Worker(slices, "w0")
    worker.open()
    before = worker.pulled()
    with pytest.raises(DivergedError, match=r"w0\.1 has a gradient of parameter 0"):
        worker.push(float("nan"), 1)
    assert all(torch.equal(was, now) for was, now in zip(before, worker.pulled(), strict=True))


def test_a_run_begins_from_a_capture_in_another_number_of_slices(runs: Runs) -> None:
    first, second = runs.servers(2), runs.servers(5)
    one, other = Worker(first, "w0"), Worker(second, "w0")
    one.open()
    one.push(1.0, 1)
    captured = one.servers.capture(timeout_s=WAIT_S)
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

    assert other.servers.open(other.layout, initial, timeout_s=WAIT_S)
    for worker, clock in ((one, 2), (other, 2)):
        worker.push(-2.0, clock)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.pulled(), other.pulled(), strict=True))


def test_a_worker_with_another_model_is_told_so(runs: Runs) -> None:
    slices = runs.servers()
    Worker(slices, "w0").open()
    other = Worker(slices, "w1")
    other.optimizer = torch.optim.Adam(other.model.parameters())  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="other parameters or optimizers"):
        other.open()


def test_a_capture_has_each_update_in_all_slices_or_in_none(runs: Runs) -> None:
    slices = runs.servers(3)
    first = Worker(slices, "w0", momentum=0.0)
    first.open()
    start = first.pulled()
    stopping = threading.Event()

    def work(name: str) -> None:
        worker = Worker(slices, name, momentum=0.0)
        worker.open()
        clock = worker.servers.join(0)
        while not stopping.is_set():
            clock += 1
            worker.push(-1.0, clock)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            captured = first.servers.capture(timeout_s=WAIT_S)
            assert len(set(captured.versions)) == 1, captured.versions
            moved = {
                round(
                    float((piece.values - start[segment.parameter].flatten()[segment.start : segment.stop]).mean()), 3
                )
                for segment, piece in captured.pieces()
            }
            assert moved == {captured.versions[0] * 0.5}, (moved, captured.versions)
            captured.close()
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert first.servers.clocks().keys() == {"w1", "w2"}
