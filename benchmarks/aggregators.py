"""How long robust aggregation takes, against adding the updates up once and other libraries; in how much memory.

    python benchmarks/aggregators.py                  # n = 20 and 50, d = 1e6 and 1e7: minutes, and 5 GB of memory
    python benchmarks/aggregators.py --n 20 --d 1e6   # seconds
    python benchmarks/aggregators.py --check --json f.json
    python benchmarks/aggregators.py --n 50 --d 1e7 --rules krum,mda --add --json f.json   # one piece after the other
    python benchmarks/aggregators.py --judge --json f.json                                 # 1 if a bar is missed in it

Each rule and each library computes in a process of its own, on the same float32 numbers, with as many threads as torch
has, and the fastest of a few rounds counts. `sums` is that time over the time of `updates.sum(0)`, which is measured in
the same process between the rounds. Extra memory is the peak of resident memory beyond the updates and one result, as a
part of the updates' size; the other libraries' includes their result.

Peers are measured where they are importable: byzfl, byzpy, flwr. byzfl imports torchvision, matplotlib and seaborn for
parts that are not measured here; where those are missing, empty modules stand in for them. MDA is compared only where a
library that looks at all subsets can end, with C(n, f) up to 5,000. Settings are each library's own defaults: byzfl's
geometric median ends after 3 rounds, ours when it stands still.

Pieces: `--add` leaves in the file what is there of other rules, sizes and libraries. A piece of one rule takes, on two
cores, seconds at d = 1e6, and at d = 1e7 a minute or two, most of it the slower libraries'; what does not end within
`--timeout` seconds is told and left away.

Bars, where they are checked: median and trimmed mean within 4 sums at n = 20, rules of distances within 25, extra
memory at most 5 %; faster than every peer, ten times for median and trimmed mean. A peer that has the rule and was not
measured is no bar that was passed: the table, `not_compared` in the file and --check name it, each with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arguments import conclude, listed

COLUMNWISE = ("median", "trimmed-mean")
DISTANCES = (
    *("krum", "multi-krum", "bulyan", "geometric-median", "centered-clipping", "mda", "caf"),
    *("nnm+trimmed-mean", "distinct+centered-clipping"),
)
RULES = ("mean", *COLUMNWISE, "meamed", *DISTANCES)
PEERS = ("byzfl", "byzpy", "flwr")
SUMS_MAX = {**dict.fromkeys(COLUMNWISE, 4.0), **dict.fromkeys(DISTANCES, 25.0)}  # the bars, at n = 20
BARRED_N = 20
EXTRA_MAX = 0.05
FASTER_MIN = dict.fromkeys(COLUMNWISE, 10.0)
SUBSETS_MAX = 5000
TIMEOUT_S = 900.0
FIGURES = ("seconds", "sums", "sum_seconds", "extra")
UNMEASURED = {"torchvision": ("datasets", "transforms"), "matplotlib": ("pyplot",), "seaborn": ()}  # that byzfl imports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=listed(["10", "20", "50"]), default=["20", "50"])
    parser.add_argument("--d", type=listed(["1e5", "1e6", "1e7"]), default=["1e6", "1e7"])
    parser.add_argument("--rules", type=listed(RULES), default=list(RULES))
    parser.add_argument("--peers", type=listed([*PEERS, "none"]), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    parser.add_argument("--add", action="store_true", help="to what is in --json's file already")
    parser.add_argument("--judge", action="store_true", help="measure nothing: only look at --json's file")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="for one rule of one library")
    parser.add_argument("--one", nargs=4, metavar=("WHO", "RULE", "N", "D"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        who, rule, n, d = args.one
        print(json.dumps(measure(who, rule, int(n), int(d), args.rounds)))
        return 0
    if (args.add or args.judge) and not args.json:
        parser.error("--add and --judge go with --json FILE")
    if args.judge:
        args.check, args.add = True, True
        known = figures_in(args.json)
        unmeasured = [f"{name}: not measured" for name in wanted(args) if f"holdfast_{name}_seconds" not in known]
        tell_uncompared(known)
        return conclude(args, known, [*judged(known), *unmeasured])
    peers = [peer for peer in args.peers if peer != "none"]
    missing = [peer for peer in peers if importlib.util.find_spec(peer) is None]
    absent = {
        peer: "not installed" if peer in missing else "not asked for" for peer in {*PEERS} - {*peers} | {*missing}
    }
    figures = figures_in(args.json) if args.add else {}
    for n, d in ((int(n), int(float(d))) for n in args.n for d in args.d):
        print(f"\nn = {n}, d = {d:.0e}, f = {n // 5}")
        print(f"{'rule':<18} {'who':<9} {'seconds':>9} {'sums':>7} {'extra':>7}")
        for rule in args.rules:
            name, found = f"{rule}_n{n}_d{d:.0e}", dict[str, dict[str, float] | str]()
            for who in ("holdfast", *PEERS):
                if who == "holdfast" or offered(who, rule, n):
                    found[who] = absent.get(who) or ask(who, rule, n, d, args.rounds, args.timeout)
            show(rule, found)
            keep(figures, name, found)
            if args.add:  # a piece that is cut off keeps what it has
                args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.check:
        tell_uncompared(figures)
    return conclude(args, figures, list(judged(figures)))


def keep(figures: dict[str, Any], name: str, found: dict[str, dict[str, float] | str]) -> None:
    """What was measured, and of whom was not, why not; what is there of an earlier run stays, unless it is measured."""
    reasons: dict[str, str] = figures.setdefault("not_compared", {}).setdefault(name, {})
    for who, one in found.items():
        if isinstance(one, str):
            reasons[who] = one
        else:
            reasons.pop(who, None)
            figures |= {f"{who}_{name}_{what}": value for what, value in one.items()}


def uncompared(figures: dict[str, Any]) -> Iterator[str]:
    """The peers that have a rule that was measured here, and were not measured themselves."""
    for rule, n, d in itertools.product(RULES, (10, 20, 50), ("1e5", "1e6", "1e7")):
        name = f"{rule}_n{n}_d{float(d):.0e}"
        for peer in PEERS if f"holdfast_{name}_seconds" in figures else ():
            if offered(peer, rule, n) and f"{peer}_{name}_seconds" not in figures:
                yield f"{name} with {peer}: {figures.get('not_compared', {}).get(name, {}).get(peer, 'not measured')}"


def tell_uncompared(figures: dict[str, Any]) -> None:
    for line in uncompared(figures):
        print(f"not compared: {line}")


def wanted(args: argparse.Namespace) -> list[str]:
    return [f"{rule}_n{n}_d{float(d):.0e}" for n in args.n for d in args.d for rule in args.rules]


def figures_in(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def judged(figures: dict[str, Any]) -> Iterator[str]:
    """The bars that are missed in all that was measured."""
    for rule, n, d in itertools.product(RULES, (10, 20, 50), ("1e5", "1e6", "1e7")):
        name = f"{rule}_n{n}_d{float(d):.0e}"
        found = {
            who: {what: figures[key] for what in FIGURES if (key := f"{who}_{name}_{what}") in figures}
            for who in ("holdfast", *PEERS)
        }
        if found["holdfast"]:
            yield from judge(name, rule, n, found)


def show(rule: str, found: dict[str, dict[str, float] | str]) -> None:
    for who, one in found.items():
        if isinstance(one, str):
            print(f"{rule:<18} {who:<9} not compared: {one}", flush=True)
        else:
            print(f"{rule:<18} {who:<9} {one['seconds']:>9.4f} {one['sums']:>7.1f} {one['extra']:>7.1%}", flush=True)


def judge(name: str, rule: str, n: int, found: dict[str, dict[str, float]]) -> Iterator[str]:
    ours = found["holdfast"]
    if n == BARRED_N and rule in SUMS_MAX and ours["sums"] > SUMS_MAX[rule]:
        yield f"{name}: {ours['sums']:.1f} sums, not within {SUMS_MAX[rule]:.0f}"
    if ours["extra"] > EXTRA_MAX:
        yield f"{name}: {ours['extra']:.1%} extra memory, not within {EXTRA_MAX:.0%}"
    for who, one in found.items():
        bar = FASTER_MIN.get(rule, 1.0)
        if who != "holdfast" and one and one["seconds"] < bar * ours["seconds"]:
            yield f"{name}: {one['seconds'] / ours['seconds']:.1f} times as fast as {who}, not {bar:.0f}"


def ask(who: str, rule: str, n: int, d: int, rounds: int, timeout_s: float) -> dict[str, float] | str:
    """What `measure` finds in a process of its own, or why it finds nothing."""
    command = [sys.executable, "-W", "ignore", __file__, "--rounds", str(rounds), "--one", who, rule, str(n), str(d)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **QUIET})
    except subprocess.TimeoutExpired:
        if who == "holdfast":
            raise SystemExit(f"aggregators: {rule}: no end after {timeout_s:.0f} s") from None
        return f"no end after {timeout_s:.0f} s"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing said"]
        if who == "holdfast":
            raise SystemExit(f"aggregators: {rule}: {last[0]}")
        return f"failed: {last[0]}"
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


QUIET = {"FLWR_TELEMETRY_ENABLED": "0"}


def measure(who: str, rule: str, n: int, d: int, rounds: int) -> dict[str, float]:
    import torch

    f = n // 5
    updates = torch.empty(n, d)
    for number, row in enumerate(updates):
        row.normal_(generator=torch.Generator().manual_seed(number))
    few = updates[:, :4096].clone()
    compute = computing(who, rule, f)
    compute(few, torch.empty(4096))  # imports, compiling, threads
    updates.sum(0)
    out = torch.zeros(d)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    compute(updates, out)
    extra = (resident("VmHWM") - before) / (updates.numel() * 4)
    took, sums = [], []
    for _ in range(rounds):
        took.append(timed(lambda: compute(updates, out)))
        sums.append(timed(lambda: updates.sum(0)))
        if sum(took) > 60.0:
            break
    return {"seconds": min(took), "sums": min(took) / min(sums), "sum_seconds": min(sums), "extra": max(extra, 0.0)}


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


def offered(who: str, rule: str, n: int) -> bool:
    rules = {
        "byzfl": set(RULES) - {"bulyan", "distinct+centered-clipping"},
        "byzpy": {
            "median",
            "trimmed-mean",
            "meamed",
            "krum",
            "multi-krum",
            "geometric-median",
            "centered-clipping",
            "mda",
            "caf",
        },
        "flwr": {"mean", "median", "trimmed-mean", "krum", "multi-krum", "bulyan"},
    }[who]
    return rule in rules and (rule != "mda" or math.comb(n, n // 5) <= SUBSETS_MAX)


def computing(who: str, rule: str, f: int) -> Callable[[Any, Any], Any]:
    return {"holdfast": of_holdfast, "byzfl": of_byzfl, "byzpy": of_byzpy, "flwr": of_flwr}[who](rule, f)


def of_holdfast(rule: str, f: int) -> Callable[[Any, Any], Any]:
    from holdfast.byzantine import parse

    made = parse(rule)
    return lambda updates, out: made.aggregate(updates, f, out=out)


class StandIn(types.ModuleType):
    """A module that is not there, with whatever is asked of it at import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", lambda *given, **named: None)


def of_byzfl(rule: str, f: int) -> Callable[[Any, Any], Any]:
    for name, parts in UNMEASURED.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            for whole in (name, *(f"{name}.{part}" for part in parts)):
                sys.modules[whole] = StandIn(whole)
    aggregators = importlib.import_module("byzfl.aggregators.aggregators")
    if rule == "nnm+trimmed-mean":
        before, after = importlib.import_module("byzfl.aggregators.preaggregators").NNM(f), aggregators.TrMean(f)
        return lambda updates, out: after(before(updates))
    names = {
        "mean": lambda: aggregators.Average(),
        "median": lambda: aggregators.Median(),
        "trimmed-mean": lambda: aggregators.TrMean(f),
        "meamed": lambda: aggregators.Meamed(f),
        "krum": lambda: aggregators.Krum(f),
        "multi-krum": lambda: aggregators.MultiKrum(f),
        "geometric-median": lambda: aggregators.GeometricMedian(),
        "centered-clipping": lambda: aggregators.CenteredClipping(L=3),
        "mda": lambda: aggregators.MDA(f),
        "caf": lambda: aggregators.CAF(f),
    }
    return lambda updates, out: names[rule]()(updates)


def of_byzpy(rule: str, f: int) -> Callable[[Any, Any], Any]:
    rooms = [importlib.import_module(f"byzpy.aggregators.{kind}_wise") for kind in ("coordinate", "geometric", "norm")]
    found = {name: getattr(room, name) for room in rooms for name in dir(room)}
    if rule == "median":
        made = found["CoordinateWiseMedian"]()
    elif rule == "trimmed-mean":
        made = found["CoordinateWiseTrimmedMean"](f=f)
    elif rule == "meamed":
        made = found["MeanOfMedians"](f=f)
    elif rule == "krum":
        made = found["Krum"](f=f)
    elif rule == "multi-krum":
        return lambda updates, out: found["MultiKrum"](f=f, q=len(updates) - f).aggregate(list(updates))
    elif rule == "geometric-median":
        made = found["GeometricMedian"]()
    elif rule == "centered-clipping":
        made = found["CenteredClipping"](c_tau=100.0, M=3)
    else:
        made = found[{"mda": "MinimumDiameterAveraging", "caf": "CAF"}[rule]](f=f)
    return lambda updates, out: made.aggregate(list(updates))


def of_flwr(rule: str, f: int) -> Callable[[Any, Any], Any]:
    """The functions that its strategies call, with every update as one array."""
    functions = importlib.import_module("flwr.server.strategy.aggregate")

    def results(updates: Any) -> list[Any]:
        return [([row.numpy()], 1) for row in updates]

    calls: dict[str, Callable[[Any], Any]] = {
        "mean": lambda updates: functions.aggregate(results(updates)),
        "median": lambda updates: functions.aggregate_median(results(updates)),
        "trimmed-mean": lambda updates: functions.aggregate_trimmed_avg(results(updates), f / len(updates)),
        "krum": lambda updates: functions.aggregate_krum(results(updates), f, 0),
        "multi-krum": lambda updates: functions.aggregate_krum(results(updates), f, len(updates) - f),
        "bulyan": lambda updates: functions.aggregate_bulyan(results(updates), f, functions.aggregate_krum, to_keep=0),
    }
    return lambda updates, out: calls[rule](updates)


if __name__ == "__main__":
    sys.exit(main())
