"""A worker's end is an ordinary exception: it can be caught, is told again, and becomes an exit code at the edge."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.core.errors import ConfigError, Evicted, WorkerEnded
from holdfast.placement.environment import RUN_DIR, WORKER
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
STEPS = 12


def join() -> tuple[holdfast.Run, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return holdfast.join(model, optimizer, data, batch_size=16, shards=4, seed=1), model, optimizer


def train(leave_at: int | None = None, *, waits: bool = False) -> str:
    """`waits`: it does not come to the end before there are two workers again."""
    run, model, optimizer = join()
    try:
        for step in run.steps(STEPS):
            for x, y in step:
                ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            if step.number == leave_at:
                run._worker.replace_me("for a test")
            while waits and step.number == 4 and not registered("w1.2"):
                time.sleep(0.01)
            if waits and step.number > 4 and len(run.workers) == 1:
                time.sleep(0.1)
        return run.digest()
    finally:
        run.close()


def registered(worker: str) -> bool:
    events = Path(os.environ[RUN_DIR]) / "events" / f"{worker}.jsonl"
    return events.exists() and "registered" in events.read_text()


def come_back() -> str:
    """As an actor would: in a thread, whose worker is evicted; caught, and joined again as the next incarnation."""
    found: list[Any] = []

    def body() -> None:
        try:
            train(leave_at=2)
        except Exception as error:
            assert isinstance(error, Evicted) and not isinstance(error, SystemExit) and error.code == 75
        try:
            join()
        except ConfigError as error:
            assert "w1.1 has left the run" in str(error) and "HOLDFAST_WORKER=w1.2" in str(error)
        os.environ[WORKER] = "w1.2"
        found.append(train())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return str(found[0])


def test_an_evicted_worker_can_join_again_in_the_same_process() -> None:
    alone = agreed(forked(train, workers=1))
    assert agreed(forked({"w0.1": lambda: train(waits=True), "w1.1": come_back})) == alone


def told_again() -> list[str]:
    run, _, _ = join()
    said = []
    for _ in range(2):
        try:
            for step in run.steps(STEPS):
                list(step)
                run._worker.replace_me("for a test")
        except WorkerEnded as end:
            said.append(end.reason)
    run.close()
    return said


def test_whoever_goes_on_regardless_is_told_again() -> None:
    assert agreed(forked(told_again, workers=1)) == ["for a test", "for a test"]


SCRIPT = """
import os, signal, torch, holdfast
from torch.utils.data import TensorDataset
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
run = holdfast.join(model, optimizer, TensorDataset(torch.randn(64, 6)), batch_size=16, shards=4)
def train():
    for step in run.steps(8):
        for (x,) in step:
            model(x).sum().backward()
        optimizer.step()
        if step.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
"""
ENDS = {"uncaught": "train()", "caught": "try: train()\nexcept Exception as end: print('caught', type(end).__name__)"}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("starter", [[], ["-m", "holdfast.placement.bootstrap"]], ids=["by hand", "bootstrap"])
def test_an_end_is_the_exit_code_of_a_script(ends: str, starter: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + ENDS[ends])
    done = subprocess.run([sys.executable, *starter, str(script)], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    assert ("caught Stopped" in done.stdout) == (ends == "caught")
    assert done.returncode == (0 if ends == "caught" and not starter else 143), done.stderr
