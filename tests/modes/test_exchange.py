"""What a worker does with its servers while it computes: in one process, with servers in memory that may be held up."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.core.errors import PeerError
from holdfast.core.spending import JOINING, WAITING
from holdfast.data.shards import ShardPlan
from holdfast.events import EventLog
from holdfast.modes.asynchronous.attendance import SAY_S, ServedAttendance
from holdfast.modes.asynchronous.exchange import Update, UpdateExchange
from holdfast.modes.asynchronous.given_steps import GivenSteps
from holdfast.modes.asynchronous.pacing import LEADS, prepare_after_s, usual_lead_s
from holdfast.modes.port import Runtime, TrainingParts
from holdfast.servers.memory import MemoryServers, MemorySlices
from holdfast.servers.port import initial_of, layout_of
from holdfast.servers.recipe import settings_of
from holdfast.servers.units_port import MemoryUnits, ServerLines, SharedTable

WAIT_S = 10.0


class HeldUp(MemoryServers):
    """Servers that acknowledge updates only while `open`."""

    def __init__(self, slices: MemorySlices, worker: str = "w0") -> None:
        super().__init__(slices, worker)
        self.gate = threading.Event()
        self.gate.set()

    def push(self, *given: Any, **options: Any) -> Any:
        return Gated(super().push(*given, **options), self.gate)


class Gated:
    def __init__(self, inner: Any, gate: threading.Event) -> None:
        self._inner, self._gate = inner, gate

    @property
    def done(self) -> bool:
        return self._gate.is_set()

    def waits_for(self) -> str:
        return "parameters/0 (s0.1, its primary, is gone)"

    def wait(self, timeout_s: float) -> Any:
        if not self._gate.wait(timeout_s):
            raise TimeoutError
        return self._inner.wait(timeout_s)


class Training:
    """One worker's model on servers in memory, and the exchange with them."""

    def __init__(self, staleness: int | None) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.values = list(self.model.parameters())
        self.servers, self.units = HeldUp(MemorySlices()), MemoryUnits(SharedTable(), "w0")
        named = dict(self.model.named_parameters())
        self.servers.open(layout_of(named, self.optimizer), initial_of(self.values), timeout_s=1)
        self.units.begin(0, [])
        self.servers.join()
        staged = [torch.empty_like(one) for one in self.values]
        self.exchange = UpdateExchange(
            self.servers, self.units, staged, staleness=staleness, clock=0, wake=lambda: None
        )

    def taken(self) -> int | None:
        """The next unit, once it is there."""
        ready = until(self.exchange.take)
        assert ready is not None
        return ready.given.unit  # type: ignore[no-any-return]

    def push(self, unit: int) -> None:
        gradients = [torch.ones_like(one) for one in self.values]
        self.exchange.push(Update(unit, gradients, [settings_of(group) for group in self.optimizer.param_groups]))


def until(found: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        if value := found():
            return value
        time.sleep(0.001)
    raise AssertionError("it did not come")


@pytest.fixture(params=[0, 1, None])
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    training = Training(request.param)
    yield training
    training.servers.gate.set()
    training.exchange.close(WAIT_S)


def test_a_push_that_is_under_way_holds_up_no_unit_that_may_begin_without_it(training: Training) -> None:
    exchange = training.exchange
    exchange.prepare(10)
    assert training.taken() == 0
    training.servers.gate.clear()
    training.push(0)
    exchange.prepare(10)
    if training.exchange._staleness == 0:
        until(lambda: training.units._shared.table.waiting == ["w0"])
        assert exchange.take() is None, "in lock step its own update must be in"
        training.servers.gate.set()
    assert training.taken() == 1
    training.servers.gate.set()
    assert until(exchange.take_pushed)[0].staleness == 0
    assert exchange.clock == 1


def test_the_next_unit_is_not_asked_for_before_anything_is_known_of_the_pace() -> None:
    training = Training(4)
    exchange = training.exchange
    exchange.prepare(10)
    assert training.taken() == 0
    exchange.prepare(10, ahead=True)
    exchange.call(lambda: None, WAIT_S)  # what was handed over before is taken up when this is done
    assert exchange.take() is None
    assert training.units._shared.table.next == 1, "it is left to others until the first unit is computed"
    training.push(0)
    assert training.taken() == 1
    exchange.prepare(10, ahead=True)
    assert training.taken() == 2, "while unit 1 is computed, by how long unit 0 took"
    exchange.close(WAIT_S)


@given(took_s=st.floats(0, 1e6), lead_s=st.floats(0, 1e6))
def test_a_unit_is_asked_for_twice_as_early_as_is_needed_and_never_in_the_past(took_s: float, lead_s: float) -> None:
    after_s = prepare_after_s(took_s, lead_s)
    assert 0 <= after_s <= took_s
    assert after_s == 0 or took_s - after_s == pytest.approx(LEADS * lead_s, rel=1e-3, abs=1e-6)
    assert prepare_after_s(math.inf, lead_s) == math.inf
    assert usual_lead_s(lead_s, took_s) >= took_s


def test_what_is_waited_for_is_known_from_other_threads(training: Training) -> None:
    exchange = training.exchange
    exchange.prepare(10)
    assert training.taken() == 0
    assert exchange.delay() is None
    training.servers.gate.clear()
    training.push(0)
    delay = until(exchange.delay)
    assert delay.what == "parameters/0 (s0.1, its primary, is gone) to acknowledge its update of step 0"
    assert not delay.usual


def test_a_push_that_no_server_takes_is_an_error_where_the_training_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.modes.asynchronous.exchange.ACKNOWLEDGED_S", 0.05)
    training = Training(1)
    training.exchange.prepare(10)
    assert training.taken() == 0
    training.servers.gate.clear()
    training.push(0)
    training.exchange.prepare(1)  # which is over when unit 0 is used
    with pytest.raises(PeerError, match="parameters/0"):
        until(training.exchange.take)


class FakeRuntime:
    """What an attendance has of the worker; `listen` looks whether the clock of the test should go on."""

    def __init__(self) -> None:
        self.waiting = self.spending = self
        self.words: list[str] = []
        self.categories: list[str] = []
        self.listened = 0
        self.on_listen: Callable[[], None] = lambda: None

    def outside_steps(self, what: str, whom: Sequence[str]) -> None:
        self.words.append(what)

    def inside_steps(self) -> None:
        self.words.append("")

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        self.categories.append(category)
        yield

    def listen(self, at_most_s: float) -> None:
        self.listened += 1
        self.on_listen()
        time.sleep(0.001)

    def wake(self) -> None:
        pass


def test_a_worker_says_what_it_waits_for_within_seconds(tmp_path: Path) -> None:
    """In its heartbeat at once, in the log after SAY_S, once; and waiting is not what faults have cost."""
    later_s = [0.0]
    servers, runtime = HeldUp(MemorySlices()), FakeRuntime()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = GivenSteps(ShardPlan(length=64, batch_size=8, shards=2, seed=0))
    events = EventLog(tmp_path / "w0.1.jsonl", "w0.1")
    lines = ServerLines(servers, MemoryUnits(SharedTable(), "w0"))
    parts = TrainingParts(
        me="w0.1", model=model, optimizers=optimizer, extras={}, data=data, events=events, servers=lambda: lines
    )
    attendance = ServedAttendance(parts, data, 0, adaptive=False, clock=lambda: time.monotonic() + later_s[0])
    attendance.attach(cast(Runtime, runtime))
    attendance.arrives(lambda: None)
    attendance.opens(0, 10)
    servers.gate.clear()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1, 3)
    attendance.updates(optimizer)
    attendance.ends(0)

    def goes_on() -> None:
        if runtime.listened == before + 20:
            assert any("parameters/0" in words for words in runtime.words), "the heartbeat knows it at once"
            later_s[0] = SAY_S + 1
        elif runtime.listened == before + 40:
            servers.gate.set()

    before, runtime.on_listen = runtime.listened, goes_on
    attendance.opens(1, 10)
    assert data.unit == 1
    written = [json.loads(line) for line in (tmp_path / "w0.1.jsonl").read_text().splitlines()]
    said = [event for event in written if event["kind"] == "waiting"]
    assert len(said) == 1
    what = "parameters/0 (s0.1, its primary, is gone) to acknowledge its update of step 0"
    assert f"waiting for {what} since" in said[0]["reason"]
    assert said[0]["step"] == 1
    assert runtime.categories[0] == JOINING, "while it comes by the state"
    assert set(runtime.categories[1:]) == {WAITING}
    assert runtime.words[-1] == ""
    attendance.close()
