"""What faults cost those who stay: a worker killed, a worker stopped, a worker that joins.

    python benchmarks/recovery.py                        # all three
    python benchmarks/recovery.py --fault kill --check --json f.json
    python benchmarks/recovery.py --fault join --optimizer adam
    python benchmarks/recovery.py --fault kill --ledger etcd --check
    python benchmarks/recovery.py --quick                # a smoke run

kill  SIGKILL to a random worker at a random moment, 20 times; the agent replaces it each time. The overhead is the
      time to the survivors' next committed step, without the rest of a normal step and without the time of
      computing the lost shards, as the survivors measured it.
stop  SIGSTOP instead: the others find out when the worker's lease runs out.
join  `holdfast scale` adds a worker to a run with 25 M parameters. The stall is the longest step around the
      newcomer's first one, beyond a normal step before.

With --ledger etcd the views are agreed on in an etcd with three members on this host, and the run is one on several
hosts that has only one. The bar is then on the whole time from the SIGKILL to the survivors' next committed step, and
to the first that they computed alone: what the lost worker had handed in before needs no new view.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from arguments import conclude
from commits import CommitLog, Fault
from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.core.errors import HoldfastError
from holdfast.trust.keys import create_keys
from launching import BenchmarkError, holdfast_command, last_lines, processes

RUN = "bench"
FAULTS = ("kill", "stop", "join")
WORKERS = 4
SHARDS = 8
SHARD_TIME_S = 0.02
LEASE_S = 2.0
COMMITS_WHEN_LEVEL = 5  # a worker that has committed so many steps in a row is a member like the others
START_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 60.0
# The bars.
KILL_MEDIAN_S, KILL_WORST_S = 0.15, 0.5
ETCD_TO_COMMIT_MEDIAN_S = 0.5
JOIN_STALL_STEPS = 1.0


@dataclass
class Training:
    """A run under test. Only this process's main thread touches it."""

    home: Path
    agent: subprocess.Popen[bytes]
    log: Path
    commits: CommitLog
    lost: set[int] = field(default_factory=set)  # taken away by us; may still be in the process table

    def wait(self, what: str, done: Callable[[], bool], *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.commits.poll()
            if done():
                return
            if self.agent.poll() is not None:
                raise BenchmarkError(f"the agent ended with {self.agent.returncode}\n{last_lines(self.log)}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"after {timeout_s:g} s still waiting for {what}\n{last_lines(self.log)}")
            time.sleep(0.05)

    def level(self) -> list[int]:
        """The workers that live and keep step with the first of them."""
        alive = {
            pid: commits
            for pid, commits in self.commits.workers.items()
            if pid not in self.lost and Path(f"/proc/{pid}").exists()
        }
        newest = max((commits[-1].step for commits in alive.values()), default=0)
        return sorted(
            pid
            for pid, commits in alive.items()
            if len(commits) >= COMMITS_WHEN_LEVEL and commits[-1].step >= newest - 2
        )

    def wait_for_workers(self, workers: int) -> list[int]:
        self.wait(f"{workers} workers", lambda: len(self.level()) == workers, timeout_s=START_TIMEOUT_S)
        return self.level()

    def pass_steps(self, steps: int) -> None:
        def newest() -> int:
            return max(commits[-1].step for commits in self.commits.workers.values())

        goal = newest() + steps
        self.wait(f"step {goal}", lambda: newest() >= goal, timeout_s=STEP_TIMEOUT_S)

    def scale(self, workers: int) -> None:
        command = [sys.executable, "-m", "holdfast", "scale", "--dir", str(self.home), RUN, str(workers)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if answer.returncode:
            raise BenchmarkError(f"holdfast scale: {answer.stderr.strip()}")


@dataclass
class Result:
    """Figures by name, and the bars that they missed."""

    figures: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def bar(self, name: str, limit: float) -> None:
        if not self.figures[name] < limit:
            self.missed.append(f"{name} is {self.figures[name]:.3f}, not below {limit:g}")


def main() -> int:
    args = parse_arguments()
    print(f"seed {args.seed}", file=sys.stderr)
    result = Result()
    try:
        for fault in args.fault:
            if fault == "join":
                joins(args, result)
            else:
                losses(fault, args, result)
    except (BenchmarkError, HoldfastError) as error:
        print(f"recovery: {error}", file=sys.stderr)
        return 1
    for name, value in result.figures.items():
        print(f"{name:<36} {value:.4g}")
    return conclude(args, result.figures, result.missed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, action="append", help="may be given again (default: all)")
    parser.add_argument("--times", type=int, help="how often (default: kill 20, stop 3, join 5)")
    parser.add_argument("--ledger", choices=("embedded", "etcd"), default="embedded", help="etcd: with three members")
    parser.add_argument("--path", choices=("auto", "shared-memory", "network"), default="auto")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd", help="of the model that is joined")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--quick", action="store_true", help="each fault once or twice, a small model to join")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    args.fault = args.fault or list(FAULTS)
    return args


@contextmanager
def training(args: argparse.Namespace, workers: int, arguments: Sequence[str]) -> Iterator[Training]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-"))
        home = Path(directory)
        options = ["--path", args.path, "--lease", str(LEASE_S), "--restarts", "1000"]
        if args.ledger == "etcd":
            create_keys(home / "keys")
            cluster = stack.enter_context(EtcdCluster(home / "etcd"))
            options += ["--ledger", cluster.url, "--keys", str(home / "keys"), "--host", "alpha"]
        command = holdfast_command(home, run=RUN, workers=workers, script="recovery_worker.py", options=options)
        with processes([[*command, "--out", directory, *arguments]], home / "log") as (agent,):
            yield Training(home, agent, home / "log", CommitLog(home))


def losses(fault: str, args: argparse.Namespace, result: Result) -> None:
    """Take a random worker away, again and again."""
    chance = random.Random(f"{args.seed} {fault}")
    times = args.times or {"kill": 2 if args.quick else 20, "stop": 1 if args.quick else 3}[fault]
    found: list[Fault] = []
    back_s: list[float] = []
    arguments = ["--workload", "1m", "--shards", str(SHARDS), "--shard-time", str(SHARD_TIME_S)]
    with training(args, WORKERS, arguments) as run:
        run.wait_for_workers(WORKERS)
        for number in range(times):
            run.pass_steps(25)  # quiet steps, to know what is normal
            workers = run.wait_for_workers(WORKERS)
            time.sleep(chance.uniform(0.0, 3 * SHARD_TIME_S * SHARDS / WORKERS))
            victim = chance.choice(workers)
            run.lost.add(victim)
            survivors = [pid for pid in workers if pid != victim]
            moment = time.time()
            os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            found.append(await_fault(run, survivors, moment))
            run.wait_for_workers(WORKERS)
            back_s.append(min(first_commits(run, moment)) - moment)
            report(f"{fault} {number + 1}/{times}", found[-1], back_s[-1])
        gaps = run.commits.gaps()

    overheads = [one.overhead_s for one in found]
    to_commit = [one.to_commit_s for one in found]
    alone = [one.alone_s for one in found]
    result.figures |= {
        f"{fault}_overhead_median_s": statistics.median(overheads),
        f"{fault}_overhead_worst_s": max(overheads),
        f"{fault}_to_commit_median_s": statistics.median(to_commit),
        f"{fault}_to_commit_worst_s": max(to_commit),
        f"{fault}_alone_median_s": statistics.median(alone),
        f"{fault}_alone_worst_s": max(alone),
        f"{fault}_replaced_median_s": statistics.median(back_s),
        f"{fault}_step_s": statistics.median(one.step_s for one in found),
        f"{fault}_wasted_shards": sum(one.wasted_shards for one in found),
        f"{fault}_steps_lost": gaps,
        f"{fault}_times": len(found),
    }
    result.bar(f"{fault}_steps_lost", 1)
    if fault == "kill" and args.ledger == "etcd":
        result.bar("kill_to_commit_median_s", ETCD_TO_COMMIT_MEDIAN_S)
        result.bar("kill_alone_median_s", ETCD_TO_COMMIT_MEDIAN_S)
    elif fault == "kill":
        result.bar("kill_overhead_median_s", KILL_MEDIAN_S)
        result.bar("kill_overhead_worst_s", KILL_WORST_S)


def await_fault(run: Training, survivors: Sequence[int], moment: float) -> Fault:
    def two_steps_later() -> bool:
        steps = run.commits.of(survivors)
        first = steps.first_after(moment)
        return first is not None and steps.has(first + 1)

    run.wait("the survivors' next commits", two_steps_later, timeout_s=STEP_TIMEOUT_S)
    return run.commits.of(survivors).fault(moment, SHARDS)


def first_commits(run: Training, moment: float) -> list[float]:
    """When those who came after `moment` committed their first step."""
    return [commits[0].at for commits in run.commits.workers.values() if commits[0].at > moment]


def joins(args: argparse.Namespace, result: Result) -> None:
    """Add a worker to a run of three, let it go, and again."""
    times = args.times or (1 if args.quick else 5)
    stalls: list[float] = []
    normal: list[float] = []
    arguments = ["--workload", "1m" if args.quick else "25m", "--optimizer", args.optimizer, "--shards", str(WORKERS)]
    with training(args, WORKERS - 1, arguments) as run:
        run.wait_for_workers(WORKERS - 1)
        for number in range(times):
            run.pass_steps(12)
            there = run.wait_for_workers(WORKERS - 1)
            before = max(commits[-1].step for commits in run.commits.workers.values())
            moment = time.time()
            run.scale(WORKERS)
            run.wait_for_workers(WORKERS)
            steps = run.commits.of(there)
            first = min(c[0].step for c in run.commits.workers.values() if c[0].at > moment)
            around = [step for step in range(first - 3, first + 3) if steps.has(step, step - 1)]
            normal.append(steps.normal_s(before))
            stalls.append(max(map(steps.duration_s, around)) - normal[-1])
            print(
                f"join {number + 1}/{times}: stall {stalls[-1]:.3f} s, normal step {normal[-1]:.3f} s, "
                f"level after {min(first_commits(run, moment)) - moment:.1f} s",
                file=sys.stderr,
            )
            run.scale(WORKERS - 1)
            run.wait_for_workers(WORKERS - 1)
        gaps = run.commits.gaps()

    ratios = [stall / step for stall, step in zip(stalls, normal, strict=True)]
    result.figures |= {
        "join_stall_median_s": statistics.median(stalls),
        "join_stall_worst_s": max(stalls),
        "join_step_s": statistics.median(normal),
        "join_stall_median_steps": statistics.median(ratios),
        "join_stall_worst_steps": max(ratios),
        "join_steps_lost": gaps,
        "join_times": len(stalls),
    }
    result.bar("join_stall_worst_steps", JOIN_STALL_STEPS)
    result.bar("join_steps_lost", 1)


def report(label: str, fault: Fault, back_s: float) -> None:
    print(
        f"{label}: next commit after {fault.to_commit_s:.3f} s, alone after {fault.alone_s:.3f} s, "
        f"overhead {fault.overhead_s:.3f} s, replaced after {back_s:.1f} s",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
