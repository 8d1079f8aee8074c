"""Train while workers are killed, stopped and added; then train in peace, and compare the weights bit for bit.

    make demo                            # four workers, about 90 seconds
    python scripts/demo.py --quick       # three workers, one kill, one stop, one more worker: half a minute

The training is examples/digits.py: a small convolutional net on scikit-learn's handwritten digits, slowed down by
sleeping so that there is something to watch. Exit code 0 only if every fault took place, the training survived
it, and the weights of both runs are the same. Runs in a temporary directory and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

for module, package in {"torch": "torch", "sklearn": "scikit-learn", "holdfast": "holdfast"}.items():
    if importlib.util.find_spec(module) is None:
        print(f"demo: {package} is missing; install it with `make install`, or pip install -e '.[demo]'")
        sys.exit(2)

from holdfast.events.telling import count  # noqa: E402
from holdfast.observe.fold import RunRecord  # noqa: E402
from holdfast.testing.observed_run import Failed, ObservedRun, send  # noqa: E402

SCRIPT = Path(__file__).parent.parent / "examples" / "digits.py"
BATCH = 80
SHARDS = 10  # at most 4, 3 or 2 for each of 3, 4 or 5 workers: every change of the crew shows in the samples/s
STEPS_PER_EPOCH = 17
FINISH_S = 300.0
REPLACED_S = 60.0

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`faults` are (what, earliest, latest): between these fractions of the steps, once the crew is complete."""

    workers: int
    spares: int = 0
    epochs: int
    sleep_s: float  # for each shard
    lease_s: float
    faults: tuple[tuple[str, float, float], ...]

    @property
    def steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH

    def script(self) -> list[str]:
        return [str(SCRIPT), "--batch-size", str(BATCH), "--shards", str(SHARDS), "--epochs", str(self.epochs)]

    def options(self) -> list[str]:
        return ["--workers", str(self.workers), "--spares", str(self.spares), "--lease", str(self.lease_s)]


FULL = Plan(
    workers=4,
    epochs=20,
    sleep_s=0.04,
    lease_s=2.0,
    faults=(
        ("kill", 0.07, 0.15),
        ("kill the leader", 0.22, 0.35),
        ("stop", 0.38, 0.50),
        ("add", 0.55, 0.60),
    ),
)
QUICK = Plan(  # a spare, so that nothing waits for a new worker's imports
    workers=3,
    spares=1,
    epochs=5,
    sleep_s=0.03,
    lease_s=1.0,
    faults=(("add", 0.07, 0.07), ("kill the leader", 0.20, 0.40), ("stop", 0.40, 0.70)),
)


@dataclass(kw_only=True)
class Fault:
    """One that was done, and what came of it."""

    what: str
    kind: str
    worker: str  # the victim, if there is one
    at: float  # seconds since 1970, as in the event log
    view: int  # the newest before it
    step: int


class Shown(ObservedRun):
    """A run whose agent's output is shown as it comes."""

    def __init__(self, home: Path, name: str, options: list[str], script: list[str], *, began: float) -> None:
        super().__init__(home, name, options, script)
        self.record = RunRecord()
        self._began = began
        self._shown = 0  # bytes of the log

    def look(self) -> None:
        super().look()
        with self.log_path.open("rb") as file:
            file.seek(self._shown)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._shown += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self.show(line)

    def fold(self, event: Event) -> None:
        super().fold(event)
        self.record.feed(event)

    def show(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {line}", flush=True)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    def accuracy(self) -> str:
        found = re.search(r"([\d.]+%) of \d+ test images right", self.log())
        return found[1] if found else "unknown"


@dataclass
class Faults:
    """Does them, one after the other, and waits until the training has got over each."""

    run: Shown
    plan: Plan
    done: list[Fault] = field(default_factory=list)

    def do_all(self) -> None:
        self.run.wait(lambda: self.run.step > 0, "the first step")
        for what, earliest, latest in self.plan.faults:
            first, last = earliest * self.plan.steps, latest * self.plan.steps
            self.run.wait(lambda step=first: self.run.step >= step, f"step {first:.0f}")  # type: ignore[misc]
            self.run.wait(lambda step=last: self._complete() or self.run.step >= step, "replacements")  # type: ignore[misc]
            if what == "add":
                self._add()
            else:
                self._take_away(what)

    def _complete(self) -> bool:
        return len(self.run.living_members()) >= self.plan.workers

    def _take_away(self, what: str) -> None:
        self.run.wait(lambda: len(self.run.living_members()) >= 2, "two members", REPLACED_S)
        living = self.run.living_members()
        worker = living[{"kill": -1, "kill the leader": 0, "stop": 1}[what]]
        pid = self.run.pids[worker]
        name, number = ("kill -STOP", signal.SIGSTOP) if what == "stop" else ("kill -9", signal.SIGKILL)
        fault = self._announce(
            f"{name} {worker}", what, worker, f" (process {pid}{', the leader' * (worker == living[0])})"
        )
        send(pid, number)
        self.run.wait(
            lambda: worker not in self.run.members and recovered_at(self.run, fault) is not None,
            f"the training to go on without {worker}",
        )

    def _add(self) -> None:
        size = self.plan.workers + 1
        fault = self._announce(f"holdfast scale {self.run.name} {size}", "add", "", " (one more)")
        self.run.scale(size)
        self.run.wait(lambda: joined(self.run, fault, size) is not None, "one more worker")

    def _announce(self, what: str, kind: str, worker: str, more: str) -> Fault:
        self.run.show(f">>> {what}{more}")
        fault = Fault(what=what, kind=kind, worker=worker, at=time.time(), view=self.run.view, step=self.run.step)
        self.done.append(fault)
        return fault


def recovered_at(run: Shown, fault: Fault) -> float | None:
    """When the last survivor committed its first step after the fault; of one left behind, when progress was told."""
    late = [event["t"] for event in run.of_kind("late") if event["worker"] == fault.worker and event["t"] >= fault.at]
    if late:
        return min((float(event["t"]) for event in run.of_kind("progress") if event["t"] > late[0]), default=None)
    after = [event for event in run.of_kind("recovered") if event["view"] > fault.view]
    first = min((event["view"] for event in after), default=0)
    return max((float(event["t"]) for event in after if event["view"] == first), default=None)


def joined(run: Shown, fault: Fault, size: int) -> Event | None:
    """The moment at which the crew had this size for the first time."""
    views = [event["view"] for event in run.of_kind("view") if len(event["members"]) == size]
    found = [event for event in run.of_kind("joined") if event["view"] > fault.view and event["view"] in views]
    return found[0] if found else None


@dataclass(frozen=True)
class Stretch:
    """From one progress event to the next."""

    began: float
    ended: float
    usual_s: float  # what its steps usually take


class Goodput:
    """How much of the time between the first and the last step went into steps at the usual pace.

    The usual pace is the median over the stretches without a change of members, for each number of workers.
    """

    def __init__(self, progress: list[Event]) -> None:
        points = sorted(progress, key=lambda event: (event["step"], event["t"]))
        pairs = [(a, b, b["step"] - a["step"]) for a, b in pairwise(points) if b["step"] > a["step"]]
        paces: dict[int, list[float]] = {}
        for a, b, steps in pairs:
            if a["view"] == b["view"]:
                paces.setdefault(b["workers"], []).append((b["t"] - a["t"]) / steps)
        self.step_s = {workers: statistics.median(found) for workers, found in paces.items()}
        fastest = min(self.step_s.values())
        self.stretches = [
            Stretch(a["t"], b["t"], steps * min(self.step_s.get(e["workers"], fastest) for e in (a, b)))
            for a, b, steps in pairs
        ]
        self.wall_s = points[-1]["t"] - points[0]["t"]
        self.usual_s = sum(stretch.usual_s for stretch in self.stretches)

    def lost_s(self, began: float, ended: float) -> float:
        """What the steps around these moments took beyond the usual."""
        around = [stretch for stretch in self.stretches if stretch.ended > began and stretch.began < ended]
        return max(0.0, sum(stretch.ended - stretch.began - stretch.usual_s for stretch in around))


def explain(run: Shown, fault: Fault, goodput: Goodput, size: int) -> str:
    if fault.kind == "add":
        event = joined(run, fault, size)
        assert event is not None
        moved = min(other["t"] for other in run.of_kind("view") if other["view"] == event["view"])
        lost_s = goodput.lost_s(moved, event["t"])
        return (
            f"{lost_s:.2f} s lost as {event['who']} joined, {moved - fault.at:.1f} s later; "
            f"meanwhile the others did {max(0, event['step'] - fault.step)} steps"
        )
    recovered = recovered_at(run, fault)
    assert recovered is not None
    losses = [event["t"] for event in run.of_kind("lost") if event["peer"] == fault.worker]
    losses += [event["t"] for event in run.of_kind("late") if event["worker"] == fault.worker]
    noticed = min(when for when in losses if when >= fault.at)  # at an earlier fault it may have hung up first
    silence = f", of which {noticed - fault.at:.2f} s until the others went on without it"
    return f"{recovered - fault.at:.2f} s{silence if fault.kind == 'stop' else ''}"


def summary(faulty: Shown, quiet: Shown, faults: list[Fault], workers: int, digests: tuple[str, str]) -> None:
    goodput = Goodput(faulty.of_kind("progress"))
    width = max(len(fault.what) for fault in faults)
    equal = "equal, bit for bit" if digests[0] == digests[1] else "NOT EQUAL"
    record = faulty.record
    usually = f"with {workers} workers a step takes {goodput.step_s.get(workers, math.nan):.2f} s"
    print(f"""
RESULT
  weights with faults       {digests[0]}
  weights without faults    {digests[1]}   {equal}
  test images right         {faulty.accuracy()} with faults, {quiet.accuracy()} without
  survived                  {count(record.workers.failures, "failure")}, in {count(record.workers.view, "view")}

  recovery, from the fault to the survivors' next committed step ({usually}):""")
    for fault in faults:
        print(f"    {fault.what:<{width}}   {explain(faulty, fault, goodput, workers + 1)}")
    print(f"""
  goodput                   {goodput.usual_s / goodput.wall_s:.1%}
    Between the first and the last step {goodput.wall_s:.1f} s went by. At the usual pace of the workers that lived at
    the time these steps take {goodput.usual_s:.1f} s; the rest is what the faults cost.""")


def demonstrate(home: Path, plan: Plan) -> int:
    began = time.monotonic()
    kills = sum(what.startswith("kill") for what, *_ in plan.faults)
    print(
        f"{plan.workers} workers train a small convolutional net on handwritten digits. Meanwhile this script kills "
        f"{count(kills, 'worker')},\nstops one and adds one. What `holdfast run` says is shown as it comes; "
        ">>> marks what is done to it.\n"
    )
    faulty = Shown(home, "demo", plan.options(), [*plan.script(), "--slow", str(plan.sleep_s)], began=began)
    quiet = Shown(home, "quiet", ["--workers", str(plan.workers)], plan.script(), began=began)
    try:
        faulty.start()
        faults = Faults(faulty, plan)
        faults.do_all()
        found = faulty.finish(FINISH_S)
        print("\nThe same once more, without faults and without sleeping, which changes nothing in the weights.\n")
        quiet.start()
        expected = quiet.finish(FINISH_S)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        faulty.end()
        quiet.end()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    summary(faulty, quiet, faults.done, plan.workers, (found, expected))
    return 0 if found == expected else 1


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three workers, three faults, half a minute")
    args = parser.parse_args()

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    home = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        return demonstrate(home, QUICK if args.quick else FULL)
    except Failed as error:
        print(f"\ndemo: FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; its processes are ended")
        return 130
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
