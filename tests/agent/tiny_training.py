"""A training whose steps take about a millisecond, and whose workers die as they are told to.

With --gate it stops before the step that the file names, and says so in a file beside it. Whoever dies first prints
where it is.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--die", choices=("raise", "exit", "kill"))
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--who", default="", help="only workers whose names begin so")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [(torch.randn(4), torch.randn(1)) for _ in range(64)]
    run = holdfast.join(model, optimizer, data, batch_size=8, shards=4)
    for step in run.steps(args.steps):
        while args.gate is not None and args.gate.exists() and step.number >= int(args.gate.read_text() or "0"):
            args.gate.with_name(f"at-{run.id}").write_text(str(step.number))
            time.sleep(0.01)
        for x, y in step:
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            step.record(loss=loss)
        optimizer.step()
        if args.die and step.number == args.at and run.id.startswith(args.who):
            print(f"last words of {run.id} at step {step.number}")
            print("and no end of line", end="")
            if args.die == "raise":
                raise KeyError("boom")
            if args.die == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
