"""Rows of an embedding table looked up and updated a second, against torch's own in one process; memory for each row.

    python benchmarks/tables.py                       # 1e6 and 1e7 rows: minutes, and 6 GB of memory
    python benchmarks/tables.py --rows 1e6            # a minute
    python benchmarks/tables.py --check --json f.json

Each measures in a process of its own, with one thread: holdfast.EmbeddingTable with ids of 64 bits, and
torch.nn.EmbeddingBag(sparse=True) of as many rows, whose ids are places, with torch.optim.Adagrad or SparseAdam. Ids
are drawn from a Zipf distribution over all rows. A round looks up 65,536 of them, each a bag of its own, and then
updates them: backward and step. The median of the rounds counts.

Memory is what the process needs more with all rows there than before; `payload` is 4 bytes for each value and each
number that the optimizer keeps.

Bars: looking up and updating together at least as fast as torch; memory at most 1.3 times the payload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from arguments import conclude, listed

WHO = ("holdfast", "torch")
STATE = {"adagrad": 1, "adam": 2}  # numbers that the optimizer keeps for each value
BATCH = 65_536
TOGETHER_MIN = 1.0
MEMORY_MAX = 1.3
TIMEOUT_S = 900.0
FILLED_AT_ONCE = 1 << 18


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=listed(["1e5", "1e6", "1e7"]), default=["1e6", "1e7"])
    parser.add_argument("--optimizers", type=listed(list(STATE)), default=list(STATE))
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--exponent", type=float, default=1.05, help="of the Zipf distribution")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    parser.add_argument("--one", nargs=3, metavar=("WHO", "OPTIMIZER", "ROWS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        who, optimizer, rows = args.one
        print(json.dumps(measure(who, optimizer, int(rows), args)))
        return 0
    figures: dict[str, float] = {}
    missed: list[str] = []
    print(f"{'rows':>6} {'optimizer':<9} {'who':<9} {'look-ups/s':>11} {'updates/s':>11} {'both/s':>11} {'B/row':>7}")
    for rows in (int(float(one)) for one in args.rows):
        for optimizer in args.optimizers:
            name = f"{optimizer}_{rows:.0e}"
            found = {who: ask(who, optimizer, rows, args) for who in WHO}
            for who, one in found.items():
                shown = " ".join(f"{one[what]:>11,.0f}" for what in ("looked_up_per_s", "updated_per_s", "both_per_s"))
                print(f"{rows:>6.0e} {optimizer:<9} {who:<9} {shown} {one['bytes_per_row']:>7.0f}", flush=True)
                figures |= {f"{who}_{name}_{what}": value for what, value in one.items()}
            ratios = {what: found["holdfast"][what] / found["torch"][what] for what in found["torch"]}
            shown = " ".join(f"{ratios[what]:>11.2f}" for what in ("looked_up_per_s", "updated_per_s", "both_per_s"))
            print(f"{rows:>6.0e} {optimizer:<9} {'ratio':<9} {shown} {ratios['bytes_per_row']:>7.2f}", flush=True)
            figures |= {f"ratio_{name}_{what}": value for what, value in ratios.items()}
            payload = 4 * args.dim * (1 + STATE[optimizer])
            figures[f"payload_{name}"] = payload
            if ratios["both_per_s"] < TOGETHER_MIN:
                missed.append(f"{name}: {ratios['both_per_s']:.2f} of torch's rows a second, not {TOGETHER_MIN:g}")
            if found["holdfast"]["bytes_per_row"] > MEMORY_MAX * payload:
                each = found["holdfast"]["bytes_per_row"]
                missed.append(f"{name}: {each:.0f} bytes for a row of {payload}, not {MEMORY_MAX:g} times as many")
    return conclude(args, figures, missed)


def ask(who: str, optimizer: str, rows: int, args: argparse.Namespace) -> dict[str, float]:
    given = ["--dim", str(args.dim), "--rounds", str(args.rounds), "--exponent", str(args.exponent)]
    command = [sys.executable, "-W", "ignore", __file__, *given, "--one", who, optimizer, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"tables: {who}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def measure(who: str, optimizer: str, rows: int, args: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    batches = drawn(rows, args.rounds, args.exponent)
    gradient = torch.randn(BATCH, args.dim, generator=torch.Generator().manual_seed(1))
    before = resident()
    table = (Ours if who == "holdfast" else Torchs)(rows, args.dim, optimizer)
    nbytes = resident() - before
    looked_up, updated = [], []
    for places in batches:
        ids = table.ids(places)
        start = time.perf_counter()
        found = table.look_up(ids)
        middle = time.perf_counter()
        found.backward(gradient)
        table.step()
        looked_up.append(middle - start)
        updated.append(time.perf_counter() - middle)
    look_up_s, update_s = statistics.median(looked_up), statistics.median(updated)
    return {
        "looked_up_per_s": BATCH / look_up_s,
        "updated_per_s": BATCH / update_s,
        "both_per_s": BATCH / (look_up_s + update_s),
        "bytes_per_row": nbytes / rows,
    }


def drawn(rows: int, rounds: int, exponent: float) -> list[Any]:
    """Places of rows: which of them are drawn often has nothing to do with where they lie."""
    import numpy as np

    draws = np.random.default_rng(7)
    sums = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    anywhere = draws.permutation(rows)
    return [anywhere[np.searchsorted(sums, draws.random(BATCH) * sums[-1])] for _ in range(rounds)]


class Ours:
    def __init__(self, rows: int, dim: int, optimizer: str) -> None:
        import numpy as np

        import holdfast
        from holdfast import tables

        kinds = {"adagrad": tables.Adagrad(lr=0.01), "adam": tables.Adam(lr=0.001)}
        self.table = holdfast.EmbeddingTable(dim, optimizer=kinds[optimizer])
        for start in range(0, rows, FILLED_AT_ONCE):
            places = np.arange(start, min(rows, start + FILLED_AT_ONCE))
            nothing = np.zeros((len(places), dim), dtype=np.float32)
            self.table.store.push(self.ids(places).numpy().view(np.uint64), nothing, lr=0.0)

    @staticmethod
    def ids(places: Any) -> Any:
        """Ids that lie anywhere in 64 bits."""
        import numpy as np
        import torch

        return torch.from_numpy((places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))

    def look_up(self, ids: Any) -> Any:
        return self.table(ids)

    def step(self) -> None:
        self.table.step()


class Torchs:
    def __init__(self, rows: int, dim: int, optimizer: str) -> None:
        import torch

        self.bag = torch.nn.EmbeddingBag(rows, dim, sparse=True, mode="sum")
        kinds: dict[str, Any] = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        self.optimizer = kinds[optimizer](self.bag.parameters(), lr=0.01)
        self.offsets = torch.arange(BATCH)
        self.bag(torch.arange(1), torch.arange(1)).sum().backward()
        self.step()  # the optimizer's state is there from now on
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.add_(0.0)  # and its pages are memory in use

    @staticmethod
    def ids(places: Any) -> Any:
        import torch

        return torch.from_numpy(places)

    def look_up(self, ids: Any) -> Any:
        return self.bag(ids, self.offsets)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


if __name__ == "__main__":
    sys.exit(main())
