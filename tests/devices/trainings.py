"""A training on the simulated device, as a script has it, in a process that was forked from the test's."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast
from holdfast.placement.environment import RUN_DIR
from tests.harness import device as simulated
from tests.harness.device import collectives

BATCH, STEPS = 24, 8
LATE, EARLY = "late", "early"


def dataset(samples: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 1, 4, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 5, (samples,), generator=generator))


class Net(nn.Module):
    """With buffers that are floats, whole numbers and not changed at all, and dropout from the device's generator."""

    fixed: torch.Tensor

    def __init__(self, width: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.ModuleList(nn.Linear(64 if not layer else width, width) for layer in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers - 1))
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 5)
        self.register_buffer("fixed", torch.tensor([1.0, float("inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x))).flatten(1)
        for number, layer in enumerate(self.hidden):
            h = F.gelu(layer(h))
            if number:
                h = self.norms[number - 1](h)
        logits: torch.Tensor = self.last(self.drop(h))
        return logits


def train(
    when: str = LATE,
    *,
    shards: int = 6,
    steps: int = STEPS,
    build: Callable[[], nn.Module] = Net,
    before: Callable[[holdfast.Run, int], object] = lambda run, step: None,
    in_shard: Callable[[holdfast.Run, int], object] = lambda run, step: None,
    after: Callable[[holdfast.Run], Any] = lambda run: None,
    library: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The digest of its weights, what the last step had recorded, and how often its thread waited for the device.

    That is in each step, and between join and its first step, where it may be given a state.
    `library`: torch knows of one that moves bytes of this device.
    """
    device = simulated.load()
    if library:
        collectives.register()
    simulated.native().set_early(when == EARLY)
    torch.manual_seed(5)
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    run = holdfast.join(
        model, optimizer, dataset(), batch_size=BATCH, shards=shards, extras={"scheduler": scheduler}, **options
    )
    waits: list[int] = []
    before_first = -sum(simulated.blocked_here().values())
    metrics: Mapping[str, float] = {}
    for step in run.steps(steps):
        before(run, step.number)
        waited = sum(simulated.blocked_here().values())
        before_first += 0 if waits else waited
        for batch in step:
            x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            step.record(loss=loss, largest=x.abs().max())
            in_shard(run, step.number)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimizer.step()
        scheduler.step()
        metrics = {**metrics, **step.metrics}
        waits.append(sum(simulated.blocked_here().values()) - waited)
    found = {"digest": run.digest(), "metrics": dict(metrics), "more": after(run)}
    run.close()
    return {**found, "waits": waits, "before_first": before_first}


def groups_of(worker: str) -> list[str]:
    """The libraries of the process groups that this worker has had: one for each view in which one stood."""
    lines = (Path(os.environ[RUN_DIR]) / "events" / f"{worker}.jsonl").read_text().splitlines()
    return [event["library"] for event in map(json.loads, lines) if event["kind"] == "carried"]


def kill_at(worker: str, step: int) -> Callable[[holdfast.Run, int], None]:
    """In the middle of the worker's first shard of a step."""

    def look(run: holdfast.Run, now: int) -> None:
        if run.id == worker and now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return look


def wait_for(path: Path, inside: str = "") -> None:
    """Until it is there, or something of that name somewhere inside it."""
    deadline = time.monotonic() + 150.0
    while not (next(path.rglob(inside), None) if inside else path.exists()):
        assert time.monotonic() < deadline, f"{inside or path.name} is not there"
        time.sleep(0.005)


def wait_until_registered(worker: str) -> None:
    events = Path(os.environ[RUN_DIR]) / "events" / f"{worker}.jsonl"
    wait_for(events)
    deadline = time.monotonic() + 150.0
    while "registered" not in events.read_text():
        assert time.monotonic() < deadline, f"{worker} has not registered"
        time.sleep(0.005)
