"""A training whose rows say how many steps are in them: half of that number, exactly. So does a dense parameter.
Another table has all that a row can have: counts of ids that have no row yet, ages, and an optimizer's state.

Each worker writes a line for each step that it begins into a file of its own in the directory that it is given: how
many steps there are by the loop, by the dense parameter and by the rows, and what the shards of the tables are.
The mode is the exact one, or with the word `async` the asynchronous one.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import holdfast
from holdfast import tables

LINES, STEPS, PAUSE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Parameter(torch.zeros(1))
        self.counted = holdfast.EmbeddingTable(2, optimizer=tables.SGD(lr=1.0), first=tables.Uniform(0.0))
        ends = tables.Expire(updates=40)
        self.full = holdfast.EmbeddingTable(3, optimizer=tables.AdamW(lr=0.01), admit=3, expire=ends, seed=3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        every = self.counted(torch.arange(32)).sum() / 2  # of each id, once a step over all shards
        return -(self.dense.sum() + every) + self.full(ids).square().sum()


def shards_of(table: holdfast.EmbeddingTable) -> list[str]:
    found = []
    for shard in range(table.store.shards):
        changes = table.store.changes(shard)
        words = [json.dumps(changes.moment.encode()).encode(), changes.records.tobytes()]
        found.append(hashlib.sha256(b"".join([*words, *(one.tobytes() for one in changes.candidates)])).hexdigest())
    return found


torch.manual_seed(0)
model = Counting()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = [torch.tensor(number * number % 97) for number in range(160)]
mode = holdfast.Async(staleness=2) if sys.argv[4:] == ["async"] else holdfast.Exact()
run = holdfast.join(model, optimizer, data, batch_size=8, shards=4, mode=mode)
with (LINES / f"{os.getpid()}.lines").open("w") as lines:
    for step in run.steps(STEPS):
        seen = False
        for ids in step:
            if not seen:
                seen, rows = True, model.counted.store.look_up(torch.arange(32).numpy().astype("uint64"))
                told = {"step": run.step, "leader": run.leader, "dense": model.dense.item()}
                told |= {"rows": [rows.min().item() * 2, rows.max().item() * 2]}
                told |= {"shards": {name: shards_of(getattr(model, name)) for name in ("counted", "full")}}
                lines.write(json.dumps(told) + "\n")
                lines.flush()
            model(ids).backward()
            time.sleep(PAUSE_S)
        optimizer.step()
        if not run.leader:
            time.sleep(2 * PAUSE_S)  # the first member saves: whoever is slower must not be left out of the rows
        model.counted.step()
        model.full.step()
