"""The step engine under a client that is no generator: plain calls, in a thread that is not the main one."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
STEPS, SHARDS = 10, 8


def join(**options: Any) -> tuple[holdfast.Run, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return holdfast.join(model, optimizer, data, batch_size=24, shards=SHARDS, seed=1, **options), model, optimizer


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def two_fors() -> list[Any]:
    run, model, optimizer = join()
    losses = []
    for step in run.steps(STEPS):
        for batch in step:
            loss = loss_of(model, batch)
            loss.backward()
            step.record(loss=loss)
        optimizer.step()
        losses.append(step.metrics["loss"])
    run.close()
    return [run.digest(), losses]


class Trainer:
    """One that owns its loop, as trainers do: it calls the engine, and is called by nobody."""

    def __init__(self, *, dies_at: tuple[int, int] | None = None, stops: str = "") -> None:
        self._dies_at = dies_at
        self._stops = stops  # in its first step: "all", or "leader"
        self.run, self._model, self._optimizer = join()

    def fit(self) -> list[Any]:
        engine, losses = self.run.engine, []
        while engine.next_step() < STEPS and not engine.stops_here():
            losses.append(self.train_step(engine.begin().number))
        self.run.finish()
        self.run.close()
        return [self.run.digest(), losses]

    def train_step(self, number: int) -> float:
        engine, done = self.run.engine, 0
        while not engine.reduce():
            while (shard := engine.open_shard()) is not None:
                loss = loss_of(self._model, shard.batch)
                loss.backward()
                shard.record("loss", loss.item())
                if (number, done) == self._dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.contribute(shard)
                done += 1
        self._optimizer.step()
        metrics = engine.current.metrics if engine.current is not None else {}
        if number == 0 and (self._stops == "all" or (self._stops == "leader" and self.run.leader)):
            self.run.stop("enough")
        engine.applied()
        return metrics["loss"]


def in_a_thread(**options: Any) -> list[Any]:
    found: list[Any] = []

    def body() -> None:
        try:
            found.append(Trainer(**options).fit())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]  # type: ignore[no-any-return]


def test_a_client_with_a_loop_of_its_own_gives_the_bits_of_the_two_fors() -> None:
    alone = agreed(forked(two_fors, workers=1))
    assert agreed(forked(in_a_thread, workers=2)) == alone


@pytest.mark.parametrize(("stops", "steps"), [("all", 1), ("leader", 3)])
def test_it_stops_with_all_others(stops: str, steps: int) -> None:
    _, losses = agreed(forked(lambda: in_a_thread(stops=stops), workers=2))
    assert len(losses) == steps


@pytest.mark.parametrize("shard", [0, 2])
def test_also_when_a_worker_is_killed_in_the_middle_of_its_shards(shard: int) -> None:
    alone = agreed(forked(two_fors, workers=1))
    outcomes = forked({"w0.1": in_a_thread, "w1.1": lambda: in_a_thread(dies_at=(1, shard))})
    assert outcomes["w1.1"].signal == signal.SIGKILL
    assert agreed(outcomes) == alone


def test_clients_of_both_kinds_are_workers_of_one_run() -> None:
    alone = agreed(forked(two_fors, workers=1))
    outcomes = forked({"w0.1": in_a_thread, "w1.1": two_fors})
    assert agreed(outcomes) == alone


def test_a_shard_that_is_given_up_can_be_left_behind() -> None:
    def gives_up() -> str:
        run, _, _ = join()
        run.engine.begin()
        assert run.engine.open_shard() is not None
        run.engine.put_down()
        run.close(failed=True)
        return "closed"

    assert agreed(forked(gives_up, workers=1)) == "closed"
