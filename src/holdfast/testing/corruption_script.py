"""The training of the corruption drill: that of the exactness test, and one worker whose memory flips one bit, once.

The flip is done here, in the script, through the tensors that a script can reach; nothing of Holdfast knows of it. It
is told by the environment, so that all workers run the same command, and only the worker of that name obeys: the one
that comes in its place has another name and is honest.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.testing.exactness_script import Net, Noisy

FLIP = "HOLDFAST_DRILL_FLIP"  # "WORKER KIND STEP SEED BIT"; bit -1: any
KINDS = ("gradient", "parameter", "optimizer")
# What is rounded away heals: an optimizer's averages forget, and a small parameter is soon another. Of a low bit
# nothing may be left a few steps later, and no harm done. So the drill flips what lasts until it is compared.
LOWEST_BIT = {"gradient": 0, "parameter": 4, "optimizer": 16}
SMALLEST = {"gradient": 0.0, "parameter": 0.01, "optimizer": 0.0}


def flip(tensors: list[torch.Tensor], kind: str, rng: random.Random, bit: int = -1) -> str:
    """Flip one bit of one number that is not zero, and say which."""
    floats = [tensor for tensor in tensors if tensor.dtype == torch.float32]
    candidates = [tensor for tensor in floats if bool((tensor.detach().abs() > SMALLEST[kind]).any())]
    tensor = rng.choice(candidates).detach()
    bits = tensor.view(torch.int32)
    places = (tensor.abs() > SMALLEST[kind]).nonzero().tolist()
    place = tuple(rng.choice(places))
    bit = bit if bit >= 0 else rng.randrange(LOWEST_BIT[kind], 32)
    before = float(tensor[place])
    bits[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    return f"bit {bit} of {tuple(tensor.shape)}{list(place)}: {before!r} -> {float(tensor[place])!r}"


class Flip:
    """What this worker is to do wrong, if anything."""

    def __init__(self, worker: str, note: Path) -> None:
        who, self.kind, step, seed, bit = os.environ.get(FLIP, "- - -1 0 -1").split()
        self._bit = int(bit)
        self._step = int(step) if who == worker else -1
        self._rng = random.Random(int(seed))
        self._note = note

    def happens(self, kind: str, step: int, tensors: list[torch.Tensor]) -> None:
        if kind == self.kind and step == self._step and tensors:
            self._step = -1
            self._note.write_text(f"{step} {flip(tensors, kind, self._rng, self._bit)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--note", type=Path, required=True, help="where to write down what was flipped")
    args = parser.parse_args()

    torch.manual_seed(11)
    model = Net(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=args.steps + 1)
    run = holdfast.join(model, optimizer, Noisy(), batch=32, shards=8, seed=3, extras={"scheduler": scheduler})
    bad = Flip(run.id, args.note)
    for step in run.steps(args.steps):
        bad.happens("parameter", step.number, list(model.parameters()))
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            step.record(loss=loss)
            bad.happens("gradient", step.number, [p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimizer.step()
        state: list[dict[str, Any]] = list(optimizer.state.values())
        bad.happens("optimizer", step.number, [one["momentum_buffer"] for one in state])
        scheduler.step()


if __name__ == "__main__":
    main()
