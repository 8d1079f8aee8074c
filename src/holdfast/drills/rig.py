"""The starter that a drill puts before the user's script, in every worker.

    holdfast run … -m holdfast.drills.rig script.py arguments…

Writes a trace: after every step that is applied, the digest of each tensor of the model, the view, and whose shards
counted. Looks then whether there is an order for this worker to flip a bit. The script sees nothing of it; what it
costs is one hash over the weights a step, and only in drills.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.drills.trace import DIGITS, TRACE, order_path, result_path, trace_path
from holdfast.engine.api import joining
from holdfast.engine.api.run import Run
from holdfast.engine.gradients import Shares
from holdfast.placement.bootstrap import run_script
from holdfast.placement.directory import replace_file
from holdfast.state.digest import digest_tensors
from holdfast.state.local import whole
from holdfast.state.naming import named_state
from holdfast.state.optimizer import by_name
from holdfast.testing.bit_flips import flip

SAMPLES_MAX = 4096  # of a step, whose numbers are written down


class Tracer:
    """Belongs to the thread of the user's loop. A full disk costs the trace, not the training."""

    def __init__(self, run: Run, directory: Path) -> None:
        self._run = run
        self._directory = directory
        self._names: list[str] = []
        self._began = False
        self._ranks = run._worker.ranks
        path = trace_path(directory, run.id) if run._worker.rank == 0 else os.devnull  # one of a group writes for all
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._flipper = Flipper(run, directory)

    def applied(self, step: int, view: int, counted: Shares) -> None:
        state = {name: value for name, value in named_state(self._run.model).items() if torch.is_tensor(value)}
        digests = "".join(digest_tensors([(name, whole(value))])[:DIGITS] for name, value in state.items())
        names = list(state)
        counted = tuple((who, self._leaves(bundles)) for who, bundles in counted)
        if names != self._names or not self._began:
            self._names, self._began = names, True
            self._write({"names": names, "plan": self._plan()})
        handed = self._run.plan.handed
        ahead = {"n": handed.current.digest()} if handed is not None and handed.current is not None else {}
        self._write(
            {
                "s": step,
                "t": round(time.time(), 6),
                "v": view,
                "d": digests,
                "c": counted,
                **ahead,
                **self._sampled(step),
            }
        )
        self._flipper.look(step)

    def _sampled(self, step: int) -> dict[str, Any]:
        """What only the worker's own sampler can say."""
        plan = self._run.plan
        if plan.sampling is None or plan.samples_in(step) > SAMPLES_MAX:
            return {}
        numbers = [number for shard in range(plan.shards) for number in plan.indices(step, shard)]
        return {"e": plan.epoch_of(step), "i": numbers}

    def _leaves(self, bundles: tuple[int, ...]) -> tuple[int, ...]:
        """The shards of the plan. To the machine of a group a shard is a bundle of as many as there are ranks."""
        return tuple(bundle * self._ranks + rank for bundle in bundles for rank in range(self._ranks))

    def _plan(self) -> dict[str, Any]:
        plan = self._run.plan
        fields = {
            name: getattr(plan, name)
            for name in ("length", "batch_size", "shards", "seed", "drop_last", "shuffle", "order_seed")
        }
        arrangement = plan.arrangement
        words = None if arrangement is None else arrangement.words()
        if plan.handed is not None:
            return {**fields, "sampler": "iterable"}
        if words is not None:
            return {**fields, "stream": words}
        if arrangement is not None:
            return {**fields, "sampler": "stream"}
        return fields if plan.sampling is None else {**fields, "sampler": True}

    def _write(self, record: dict[str, Any]) -> None:
        try:
            os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")
        except OSError:
            pass


class Flipper:
    """Flips one bit when it is ordered to, and writes down which."""

    def __init__(self, run: Run, directory: Path) -> None:
        self._run = run
        self._order = order_path(directory, run.id)
        self._result = result_path(directory, run.id)

    def look(self, step: int) -> None:
        if not self._order.exists():
            return
        order = json.loads(self._order.read_text())
        self._order.unlink()
        rng = random.Random(order["seed"])
        if order["kind"] == "gradient":
            self._flip_gradient(step + 1, rng)
        elif order["kind"] == "parameter":
            self._flip(step + 1, [p for p in self._run.model.parameters() if p.requires_grad], "parameter", rng)
        else:
            states = [state for one in by_name(self._run.optimizer).values() for state in one.state.values()]
            tensors = [value for state in states for value in state.values() if torch.is_tensor(value) and value.dim()]
            self._flip(step + 1, tensors, "optimizer", rng)

    def _flip_gradient(self, step: int, rng: random.Random) -> None:
        """In the next one that a chosen parameter gets, before anybody has looked at it."""
        trained = [p for p in self._run.model.parameters() if p.requires_grad and p.dtype == torch.float32]
        if not trained:
            self._tell(step, "")
            return

        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None and bool(parameter.grad.abs().max() > 0):
                handle.remove()
                self._flip(step, [parameter.grad], "gradient", rng)

        chosen: Any = rng.choice(trained)
        handle = chosen.register_post_accumulate_grad_hook(accumulated)

    def _flip(self, step: int, tensors: list[torch.Tensor], kind: str, rng: random.Random) -> None:
        try:
            self._tell(step, flip(tensors, kind, rng))
        except IndexError:  # there is no number in 32 bits that is not zero
            self._tell(step, "")

    def _tell(self, step: int, what: str) -> None:
        replace_file(self._result, json.dumps({"step": step, "what": what}))


def watch_joins(directory: Path) -> None:
    """Let every run that the script joins be traced."""
    join = joining.join

    @functools.wraps(join)
    def traced(*arguments: Any, **options: Any) -> Run:
        run = join(*arguments, **options)
        run.watch(Tracer(run, directory).applied)
        return run

    joining.join = traced
    holdfast.join = traced


def main() -> None:
    if TRACE in os.environ:
        watch_joins(Path(os.environ[TRACE]))
    run_script(sys.argv[1:])


if __name__ == "__main__":
    main()
