"""A model that is sharded over the ranks of a group, as a user's script. With --plain it is whole in every process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.placement.ranks import ranks_here
from holdfast.state.local import whole
from tests.harness.gate import wait_at

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("optimizer", choices=["SGD", "AdamW"])
parser.add_argument("--plain", action="store_true")
parser.add_argument("--large", action="store_true", help="so large that a reduction takes two rounds")
parser.add_argument("--unequal", action="store_true", help="batches of 9 samples, which 8 shards share as 2, 1, 1, ...")
parser.add_argument("--mixed", action="store_true", help="computes in bfloat16")
parser.add_argument("--whole", type=Path, help="a file for all of the state at the end, put together by torch")
parser.add_argument("--skips", action="store_true", help="a module that every other step does not use")
parser.add_argument("--gate", default="")
parser.add_argument("--shards", type=int, default=8)
parser.add_argument("--wrong", default="", help="what a group cannot do")
args = parser.parse_args()


class Net(nn.Module):
    """Widths that no number of ranks divides, dropout, and a parameter of one dimension."""

    step = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(33, width)
        self.norm = nn.BatchNorm1d(width) if args.wrong == "batch norm" else nn.LayerNorm(width)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
        self.last = nn.Linear(width, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.norm(self.first(x)))
        y: torch.Tensor = self.last(hidden if args.skips and self.step % 2 else self.hidden(hidden))
        if args.wrong == "twice":
            y = y + self.last(self.hidden(y.new_ones(57)))
        return y.float()


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(33, generator=generator) + 0.01 * torch.randn(33)
        return x, x[:11].tanh() + x[11:22] * x[22:33]


def main() -> None:
    torch.manual_seed(0)
    model = Net(513 if args.large else 57)
    rank = 0
    if not args.plain:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        group = holdfast.group()
        rank = group.rank
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.mixed else None)
        for layer in (model.first, model.hidden, model.last):
            fully_shard(layer, mesh=group.mesh, mp_policy=policy)
        fully_shard(model, mesh=group.mesh, mp_policy=policy)
    kinds = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
    }
    optimizer = kinds[args.optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    more: dict[str, Any] = {"mode": holdfast.Elastic()} if args.wrong == "elastic" else {}
    extras = {"scheduler": scheduler}
    if args.unequal:
        more["batch_sampler"] = [list(range(start, start + 9)) for start in range(0, 450, 9)]
    else:
        more["batch_size"] = 48
    run = holdfast.join(model, optimizer, Samples(), shards=args.shards, seed=3, extras=extras, **more)
    if args.wrong == "evaluate":
        run.evaluate(Samples(), lambda batch: {"loss": F.mse_loss(model(batch[0]), batch[1])})
    for step in run.steps(args.steps):
        wait_at(Path(args.gate) if args.gate else None, f"{run.id}-{rank}", step.number)
        model.step = step.number
        for x, y in step:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            step.record(loss=loss)
        norm = holdfast.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        if run.leader:
            print(f"step {step.number} loss {step.metrics['loss']!r} norm {norm.item()!r}", flush=True)
    if args.whole:
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        names = [name for name, _ in model.named_parameters()]
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        for name, state in zip(names, states, strict=True):
            weights |= {f"{name} {key}": whole(value) for key, value in state.items()}
        if rank == 0:
            safetensors.torch.save_file(weights, args.whole)
    digest = run.digest()
    print(f"digest {digest}", flush=True)
    if args.wrong == "last lines" and rank == 1:
        run.close()
        while ranks_here().links[0].recv(1 << 16):  # until rank 0 is through
            pass
        raise OSError("the disk is full")


if __name__ == "__main__":
    main()
