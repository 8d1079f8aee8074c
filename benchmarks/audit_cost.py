"""What comparing states costs: the time that a worker spends on the digests of one interval, against its steps.

    python benchmarks/audit_cost.py

For models of four sizes with AdamW: a step of two shards is timed (forward, backward, update), then every digest that
is due within one interval of `--audit-every` steps. The share is what `holdfast run` pays for it by default; messages
are not counted, since the digests travel in those that are sent anyway. Shards that are computed twice cost what they
cost: their fraction. Times are of the processor, one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

from holdfast.membership.auditing import AuditRules
from holdfast.state.slices import slice_digest, slices_for
from holdfast.state.snapshot import Holder


def perceptron(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def measure(width: int, depth: int, samples: int, every: int) -> None:
    torch.manual_seed(1)
    model = perceptron(width, depth)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(samples, width), torch.randint(0, 10, (samples,))

    def step() -> float:
        began = time.thread_time()
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - began

    step()
    step_s = sorted(step() for _ in range(7))[3]
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    rules = AuditRules(every=every, slices=slices_for(size))
    slices = min(rules.slices, every)
    holder = Holder(model, optimizer)
    times = []
    for _ in range(3):
        began = time.thread_time()
        for number in range(every):
            due = rules.slice_due(number)
            if due is not None:
                slice_digest(holder.refer(number), due, slices)
        times.append(time.thread_time() - began)
    spent_s = sorted(times)[1]
    state_mb = holder.refer(0).nbytes / 1e6
    print(
        f"{state_mb:8.1f} MB of state, {len(list(model.parameters()))} parameters: step {1000 * step_s:8.2f} ms, "
        f"{slices} of {every} steps take {1000 * spent_s:.2f} ms more in all: {spent_s / every / step_s:.3%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for width, depth, samples in ((64, 2, 8), (256, 8, 32), (1024, 12, 32), (1024, 80, 32)):
        measure(width, depth, samples, args.every)


if __name__ == "__main__":
    main()
