"""One reduction between hosts: shared memory within each and one stream out of it, against all over TCP, and gloo.

    python benchmarks/hosts.py
    python benchmarks/hosts.py --layouts 2x2,2x4 --elements 25000000 --json hosts.json --check

`2x4` is two hosts with four workers each; all are processes of this machine, and loopback stands for the network, so
times show the work that is done and not what a slower network adds. Each worker holds one vector of floats and ends
with the mean over all of them. Rounds of the three systems take turns; shown are the median of the slowest worker's
times, and what one host sends to others, counted at the sockets (of gloo's we have none to count). The least that a
host can send is 2·(H−1)/H of the vector.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from itertools import combinations
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.words import View, host_of
from holdfast.membership.codec import decode
from holdfast.net.groups import Connection, Group
from holdfast.reduce.arena import Arena
from holdfast.reduce.hosts import Hosts
from holdfast.reduce.layout import Layout
from holdfast.reduce.network import Network
from holdfast.reduce.reduction import SMALL_BYTES, Brought, ReductionTerms, bring
from holdfast.reduce.sums import Sums
from transport import together

SYSTEMS = ("gloo", "network", "hosts")
REPEATS = 9
BYTES_MARGIN = 1.1  # over the least that a host can send


class Counted(socket.socket):
    """A socket that counts what it sends."""

    sent = 0

    def send(self, data: Any, flags: int = 0) -> int:
        count = super().send(data, flags)
        self.sent += count
        return count


class Worker:
    """One process: connections to all others, the arenas of its host, and gloo's process group."""

    def __init__(self, me: str, members: tuple[str, ...], pairs: dict[tuple[str, str], Counted]) -> None:
        self.me, self.members = me, members
        self.group = Group(View(1, members), me, decode)
        self.abroad = [pairs[me, peer] for peer in members if host_of(peer) != host_of(me)]
        for peer in members:
            if peer != me:
                self.group.add(Connection(peer, pairs[me, peer]))

    def prepare(self, elements: int, arenas: dict[str, Arena]) -> None:
        self.near = {member: arena for member, arena in arenas.items() if host_of(member) == host_of(self.me)}
        self.layout = Layout([torch.empty(elements)])
        rank = self.members.index(self.me)
        sums = Sums(self.near[self.me], len(self.members), parities=1)
        sums.begin(0, self.layout)
        self.vector = torch.full((elements,), float(rank))
        sums.add(rank, [self.vector], [0])
        self.near[self.me].set_stamp(1, 0)
        ((_, slot),) = bring(sums, {}).nodes
        self.brought = {
            member: Brought((((shard, shard + 1), slot),), None, {}) for shard, member in enumerate(self.members)
        }

    def action(self, system: str) -> Callable[[], object]:
        if system == "gloo":
            return lambda: dist.all_reduce(self.vector)
        shards, small = len(self.members), self.layout.slot_bytes <= SMALL_BYTES
        if system == "network":
            network = Network(self.group, self.near[self.me], ReductionTerms(shards, small))
            return lambda: network.reduce(0, self.layout, self.members, self.brought)
        hosts = Hosts(self.group, self.near, ReductionTerms(shards, small))
        right = (shards - 1) / 2

        def reduce() -> None:
            memory, _ = hosts.reduce(0, self.layout, self.members, self.brought)
            dist.barrier()  # stands for the round of Done
            assert self.layout.vectors(memory)[0][-1] == right

        return reduce

    def sent(self) -> int:
        return sum(sock.sent for sock in self.abroad)


def work(worker: Worker, elements: int, arenas: dict[str, Arena], rendezvous: str, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    rank = worker.members.index(worker.me)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(worker.members))
    worker.prepare(elements, arenas)
    found: dict[str, list[tuple[float, int]]] = {system: [] for system in SYSTEMS}
    actions = {system: worker.action(system) for system in SYSTEMS}
    for repeat in range(REPEATS + 1):
        for system in SYSTEMS:
            before = worker.sent()
            dist.barrier()
            start = time.perf_counter()
            actions[system]()
            if repeat:  # the first touches fresh memory
                found[system].append((time.perf_counter() - start, worker.sent() - before))
    pipe.send(found)
    dist.destroy_process_group()


def measure(hosts: int, workers: int, elements: int) -> dict[str, tuple[float, int]]:
    """By system: median seconds, each repeat taken at its slowest worker; the most bytes that a host sent to others."""
    members = tuple(f"w{slot}.1@host{host}" for host in range(hosts) for slot in range(workers))
    layout = Layout([torch.empty(elements, device="meta")])
    arenas = {member: Arena.create(len(members), layout.slot_bytes) for member in members}
    pairs: dict[tuple[str, str], Counted] = {}
    for a, b in combinations(members, 2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            left = socket.create_connection(server.getsockname())
            right, _ = server.accept()
        for key, sock in (((a, b), left), ((b, a), right)):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pairs[key] = Counted(fileno=sock.detach())
    results = together(work, [(Worker(member, members, pairs), elements, arenas) for member in members])
    for sock in pairs.values():
        sock.close()
    for arena in arenas.values():
        arena.close()
    figures = {}
    for system in SYSTEMS:
        rounds = list(zip(*(result[system] for result in results), strict=True))
        seconds = statistics.median(max(time_s for time_s, _ in one) for one in rounds)
        by_host = [
            sum(sent for _, sent in one[host * workers : (host + 1) * workers])
            for one in rounds
            for host in range(hosts)
        ]
        figures[system] = seconds, max(by_host)
    return figures


def misses(hosts: int, workers: int, elements: int, found: dict[str, tuple[float, int]]) -> list[str]:
    """What is worse than it should be, where there is something to gain: several workers a host, and large vectors."""
    name, missed = f"{elements} floats on {hosts}x{workers}", []
    if workers == 1 or elements * 4 <= SMALL_BYTES:
        return []
    even = workers & (workers - 1) == 0  # each host's shards are one node of the tree
    if even and found["hosts"][1] > BYTES_MARGIN * least_bytes(hosts, elements):
        missed.append(f"{name}: a host sends more than {BYTES_MARGIN} times the least")
    if found["hosts"][0] > found["network"][0]:
        missed.append(f"{name}: slower than all over TCP")
    return missed


def least_bytes(hosts: int, elements: int) -> float:
    return 2 * (hosts - 1) / hosts * elements * 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="2x2", help="HOSTSxWORKERS, several with commas")
    parser.add_argument("--elements", default="1000000,25000000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 if a host sends too much, or it takes longer than all over TCP",
    )
    args = parser.parse_args()
    figures: dict[str, float] = {}
    missed: list[str] = []
    print(
        f"{'':>10} {'':>6} {'time, ms':>26} {'a host sends, MB':>22}\n"
        f"{'floats':>10} {'hosts':>6} {'gloo':>8} {'network':>8} {'hosts':>8} {'least':>6} {'network':>8} {'hosts':>6}"
    )
    for elements in map(int, args.elements.split(",")):
        for layout in args.layouts.split(","):
            hosts, workers = map(int, layout.split("x"))
            found = measure(hosts, workers, elements)
            name = f"{elements}_{layout}"
            figures |= {f"{system}_s_{name}": seconds for system, (seconds, _) in found.items()}
            figures |= {f"{system}_bytes_{name}": found[system][1] for system in ("network", "hosts")}
            times = " ".join(f"{found[system][0] * 1e3:>8.2f}" for system in SYSTEMS)
            sent = f"{found['network'][1] / 1e6:>8.1f} {found['hosts'][1] / 1e6:>6.1f}"
            print(f"{elements:>10} {layout:>6} {times} {least_bytes(hosts, elements) / 1e6:>6.1f} {sent}", flush=True)
            missed += misses(hosts, workers, elements, found)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    if args.check and missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
