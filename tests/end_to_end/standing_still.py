"""A training in which a chosen worker never says that it is ready, from a chosen step on, in one of several ways.

Each is planted here, in the script's own process: the worker lives, beats, keeps its lease and answers every knock.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import holdfast
from holdfast.engine.api.outside import Outside
from holdfast.engine.between_loops import BetweenLoops
from holdfast.engine.worker import Worker
from holdfast.membership import messages as m

WORKER = os.environ.get("HOLDFAST_WORKER", "")


def plant(how: str, at: int) -> None:
    computed, broadcast = Worker.computed, Worker._broadcast

    def mute(self: Worker, effect: m.Broadcast) -> None:
        group = self._group
        if group is not None and isinstance(effect.message, m.Ready) and effect.message.step >= at:
            group.send = lambda *_, **__: None  # type: ignore[method-assign]
        broadcast(self, effect)

    def forget(self: Worker, step: int, *rest: Any, **more: Any) -> None:
        if step < at:
            computed(self, step, *rest, **more)

    def wait(self: BetweenLoops, step: int) -> None:
        others = tuple(one for one in self._machine.view.members if one != self._machine.me)  # type: ignore[union-attr]
        self._machine.readers = lambda: others  # type: ignore[method-assign]
        self._wait_while(self._machine.readers)

    if how == "mute":  # it thinks that it has said so
        Worker._broadcast = mute  # type: ignore[method-assign]
        Worker._EFFECTS[m.Broadcast] = mute
    elif how == "forget":  # it has computed its shards and does not know
        Worker.computed = forget  # type: ignore[method-assign]
    elif how == "loop-end":  # it waits at the end of a loop for others to load what they have long since loaded
        BetweenLoops.end = wait  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--first", type=int, default=20, help="where the first of two loops ends")
    parser.add_argument("--plant", nargs="*", default=[], help="WORKER:HOW:STEP")
    parser.add_argument("--evaluate", type=float, default=0.0, help="seconds, of the leader, after the first loop")
    parser.add_argument("--long", type=float, default=0.0, help="seconds that a shard of step 40 takes w1.1")
    parser.add_argument("--apart", action="store_true", help="between the loops the workers wait at different calls")
    parser.add_argument("--say", type=Path, default=Path())
    args = parser.parse_args()
    for planted in args.plant:
        worker, how, at = planted.split(":")
        if worker == WORKER:
            plant(how, int(at))
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(256, 8, generator=generator), torch.randint(0, 4, (256,), generator=generator)
    )
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = holdfast.join(model, optimizer, data, batch_size=32, shards=8, seed=3)
    for until in (args.first, args.steps):
        for step in run.steps(until):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                if step.number == 40 and WORKER == "w1.1":
                    time.sleep(args.long)
            optimizer.step()
        if until == args.first and args.apart:
            Outside._check_same_call = lambda *_: None  # type: ignore[method-assign]  # it would refuse this at once
            run.gather(1) if WORKER.startswith("w0.") else run.record(accuracy=1.0)
        if until == args.first and args.evaluate and run.leader:
            args.say.joinpath("evaluates").touch()
            time.sleep(args.evaluate)
    print("digest", run.digest())


if __name__ == "__main__":
    main()
