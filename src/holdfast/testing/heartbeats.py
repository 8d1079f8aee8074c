"""Heartbeats in a ring of many workers, simulated: what they cost each, and how soon a loss is noticed.

    python -m holdfast.testing.heartbeats --workers 10 --workers 1000 --workers 10000 --seed 1

Seeded, without processes. Beats are delayed and now and then lost, workers are lost one by one and a host at a time.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.words import host_of, worker_id
from holdfast.detection.phi import Intervals, phi
from holdfast.detection.progress import BEAT_DEVIATION_S, PHI_HUNG
from holdfast.detection.ring import watch_lists

BEAT_S = 0.25
LOOK_S = 0.1
SILENT_S = 0.8
DELAY_S = 0.005  # of a message, on average
LOST = 0.01  # of the messages
PER_HOST = 8
LEARNT_S = 20.0
LOSSES = 30  # workers whose loss is looked at, and as many hosts, or all


@dataclass(frozen=True)
class Outcome:
    workers: int
    sent_per_s: float  # by the worker that sends most
    heard_per_s: float  # by the worker that hears most
    noticed_s: float  # median over the losses, of the first watcher that noticed
    noticed_s_worst: float
    false_alarms: int
    unnoticed: int  # all watchers were lost with whom they watched


def simulate(workers: int, seed: int) -> Outcome:
    chance = random.Random(f"{seed} {workers}")
    members = [worker_id(slot, 1, f"h{host}") for host in range(-(-workers // PER_HOST)) for slot in range(PER_HOST)]
    members = members[:workers]
    watches = watch_lists(members)
    watchers: dict[str, list[str]] = {member: [] for member in members}
    for member, watched in watches.items():
        for one in watched:
            watchers[one].append(member)
    sent = Counter({member: len(heard_by) for member, heard_by in watchers.items()})
    noticed: list[float] = []
    false_alarms = unnoticed = 0
    for victims in _losses(members, chance):
        lost_at = LEARNT_S + chance.uniform(0.0, BEAT_S)
        for victim in chance.sample(victims, min(2, len(victims))):
            times = [_notice(lost_at, chance) for watcher in watchers[victim] if watcher not in victims]
            false_alarms += sum(time is None for time in times)
            found = [time for time in times if time is not None]
            unnoticed += not times
            noticed += [min(found) - lost_at] if found else []
    return Outcome(
        workers,
        max(sent.values()) / BEAT_S,
        max(map(len, watches.values())) / BEAT_S,
        round(statistics.median(noticed), 3),
        round(max(noticed), 3),
        false_alarms,
        unnoticed,
    )


def _losses(members: Sequence[str], chance: random.Random) -> list[list[str]]:
    """Single workers, and whole hosts where there is more than one."""
    singles = [[member] for member in chance.sample(members, min(LOSSES, len(members)))]
    hosts = sorted({host_of(member) for member in members})
    chosen = set(chance.sample(hosts, min(LOSSES, len(hosts)))) if len(hosts) > 1 else set()
    by_host: dict[str, list[str]] = {}
    for member in members:
        if host_of(member) in chosen:
            by_host.setdefault(host_of(member), []).append(member)
    return singles + list(by_host.values())


def _notice(lost_at: float, chance: random.Random) -> float | None:
    """When one watcher is sure of the loss; None if it was sure of one before there was any."""
    arrivals = []
    at = chance.uniform(0.0, BEAT_S)
    while at < lost_at:
        if chance.random() >= LOST:
            arrivals.append(at + chance.expovariate(1.0 / DELAY_S))
        at += BEAT_S
    kept, last, following = Intervals(), arrivals[0], 1
    now = last + chance.uniform(0.0, LOOK_S)
    while True:
        while following < len(arrivals) and arrivals[following] <= now:
            kept.add(arrivals[following] - last)
            last, following = arrivals[following], following + 1
        silence_s = now - last
        if silence_s >= SILENT_S and phi(silence_s, kept.history(), deviation_s_min=BEAT_DEVIATION_S) >= PHI_HUNG:
            return now if now >= lost_at else None
        now += LOOK_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for workers in args.workers or [10, 1000, 10000]:
        print(simulate(workers, args.seed))


if __name__ == "__main__":
    main()
