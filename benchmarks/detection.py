"""How soon a worker that hangs is noticed, whether anybody else is accused, and what it costs to know.

    python benchmarks/detection.py                       # everything, about 20 minutes
    python benchmarks/detection.py --part stop --check --json f.json
    python benchmarks/detection.py --part quiet --minutes 2
    python benchmarks/detection.py --quick               # a smoke run, about 2 minutes

stop      SIGSTOP to a random worker of four at a random moment, at a step of 0.2 s, with default settings: the time to
          the first step that the others commit without it.
deadlock  The training thread of one takes a lock twice in a shard, while all its other threads live on. The event log
          must name the function.
quiet     Nothing is wrong, for --minutes: a fifth of the shards takes up to a second longer, a process beside them uses
          all the processor it can get, and in the middle everybody evaluates, asleep, for 30 s. Nobody may be accused.
cost      Processor time of a worker's heartbeats as a share of its step time, with four workers.
ring      Simulated at 40, 1,000 and 10,000 workers, eight a host, with the neighbours that ship: messages of one agent,
          and the time until a lost host is noticed. Then three agents over real connections: what the ring takes each,
          as a share of a processor and in bytes a second, and the time until two of them miss the third.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arguments import conclude, listed
from commits import CommitLog
from holdfast.agent.hosts.ring_watch import RingNews, RingWatch
from holdfast.agent.ledger_watch import LedgerContents
from holdfast.agent.workers.heartbeat_watch import Glance, find_pages
from holdfast.core.errors import HoldfastError
from holdfast.core.words import KEY_HOSTS, encode_json
from holdfast.detection.beat import Activity
from holdfast.detection.heartbeat import Pulse
from holdfast.detection.pages import FOLDER
from holdfast.detection.progress import Level
from holdfast.events import read_events
from holdfast.net.sockets import open_tcp
from holdfast.placement.directory import RunDirectory, home_directory
from holdfast.trust.keys import create_keys
from launching import BenchmarkError, holdfast_command, processes
from recovery import Result, Training, await_fault

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what the tests have
from tests.harness.heartbeats import simulate

RUN = "bench"
PARTS = ("stop", "deadlock", "quiet", "cost", "ring")
WORKERS, SHARDS, SHARD_TIME_S = 4, 8, 0.1  # two shards each: a step of 0.2 s
EVALUATION_S = 30.0
ACCUSING = ("hung", "evicted", "worker_exited")
LATE_S = 2.0  # from the moment that one is left behind until all have gone on
STEP_TIMEOUT_S = 180.0
COST_S = 20.0
# The bars.
STOP_MEDIAN_S = 3.0
DEADLOCK_MEDIAN_S = 10.0
COST_SHARE = 0.005
RING_SPREAD_S = 0.2
RING_COST_SHARE = 0.01
RING_BYTES_PER_S = 50_000
RING_S = 10.0


def main() -> int:
    args = parse_arguments()
    print(f"seed {args.seed}", file=sys.stderr)
    result = Result()
    try:
        for part in args.part:
            globals()[f"measure_{part}"](args, result)
    except (BenchmarkError, HoldfastError) as error:
        print(f"detection: {error}", file=sys.stderr)
        return 1
    for name, value in result.figures.items():
        print(f"{name:<36} {value:.4g}")
    return conclude(args, result.figures, result.missed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=listed(PARTS), default=list(PARTS), help="stop,quiet,… (default: all)")
    parser.add_argument("--times", type=int, help="how often to stop or deadlock (default: 7 and 3)")
    parser.add_argument("--minutes", type=float, help="of the quiet run (default: 10)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--quick", action="store_true", help="each fault once, a minute of quiet")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    args.minutes = args.minutes or (1.0 if args.quick else 10.0)
    return args


@contextmanager
def training(arguments: Sequence[str] = ()) -> Iterator[Training]:
    """Four workers with a step of 0.2 s and default settings."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        home = Path(directory)
        options = ["--restarts", "1000"]
        command = holdfast_command(home, run=RUN, workers=WORKERS, script="detection_worker.py", options=options)
        mine = ["--out", directory, "--shards", str(SHARDS), "--shard-time", str(SHARD_TIME_S)]
        with processes([[*command, *mine, *arguments]], home / "log") as (agent,):
            yield Training(home, agent, home / "log", CommitLog(home))


def events(run: Training, *kinds: str) -> list[dict[str, Any]]:
    found = read_events(RunDirectory(home_directory(str(run.home)), RUN).events)
    return [event for event in found if event["kind"] in kinds]


def measure_stop(args: argparse.Namespace, result: Result) -> None:
    """Take a random worker's processor away, again and again."""

    def stop(run: Training, victim: int) -> None:
        os.kill(victim, signal.SIGSTOP)

    faults("stop", stop, args.times or (1 if args.quick else 7), args, result)
    result.bar("stop_alone_median_s", STOP_MEDIAN_S)


def measure_deadlock(args: argparse.Namespace, result: Result) -> None:
    def deadlock(run: Training, victim: int) -> None:
        partial = run.home / "deadlock.new"
        partial.write_text(str(victim))
        partial.replace(run.home / "deadlock")

    named = faults("deadlock", deadlock, args.times or (1 if args.quick else 3), args, result)
    result.figures["deadlock_unnamed"] = sum("take_a_lock_twice" not in stacks for stacks in named)
    result.bar("deadlock_alone_median_s", DEADLOCK_MEDIAN_S)
    result.bar("deadlock_unnamed", 1)


def faults(name: str, cause: Any, times: int, args: argparse.Namespace, result: Result) -> list[str]:
    """Returns the stacks that were written down, one for each fault."""
    chance = random.Random(f"{args.seed} {name}")
    alone, next_commit, steps = [], [], []
    with training() as run:
        run.wait_for_workers(WORKERS)
        for number in range(times):
            run.pass_steps(25)  # quiet steps, to know what is normal
            workers = run.wait_for_workers(WORKERS)
            time.sleep(chance.uniform(0.0, 3 * SHARD_TIME_S))
            victim = chance.choice(workers)
            run.lost.add(victim)
            moment = time.time()
            cause(run, victim)
            fault = await_fault(run, [pid for pid in workers if pid != victim], moment)
            alone.append(fault.alone_s)
            next_commit.append(fault.to_commit_s)
            steps.append(fault.step_s)
            print(
                f"{name} {number + 1}/{times}: next commit after {fault.to_commit_s:.3f} s, "
                f"alone after {fault.alone_s:.3f} s",
                file=sys.stderr,
                flush=True,
            )
            run.wait_for_workers(WORKERS)
        told = events(run, "hung")
        gaps = run.commits.gaps()
    result.figures |= {
        f"{name}_alone_median_s": statistics.median(alone),
        f"{name}_alone_worst_s": max(alone),
        f"{name}_to_commit_median_s": statistics.median(next_commit),
        f"{name}_step_s": statistics.median(steps),
        f"{name}_told": len(told),
        f"{name}_steps_lost": gaps,
        f"{name}_times": times,
    }
    result.bar(f"{name}_steps_lost", 1)
    if len(told) != times:
        result.missed.append(f"{name}: {times} hung, and the event log tells of {len(told)}")
    return [event["stacks"] for event in told]


def is_unexplained(event: dict[str, Any], late: list[dict[str, Any]]) -> bool:
    """A view that was given up, though nobody was late: the others go on without such a one, and it comes back."""
    return event["kind"] == "lost" and not any(abs(event["t"] - one["t"]) < LATE_S for one in late)


def measure_quiet(args: argparse.Namespace, result: Result) -> None:
    """Nothing is wrong, whatever it looks like."""
    with training(["--delays", "0.2"]) as run:
        run.wait_for_workers(WORKERS)
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            began = time.time()
            end = began + 60.0 * args.minutes
            wait_until(run, began + 30.0 * args.minutes - EVALUATION_S / 2)
            at = max(commits[-1].step for commits in run.commits.workers.values()) + 5
            partial = run.home / "evaluate.new"
            partial.write_text(f"{at} {EVALUATION_S}")
            partial.replace(run.home / "evaluate")
            wait_until(run, max(end, time.time() + EVALUATION_S + 20.0))
            told = [event for event in events(run, *ACCUSING, "lost", "late") if event["t"] >= began]  # not the start
            late = [event for event in told if event["kind"] == "late"]
            accused = [event for event in told if event["kind"] in ACCUSING or is_unexplained(event, late)]
            for event in accused:
                print({key: value for key, value in event.items() if key != "stacks"}, file=sys.stderr)
            steps = max(commits[-1].step for commits in run.commits.workers.values())
            result.figures |= {
                "quiet_accused": len(accused),
                "quiet_late": len({(event["worker"], event["step"]) for event in late}),
                "quiet_minutes": (time.time() - began) / 60.0,
                "quiet_steps": steps,
                "quiet_evaluated": float(steps > at),
            }
        finally:
            hog.kill()
            hog.wait()
    result.bar("quiet_accused", 1)
    if not result.figures["quiet_evaluated"]:
        result.missed.append("quiet: the evaluation did not come to its end")


def wait_until(run: Training, moment: float) -> None:
    run.wait("the time to pass", lambda: time.time() >= moment, timeout_s=moment - time.time() + STEP_TIMEOUT_S)


def measure_cost(args: argparse.Namespace, result: Result) -> None:
    """What the hearts say of themselves, and what it takes the training thread to say what it is in."""
    pulse = Pulse()
    calls = 100_000
    began = time.perf_counter()
    for number in range(calls):
        pulse.enter(Activity.SHARD, number)
    enter_s = (time.perf_counter() - began) / calls
    with training() as run:
        run.wait_for_workers(WORKERS)
        pages = find_pages(RunDirectory(home_directory(str(run.home)), RUN).path / FOLDER, known={})
        before = {name: page.read() for name, page in pages.items()}
        wait_until(run, time.time() + (COST_S / 4 if args.quick else COST_S))
        shares, beats = [], []
        for name, page in pages.items():
            first, last = before[name], page.read()
            assert first is not None and last is not None
            seconds = last.at - first.at
            shares.append((last.cost_s - first.cost_s + enter_s * (last.entered - first.entered)) / seconds)
            beats.append((last.cost_s - first.cost_s) / (last.number - first.number))
            page.close()
    result.figures |= {
        "cost_share": max(shares),
        "cost_beat_s": statistics.median(beats),
        "cost_enter_s": enter_s,
    }
    result.bar("cost_share", COST_SHARE)


def measure_ring(args: argparse.Namespace, result: Result) -> None:
    outcomes = [simulate(workers, args.seed) for workers in (40, 1_000, 10_000)]
    for one in outcomes:
        result.figures |= {
            f"ring_{one.workers}_messages_per_s": one.sent_per_s + one.heard_per_s,
            f"ring_{one.workers}_noticed_s": one.noticed_s,
            f"ring_{one.workers}_false_alarms": one.false_alarms,
        }
        result.bar(f"ring_{one.workers}_false_alarms", 1)
    noticed = [one.noticed_s for one in outcomes]
    result.figures["ring_noticed_spread_s"] = max(noticed) - min(noticed)
    result.bar("ring_noticed_spread_s", RING_SPREAD_S)
    if len({one.sent_per_s + one.heard_per_s for one in outcomes}) != 1:
        result.missed.append("ring: what one agent sends and hears grows with the run")
    measure_real_ring(args, result)


def measure_real_ring(args: argparse.Namespace, result: Result) -> None:
    """Three agents' places in the ring in this process: their threads say what they cost."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        keys = create_keys(Path(directory) / "keys")
        hosts = ("a", "b", "c")
        glance = Glance(Level.OK, 1000, 0.0)
        noticed: list[float] = []

        def report(news: RingNews) -> None:
            noticed.extend([time.monotonic()] if news.kind == "host_silent" else [])

        servers = {host: open_tcp("127.0.0.1") for host in hosts}
        values = {KEY_HOSTS + host: encode_json({"ring": address}) for host, (_, address) in servers.items()}
        rings = {}
        for host, (server, _) in servers.items():
            workers = {f"w{slot}.1@{host}": glance for slot in range(8)}
            look = {"glances": lambda workers=workers: workers, "report": report}
            rings[host] = RingWatch(host, server, keys, lease_s=2.0, **look)
            rings[host].listening(lambda news: None)(LedgerContents(values))
        try:
            time.sleep(5.0)  # connected, and of one another's rhythm
            before = {host: (ring.cost_s, ring.sent_bytes, ring.received_bytes) for host, ring in rings.items()}
            seconds = RING_S / 4 if args.quick else RING_S
            time.sleep(seconds)
            costs = [(rings[host].cost_s - cost_s) / seconds for host, (cost_s, _, _) in before.items()]
            sent = [(rings[host].sent_bytes - count) / seconds for host, (_, count, _) in before.items()]
            heard = [(rings[host].received_bytes - count) / seconds for host, (_, _, count) in before.items()]
            rings["b"]._send = lambda beat: None  # its host loses its network
            moment = time.monotonic()
            while len(noticed) < 2 and time.monotonic() < moment + STEP_TIMEOUT_S:
                time.sleep(0.01)
        finally:
            for ring in rings.values():
                ring.close()
    result.figures |= {
        "ring_agent_cost_share": max(costs),
        "ring_agent_sent_bytes_per_s": max(sent),
        "ring_agent_heard_bytes_per_s": max(heard),
        "ring_agents_noticed_s": max(noticed) - moment if len(noticed) == 2 else float("inf"),
    }
    result.bar("ring_agent_cost_share", RING_COST_SHARE)
    result.bar("ring_agent_sent_bytes_per_s", RING_BYTES_PER_S)
    result.bar("ring_agents_noticed_s", 2.0)


if __name__ == "__main__":
    sys.exit(main())
