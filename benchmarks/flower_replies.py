"""What one client's reply does to a run: Flower's own strategies beside RobustStrategy, with real Flower messages.

    python benchmarks/flower_replies.py --check --write

Five clients, the last of which is odd in its own way, and ten of which four are; two rounds; everything in this
process, and replies go through Flower's serialization. A cell says whether the run went on, and whether the model is
one: `ends the run` with the kind of error, `NaN`, `far off` (by more than 1, where honest clients differ by 0.1), or
`goes on`. Every strategy is told of as many hostile clients as there are.
`--write` puts the table into docs/how-to/flower.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "flower.md"
BEGINS, ENDS = "<!-- replies: printed by benchmarks/flower_replies.py -->\n", "<!-- replies: end -->"
CLIENTS, ROUNDS = 5, 2
sys.path.insert(0, str(ROOT))
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp import strategy as flowers  # noqa: E402

from arguments import conclude  # noqa: E402
from holdfast.integrations.flower import RobustStrategy  # noqa: E402
from tests.harness.flower_grid import Client, ScriptedGrid  # noqa: E402


def flower(name: str, n: int, f: int) -> Any:
    """Flower's own, which ask everybody; the trimmed mean cuts off as large a part as there are hostile clients."""
    special = {"FedTrimmedAvg": {"beta": f / n}, "Krum": {"num_malicious_nodes": f}}
    special["MultiKrum"] = {"num_malicious_nodes": f, "num_nodes_to_select": n - f - 1}
    everybody = {"min_train_nodes": n, "min_available_nodes": n, "fraction_evaluate": 0.0}
    return getattr(flowers, name)(**everybody, **special.get(name, {}))


OWN = "RobustStrategy"
STRATEGIES = ("FedAvg", "FedMedian", "FedTrimmedAvg", "MultiKrum", "Krum", OWN)


def weights(content: RecordDict, change: Callable[[Any], Any]) -> None:
    arrays = content.array_records["arrays"]
    content["arrays"] = ArrayRecord({name: Array(change(array.numpy())) for name, array in arrays.items()})


def with_array(content: RecordDict) -> None:
    content.array_records["arrays"]["more"] = Array(np.ones(3, np.float32))


def examples(number: float) -> Callable[[RecordDict], None]:
    return lambda content: content.__setitem__("metrics", MetricRecord({"num-examples": number}))


def dropped(content: RecordDict) -> None:
    raise RuntimeError("this client has crashed")


REPLIES: dict[str, Callable[[RecordDict], None]] = {
    "an array too many": with_array,
    "another shape": lambda content: weights(content, lambda one: one.reshape(-1)[:-1].copy()),
    "NaN": lambda content: weights(content, lambda one: np.full_like(one, np.nan)),
    "a model far off": lambda content: weights(content, lambda one: one + 1000),
    "no `num-examples`": lambda content: content.__setitem__("metrics", MetricRecord({"loss": 1.0})),
    "no record of metrics": lambda content: content.__delitem__("metrics"),
    "10³⁰ examples, far off": lambda content: (weights(content, lambda one: one + 1000), examples(1e30)(content))[0],
    "it crashes": dropped,
}
TOGETHER = {  # how many clients, and what the last ones of them do
    "one crashes, another is far off": (5, ("it crashes", "a model far off")),
    "of ten, two crash and two are far off": (10, ("it crashes", "it crashes", "a model far off", "a model far off")),
}


def client(number: int, change: Callable[[RecordDict], None] | None) -> Client:
    def reply(message: Message) -> Message:
        generator = np.random.default_rng([number, int(message.content["config"]["server-round"])])
        made = {
            name: Array((array.numpy() + generator.normal(1.0, 0.1, array.shape)).astype(np.float32))
            for name, array in message.content["arrays"].items()
        }
        content = RecordDict({"arrays": ArrayRecord(made), "metrics": MetricRecord({"num-examples": 10})})
        if change is not None:
            change(content)
        return Message(content, reply_to=message)

    return reply


def outcome(strategy: str, kind: str) -> str:
    n, odd = TOGETHER.get(kind, (CLIENTS, (kind,)))
    clients = {number: client(number, None) for number in range(n)}
    for number, what in enumerate(odd):
        clients[n - len(odd) + number] = client(n - len(odd) + number, REPLIES[what])
    f = max(1, sum(what != "it crashes" for what in odd))
    chosen = RobustStrategy("trimmed-mean", f=f) if strategy == OWN else flower(strategy, n, f)
    model = ArrayRecord({"weight": Array(np.zeros((4, 5), np.float32)), "bias": Array(np.zeros(5, np.float32))})
    try:
        result = chosen.start(ScriptedGrid(clients), model, num_rounds=ROUNDS, timeout=5)
    except Exception as error:  # that is what is asked
        return f"ends the run: {type(error).__name__}"
    found = np.concatenate([array.numpy().reshape(-1) for array in result.arrays.values()])
    if not np.isfinite(found).all():
        return "NaN"
    return "far off" if np.abs(found - ROUNDS).max() > 1.0 else "goes on"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if RobustStrategy does not go on everywhere")
    parser.add_argument("--write", action="store_true", help="put the table into docs/how-to/flower.md")
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    table = {kind: {name: outcome(name, kind) for name in STRATEGIES} for kind in (*REPLIES, *TOGETHER)}
    lines = [f"| one client of {CLIENTS} sends | {' | '.join(STRATEGIES)} |", "|---|" + "---|" * len(STRATEGIES)]
    lines += [f"| {kind} | {' | '.join(cells.values())} |" for kind, cells in table.items()]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGINS)
        PAGE.write_text(before + BEGINS + text + ENDS + rest.partition(ENDS)[2])
    goes_on = {name: float(sum(cells[name] == "goes on" for cells in table.values())) for name in STRATEGIES}
    missed = [
        f"{kind}: {cells['RobustStrategy']}" for kind, cells in table.items() if cells["RobustStrategy"] != "goes on"
    ]
    return conclude(args, goes_on, missed)


if __name__ == "__main__":
    sys.exit(main())
