"""What a checkpoint of about 1 GB costs: time that training is held up, time to durable, time and memory it adds.

    python benchmarks/checkpoint.py                      # everything, about 11 minutes on 2 cores
    python benchmarks/checkpoint.py --check --json f.json
    python benchmarks/checkpoint.py --quick              # a smoke run with 100 MB: does it work at all?
    python benchmarks/checkpoint.py --systems holdfast --cases short,busy_2

The state is that of a model with 84 M parameters and Adam. The limits of the machine (a copy in warm memory, a direct
and a buffered write with fsync, a direct read) are measured before and between everything else, the systems and cases
take turns, and medians are compared, so that a change in the machine's load falls on all of them. Peers run once.

Cases of Holdfast. `free` (1 worker computes with one thread) and `waiting_2` (2 workers whose steps wait as for an
accelerator) have steps longer than the copy and a core to spare; in `busy_2` two workers keep two cores busy; in
`short` and `short_2` a step of 10 ms leaves no time to copy behind it. Peers run the loop of `free`.

Held: how long the loop stands still for a save: the time of a peer's call; for Holdfast the time to begin one and the
wait before the state may change (held_s in its events). Longer: by how much the step in which a save begins takes
longer than those of the same run that no save touches: what the copy takes from the memory's bandwidth is in it, and
the noise of a step, which is as much as a copy takes. Added: the time of the steps from a save on until long after it
is durable, minus the time of as many steps without one; all that a save costs is in that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from arguments import conclude, listed
from checkpoint_limits import Limits
from checkpoint_worker import PEERS
from holdfast.checkpoint import load
from holdfast.checkpoint.format.parts import PART_BYTES
from holdfast.checkpoint.restoring.reading import list_checkpoints
from holdfast.checkpoint.settings import NOWHERE
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.events import EventReader
from launching import BENCHMARKS, BenchmarkError, holdfast_command, last_lines, run_to_end

OURS = "holdfast"
TITLES = {
    OURS: "holdfast",
    "torch_save": "torch.save",
    "dcp": "dcp.save",
    "dcp_thread": "dcp.async_save, thread",
    "dcp_process": "dcp.async_save, process",
    "dlrover": "DLRover",
}
BLOCKS = 5
WIDTH, WIDTH_QUICK = 4096, 1280
RUN_TIMEOUT_S = 180.0
LOADS = 3
# The bars, in copies of the state, direct writes and direct reads of the same bytes, and seconds.
HELD_COPIES_MAX, HELD_COPIES_FREE_MAX = 1.3, 0.5
DURABLE_WRITES_MAX = 1.6
LOAD_READS_MAX = 1.3
ADDED_S_MAX, ADDED_FREE_S_MAX = 0.3, 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """`span` steps take longer than a save: a save begins, and `span` steps later there is none under way."""

    name: str
    workers: int
    span: int
    dense: bool = False
    wait_s: float = 0.0
    rows: int = 8
    free: bool = False  # a core is, and a step is longer than the copy
    busy: bool = False  # all cores are

    def arguments(self) -> list[str]:
        dense = ["--dense"] if self.dense else []
        return [*dense, "--wait", str(self.wait_s), "--rows", str(self.rows), "--workers", str(self.workers)]


CASES = (
    Case(name="free", workers=1, span=4, dense=True, rows=32, free=True),
    Case(name="waiting_2", workers=2, span=7, wait_s=0.3, free=True),
    Case(name="busy_2", workers=2, span=4, dense=True, rows=16, busy=True),
    Case(name="short", workers=1, span=175, wait_s=0.01),
    Case(name="short_2", workers=2, span=175, wait_s=0.01),
)
PEER_CASE = CASES[0]
MEMORY_WORKERS = (1, 4)


@dataclass
class Found:
    """What one system, or one case of ours, has shown so far."""

    held_first_s: list[float] = field(default_factory=list)
    held_later_s: list[float] = field(default_factory=list)
    longer_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def add(
        self, steps: Sequence[float], save: int, *, first: bool, held_s: float, durable_s: float, span: int
    ) -> None:
        quiet = steps[save + span : save + 2 * span]
        step_s = statistics.median(quiet)
        (self.held_first_s if first else self.held_later_s).append(held_s)
        self.longer_s.append(steps[save] - step_s)
        self.durable_s.append(durable_s)
        self.added_s.append(sum(steps[save : save + span]) - sum(quiet))
        self.step_s.append(step_s)

    def figures(self) -> dict[str, float]:
        return {name: statistics.median(values) if values else math.nan for name, values in vars(self).items()}


@dataclass
class Result:
    """Figures by name, and the bars that they missed."""

    figures: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def bar(self, name: str, value: float, limit: float) -> None:
        self.figures[name] = value
        if not value <= limit:  # nor if it could not be measured
            self.missed.append(f"{name} is {value:.3f}, above {limit:g}")


class Benchmark:
    def __init__(self, args: argparse.Namespace, limits: Limits, systems: Sequence[str]) -> None:
        self._args = args
        self._limits = limits
        self._systems = systems
        self._start = time.monotonic()
        self.cases: dict[str, Found] = {}
        self.peers: dict[str, Found] = {}
        self.memory: dict[int, float] = {}  # workers -> peak of a save's extra memory, in states
        self.reads_s: dict[str, list[float]] = {}  # read and load, to memory in use and to new memory

    def run(self) -> None:
        if OURS in self._systems:
            for workers in MEMORY_WORKERS:
                self._measure_memory(workers)
        for number in range(self._args.rounds):
            self._limits.measure(buffered=True)
            for case in CASES:
                if OURS in self._systems and case.name in self._args.cases:
                    self._measure_case(number, case)
                    self._limits.measure()
            for system in PEERS if number == 0 else ():  # once, and one save more: they are slow
                if system in self._systems:
                    self._measure_peer(system)
            self._limits.measure()

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:4.0f} s] {text}", file=sys.stderr, flush=True)

    def _train(
        self, directory: Path, case: Case, *, steps: int, every: int, width: int | None = None
    ) -> list[dict[str, Any]]:
        """A run of ours with its checkpoints in `kept`, or none; what its workers left."""
        kept = ["--checkpoint", str(directory / "kept") if every else NOWHERE, "--keep", "1"]
        when = ["--save-every", str(every)] if every else []
        command = holdfast_command(
            directory, run="bench", workers=case.workers, script="checkpoint_worker.py", options=[*kept, *when]
        )
        return self._end([*command, *case.arguments()], directory, case.workers, steps, width or self._args.width)

    def _end(self, command: list[str], directory: Path, workers: int, steps: int, width: int) -> list[dict[str, Any]]:
        common = ["--out", str(directory), "--steps", str(steps), "--width", str(width), "--blocks", str(BLOCKS)]
        run_to_end([[*command, *common]], directory / "log", timeout_s=RUN_TIMEOUT_S)
        left = [json.loads(path.read_text()) for path in directory.glob("*.json")]
        if len(left) != workers:
            lines = last_lines(directory / "log")
            raise BenchmarkError(f"{len(left)} of {workers} workers left figures\n{lines}")
        return left

    def _measure_memory(self, workers: int) -> None:
        """Peaks of two short runs, one that saves and one that does not; a quarter of the state does."""
        case = Case(name="memory", workers=workers, span=1, dense=True, wait_s=0.2)
        width = self._args.width // 2
        peaks = []
        for saves in (True, False):
            with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
                left = self._train(Path(directory), case, steps=6, every=4 if saves else 0, width=width)
            peaks.append(max(worker["peak_bytes"] for worker in left))
        self.memory[workers] = (peaks[0] - peaks[1]) / state_bytes(width)
        self._say(f"memory of a save with {workers} workers: {self.memory[workers]:.2f} of the state each")

    def _measure_case(self, number: int, case: Case) -> None:
        found = self.cases.setdefault(case.name, Found())
        every = 2 * case.span
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
            directory = Path(name)
            left = self._train(directory, case, steps=(self._args.saves + 1) * every, every=every)
            steps = longest_steps(worker["ends"] for worker in left)
            events = EventReader(directory / "runs" / "bench" / "events").poll()
            saved = {event["step"]: event for event in events if event["kind"] == "checkpoint"}
            for save in range(every, len(steps) - every + 1, every):
                if save not in saved:  # an earlier one was still on its way: too long, and a bar may show it
                    self._say(f"{case.name}: step {save} was passed over")
                    continue
                event = saved[save]
                held_s, durable_s, first = event["held_s"], event["duration_s"], save == every
                found.add(steps, save, first=first, held_s=held_s, durable_s=durable_s, span=case.span)
            if case is CASES[0] or not self.reads_s:
                self._measure_loads(directory / "kept")
        self._report(f"round {number + 1} holdfast {case.name}", found)

    def _measure_loads(self, kept: Path) -> None:
        """The files of a checkpoint, read plainly and as a checkpoint, to memory in use and to new memory, in turn."""
        uri = str(kept)
        step = list_checkpoints(open_storage(uri))[0].step
        files = sorted(kept.glob(f"*{step}/*.safetensors"))
        state = load(uri)
        ways: dict[str, Callable[[], object]] = {
            "read": lambda: self._limits.read_files(files),
            "load": lambda: load(uri, into=state),
            "read_anew": lambda: self._limits.read_files_anew(files),
            "load_anew": lambda: load(uri),
        }
        for _ in range(LOADS):
            for name, way in ways.items():
                self._limits.forget(files)
                began = time.monotonic()
                way()
                self.reads_s.setdefault(name, []).append(time.monotonic() - began)

    def _measure_peer(self, system: str) -> None:
        found = self.peers.setdefault(system, Found())
        every = 2 * PEER_CASE.span
        script = [sys.executable, str(BENCHMARKS / "checkpoint_worker.py")]
        command = [*script, "--system", system, "--every", str(every), *PEER_CASE.arguments()]
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
            (left,) = self._end(command, Path(directory), 1, (self._args.saves + 2) * every, self._args.width)
        steps = longest_steps([left["ends"]])
        for save in left["saves"]:
            held_s, durable_s = save["free"] - save["began"], save["durable"] - save["began"]
            first = save["step"] == every
            found.add(steps, save["step"], first=first, held_s=held_s, durable_s=durable_s, span=PEER_CASE.span)
        self._report(TITLES[system], found)

    def _report(self, label: str, found: Found) -> None:
        held = [*found.held_first_s[-1:], *found.held_later_s[-self._args.saves + 1 :]]
        self._say(
            f"{label}: held {', '.join(f'{s:.3f}' for s in held)} s, durable {found.durable_s[-1]:.2f} s, "
            f"added {found.added_s[-1]:+.3f} s, step {found.step_s[-1]:.3f} s"
        )

    # -- what it comes to

    def result(self) -> Result:
        result = Result(figures=self._limits.figures())
        copy_s, write_s = result.figures["limit_copy_s"], result.figures["limit_direct_write_s"]
        for case in CASES:
            if case.name not in self.cases:
                continue
            figures = self.cases[case.name].figures()
            result.figures |= {f"{figure}_{case.name}": value for figure, value in figures.items()}
            limit = HELD_COPIES_FREE_MAX if case.free else HELD_COPIES_MAX
            result.bar(f"held_first_copies_{case.name}", figures["held_first_s"] / copy_s, limit)
            result.bar(f"held_copies_{case.name}", figures["held_later_s"] / copy_s, limit)
            result.bar(f"durable_writes_{case.name}", figures["durable_s"] / write_s, DURABLE_WRITES_MAX)
            if case.free or case.busy:
                result.bar(f"added_s_{case.name}", figures["added_s"], ADDED_FREE_S_MAX if case.free else ADDED_S_MAX)
        for system, found in self.peers.items():
            result.figures |= {f"{figure}_{system}": value for figure, value in found.figures().items()}
        if self.reads_s:
            times = {name: statistics.median(values) for name, values in self.reads_s.items()}
            result.figures |= {f"{name}_s": value for name, value in times.items()}
            result.bar("load_reads", times["load"] / times["read"], LOAD_READS_MAX)
            result.bar("load_anew_reads", times["load_anew"] / times["read_anew"], LOAD_READS_MAX)
        for workers, states in self.memory.items():
            # Whole parts are shared out; buffers have a sixteenth to spare, and a process some megabytes of its own.
            share = min(1.0, 1 / workers + PART_BYTES / state_bytes(self._args.width // 2))
            result.bar(f"memory_states_{workers}", states, share * 17 / 16 + 0.1)
        return result


def longest_steps(ends: Iterable[Sequence[float]]) -> list[float]:
    """Each step's duration in the worker that took longest for it; the first has none, and counts as 0."""
    durations = [[0.0, *(later - earlier for earlier, later in pairwise(worker))] for worker in ends]
    return [max(of_all) for of_all in zip(*durations, strict=True)]


def main() -> int:
    args = parse_arguments()
    systems = list(args.systems)
    if "dlrover" in systems and importlib.util.find_spec("dlrover") is None:
        systems.remove("dlrover")
        print("DLRover: not installed", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        limits = Limits(Path(directory), state_bytes(args.width))
        benchmark = Benchmark(args, limits, systems)
        try:
            benchmark.run()
        except BenchmarkError as error:
            print(f"checkpoint: {error}", file=sys.stderr)
            return 1
    result = benchmark.result()
    print_tables(benchmark, result, state_bytes(args.width))
    return conclude(args, result.figures, result.missed)


def state_bytes(width: int) -> int:
    """Of the model's large tensors, and of the two that Adam has for each."""
    return 3 * 4 * BLOCKS * width * width


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--systems", type=listed(list(TITLES)), default=list(TITLES))
    parser.add_argument("--cases", type=listed(names), default=names)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--saves", type=int, default=4, help="of one run (default: 4)")
    parser.add_argument("--quick", action="store_true", help="one round with 100 MB")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.width = WIDTH_QUICK if args.quick else WIDTH
    return args


def print_tables(benchmark: Benchmark, result: Result, size: int) -> None:
    figures = result.figures
    copy_s, write_s = figures["limit_copy_s"], figures["limit_direct_write_s"]
    print(f"a state of {size / 1e9:.2f} GB; limits of this machine, in seconds:")
    for name in ("copy", "direct_write", "buffered_write", "direct_read"):
        low, high = figures[f"limit_{name}_min_s"], figures[f"limit_{name}_max_s"]
        print(f"  {name.replace('_', ' '):<15} {figures[f'limit_{name}_s']:.3f}  ({low:.3f} to {high:.3f})")
    print(f"{'':<24} {'held: first':>11} {'later':>7} {'copies':>6} {'longer':>7} {'durable':>7} {'writes':>6}", end="")
    print(f" {'added':>7} {'step':>7}")
    rows = [(f"holdfast {name}", found) for name, found in benchmark.cases.items()]
    rows += [(TITLES[system], found) for system, found in benchmark.peers.items()]
    for title, found in rows:
        mine = found.figures()
        print(
            f"{title:<24} {mine['held_first_s']:>11.3f} {mine['held_later_s']:>7.3f} "
            f"{mine['held_later_s'] / copy_s:>6.2f} {mine['longer_s']:>+7.3f} {mine['durable_s']:>7.2f} "
            f"{mine['durable_s'] / write_s:>6.2f} {mine['added_s']:>+7.3f} {mine['step_s']:>7.3f}"
        )
    print("held: seconds that the loop stands still. longer: the step with a save, than others.")
    print(
        "copies, writes: in copies of the state in warm memory, and direct writes of it. added: to training, per save."
    )
    for way, place in (("", "memory in use"), ("_anew", "new memory")) if benchmark.reads_s else ():
        load_s, reads, read_s = (figures[name] for name in (f"load{way}_s", f"load{way}_reads", f"read{way}_s"))
        print(f"load to {place}, digests checked: {load_s:.2f} s, {reads:.2f} direct reads to such ({read_s:.2f} s)")
    for workers, states in benchmark.memory.items():
        print(f"memory of a save, each of {workers} workers: {states:.2f} of the state (the rule: 1/n, in whole parts)")


if __name__ == "__main__":
    sys.exit(main())
