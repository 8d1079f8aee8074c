"""Parameter servers under fire: primaries are killed, stopped and cut off while workers push what can be counted.

    python -m tests.soak.servers --seed 3 --for 120s
    python -m tests.soak.servers --seeds 1-20 --brisk

Three servers, three replicas of each slice, four workers and a reader. Every 5 s the primary of the next slice is
killed and replaced; in between, drawn from the seed, a primary is stopped for a while or until others have deposed it,
or a server is cut off from the others, from one of them, from the ledger or from both. By the seed, too, workers come
over TCP or through shared memory, and updates count in memory or on disk; from disk a killed server may come back.
Besides, every server is asked all the time for fresh reads, whether it leads or not, and while it is stopped: so a
deposed primary that wakes has questions to answer. At the end nothing that was acknowledged is lost, nothing is there
twice, the history of every slice is linearizable, and all replicas have the same. Prints what it did; if a promise is
broken, the seed, and exits with 1.

--brisk: as many kills in a quarter of the time: 30 s, six slices, no pause between the faults.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.core.durations import parse_duration
from tests.harness.servers.accounting import Accounts
from tests.harness.servers.direct_reads import StubbornReaders, read_directly
from tests.harness.servers.fleet import Fleet
from tests.harness.servers.gating import LEDGER

PACE_S = 0.15
STUBBORN_PACE_S = 0.2
LEVEL_S = 20.0  # replicas are level again after this, when nobody pushes


@dataclass(frozen=True, kw_only=True)
class Plan:
    for_s: float = 120.0
    every_s: float = 5.0
    slices: int = 3
    longest_fault_s: float = 2.5


BRISK = Plan(for_s=30.0, every_s=0.0, slices=6, longest_fault_s=1.2)


class Fire:
    def __init__(self, fleet: Fleet, accounts: Accounts, readers: StubbornReaders, rng: random.Random, plan: Plan):
        self._fleet = fleet
        self._accounts = accounts
        self._readers = readers
        self._rng = rng
        self._plan = plan
        self._began = time.monotonic()
        self.kills = 0
        self.disturbances = 0

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

    # ---- faults

    def kill(self) -> None:
        """The primary of the next slice. Of the others one may not reach the ledger at that moment."""
        fleet, rng = self._fleet, self._rng
        name = self._primary(self.kills % self._plan.slices)
        self.kills += 1
        announce, comes_back = rng.random() < 0.5, fleet.is_durable and rng.random() < 0.5
        unaware = rng.choice(sorted(set(fleet.processes) - {name})) if rng.random() < 0.3 else ""
        words = [f"kill {name}", "the ledger is told" if announce else "", f"{unaware} is cut from the ledger"]
        self.say(", ".join(word for word in (words if unaware else words[:2]) if word))
        if unaware:
            fleet.cut(unaware, {LEDGER})
        fleet.kill(name, announce=announce)
        self.goes_on()
        if unaware:
            fleet.cut(unaware, set())
        if comes_back:
            fleet.restart(name)
            fleet.wait_for(lambda: name in fleet.registered(), f"{name} is registered again")
        else:
            new = fleet.replace(name)
            fleet.wait_for(self._whole, f"{new} has taken the place of {name}")
        self._readers.attend()

    def disturb(self) -> None:
        self.disturbances += 1
        name = self._rng.choice([self._primary(number) for number in range(self._plan.slices)])
        others = {one for one in self._fleet.processes if one != name}
        for_s = self._rng.uniform(0.3, self._plan.longest_fault_s)
        kinds: dict[str, Callable[[], None]] = {
            "stop": lambda: self._stop(name, for_s),
            "stop until it is deposed": lambda: self._stop_until_deposed(name),
            "cut from servers": lambda: self._cut(name, others, for_s),
            "cut from the ledger": lambda: self._cut(name, {LEDGER}, for_s),
            "cut from all": lambda: self._cut(name, others | {LEDGER}, for_s),
            "cut from one": lambda: self._cut(name, {self._rng.choice(sorted(others))}, for_s),
        }
        kind = self._rng.choice(sorted(kinds))
        self.say(f"{kind}: {name} for {for_s:.1f} s")
        kinds[kind]()
        self.goes_on()

    def _stop(self, name: str, for_s: float) -> None:
        os.kill(self._fleet.processes[name], signal.SIGSTOP)
        time.sleep(for_s)
        os.kill(self._fleet.processes[name], signal.SIGCONT)

    def _stop_until_deposed(self, name: str) -> None:
        os.kill(self._fleet.processes[name], signal.SIGSTOP)
        try:
            self._fleet.wait_for(
                lambda: all(one.primary != name for one in self._fleet.configurations().values()), "others lead"
            )
            self.goes_on()
        finally:
            os.kill(self._fleet.processes[name], signal.SIGCONT)

    def _cut(self, name: str, others: set[str], for_s: float) -> None:
        self._fleet.cut(name, others)
        time.sleep(for_s)
        self._fleet.cut(name, set())

    # ---- the end

    def check_replicas(self) -> None:
        """Each replica has what the primary has: nobody who was deposed has changed anything of its own."""
        for number, expected in enumerate(self._accounts.final):
            for server in self._fleet.configurations()[f"parameters/{number}"].replicas:
                is_same = partial(self._has, server, number, expected)
                self._fleet.wait_for(is_same, f"{server} has the same in slice {number}", LEVEL_S)

    def _has(self, server: str, number: int, expected: torch.Tensor) -> bool:
        head, values = read_directly(self._fleet, server, number, fresh=False)
        return "refused" not in head and torch.equal(values, expected)


def soak(seed: int, plan: Plan) -> None:
    """AssertionError if a promise is broken."""
    rng = random.Random(f"servers soak {seed}")
    over_tcp, durable = rng.random() < 0.5, rng.random() < 0.25
    path, kept = "TCP" if over_tcp else "shared memory", "on disk" if durable else "in memory"
    print(f"seed {seed}, for {plan.for_s:g} s, {plan.slices} slices, through {path}, {kept}", flush=True)
    with Fleet(3, replicas=3, over_tcp=over_tcp, durable=durable) as fleet:
        accounts = Accounts(fleet, slices=plan.slices, pushes_max=20_000, pace_s=PACE_S)
        readers = StubbornReaders(fleet, slices=plan.slices, pace_s=STUBBORN_PACE_S, seen=accounts.saw)
        try:
            accounts.start(workers=4, readers=1)
            readers.attend()
            fire = Fire(fleet, accounts, readers, rng, plan)
            fire.goes_on()
            ends = time.monotonic() + plan.for_s
            while (began := time.monotonic()) < ends:
                fire.kill()
                fire.disturb()
                time.sleep(max(0.0, began + plan.every_s - time.monotonic()))
            accounts.stop()
            readers.close()
            fire.say("checking")
            accounts.check()
            fire.check_replicas()
            reads = sum(one.call[0] == "read" for one in accounts.history[0])
            fire.say(
                f"all promises kept: {fire.kills} kills, {fire.disturbances} stops and cuts, {reads} fresh reads of a "
                f"slice, {readers.refused} reads refused by who does not lead"
            )
        finally:
            readers.close()
            accounts.close()


def seeds_in(text: str) -> Sequence[int]:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", "--seeds", type=seeds_in, default=range(1), metavar="N or FIRST-LAST")
    parser.add_argument("--for", dest="for_s", type=partial(parse_duration, "--for"), metavar="TIME")
    parser.add_argument("--brisk", action="store_true")
    args = parser.parse_args()
    plan = BRISK if args.brisk else Plan()
    if args.for_s is not None:
        plan = Plan(**{**vars(plan), "for_s": args.for_s})
    for seed in args.seed:
        try:
            soak(seed, plan)
        except AssertionError as error:
            print(f"broken with --seed {seed}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
