"""What codecs save on a slow link: bytes of an update on the wire, the time of a push, and the accuracy they leave.

    python benchmarks/push_codecs.py [--elements 4000000] [--updates 8] [--json FILE]
    python benchmarks/push_codecs.py --train             # the demo's model with each, 4 workers at staleness 4: minutes

Bytes: a worker pushes random gradients of float32 over TCP to one server in a process of its own; what its sockets have
moved is counted, heads, acknowledgements and all. `worker` is how long the push takes to put together, which is what
encoding costs; `in all` until it is acknowledged. Bars of --check: 16 bits are 0.51 of the plain bytes at most, 8 bits
0.27, the largest hundredth 0.03.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch

from arguments import conclude
from modes import measure
from parameter_server import our_servers

CODECS = {"plain": 1.0, "fp16": 0.51, "bf16": 0.51, "int8": 0.27, "top-k:0.01": 0.03}  # and the bars
TENSORS = 8


def push_each(elements: int, updates: int, figures: dict[str, float]) -> None:
    from holdfast.ledger.embedded import EmbeddedLedger
    from holdfast.servers.client import ClientSettings, RemoteServers
    from holdfast.servers.codecs import codec_of
    from holdfast.servers.compressing import Compressor
    from holdfast.servers.port import initial_of, layout_of
    from holdfast.servers.recipe import settings_of
    from holdfast.trust.keys import Keys

    parameters = {str(n): torch.nn.Parameter(torch.zeros(elements // TENSORS)) for n in range(TENSORS)}
    optimizer = torch.optim.SGD(parameters.values(), 0.001)
    gradients = [torch.randn_like(one) for one in parameters.values()]
    groups = [settings_of(group) for group in optimizer.param_groups]
    print(f"{'codec':12} {'MB an update':>13} {'of plain':>9} {'worker ms':>10} {'in all ms':>10}", flush=True)
    with our_servers(1, 1, "tcp") as running:
        secret = bytes.fromhex(running.words["secret"])
        client = RemoteServers(
            "w0",
            1,
            "elsewhere",
            Keys.from_secret(secret),
            lambda: EmbeddedLedger(Path(running.words["ledger"]), secret),
            ClientSettings(servers=1, replicas=1),
        )
        client.open(layout_of(parameters, optimizer), initial_of(list(parameters.values())), timeout_s=60)
        clock = 0
        for name in CODECS:
            compressor = Compressor(codec_of(name)) if name != "plain" else None
            before, made, whole = client.moved_bytes, [], []
            for _ in range(updates):
                clock += 1
                began = time.perf_counter()
                ticket = client.push(gradients, groups, clock=clock, copy=False, compressor=compressor)
                made.append(time.perf_counter() - began)
                ticket.wait(60)
                whole.append(time.perf_counter() - began)
            figures[f"{name} bytes"] = moved = (client.moved_bytes - before) / updates
            figures[f"{name} of plain"] = share = moved / figures["plain bytes"]
            figures[f"{name} ms"] = median(whole) * 1000
            print(
                f"{name:12} {moved / 1e6:13.3f} {share:9.3f} {median(made) * 1000:10.1f} {median(whole) * 1000:10.1f}",
                flush=True,
            )
        client.close()


def train_each(steps: int, figures: dict[str, float]) -> None:
    print(f"{'codec':12} {'accuracy':>9} {'seconds':>8}", flush=True)
    for name in CODECS:
        found = measure("async 4", 1.0, steps, 3, "" if name == "plain" else name)
        figures[f"{name} accuracy"] = found["accuracy"]
        print(f"{name:12} {found['accuracy']:9.4f} {found['took_s']:8.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=4_000_000)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=264)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed, and name it")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    push_each(args.elements, args.updates, figures)
    if args.train:
        train_each(args.steps, figures)
    missed = [
        f"{name} moves {figures[f'{name} of plain']:.3f} of the plain bytes, and {bar:g} is the bar"
        for name, bar in CODECS.items()
        if figures[f"{name} of plain"] > bar
    ]
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
