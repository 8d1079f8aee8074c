"""Where slices should be: a pure decision, from who serves now and where slices are.

A slice that has lost a replica gets another, on the server with the least to do, on a host that has none of it yet if
there is one. When every slice has its replicas, slices move one at a time from the servers with the most of them to
those with the least, and away from slow ones. Each target comes with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.log.configuration import Configuration
from holdfast.servers.placing import Target

UNEVEN = 2  # a slice moves only if that makes it more even


@dataclass(frozen=True)
class Move:
    slice: str
    target: Target
    reason: str


def decide(
    slices: Mapping[str, Configuration],
    targets: Mapping[str, Target],
    hosts: Mapping[str, str],
    replicas: int,
    slow: Collection[str] = (),
) -> list[Move]:
    """`hosts`: of the servers that are registered. `replicas`: how many a slice should have, if there are as many.

    Nothing is decided for a slice whose replicas are all gone: nobody has its state.
    """
    load = Counter(dict.fromkeys(hosts, 0))
    for name, configuration in slices.items():
        wanted = targets[name].replicas if name in targets else configuration.replicas
        load.update(server for server in wanted if server in hosts)
    moves = [
        move
        for name, configuration in sorted(slices.items())
        if (move := _completed(name, configuration, targets.get(name), hosts, replicas, load)) is not None
    ]
    if moves or any(not _is_settled(slices[name], targets.get(name)) for name in slices):
        return moves
    return _evened(slices, hosts, load, slow)


def _completed(
    name: str,
    configuration: Configuration,
    target: Target | None,
    hosts: Mapping[str, str],
    replicas: int,
    load: Counter[str],
) -> Move | None:
    """A whole set of replicas for a slice that lacks some."""
    wanted = target.replicas if target is not None else configuration.replicas
    if not any(server in hosts for server in configuration.replicas):
        return None
    living = [server for server in wanted if server in hosts]
    count = min(replicas, len(hosts))
    if len(living) >= count and len(living) == len(wanted):
        return None
    chosen = list(living)
    while len(chosen) < count:
        best = _best(chosen, hosts, load)
        chosen.append(best)
        load[best] += 1
    lost = [server for server in wanted if server not in hosts]
    new = [server for server in chosen if server not in wanted]
    why = f"{', '.join(lost)} is gone" if lost else "there are more servers"
    return Move(name, Target(tuple(chosen)), f"{why}; {', '.join(new) or 'nobody'} takes its place")


def _best(chosen: Collection[str], hosts: Mapping[str, str], load: Counter[str]) -> str:
    used = Counter(hosts[server] for server in chosen if server in hosts)
    others = [server for server in hosts if server not in chosen]
    return min(others, key=lambda server: (used[hosts[server]], load[server], server))


def _is_settled(configuration: Configuration, target: Target | None) -> bool:
    return target is None or set(configuration.replicas) == set(target.replicas)


def _evened(
    slices: Mapping[str, Configuration], hosts: Mapping[str, str], load: Counter[str], slow: Collection[str]
) -> list[Move]:
    """One slice less for the server with the most, one more for the one with the least."""
    for server in sorted(hosts, key=lambda one: (one not in slow, -load[one], one)):
        for name, configuration in sorted(slices.items()):
            others = [one for one in configuration.replicas if one != server]
            if server not in configuration.replicas:
                continue
            heirs = [one for one in hosts if one not in configuration.replicas and one not in slow]
            if not heirs:
                continue
            heir = _best(others, {one: hosts[one] for one in (*others, *heirs) if one in hosts}, load)
            if server in slow or load[server] - load[heir] >= UNEVEN:
                why = f"{server} is slow" if server in slow else f"{heir} has fewer slices"
                return [Move(name, Target((*others, heir)), f"{why}; its copy on {server} moves there")]
    return []
