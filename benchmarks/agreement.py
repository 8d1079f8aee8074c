"""What it costs that servers agree, in real runs: messages and bytes a round, between servers and with clients.

    python benchmarks/agreement.py --check --json agreement.json

One server that is trusted (f=0) beside 3f+1 that agree, with the same clients, model and rule. Nobody lies. Every
server is a process of this host, so the time is that of signatures, disks and scheduling, not of a network.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from arguments import conclude
from holdfast.byzantine.agreement.machine import Timing
from holdfast.byzantine.agreement.processes import Nursery, RoundSettings, ServerGroup, one_round

# A server says five things a round: attestation, prepare, commit, result, and the leader its proposal; with the
# questions and repetitions of a busy machine it may be twice as much.
MESSAGES_PER_LINK_MAX = 10.0
SHARE_OF_CLIENTS_BYTES_MAX = 0.05


def measure(servers: int, f: int, clients: int, parameters: int, rounds: int, nursery: Nursery) -> dict[str, float]:
    first = {"weights": torch.zeros(parameters)}
    updates = [{"weights": torch.randn(parameters, generator=torch.Generator().manual_seed(n))} for n in range(clients)]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        settings = RoundSettings(
            directory=directory, servers=servers, f=f, clients=clients, timing=Timing(collect_s=30.0, timeout_s=30.0)
        )
        group = stack.enter_context(ServerGroup(settings, first, nursery))
        members = [stack.enter_context(group.client(name)) for name in group.federation.clients]
        model, times = first, []
        for round in range(1, rounds + 1):
            began = time.perf_counter()
            model = one_round(members, round, model, lambda client, round, model: updates[client], 300.0)
            times.append(time.perf_counter() - began)
        figures = [_figures(group, name, rounds) for name in group.addresses]
        return {
            "messages": sum(one["messages"] for one in figures) / rounds,
            "server_bytes": sum(one["bytes"] for one in figures) / rounds,
            "client_bytes": sum(one.sent_bytes + one.received_bytes for one in members) / rounds,
            "chain_bytes": (group.directory_of("s0") / "rounds.chain").stat().st_size / rounds,
            "round_s": sorted(times[1:])[len(times[1:]) // 2],
        }


def _figures(group: ServerGroup, name: str, rounds: int) -> dict[str, float]:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            found: dict[str, float] = json.loads((group.directory_of(name) / "figures.json").read_text())
        except (OSError, ValueError):
            found = {}
        if found.get("rounds", 0) >= rounds:
            return found
        time.sleep(0.05)
    raise SystemExit(f"{name} has not come to round {rounds}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed, and name it")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    missed: list[str] = []
    print(f"{args.clients} clients, {args.parameters:,} parameters, the median of {args.rounds - 1} rounds")
    print("servers  f   messages   between servers   with clients   chain   a round")
    with Nursery() as nursery:
        for servers, f in ((1, 0), (4, 1), (7, 2)):
            found = measure(servers, f, args.clients, args.parameters, args.rounds, nursery)
            between, with_clients = found["server_bytes"] / 1e3, found["client_bytes"] / 1e6
            line = f"{servers:7}  {f}   {found['messages']:8.0f}   {between:12.0f} kB   {with_clients:9.1f} MB"
            print(f"{line}   {found['chain_bytes'] / 1e3:2.0f} kB   {found['round_s']:.2f} s", flush=True)
            figures |= {f"{servers}_{name}": value for name, value in found.items()}
            links = servers * (servers - 1)
            if links and found["messages"] / links > MESSAGES_PER_LINK_MAX:
                missed.append(
                    f"{servers} servers: {found['messages'] / links:.1f} messages a round from one to another"
                )
            if found["server_bytes"] > SHARE_OF_CLIENTS_BYTES_MAX * found["client_bytes"]:
                missed.append(f"{servers} servers send each other {found['server_bytes']:.0f} bytes a round")
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
