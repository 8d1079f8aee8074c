"""Where slices are at first, and how a slice comes to where it should be. Pure.

Whoever decides where slices are writes a target for a slice into the ledger. The slice's primary carries it out, one
change at a time, in an order in which the slice never has fewer replicas than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.core.words import decode_json, encode_json
from holdfast.log.configuration import Configuration
from holdfast.log.messages import AddReplica, HandOver, RemoveReplica, Wish


@dataclass(frozen=True)
class Target:
    """The replicas that a slice should have, and its primary; empty: any of them."""

    replicas: tuple[str, ...]
    primary: str = ""

    def encode(self) -> bytes:
        return encode_json({"replicas": list(self.replicas), "primary": self.primary})

    @classmethod
    def decode(cls, data: bytes) -> Target:
        fields = decode_json(data)
        replicas, primary = fields.get("replicas"), fields.get("primary", "")
        if not isinstance(replicas, list) or not replicas or not all(isinstance(one, str) for one in replicas):
            raise ProtocolError(f"not a slice's target: {data[:80]!r}")
        if not isinstance(primary, str) or (primary and primary not in replicas):
            raise ProtocolError(f"not a slice's target: {data[:80]!r}")
        return cls(tuple(dict.fromkeys(replicas)), primary)


def first_placement(hosts: Mapping[str, str], slices: int, replicas: int) -> list[Configuration]:
    """Of each slice. `hosts`: of the servers.

    The replicas of a slice are on as many hosts as there are, so that the loss of one takes as few of them as can be.
    The slices' primaries, and their other replicas, are spread evenly over the servers.
    """
    if replicas > len(hosts):
        raise ConfigError(
            f"{replicas} replicas of each slice need as many servers, and there are {len(hosts)}",
            hint=f"start more servers, or give --replicas {max(1, len(hosts))}",
        )
    servers = _by_turns(hosts)
    load: Counter[str] = Counter()
    found = []
    for number in range(slices):
        first = number % len(servers)
        chosen = [servers[first]]
        while len(chosen) < replicas:
            used = Counter(hosts[server] for server in chosen)
            others = [server for server in servers[first:] + servers[:first] if server not in chosen]
            chosen.append(min(others, key=lambda server: (used[hosts[server]], load[server])))
        load.update(chosen)
        found.append(Configuration(1, chosen[0], tuple(chosen)))
    return found


def _by_turns(hosts: Mapping[str, str]) -> list[str]:
    """The servers, one of each host in turn."""
    before: Counter[str] = Counter()
    places = {}
    for server in sorted(hosts):
        places[server] = before[hosts[server]]
        before[hosts[server]] += 1
    return sorted(hosts, key=lambda server: (places[server], server))


def next_wish(configuration: Configuration, target: Target, alive: Collection[str]) -> Wish | None:
    """What the primary should do next to come to the target. Only who is alive is added or handed over to."""
    here, wanted = configuration.replicas, target.replicas
    missing = [one for one in wanted if one not in here and one in alive]
    extra = [one for one in here if one not in wanted]
    extra.sort(key=lambda one: one in alive)  # those that are gone first
    removable = [one for one in extra if one != configuration.primary]
    if missing and len(here) <= len(wanted):
        return AddReplica(missing[0])
    if removable and len(here) > len(wanted):
        return RemoveReplica(removable[0])
    if missing:
        return AddReplica(missing[0])
    leaves = configuration.primary not in wanted
    heirs = [one for one in (target.primary, *wanted) if one in here and one in alive and one != configuration.primary]
    if (leaves or (target.primary and configuration.primary != target.primary)) and heirs:
        wished = target.primary if target.primary in heirs else heirs[0]
        if leaves or wished == target.primary:
            return HandOver(wished)
    return RemoveReplica(removable[0]) if removable and not set(wanted) - set(here) else None
