"""Parameter servers under fire: primaries are killed, stopped and cut off while workers push what can be counted.

    python -m tests.soak.servers --seed 3 --for 120s

Three servers, three replicas of each of three slices, four workers and a reader. Every 5 s the primary of the next
slice is killed and replaced; in between, drawn from the seed, a primary is stopped for a while, or a server is cut off
from the others, from the ledger or from both. At the end nothing that was acknowledged is lost, nothing is there twice,
and the history of every slice is linearizable. Prints what it did; if a promise is broken, the seed, and exits with 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from functools import partial

from holdfast.core.durations import parse_duration
from tests.harness.servers.accounting import Accounts
from tests.harness.servers.fleet import Fleet
from tests.harness.servers.gating import LEDGER

SLICES = 3
EVERY_S = 5.0
PACE_S = 0.15


class Fire:
    def __init__(self, fleet: Fleet, accounts: Accounts, rng: random.Random) -> None:
        self._fleet = fleet
        self._accounts = accounts
        self._rng = rng
        self._began = time.monotonic()
        self.kills = 0

    def say(self, what: str) -> None:
        now = time.monotonic() - self._began
        print(f"{now:7.2f} s  {what}; {len(self._accounts.acknowledged)} acknowledged", flush=True)

    def _primary(self, number: int) -> str:
        return self._fleet.configurations()[f"parameters/{number}"].primary

    def _whole(self) -> bool:
        """Every slice has three replicas that run."""
        running = set(self._fleet.processes)
        return all(set(one.replicas) <= running for one in self._fleet.configurations().values())

    def goes_on(self) -> None:
        before = len(self._accounts.acknowledged)
        self._fleet.wait_for(lambda: len(self._accounts.acknowledged) >= before + 5, "updates are acknowledged")

    def kill(self) -> None:
        name = self._primary(self.kills % SLICES)
        self.kills += 1
        announce = self._rng.random() < 0.5
        self.say(f"kill {name}" + (", and the ledger is told" if announce else ""))
        self._fleet.kill(name, announce=announce)
        self.goes_on()
        new = self._fleet.replace(name)
        self._fleet.wait_for(self._whole, f"{new} has taken the place of {name}")

    def disturb(self) -> None:
        name = self._rng.choice([self._primary(number) for number in range(SLICES)])
        others = {one for one in self._fleet.processes if one != name}
        for_s = self._rng.uniform(0.3, 2.5)
        kind = self._rng.choice(("stop", "cut from servers", "cut from the ledger", "cut from all", "cut from one"))
        self.say(f"{kind}: {name} for {for_s:.1f} s")
        if kind == "stop":
            os.kill(self._fleet.processes[name], signal.SIGSTOP)
            time.sleep(for_s)
            os.kill(self._fleet.processes[name], signal.SIGCONT)
        else:
            cut = {
                "cut from servers": others,
                "cut from the ledger": {LEDGER},
                "cut from all": others | {LEDGER},
                "cut from one": {self._rng.choice(sorted(others))},
            }[kind]
            self._fleet.cut(name, cut)
            time.sleep(for_s)
            self._fleet.cut(name, set())
        self.goes_on()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--for", dest="for_s", type=partial(parse_duration, "--for"), default=120.0, metavar="TIME")
    args = parser.parse_args()
    rng = random.Random(f"servers soak {args.seed}")
    print(f"seed {args.seed}, for {args.for_s:g} s", flush=True)
    try:
        with Fleet(3, replicas=3) as fleet:
            accounts = Accounts(fleet, slices=SLICES, pushes_max=20_000, pace_s=PACE_S)
            try:
                accounts.start(workers=4, readers=1)
                fire = Fire(fleet, accounts, rng)
                fire.goes_on()
                ends = time.monotonic() + args.for_s
                while (began := time.monotonic()) < ends:
                    fire.kill()
                    fire.disturb()
                    time.sleep(max(0.0, began + EVERY_S - time.monotonic()))
                accounts.stop()
                fire.say("checking")
                accounts.check()
                reads = sum(one.call[0] == "read" for one in accounts.history[0])
                fire.say(f"all promises kept: {fire.kills} kills, {reads} reads")
            finally:
                accounts.close()
    except AssertionError as error:
        print(f"broken with --seed {args.seed}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
