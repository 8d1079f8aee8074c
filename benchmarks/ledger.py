"""What the ledger takes for one thing: the embedded one, etcd with one member, etcd with three.

    python benchmarks/ledger.py
    python benchmarks/ledger.py --repeats 1000 --check --json ledger.json

One client does one thing after the other; rounds of the three ledgers take turns. `watch` is from the call of a put by
one client until another client's watch hands the change out, so it contains the put. `failover` is from the SIGKILL of
the leader until a compare-and-set that was waiting returns, and contains the election (50 ms heartbeats, 500 ms
timeout). All members are on this host and share its disk. Nothing of this is on the path of a step.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from holdfast.agent.hosts.etcd_cluster import EtcdCluster, find_etcd
from holdfast.core.errors import ConfigError
from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer
from holdfast.ledger.etcd import open_etcd
from holdfast.ledger.port import Ledger
from tests.harness import etcd_faults

OPERATIONS = ("get", "put", "compare_and_set", "keep_alive", "watch")
ROUNDS = 5
FAILOVERS = 5
VALUE = b"v" * 200  # about what a view or a registration has
WAIT_S = 10.0
# The bars, for medians: far from what a ledger takes, near to what would slow a change of view down.
OPERATION_MS, FAILOVER_MS = 25.0, 2500.0

Figures = dict[str, dict[str, float]]


@contextmanager
def ledgers(home: Path) -> Iterator[dict[str, Callable[[], Ledger]]]:
    """How to open a client of each."""
    with ExitStack() as stack:
        socket_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hf")))
        server = EmbeddedServer(home / "embedded", socket_dir / "s", bytes(32))
        server.start()
        stack.callback(server.stop)
        one = stack.enter_context(EtcdCluster(home / "one", 1))
        three = stack.enter_context(EtcdCluster(home / "three", 3))
        yield {
            "embedded": lambda: EmbeddedLedger(socket_dir / "s", bytes(32)),
            "etcd x 1": lambda: open_etcd(one.url, "benchmark"),
            "etcd x 3": lambda: open_etcd(three.url, "benchmark"),
        }


def measure(open_ledger: Callable[[], Ledger], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repetition, by operation."""
    with closing(open_ledger()) as ledger, closing(open_ledger()) as other:
        lease = ledger.grant(60.0)
        revision = ledger.put("key", VALUE)
        taken = {
            "get": repeat(repeats, lambda: ledger.get("key")),
            "put": repeat(repeats, lambda: ledger.put("key", VALUE)),
            "keep_alive": repeat(repeats, lambda: ledger.keep_alive(lease)),
        }

        def follow() -> None:
            nonlocal revision
            won = ledger.compare_and_set("compared", VALUE, expected=revision)
            assert won is not None
            revision = won

        revision = ledger.put("compared", VALUE)
        taken["compare_and_set"] = repeat(repeats, follow)

        with closing(other.watch("watched", revision=ledger.put("watched", VALUE))) as watch:

            def see() -> None:
                written = ledger.put("watched", VALUE)
                while not any(change.revision == written for change in watch.next(WAIT_S)):
                    pass

            see()  # the stream is up
            taken["watch"] = repeat(repeats, see)
        ledger.revoke(lease)
        return taken


def repeat(repeats: int, action: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def failovers(home: Path, count: int) -> list[float]:
    """Seconds from a leader's death to the end of a compare-and-set that began with it."""
    times = []
    with EtcdCluster(home / "dying", 3) as cluster, closing(open_etcd(cluster.url, "benchmark")) as ledger:
        for _ in range(count):
            revision = ledger.put("view", VALUE)
            leader = etcd_faults.leader(cluster)
            cluster.members[leader].signal(signal.SIGKILL)
            start = time.perf_counter()
            won = ledger.compare_and_set("view", VALUE, expected=revision)
            times.append(time.perf_counter() - start)
            assert won is not None
            cluster.kill(leader)  # it is dead; this waits for its end
            cluster.restart(leader)
    return times


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_ms": 1000 * statistics.median(ordered),
        "p99_ms": 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "count": len(ordered),
    }


def missed(figures: Figures) -> list[str]:
    """Which medians are above their bars."""
    return [
        f"{operation} takes {found['median_ms']:.1f} ms, not below {bar:g}"
        for operation, found in figures.items()
        if not found["median_ms"] < (bar := FAILOVER_MS if operation == "failover" else OPERATION_MS)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=500, help="of each operation on each ledger")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    try:
        find_etcd()
    except ConfigError as error:
        sys.exit(str(error))
    taken: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as home:
        with ledgers(Path(home)) as openers:
            for _ in range(ROUNDS):
                for name, opener in openers.items():
                    for operation, times in measure(opener, max(1, args.repeats // ROUNDS)).items():
                        taken.setdefault(name, {}).setdefault(operation, []).extend(times)
        lost = failovers(Path(home), FAILOVERS)
    figures: dict[str, Figures] = {
        name: {operation: summary(times) for operation, times in operations.items()}
        for name, operations in taken.items()
    }
    figures["etcd x 3"]["failover"] = summary(lost)
    print("median (99th percentile), ms")
    print(f"{'':<10}" + "".join(f"{operation:>20}" for operation in OPERATIONS))
    for name, operations in figures.items():
        cells = (f"{operations[o]['median_ms']:.2f} ({operations[o]['p99_ms']:.2f})" for o in OPERATIONS)
        print(f"{name:<10}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"etcd x 3, the leader is killed: {1000 * statistics.median(lost):.0f} ms (at most {1000 * max(lost):.0f})")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    lines = [f"{name}: {line}" for name, operations in figures.items() for line in missed(operations)]
    for line in lines if args.check else ():
        print(f"missed: {line}")
    return 1 if args.check and lines else 0


if __name__ == "__main__":
    sys.exit(main())
