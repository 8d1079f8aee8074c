"""A checkpoint of the servers' state while servers fail: it is made again, or given up while the training goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.errors import PeerError
from holdfast.data.shards import ShardPlan
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.engine.transfer.state_elsewhere import SAVE_AGAIN_S, StateElsewhere
from holdfast.events import EventLog
from holdfast.modes.asynchronous import arriving
from holdfast.modes.asynchronous.arriving import collect
from holdfast.modes.asynchronous.exchange import Update, UpdateExchange
from holdfast.modes.asynchronous.given_steps import GivenSteps
from holdfast.modes.asynchronous.served_state import ServedState
from holdfast.modes.port import Attendance
from holdfast.servers.client import RemoteServers
from holdfast.servers.units_port import MemoryUnits, ServerLines, SharedTable
from tests.harness.servers.fleet import Fleet

WAIT_S = 30.0
SLICES = 3


class Training:
    """One worker's, of the asynchronous mode, on the servers of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.model = nn.Linear(300, 40)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.state = ServedState(self.model, self.optimizer)
        self.data = GivenSteps(ShardPlan(length=64, batch_size=8, shards=2, seed=0))
        self.servers = fleet.client("w0", slices=SLICES)
        self.servers.open(self.state.layout, self.state.initial, timeout_s=WAIT_S)
        units = MemoryUnits(SharedTable(), "w0")
        units.begin(0, [])
        self.lines = ServerLines(self.servers, units)
        clock = self.servers.join()
        self.exchange = UpdateExchange(
            self.servers, units, self.state.staging(), staleness=0, clock=clock, wake=lambda: None
        )
        self.unit = 0

    def step(self) -> None:
        self.exchange.prepare(10)
        while self.exchange.take() is None:
            pass
        gradients = [torch.ones_like(one) for one in self.state.parameters]
        self.exchange.push(Update(self.unit, gradients, self.state.settings()))
        self.unit += 1
        self.exchange.call(lambda: None, WAIT_S)  # it is acknowledged when this is done

    def collect(self) -> tuple[int, ...]:
        return tuple(collect(self.lines, self.exchange, self.state, self.data))

    def close(self) -> None:
        self.exchange.close(WAIT_S)
        self.servers.close()


@contextmanager
def training(fleet: Fleet) -> Iterator[Training]:
    training = Training(fleet)
    try:
        yield training
    finally:
        training.close()


@pytest.mark.processes
@pytest.mark.xdist_group("parameter-servers")
def test_a_capture_whose_primary_is_killed_while_it_is_read_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, killed = RemoteServers.captured_slice, list[str]()
    with Fleet(3, replicas=3) as fleet, training(fleet) as one:

        def kill_first(servers: RemoteServers, number: int, *rest: Any) -> memoryview:
            if number == 1 and not killed:
                killed.append(fleet.configurations()["parameters/1"].primary)
                fleet.kill(killed[0])
            return read(servers, number, *rest)

        before = [value.detach().clone() for value in one.state.parameters]
        one.step()
        monkeypatch.setattr(RemoteServers, "captured_slice", kill_first)
        assert one.collect() == (1,) * SLICES
        assert killed, "the fault came"
        assert all(torch.equal(now, was - 1.0) for now, was in zip(one.state.parameters, before, strict=True)), (
            "the state of one moment"
        )
        one.step()
        assert one.collect() == (2,) * SLICES


@pytest.mark.processes
@pytest.mark.xdist_group("parameter-servers")
def test_a_capture_that_servers_do_not_answer_in_time_is_given_up_and_steps_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arriving, "CAPTURE_S", 1.0)
    with Fleet(1) as fleet, training(fleet) as one:
        one.step()
        (process,) = fleet.processes.values()
        os.kill(process, signal.SIGSTOP)
        try:
            with pytest.raises(PeerError, match="no state of all slices could be had"):
                one.collect()
        finally:
            os.kill(process, signal.SIGCONT)
        one.step()
        assert one.collect() == (2,) * SLICES


class Recording(NoCheckpoints):
    keeps = True

    def __init__(self) -> None:
        self.saved: list[int] = []

    def is_due(self, step: int, *, first: bool) -> bool:
        return True

    def save(self, step: int, *rest: Any, **more: Any) -> None:
        self.saved.append(step)

    def save_last(self, step: int, *rest: Any, **more: Any) -> None:
        self.saved.append(step)

    def leave(self, step: int, *rest: Any, **more: Any) -> str:
        self.saved.append(step)
        return ""


class Failing(Attendance):
    fails = True

    def workers(self, members: tuple[str, ...]) -> tuple[str, ...]:
        return members

    def collect(self) -> None:
        if self.fails:
            raise PeerError("no server has it")


def test_a_state_that_is_not_to_be_had_is_not_saved_and_the_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("holdfast.engine.transfer.state_elsewhere.time.monotonic", lambda: now[0])
    inner, attendance = Recording(), Failing()
    checkpoints = StateElsewhere(inner, attendance, "w0.1", EventLog(tmp_path / "w0.1.jsonl", "w0.1"))
    assert checkpoints.is_due(3, first=True)
    checkpoints.save(3, ("w0.1",), {})
    told = [json.loads(line) for line in (tmp_path / "w0.1.jsonl").read_text().splitlines()]
    assert [event["text"] for event in told if event["kind"] == "warning"] == ["step 3 is not saved: no server has it"]
    assert not checkpoints.is_due(4, first=True), "not again at once"
    now[0] += SAVE_AGAIN_S
    assert checkpoints.is_due(5, first=True)
    assert checkpoints.leave(5, ("w0.1",), {}, save=True) == "no server has it"
    checkpoints.save_last(6, ("w0.1",), {})
    assert checkpoints.settle(6) == "no server has it", "the end says that its last state is not saved"
    assert inner.saved == []
    attendance.fails = False
    checkpoints.save_last(6, ("w0.1",), {})
    assert checkpoints.settle(6) == "" and inner.saved == [6]
