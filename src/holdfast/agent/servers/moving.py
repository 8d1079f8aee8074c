"""Where slices should be: a pure decision, from who serves now and where slices are.

In this order:
- a slice that has lost a replica, or whose server leaves, gets another, on a host that has none of it yet if there is
  one, there on the server with the least to do;
- slices that a slow server leads are handed over to a replica that is not slow;
- when every slice has its replicas, slices move one at a time: to hosts that have none of them yet, from the servers
  with the most of them to those with the least, and away from slow ones;
- then primaries move, one at a time, from the servers that lead the most to those that lead the least.

Each target comes with a reason. Every step makes something more even and nothing less, so it comes to an end.
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


@dataclass(frozen=True, kw_only=True)
class Scene:
    """`hosts`: of the servers that are registered. `leaving` and `slow`: some of these."""

    slices: Mapping[str, Configuration]
    targets: Mapping[str, Target]
    hosts: Mapping[str, str]
    leaving: Collection[str] = ()
    slow: Collection[str] = ()

    @property
    def staying(self) -> dict[str, str]:
        return {server: host for server, host in self.hosts.items() if server not in self.leaving}

    def wanted(self, name: str) -> tuple[str, ...]:
        target = self.targets.get(name)
        return target.replicas if target is not None else self.slices[name].replicas

    def is_settled(self, name: str) -> bool:
        """The slice is where it should be, or cannot come there for now."""
        target, configuration = self.targets.get(name), self.slices[name]
        if target is None:
            return True
        if set(configuration.replicas) != set(target.replicas):
            return False
        leads = not target.primary or target.primary == configuration.primary
        return leads or target.primary not in self.staying or target.primary in self.slow


def decide(
    slices: Mapping[str, Configuration],
    targets: Mapping[str, Target],
    hosts: Mapping[str, str],
    replicas: int,
    *,
    leaving: Collection[str] = (),
    slow: Collection[str] = (),
) -> list[Move]:
    """`replicas`: how many a slice should have, if there are as many servers.

    Nothing is decided for a slice whose replicas are all gone: nobody has its state.
    """
    scene = Scene(slices=slices, targets=targets, hosts=hosts, leaving=leaving, slow=slow)
    load = Counter(dict.fromkeys(scene.staying, 0))
    for name in slices:
        load.update(server for server in scene.wanted(name) if server in scene.staying)
    names = sorted(slices)
    moves = [move for name in names if (move := _completed(scene, name, replicas, load)) is not None]
    moved = {move.slice for move in moves}
    moves += [move for name in names if name not in moved and (move := _handed_over(scene, name)) is not None]
    if moves or not all(scene.is_settled(name) for name in names):
        return moves
    return _spread(scene, load) or _evened(scene, load) or _led_evenly(scene)


def _completed(scene: Scene, name: str, replicas: int, load: Counter[str]) -> Move | None:
    """A whole set of replicas for a slice that lacks some."""
    wanted, staying = scene.wanted(name), scene.staying
    if not staying or not any(server in scene.hosts for server in scene.slices[name].replicas):
        return None
    chosen = [server for server in wanted if server in staying]
    count = min(replicas, len(staying))
    if len(chosen) >= count and len(chosen) == len(wanted):
        return None
    while len(chosen) < count:
        best = _best(chosen, staying, load)
        chosen.append(best)
        load[best] += 1
    lost = [server for server in wanted if server not in scene.hosts]
    left = [server for server in wanted if server in scene.leaving and server in scene.hosts]
    new = [server for server in chosen if server not in wanted]
    why = [f"{', '.join(lost)} is gone"] * bool(lost) + [f"{', '.join(left)} leaves"] * bool(left)
    if why:
        then = f"{', '.join(new)} takes its place" if new else "nobody takes its place"
    else:
        then = f"{', '.join(new)} has a copy, too"
    reason = f"{' and '.join(why) or 'there are more servers'}; {then}"
    return Move(name, Target(tuple(chosen)), reason)


def _best(chosen: Collection[str], hosts: Mapping[str, str], load: Counter[str]) -> str:
    used = Counter(hosts[server] for server in chosen if server in hosts)
    others = [server for server in hosts if server not in chosen]
    return min(others, key=lambda server: (used[hosts[server]], load[server], server))


def _handed_over(scene: Scene, name: str) -> Move | None:
    """Away from a slow primary, to a replica that is not slow."""
    configuration, target = scene.slices[name], scene.targets.get(name)
    primary = configuration.primary
    if primary not in scene.slow:
        return None
    wanted = scene.wanted(name)
    if target is not None and target.primary and target.primary not in scene.slow and target.primary in scene.staying:
        return None  # it is on its way
    led = Counter(one.primary for one in scene.slices.values())
    heirs = [one for one in configuration.replicas if one in wanted and one in scene.staying and one not in scene.slow]
    if not heirs:
        return None
    heir = min(heirs, key=lambda one: (led[one], one))
    return Move(name, Target(wanted, heir), f"{primary} is slow; {heir} leads instead")


def _spread(scene: Scene, load: Counter[str]) -> list[Move]:
    """One replica from a host that has several of a slice to a host that has none of it."""
    staying = scene.staying
    for name, configuration in sorted(scene.slices.items()):
        used = Counter(staying[server] for server in configuration.replicas if server in staying)
        heirs = [server for server in staying if not used[staying[server]] and server not in scene.slow]
        crowded = [server for server in configuration.replicas if used[staying.get(server, "")] >= UNEVEN]
        if not heirs or not crowded:
            continue
        heir = min(heirs, key=lambda server: (load[server], server))
        server = max(crowded, key=lambda one: (one != configuration.primary, load[one], one))
        others = tuple(one for one in configuration.replicas if one != server)
        reason = f"{staying[server]} has {used[staying[server]]} copies of it and {staying[heir]} none"
        return [Move(name, Target((*others, heir)), f"{reason}; that of {server} moves to {heir}")]
    return []


def _evened(scene: Scene, load: Counter[str]) -> list[Move]:
    """One slice less for the server with the most, one more for the one with the least."""
    staying, slow = scene.staying, scene.slow
    for server in sorted(staying, key=lambda one: (one not in slow, -load[one], one)):
        for name, configuration in sorted(scene.slices.items()):
            if server not in configuration.replicas:
                continue
            others = [one for one in configuration.replicas if one != server]
            used = Counter(staying[one] for one in others if one in staying)
            heirs = {
                one: staying[one]
                for one in staying
                if one not in configuration.replicas and one not in slow and used[staying[one]] <= used[staying[server]]
            }
            if not heirs:
                continue
            heir = min(heirs, key=lambda one: (used[heirs[one]], load[one], one))
            if server in slow or load[server] - load[heir] >= UNEVEN:
                why = f"{server} is slow" if server in slow else f"{heir} has fewer slices"
                return [Move(name, Target((*others, heir)), f"{why}; its copy on {server} moves to {heir}")]
    return []


def _led_evenly(scene: Scene) -> list[Move]:
    """One slice less to lead for the server that leads the most, one more for a replica that leads the least."""
    fit = [server for server in scene.staying if server not in scene.slow]
    led = Counter(dict.fromkeys(fit, 0))
    led.update(one.primary for one in scene.slices.values() if one.primary in led)
    for server in sorted(fit, key=lambda one: (-led[one], one)):
        for name, configuration in sorted(scene.slices.items()):
            heirs = [one for one in configuration.replicas if one in led]
            if configuration.primary != server or not heirs:
                continue
            heir = min(heirs, key=lambda one: (led[one], one))
            if led[server] - led[heir] >= UNEVEN:
                reason = f"{server} leads {led[server]} slices and {heir} {led[heir]}"
                return [Move(name, Target(configuration.replicas, heir), f"{reason}; {heir} leads this one")]
    return []
