"""A small language model on a stream of files: token files mapped into memory, or documents packed into sequences.

    python examples/tokens.py                                       # alone; makes its own token files in ./tokens
    holdfast run --workers 3 examples/tokens.py
    holdfast drill --kill-every 5s --for 20s -- examples/tokens.py --epochs 4 --slow 0.02
    holdfast run --workers 3 examples/tokens.py --from packed       # documents in JSON lines, packed
    holdfast run --workers 3 examples/tokens.py --from mixed        # seven of packed documents to three of tokens

Every sample of an epoch is used once, whatever fails, and no worker reads what came before it: the order of an epoch
follows from the run's seed. The data is made of the sources of Python's library, letter by letter.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.data import Mixture, Stream, Tokens

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, default=Path("tokens"), help="where the files are, and are made if missing")
parser.add_argument("--from", dest="kind", choices=("tokens", "packed", "mixed"), default="tokens")
parser.add_argument("--files", type=int, default=8, help="how many are made")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64, help="sequences in a step, over all workers")
parser.add_argument("--shards", type=int, default=8, help="parts of a batch; at least as many as workers")
parser.add_argument("--context", type=int, default=64, help="letters that the model sees")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--loaders", type=int, default=0, help="processes of each worker that read ahead")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="extra seconds of sleep per shard")
args = parser.parse_args()


def make(directory: Path) -> None:
    """Files of 2 or so pages of text each, as numbers and as documents. Written aside and renamed: all workers try."""
    directory.mkdir(parents=True, exist_ok=True)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for number in range(args.files):
        text = library[number % len(library)].read_bytes()[:40_000]
        tokens = numpy.frombuffer(text, dtype=numpy.uint8).astype(numpy.uint16).tobytes()
        documents = "\n".join(json.dumps({"text": part.decode()}) for part in text.split(b"\n\n") if part.isascii())
        for path, data in (
            (directory / f"{number:04}.bin", tokens),
            (directory / f"{number:04}.jsonl", documents.encode()),
        ):
            if not path.exists():
                aside = path.with_name(f".{path.name}.{time.time_ns()}")
                aside.write_bytes(data)
                aside.replace(path)


def letters_of(line: bytes) -> list[int]:
    """A document's tokens, with one at the end that says so."""
    return [*json.loads(line)["text"].encode(), 0]


make(args.data)
length = args.context + 1  # the letters, and what follows the last of them
tokens = Stream(
    [Tokens(path, length=args.context, overlap=1) for path in sorted(args.data.glob("*.bin"))], shuffle_buffer=1024
)
if args.kind == "tokens":
    data = tokens
else:
    packed = Stream(args.data / "*.jsonl", decode=letters_of, pack=length, shuffle_buffer=256)
    data = packed if args.kind == "packed" else Mixture([(packed, 7), (tokens, 3)])


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(self.letter(letters))[0])


torch.manual_seed(args.seed)
model = Model(args.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run = holdfast.join(
    model,
    optimizer,
    data,
    batch_size=args.batch_size,
    shards=args.shards,
    seed=args.seed,
    num_workers=args.loaders,
)
for step in run.epochs(args.epochs):
    for batch in step:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        step.record(loss=loss)
        time.sleep(args.slow)
    optimizer.step()
    if run.leader and (step.ends_epoch or step.number % 50 == 0):
        print(f"epoch {step.epoch}, step {step.number}: loss {step.metrics['loss']:.3f}", flush=True)
