"""Real processes, real faults, one question: are the weights those of a run in which nothing failed?

    python -m tests.soak.exactness --workers 4 --steps 300 --faults 40 --seed 1
    python -m tests.soak.exactness --loops 4 --steps 120 --faults 12 --seed 1
    python -m tests.soak.exactness --ledger etcd --hosts 3 --workers 4 --steps 300 --faults 40 --seed 1

Starts a run with `holdfast run`, then kills and stops workers, kills the agent and takes over, adds and removes
workers, at moments drawn from the seed; at the end it compares with a quiet run, promise by promise. With --hosts
the run is on several hosts, each in a network namespace, with an etcd of three members in namespaces of their own;
then hosts also lose power, the network between them is cut, and the ledger's leader is killed. Exit code 0 only if
all faults were done and every promise held. What was done and when is printed as it happens.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from holdfast.drills.checking import check
from holdfast.drills.engine import Engine
from holdfast.drills.ground import RIG, Ground, Setting
from holdfast.drills.trace import TraceReader
from holdfast.testing.observed_run import Failed
from holdfast.testing.switchboard import why_not
from tests.soak.conducting import add_common, conduct, judge, quiet_run
from tests.soak.faults_at_steps import FaultsAtSteps, FaultsOfHosts
from tests.trainings import exactness_training

SCRIPT = exactness_training.__file__


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="in all")
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--loops", type=int, default=1, help="of the script, some left early, one of them empty")
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--path", choices=("auto", "shared-memory", "network"), default="auto")
    parser.add_argument("--ledger", choices=("embedded", "etcd"), default="embedded")
    parser.add_argument("--hosts", type=int, default=1, help="in network namespaces; more than one needs etcd")
    parser.add_argument("--width", type=int, default=64, help="of the model; 2048 gives 1 M parameters")
    add_common(parser)
    args = parser.parse_args()
    if args.workers < 2 or args.steps < 6 or args.faults < 0 or args.spares < 0:
        parser.error("at least 2 workers and 6 steps, and not less than 0 faults and spares")
    if (args.hosts > 1) != (args.ledger == "etcd"):
        parser.error("--ledger etcd and --hosts N go together")
    if not 1 <= args.hosts <= args.workers:
        parser.error("a host has at least one worker")
    if args.hosts > 1 and (reason := why_not()):
        parser.error(f"--hosts cannot be had here: {reason}")
    return args


def drill(args: argparse.Namespace, home: Path) -> None:
    script = [SCRIPT, "--steps", str(args.steps), "--width", str(args.width), "--loops", str(args.loops)]
    options = ("--restarts", "10000", "--path", args.path)
    setting = Setting(workers=args.workers, spares=args.spares, hosts=args.hosts, options=options)
    began = time.monotonic()
    with Ground(setting, home, [*RIG, *script]) as ground:
        quiet = quiet_run(ground, args.digest)
        print(f"seed {args.seed}: quiet run {quiet.digest}", flush=True)
        gate = home / "gate"
        run = ground.run("faulty", "--gate", str(gate))
        plan_class = FaultsOfHosts if args.hosts > 1 else FaultsAtSteps
        plan = plan_class(ground, run, gate, steps=args.steps, faults=args.faults, seed=args.seed)
        plan.open_gate()
        run.start()
        engine = Engine(run, TraceReader(ground.traces("faulty")), plan.nemesis, plan.faults())
        try:
            faulty = engine.finish()
        finally:
            plan.nemesis.end()
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(plan.count.items()))
    seconds = time.monotonic() - began
    print(f"seed {args.seed}: {faults}; {run.view} views, {run.evicted} evictions, {seconds:.0f} s")
    judge(args.seed, check(quiet, faulty, plan.nemesis.done, None))
    if faulty.digest != quiet.digest:
        raise Failed(f"NOT EXACT: {faulty.digest}")
    print(f"seed {args.seed}: exact: {faulty.digest} (quiet {quiet.digest})")


if __name__ == "__main__":
    sys.exit(conduct("exactness", parse(), drill))
