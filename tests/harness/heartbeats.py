"""Heartbeats in the ring of many hosts, simulated: what they cost each agent, and how soon a loss is noticed.

    python -m tests.harness.heartbeats --workers 10 --workers 1000 --workers 10000 --seed 1

Seeded, without processes or sockets; the neighbours and their constants are those that ship. Beats are delayed and now
and then lost, and hosts are lost one by one, and two neighbours at a time.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from dataclasses import dataclass

from holdfast.detection.agent_beat import AgentBeat, CrewHealth
from holdfast.detection.neighbours import Neighbours
from holdfast.detection.ring import BEAT_S, LOOK_S, predecessors, successors

DELAY_S = 0.005  # of a message, on average
LOST = 0.01  # of the messages: TCP sends them again
AGAIN_S = 0.2
PER_HOST = 8  # workers
LEARNT_S = 20.0
LOSSES = 30  # hosts whose loss is looked at, and as many pairs of neighbours


@dataclass(frozen=True)
class Outcome:
    workers: int
    hosts: int
    sent_per_s: float  # by the agent that sends most
    heard_per_s: float  # by the agent that hears most
    noticed_s: float  # median over the losses, of the first watcher that noticed
    noticed_s_worst: float
    false_alarms: int
    unnoticed: int  # all watchers were lost with whom they watched


def simulate(workers: int, seed: int) -> Outcome:
    chance = random.Random(f"{seed} {workers}")
    hosts = [f"h{number:05}" for number in range(max(2, -(-workers // PER_HOST)))]
    targets = {host: successors(hosts, host) for host in hosts} if len(hosts) <= 200 else _some(hosts, chance)
    heard = Counter(target for chosen in targets.values() for target in chosen)
    noticed: list[float] = []
    false_alarms = unnoticed = 0
    chosen = chance.sample(hosts, min(LOSSES, len(hosts)))
    for victims in [{host} for host in chosen] + [{host, successors(hosts, host)[0]} for host in chosen]:
        watchers = [host for host in successors(hosts, min(victims)) if host not in victims]
        lost_at = LEARNT_S + chance.uniform(0.0, BEAT_S)
        times = [_notice(hosts, watcher, min(victims), lost_at, chance) for watcher in watchers]
        false_alarms += sum(time is None for time in times)
        found = [time for time in times if time is not None]
        unnoticed += not times
        noticed += [min(found) - lost_at] if found else []
    return Outcome(
        workers,
        len(hosts),
        max(map(len, targets.values())) / BEAT_S,
        max(heard.values()) / BEAT_S,
        round(statistics.median(noticed), 3),
        round(max(noticed), 3),
        false_alarms,
        unnoticed,
    )


def _some(hosts: list[str], chance: random.Random) -> dict[str, tuple[str, ...]]:
    """Of so many hosts, some, with all that beat to them: the ring looks the same everywhere."""
    picked = chance.sample(hosts, 50)
    near = {other for host in picked for other in (host, *predecessors(hosts, host))}
    return {host: successors(hosts, host) for host in near}


def _notice(hosts: list[str], watcher: str, victim: str, lost_at: float, chance: random.Random) -> float | None:
    """When one watcher says that it is silent; None if it said so before there was anything to say."""
    arrivals = []
    at = chance.uniform(0.0, BEAT_S)
    while at < lost_at:
        again_s = AGAIN_S if chance.random() < LOST else 0.0
        arrivals.append(at + again_s + chance.expovariate(1.0 / DELAY_S))
        at += BEAT_S
    arrivals = sorted(arrivals, reverse=True)
    neighbours = Neighbours(watcher)
    neighbours.arrange([watcher, victim, *predecessors(hosts, watcher)])
    now = chance.uniform(0.0, LOOK_S)
    while True:
        while arrivals and arrivals[-1] <= now:  # the thread wakes for each
            arrived = arrivals.pop()
            neighbours.elapse(arrived)
            neighbours.take(AgentBeat(host=victim, crew=CrewHealth()), arrived)
        neighbours.elapse(now)
        if any(found.host == victim for found in neighbours.look()):
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
