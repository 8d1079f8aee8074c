"""A small GPT whose parameters, gradients and optimizer state are sharded over the ranks of a group with fully_shard.

    python examples/sharded_gpt.py                                       # alone: a group of one rank
    holdfast run --workers 3 --ranks 2 examples/sharded_gpt.py           # three groups of two: the same bits

About 0.8 M parameters, on the sources of Python's library. What is different from an ordinary script is three lines:
the group, and fully_shard for each block and for the whole.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import Dataset

import holdfast

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=Path, help="a file to learn from; without it the sources of Python's library")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=32, help="pieces of text in a step, over all groups")
parser.add_argument("--shards", type=int, default=8, help="parts of a batch: a multiple of --ranks")
parser.add_argument("--context", type=int, default=64, help="letters that the model sees")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="extra seconds of sleep per shard")
args = parser.parse_args()


class Pieces(Dataset):
    """Piece n is `context` letters, and the letters that come next."""

    def __init__(self, letters: torch.Tensor, context: int) -> None:
        self.letters = letters
        self.context = context

    def __len__(self) -> int:
        return (len(self.letters) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        piece = self.letters[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        many, length, width = x.shape
        parts = self.attention(self.before_attention(x)).view(many, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(many, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, letters: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.letter(letters) + self.place(places))))


sources = [args.text] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"\n".join(path.read_bytes() for path in sources)
pieces = Pieces(torch.frombuffer(bytearray(text), dtype=torch.uint8), args.context)

group = holdfast.group()
torch.manual_seed(args.seed)  # all ranks build the same model, and keep a part of it
model = GPT(256, args.context, args.width, args.heads, args.layers)
for block in model.blocks:
    fully_shard(block, mesh=group.mesh)
fully_shard(model, mesh=group.mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

run = holdfast.join(
    model, optimizer, pieces, batch_size=args.batch_size, drop_last=True, shards=args.shards, seed=args.seed
)
for step in run.steps(args.steps):
    for letters, following in step:
        loss = F.cross_entropy(model(letters).flatten(0, 1), following.flatten())
        loss.backward()
        step.record(loss=loss)
        time.sleep(args.slow)
    holdfast.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if run.leader and (step.number + 1) % 20 == 0:
        print(f"step {step.number + 1}  loss {step.metrics['loss']:.4f}", flush=True)
