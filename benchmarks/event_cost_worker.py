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
from holdfast.events import EventLog
from holdfast.run.spending import Spending
from workloads import SEED, WORKLOADS


class Stopwatch:
    """The time that the training thread is in any of the watched functions; one within another counts once."""

    def __init__(self) -> None:
        self.spent_s = {"events": 0.0, "account": 0.0}
        self.calls = 0
        self._thread = threading.get_ident()
        self._inside = False

    def watch(self, owner: type, name: str, what: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return inner(*args, **kwargs)
            self._inside = True
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent_s[what] += time.perf_counter() - began
                self.calls += 1
                self._inside = False

        setattr(owner, name, watched)


def snapshot(watch: Stopwatch) -> dict[str, float]:
    return {
        "step_s": time.perf_counter(),
        "events_s": watch.spent_s["events"],
        "account_s": watch.spent_s["account"],
        "calls": watch.calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    model = workload.model()
    watch = Stopwatch()
    watch.watch(EventLog, "write", "events")
    for name in ("_move", "look", "go_on", "took", "tell"):
        watch.watch(Spending, name, "events" if name == "tell" else "account")
    run = holdfast.join(model, workload.optimizer(model), workload.dataset(), batch=workload.batch, shards=4, seed=SEED)
    before, first = snapshot(watch), 0
    for step in run.steps(1_000_000):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.record(loss=loss, late=float(first > 0 and time.perf_counter() - before["step_s"] > args.seconds))
        run.optimizer.step()
        if step.number + 1 == workload.warmup:
            before, first = snapshot(watch), step.number
        elif step.metrics["late"]:  # the same on every worker
            break
    after, steps = snapshot(watch), step.number - first
    figures = {name: (after[name] - before[name]) / steps for name in after} | {"steps": steps}
    partial = args.out / f"{os.getpid()}.tmp"
    partial.write_text(json.dumps(figures))
    partial.replace(partial.with_suffix(".json"))


if __name__ == "__main__":
    main()
