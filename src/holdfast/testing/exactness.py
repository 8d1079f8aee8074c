"""Real processes, real faults, one question: are the weights those of a run in which nothing failed?

    python -m holdfast.testing.exactness --workers 4 --steps 300 --faults 40 --seed 1
    python -m holdfast.testing.exactness --ledger etcd --hosts 3 --workers 4 --steps 300 --faults 40 --seed 1

Starts a run with `holdfast run`, then kills and stops workers, kills the agent and takes over, adds and removes
workers, at moments drawn from the seed; at the end it compares the weights with those of a quiet run. With --hosts
the run is on several hosts, each in a network namespace, with an etcd of three members in namespaces of their own;
then hosts also lose power, the network between them is cut, and the ledger's leader is killed. Exit code 0 only if
all faults were done and the digests are equal. What was done and when is printed as it happens.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.launch.etcd_cluster import EtcdCluster
from holdfast.testing.fleet import Fleet
from holdfast.testing.nemesis import HostsNemesis, Nemesis
from holdfast.testing.switchboard import Switchboard, why_not
from holdfast.testing.watched import Failed, Watched
from holdfast.trust.keys import create_keys

SCRIPT = Path(__file__).with_name("exactness_script.py")


def quiet_digest(home: Path, workers: int, path: str, script: list[str]) -> str:
    run = Watched(home, "quiet", ["--workers", str(workers), "--path", path], script)
    run.start()
    try:
        return run.finish(600)
    finally:
        run.end()


def on_one_host(args: argparse.Namespace, home: Path, script: list[str]) -> tuple[Watched, Nemesis]:
    gate = home / "gate"
    options = ["--workers", str(args.workers), "--spares", str(args.spares), "--path", args.path]
    run = Watched(home, "faulty", [*options, "--restarts", "10000"], [*script, "--gate", str(gate)])
    return run, Nemesis(run, gate, steps=args.steps, faults=args.faults, seed=args.seed, workers=args.workers)


def on_hosts(args: argparse.Namespace, home: Path, script: list[str], stack: ExitStack) -> tuple[Fleet, HostsNemesis]:
    gate = home / "gate"
    hosts = [f"h{number}" for number in range(1, args.hosts + 1)]
    members = ["e1", "e2", "e3"]
    board = stack.enter_context(Switchboard([*hosts, *members]))
    cluster = EtcdCluster(
        home / "etcd",
        addresses=[board.address(member) for member in members],
        prefix_commands=[board.command(member) for member in members],
    )
    stack.enter_context(cluster)
    create_keys(home / "keys")
    sizes = {host: len(range(index, args.workers, args.hosts)) for index, host in enumerate(hosts)}
    common = ["--ledger", cluster.url, "--keys", str(home / "keys"), "--restarts", "10000", "--path", args.path]
    fleet = Fleet(
        Watched(
            home,
            "faulty",
            [*common, "--workers", str(sizes[host]), "--spares", str(args.spares if host == hosts[0] else 0)],
            [*script, "--gate", str(gate)],
            host=host,
            prefix=board.command(host),
        )
        for host in hosts
    )
    nemesis = HostsNemesis(
        fleet,
        gate,
        sizes=sizes,
        board=board,
        cluster=cluster,
        steps=args.steps,
        faults=args.faults,
        seed=args.seed,
    )
    return fleet, nemesis


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="in all")
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", choices=("auto", "shared-memory", "network"), default="auto")
    parser.add_argument("--ledger", choices=("embedded", "etcd"), default="embedded")
    parser.add_argument("--hosts", type=int, default=1, help="in network namespaces; more than one needs etcd")
    parser.add_argument("--width", type=int, default=64, help="of the model; 2048 gives 1 M parameters")
    parser.add_argument("--digest", help="of the quiet run, if it is known already")
    parser.add_argument("--keep", action="store_true", help="keep the run directory")
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


def main() -> int:
    args = parse()
    home = Path(tempfile.mkdtemp(prefix="holdfast-exactness-"))
    script = [str(SCRIPT), "--steps", str(args.steps), "--width", str(args.width)]
    started = time.monotonic()
    with ExitStack() as stack:
        try:
            path = args.path if args.hosts == 1 else "auto"
            expected = args.digest or quiet_digest(home, args.workers, path, script)
            print(f"seed {args.seed}: quiet run {expected}", flush=True)
            run: Watched | Fleet
            nemesis: Nemesis
            run, nemesis = on_one_host(args, home, script) if args.hosts == 1 else on_hosts(args, home, script, stack)
            stack.callback(run.end)
            run.start()
            nemesis.run()
            found = run.finish(300)
        except (Failed, HoldfastError) as error:
            print(f"seed {args.seed}: FAILED: {error}\nrun directory: {home}")
            return 1
    equal = found == expected
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(nemesis.done.items()))
    print(f"seed {args.seed}: {faults}; {run.view} views, {run.evicted} evictions, {time.monotonic() - started:.0f} s")
    print(f"seed {args.seed}: {'exact' if equal else 'NOT EXACT'}: {found} (quiet {expected})")
    if equal and not args.keep:
        shutil.rmtree(home, ignore_errors=True)
    else:
        print(f"run directory: {home}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
