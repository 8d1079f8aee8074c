"""What masked sums cost: bytes that a client sends and receives, and the time of a client and of the server.

    python benchmarks/masked_sums.py                          # buckets of 2, 5, 10; 1e4 and 1e6 numbers: a minute
    python benchmarks/masked_sums.py --members 5 --d 1e5 --json f.json

One bucket in one process. `lost` members send their shares and then nothing, so that the server takes their masks off
the sum. Bytes are counted; times are the fastest of a few rounds, of one client and of the server, without any network.
`plain` is what an update in float32 has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from arguments import listed
from holdfast.byzantine.privacy.ciphers import Secrets
from holdfast.byzantine.privacy.client import MaskedClient
from holdfast.byzantine.privacy.exchange import carried
from holdfast.byzantine.privacy.fixed_point import Encoding
from holdfast.byzantine.privacy.masked_round import MaskedRound
from holdfast.byzantine.privacy.messages import Phase
from holdfast.byzantine.privacy.terms import Terms


class Measured:
    """A client, how long it took, and how much went through it."""

    def __init__(self, client: MaskedClient, is_lost: bool) -> None:
        self._client, self._is_lost = client, is_lost
        self.took_s, self.up_bytes, self.down_bytes, self.messages = 0.0, 0, 0, 0

    def hear(self, content: bytes) -> bytes | None:
        if self._is_lost and self._client.phase is Phase.MASK:
            return None
        began = time.perf_counter()
        answer = self._client.hear(content)
        self.took_s += time.perf_counter() - began
        self.down_bytes += len(content)
        self.up_bytes += len(answer)
        self.messages += 2
        return answer


def one_round(members: int, numbers: int, lost: int) -> dict[str, float]:
    terms = Terms(1, numbers, Encoding.fitting(8.0, members)).checked(members)
    names = [f"c{number:03}" for number in range(members)]
    update = terms.encoding.encode(np.random.default_rng(0).normal(size=numbers))
    clients = {}
    for place, name in enumerate(names):
        client = MaskedClient(name, 1, terms, Secrets.draw())
        client.contribute(update)
        clients[name] = Measured(client, place < lost)
    server = MaskedRound(1, names, terms, os.urandom(32))
    began = time.perf_counter()
    found = carried(server, clients)
    whole_s = time.perf_counter() - began
    assert len(found.sums) == 1 and len(found.sums[0].clients) == members - lost
    assert (found.sums[0].total == update * np.uint32(members - lost)).all()
    last = clients[names[-1]]
    return {
        "messages": last.messages,
        "up_bytes": last.up_bytes,
        "down_bytes": last.down_bytes,
        "plain_bytes": 4 * numbers,
        "client_s": last.took_s,
        "server_s": whole_s - sum(one.took_s for one in clients.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=listed(["2", "5", "10", "20"]), default=["2", "5", "10"])
    parser.add_argument("--d", type=listed(["1e4", "1e5", "1e6"]), default=["1e4", "1e6"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    figures = {}
    print("members  lost    numbers  messages  sent by a client  received  plain     client    server")
    for word in options.d:
        for members in map(int, options.members):
            for lost in sorted({0, (members - 1) // 2}):
                rounds = [one_round(members, int(float(word)), lost) for _ in range(options.rounds)]
                best = min(rounds, key=lambda one: one["client_s"] + one["server_s"])
                figures[f"{members} members, {lost} lost, {word} numbers"] = best
                print(
                    f"{members:7}  {lost:4}  {word:>9}  {best['messages']:8.0f}  {best['up_bytes']:14,.0f} B  "
                    f"{best['down_bytes']:6,.0f} B  {best['plain_bytes']:9,.0f} B  {1e3 * best['client_s']:6.1f} ms  "
                    f"{1e3 * best['server_s']:6.1f} ms",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
