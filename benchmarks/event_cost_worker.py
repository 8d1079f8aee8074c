"""One worker that watches what its events and its account of time cost the thread that trains. See event_cost.py."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn import functional as F

import holdfast
from holdfast.engine.spending import Spending
from holdfast.events import EventLog
from workloads import SEED, WORKLOADS

ACCOUNT = ("_move", "look", "go_on", "took")


class Stopwatch:
    """The processor time of the training thread in any of the watched functions; one within another counts once."""

    def __init__(self) -> None:
        self.took_s: dict[str, list[float]] = {}
        self._thread = threading.get_ident()
        self._inside = False

    def watch(self, owner: type, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)
        took_s = self.took_s.setdefault(name, [])

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return inner(*args, **kwargs)
            self._inside = True
            began = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                ended = time.thread_time()
                looked_s = time.thread_time() - ended  # at the clock, of which a look was in what was taken
                took_s.append(ended - began - looked_s)
                self._inside = False

        setattr(owner, name, watched)

    def forget(self) -> None:
        for took_s in self.took_s.values():
            took_s.clear()

    def cost_s(self, *names: str) -> float:
        return sum(sum(self.took_s[name]) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    model = workload.model()
    watch = Stopwatch()
    watch.watch(EventLog, "write")
    for name in (*ACCOUNT, "tell"):
        watch.watch(Spending, name)
    run = holdfast.join(
        model, workload.optimizer(model), workload.dataset(), batch_size=workload.batch, shards=4, seed=SEED
    )
    began = first = 0.0
    for step in run.steps(1_000_000):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.record(loss=loss, late=float(began > 0 and time.perf_counter() - began > args.seconds))
        run.optimizer.step()
        if step.number + 1 == workload.warmup:
            watch.forget()
            began, first = time.perf_counter(), step.number
        elif step.metrics["late"]:  # the same on every worker
            break
    steps = step.number - first
    figures = {
        "step_s": (time.perf_counter() - began) / steps,
        "events_s": watch.cost_s("write", "tell") / steps,
        "account_s": watch.cost_s(*ACCOUNT) / steps,
        "calls": sum(map(len, watch.took_s.values())) / steps,
    }
    partial = args.out / f"{os.getpid()}.tmp"
    partial.write_text(json.dumps(figures))
    partial.replace(partial.with_suffix(".json"))


if __name__ == "__main__":
    main()
