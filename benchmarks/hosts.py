"""The reduction between hosts by itself: shared memory within each, one stream per host, against everyone to everyone.

    python benchmarks/hosts.py
    python benchmarks/hosts.py --layout 2+2 --elements 25000000 --json hosts.json

A layout says how many workers each host has. All are processes of this machine, and what would cross the network
crosses loopback. Each worker holds one vector of floats and ends with the mean over all of them. Rounds of the three
systems take turns; the median of the slowest worker's times is shown. Then one more round is counted: the bytes that
left each host, as the kernel counts them on every TCP connection of its workers whose other end is on another host.
Loopback is faster than any network, so the times say what a host's processors can do, and the bytes what a slower
network would have to carry. Decision 3 rests on these figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.core.words import host_of
from holdfast.reduce.arena import Arena
from holdfast.reduce.hosts import Hosts, by_host
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import SMALL_BYTES
from transport import Worker, connect

SYSTEMS = ("gloo", "network", "hosts")
REPEATS = 7
BYTES_RATIO_MAX = 1.1  # of what a host must send at least

# struct tcp_info of Linux: the payload that was sent, and how much of it again.
SENT = struct.Struct("=200xQQ")

Address = tuple[str, int]
Streams = dict[tuple[Address, Address], int]  # from here, to there -> bytes


class Member(Worker):
    """One process, of a host that others share. It has the arenas of its own host only."""

    def action(self, system: str) -> Callable[[], object]:
        if system != "hosts":
            return super().action(system)
        me, small = self.members[self.rank], self.layout.slot_bytes <= SMALL_BYTES
        near = {member: arena for member, arena in self.arenas.items() if host_of(member) == host_of(me)}
        hosts = Hosts(self.group, len(self.members), near, small=small, interrupted=lambda: "")

        def reduce() -> torch.Tensor:
            memory, _ = hosts.reduce(0, self.layout, self.members, self.brought)
            dist.barrier()  # stands for the round of Done
            return memory

        return reduce

    def check(self, system: str, reduced: object) -> None:
        """All numbers of a worker's vector are its rank, so that every number of the mean is known."""
        if system == "gloo":
            return
        memory = reduced[0] if isinstance(reduced, tuple) else reduced
        assert isinstance(memory, torch.Tensor)
        (mean,) = self.layout.views(memory)
        assert torch.equal(mean, torch.full_like(mean, (len(self.members) - 1) / 2)), f"{system} gives a wrong mean"


def streams() -> Streams:
    """The payload that this process has sent so far, on each TCP connection that it has."""
    found: Streams = {}
    for link in list(Path("/proc/self/fd").iterdir()):
        if not link.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as sock, suppress(OSError):  # it listens, or is no TCP
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SENT.size)
            sent, again = SENT.unpack(info)
            found[_address(sock.getsockname()), _address(sock.getpeername())] = sent - again
    return found


def _address(name: tuple[str, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]


def work(member: Member, not_mine: list[socket.socket], elements: int, rendezvous: str, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    for sock in not_mine:
        sock.close()
    dist.init_process_group("gloo", init_method=rendezvous, rank=member.rank, world_size=len(member.members))
    member.prepare(elements)
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    actions = {system: member.action(system) for system in SYSTEMS}
    for repeat in range(REPEATS + 1):
        for system in SYSTEMS:
            dist.barrier()
            start = time.perf_counter()
            reduced = actions[system]()
            if repeat:  # the first touches fresh memory
                times[system].append(time.perf_counter() - start)
            else:
                member.check(system, reduced)
    sent: dict[str, Streams] = {}
    for system in SYSTEMS:
        dist.barrier()
        before = streams()
        actions[system]()
        dist.barrier()  # all is received, and so all was sent; its own few bytes are counted too
        sent[system] = {ends: count - before.get(ends, 0) for ends, count in streams().items()}
    pipe.send((times, sent))
    dist.destroy_process_group()


def leaving(members: tuple[str, ...], sent: list[Streams]) -> dict[str, int]:
    """Bytes that left each host, from what each member sent on each of its connections."""
    owners = {here: members[rank] for rank, found in enumerate(sent) for here, _ in found}
    result = dict.fromkeys(by_host(members), 0)
    for found in sent:
        for (here, there), count in found.items():
            if there in owners and host_of(owners[here]) != host_of(owners[there]):
                result[host_of(owners[here])] += count
    return result


def measure(counts: tuple[int, ...], elements: int) -> tuple[dict[str, float], dict[str, int]]:
    """By system: median seconds, each repeat taken at its slowest worker; and bytes that left the busiest host."""
    members = tuple(f"w{slot}.1@h{host}" for host, count in enumerate(counts) for slot in range(count))
    layout = Layout([torch.empty(elements, device="meta")])
    arenas = [Arena.create(len(members), layout.slot_bytes) for _ in members]
    pairs = connect(len(members))
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{Path(directory) / 'store'}"
        ends, processes = [], []
        for rank in range(len(members)):
            mine, theirs = context.Pipe(duplex=False)
            member = Member(rank, len(members), pairs, arenas, members)
            not_mine = [sock for (owner, _), sock in pairs.items() if owner != rank]
            arguments = (member, not_mine, elements, rendezvous, theirs)
            processes.append(context.Process(target=work, args=arguments))
            ends.append(mine)
            processes[-1].start()
            theirs.close()  # so that a worker that dies is an end of file here
        results = [end.recv() for end in ends]
        for process in processes:
            process.join(30)
    for sock in pairs.values():
        sock.close()
    for arena in arenas:
        arena.close()
    seconds, sent = {}, {}
    for system in SYSTEMS:
        rounds = zip(*(times[system] for times, _ in results), strict=True)
        seconds[system] = statistics.median(map(max, rounds))
        sent[system] = max(leaving(members, [found[system] for _, found in results]).values())
    return seconds, sent


def missed(figures: Mapping[str, float], counts: tuple[int, ...], elements: int, name: str) -> list[str]:
    """What is worse than promised. For uneven hosts a few more nodes travel: there is no bound on bytes for those."""
    found = []
    if figures[f"hosts_s_{name}"] > figures[f"network_s_{name}"]:
        found.append(f"hosts_s_{name} above network_s_{name}")
    hosts, count = len(counts), counts[0]
    even = set(counts) == {count} and not (hosts & (hosts - 1) or count & (count - 1))
    least = 2 * (hosts - 1) / hosts * elements * 4
    if even and figures[f"hosts_bytes_{name}"] > BYTES_RATIO_MAX * least:
        found.append(f"hosts_bytes_{name} above {BYTES_RATIO_MAX} x {least:.0f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="2+2", help="workers on each host; several layouts with commas: 2+2,1+3")
    parser.add_argument("--elements", default="1000000,25000000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit with 1 if a host sends more than {BYTES_RATIO_MAX} times the least (even hosts, powers of two), or "
        "takes longer than the plain network path",
    )
    args = parser.parse_args()
    figures: dict[str, float] = {}
    worse: list[str] = []
    columns = [f"{system} {unit}" for unit in ("ms", "MB") for system in SYSTEMS]
    print(f"{'floats':>10} {'hosts':>8} " + " ".join(f"{column:>10}" for column in columns))
    for elements in map(int, args.elements.split(",")):
        for layout in args.layout.split(","):
            counts = tuple(map(int, layout.split("+")))
            seconds, sent = measure(counts, elements)
            name = f"{elements}_{layout}"
            figures |= {f"{system}_s_{name}": seconds[system] for system in SYSTEMS}
            figures |= {f"{system}_bytes_{name}": sent[system] for system in SYSTEMS}
            values = [seconds[system] * 1e3 for system in SYSTEMS] + [sent[system] / 1e6 for system in SYSTEMS]
            print(f"{elements:>10} {layout:>8} " + " ".join(f"{value:>10.2f}" for value in values), flush=True)
            worse += missed(figures, counts, elements, name)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    if args.check and worse:
        print(f"missed: {', '.join(worse)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
