"""The user's script of a simulated run: a real one, on the public API, with loops, breaks, evaluations and stops.

What a script does is told by a Script, which is drawn from a seed. Its lines take virtual time, on each worker another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import TensorDataset

from holdfast.engine.api.run import Run

if TYPE_CHECKING:
    from tests.harness.runtime.process import Process

SAMPLES, EVALUATED = 40, 6


@dataclass(frozen=True)
class Loop:
    until: int
    left_after: int = -1  # the step after which it is left with `break`
    lines_s: float = 0.0  # what follows it takes a worker up to so long
    evaluates: bool = False  # and has an evaluation in it
    records: bool = False  # and records a value


@dataclass(frozen=True)
class Script:
    loops: tuple[Loop, ...]
    shards: int = 4
    evaluates_every: int = 0  # steps, after the update
    evaluates_first: bool = False  # before the first loop
    stops_after: int = -1  # the step after which all workers call run.stop
    leader_stops_after: int = -1  # or only the leader: the others must hear of it

    @classmethod
    def draw(cls, seed: int) -> Script:
        rng = random.Random(f"script {seed}")
        steps = rng.choice((3, 5, 6, 8, 12))
        ends = sorted(rng.randrange(steps + 1) for _ in range(rng.choice((0, 1, 2, 3))))
        loops, start = [], 0
        for end in ends:
            left = rng.randrange(start, end) if end > start and rng.random() < 0.4 else -1
            after = rng.random()
            loops.append(Loop(end, left, rng.choice((0.0, 0.1, 1.0)), after < 0.4, 0.3 < after < 0.6))
            start = end if left < 0 else left + 1
        last = Loop(steps, lines_s=rng.choice((0.0, 0.0, 0.5)), evaluates=rng.random() < 0.3)
        stops = rng.random()
        return cls(
            (*loops, last),
            shards=rng.choice((1, 2, 4, 5)),
            evaluates_every=rng.choice((0, 0, 1, 3)),
            evaluates_first=rng.random() < 0.15,
            stops_after=rng.randrange(steps) if stops < 0.15 else -1,
            leader_stops_after=rng.randrange(steps) if stops > 0.9 else -1,
        )

    @property
    def is_exact(self) -> bool:
        """Whether how many steps there are follows from the script alone."""
        return self.leader_stops_after < 0

    @property
    def steps(self) -> int:
        return self.loops[-1].until


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, -0.25, 0.125]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, generator=generator))


DATASET = dataset()
VALIDATION = TensorDataset(*DATASET[:EVALUATED])


class Training:
    """One process's copy of what its script builds, and the script's lines."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)

    def run(self, run: Run, script: Script) -> None:
        if script.evaluates_first:
            self._evaluate(run, "first")
        for number, loop in enumerate(script.loops):
            for step in run.steps(loop.until):
                self._train(run, step, script)
                if step.number == loop.left_after:
                    break
            self._between(run, number, loop)

    def _train(self, run: Run, step: Any, script: Script) -> None:
        process = self._process
        for x, y in step:
            noise = torch.rand(()).item()  # from the shard's own generator, whoever computes it
            process.works(process.shard_s())
            loss = ((self.model(x) - y) ** 2).mean() * (1.0 + 0.01 * noise)
            loss.backward()
            step.record(loss=loss)
        self.optimizer.step()
        process.applied(step.number, step.metrics["loss"], self.weights())
        process.works(process.line_s(0.02))
        if script.evaluates_every and (step.number + 1) % script.evaluates_every == 0:
            self._evaluate(run, f"step {step.number}")
        if step.number == script.stops_after:
            run.stop("the script has had enough")
        if step.number >= script.leader_stops_after >= 0 and run.leader and not run.stopped:
            run.stop("its leader has had enough")

    def _between(self, run: Run, number: int, loop: Loop) -> None:
        """What must happen once, whoever joins when."""
        self._process.works(self._process.line_s(loop.lines_s))
        with torch.no_grad():
            self.model.weight.mul_(0.9)
        self._process.works(self._process.line_s(loop.lines_s))
        self.optimizer.param_groups[0]["lr"] *= 0.8
        if loop.evaluates:
            self._evaluate(run, f"after loop {number}")
        if loop.records:
            found = run.record(size=lambda: float(self.model.weight.detach().abs().sum()))
            self._process.found(f"size after loop {number}", found["size"])

    def _evaluate(self, run: Run, where: str) -> None:
        def measure(batch: Any) -> dict[str, float]:
            self._process.works(self._process.line_s(0.05))
            x, y = batch
            return {"error": float(((self.model(x) - y) ** 2).mean())}

        found = run.evaluate(VALIDATION, measure, batch_size=2, prefix="val_")
        self._process.found(f"evaluation at {where}", found["val_error"])

    def weights(self) -> tuple[float, ...]:
        return tuple(self.model.weight.detach().tolist())
