"""The reduction by itself: Holdfast's two paths against gloo's all-reduce, the same vector, the same processes' count.

    python benchmarks/transport.py
    python benchmarks/transport.py --workers 2,4 --elements 25000000 --json transport.json

Each worker holds one vector of floats and ends with the mean over all of them. Rounds of the three take turns; the
median of the slowest worker's times is shown, and the ratio of gloo's time to ours (above 1: we are faster).
Decision 3 rests on these figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.words import View
from holdfast.membership.codec import decode
from holdfast.net.groups import Connection, Group
from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout
from holdfast.reduce.network import Network
from holdfast.reduce.reduction import SMALL_BYTES, ReductionTerms, bring
from holdfast.reduce.shared_memory import SharedMemory
from holdfast.reduce.sums import Sums

SYSTEMS = ("gloo", "shared_memory", "network")
REPEATS = 7


class Worker:
    """One process: a group over TCP, everyone's arena, and gloo's process group."""

    def __init__(self, rank: int, count: int, pairs: dict[tuple[int, int], socket.socket], arenas: list[Arena]) -> None:
        members = tuple(f"w{index}.1" for index in range(count))
        self.view, self.rank, self.members = View(1, members), rank, members
        self.group = Group(self.view, members[rank], decode)
        for (mine, other), sock in pairs.items():
            if mine == rank:
                self.group.add(Connection(members[other], sock))
        self.arena = arenas[rank]
        self.arenas = dict(zip(members, arenas, strict=True))

    def prepare(self, elements: int) -> None:
        self.layout = Layout([torch.empty(elements)])
        self.sums = Sums(self.arena, len(self.members), parities=1)
        self.sums.begin(0, self.layout)
        self.sums.add(self.rank, [torch.full((elements,), float(self.rank))], [0])
        self.arena.set_stamp(1, 0)
        self.brought = {}
        for rank, member in enumerate(self.members):
            one = bring(self.sums, {})
            self.brought[member] = type(one)((((rank, rank + 1), one.nodes[0][1]),), None, {})
        self.vector = torch.full((elements,), float(self.rank))

    def action(self, system: str) -> Callable[[], object]:
        if system == "gloo":
            return lambda: dist.all_reduce(self.vector)
        shards, small = len(self.members), self.layout.slot_bytes <= SMALL_BYTES
        if system == "network":
            path = Network(self.group, self.arena, ReductionTerms(shards, small))
            return lambda: path.reduce(0, self.layout, self.members, self.brought)
        shared = SharedMemory(
            self.view, self.members[self.rank], self.arenas, ReductionTerms(shards, small), two_rounds=not small
        )

        def reduce() -> None:
            shared.reduce(0, self.layout, self.members, self.brought)
            dist.barrier()  # stands for the round of Done

        return reduce


def work(rank: int, worker: Worker, elements: int, rendezvous: str, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(worker.members))
    worker.prepare(elements)
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    actions = {system: worker.action(system) for system in SYSTEMS}
    for repeat in range(REPEATS + 1):
        for system in SYSTEMS:
            dist.barrier()
            start = time.perf_counter()
            actions[system]()
            if repeat:  # the first touches fresh memory
                times[system].append(time.perf_counter() - start)
    pipe.send(times)
    dist.destroy_process_group()


def connect(count: int) -> dict[tuple[int, int], socket.socket]:
    """A connection over loopback for each pair, by who has which end."""
    pairs: dict[tuple[int, int], socket.socket] = {}
    for a in range(count):
        for b in range(a + 1, count):
            with socket.create_server(("127.0.0.1", 0)) as server:
                pairs[a, b] = socket.create_connection(server.getsockname())
                pairs[b, a], _ = server.accept()
    for sock in pairs.values():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return pairs


def together(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `work(*arguments, rendezvous, pipe)` in a process for each; what each sent into its pipe."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{Path(directory) / 'store'}"
        ends, processes = [], []
        for one in arguments:
            mine, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=work, args=(*one, rendezvous, theirs)))
            ends.append(mine)
        for process in processes:
            process.start()
        results = [end.recv() for end in ends]
        for process in processes:
            process.join(30)
    return results


def measure(count: int, elements: int) -> dict[str, float]:
    """Median seconds by system, each repeat taken at its slowest worker."""
    layout = Layout([torch.empty(elements, device="meta")])
    arenas = [Arena.create(count, layout.slot_bytes) for _ in range(count)]
    pairs = connect(count)
    results = together(work, [(rank, Worker(rank, count, pairs, arenas), elements) for rank in range(count)])
    for sock in pairs.values():
        sock.close()
    return {
        system: statistics.median(max(times) for times in zip(*(result[system] for result in results), strict=True))
        for system in SYSTEMS
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--elements", default="10000,1000000,25000000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if the network path is slower than gloo by half"
    )
    args = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'floats':>10} {'workers':>7} {'gloo ms':>9} {'shared memory ms':>17} {'network ms':>11} {'ratios':>12}")
    for elements in map(int, args.elements.split(",")):
        for count in map(int, args.workers.split(",")):
            found = measure(count, elements)
            for system, seconds in found.items():
                figures[f"{system}_s_{elements}_{count}"] = seconds
            shared, network = (found["gloo"] / found[system] for system in ("shared_memory", "network"))
            figures[f"ratio_shared_memory_{elements}_{count}"] = shared
            figures[f"ratio_network_{elements}_{count}"] = network
            print(
                f"{elements:>10} {count:>7} {found['gloo'] * 1e3:>9.2f} {found['shared_memory'] * 1e3:>17.2f} "
                f"{found['network'] * 1e3:>11.2f} {shared:>6.2f} {network:>5.2f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    missed = [name for name, value in figures.items() if name.startswith("ratio_network") and value < 0.5]
    if args.check and missed:
        print(f"missed: {', '.join(missed)} below 0.5", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
