"""With which servers a run begins: those that are registered, once there are enough of them.

On one host it is known how many there will be. On several, each host says how many it has; whoever comes later takes
its part of the replicas then.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.errors import ConfigError, HoldfastError, PeerError, ProtocolError
from holdfast.core.options.run import REPLICAS
from holdfast.core.words import KEY_HOSTS, KEY_LEAVING, KEY_SERVERS, Registration, decode_whole
from holdfast.ledger.port import Ledger


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """`servers`: how many must be there; 0: all that the run's hosts have announced, and one at least.

    `replicas`: of each slice; 0: 3, or as many as there are servers.
    """

    servers: int
    replicas: int

    def are_enough(self, found: Gathered) -> bool:
        return len(found.hosts) >= max(1, self.servers or found.announced, self.replicas)

    def replicas_of(self, found: Gathered) -> int:
        return self.replicas or min(REPLICAS, len(found.hosts))

    def too_few(self, found: Gathered | None, waited_s: float) -> HoldfastError:
        """What to say when they did not come. None: the ledger does not answer."""
        if found is None:
            return PeerError(f"the ledger does not answer, which knows the parameter servers; waited {waited_s:.0f} s")
        there = len(found.hosts)
        needed = max(1, self.servers or found.announced, self.replicas)
        if self.replicas > max(there, self.servers or found.announced):
            return ConfigError(
                f"{self.replicas} replicas of each slice need as many servers, and after {waited_s:.0f} s the run has "
                f"{there}",
                hint=f"start more hosts with --servers, or give --replicas {max(1, there)} on all of them",
            )
        return ConfigError(
            f"{needed} parameter server{'s are' if needed > 1 else ' is'} needed to begin, and after {waited_s:.0f} s "
            f"{there} {'are' if there != 1 else 'is'} registered",
            hint="see the servers' logs with `holdfast logs`; on several hosts, give --servers 1 or more on some",
        )


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The servers that are registered and stay, with their hosts, and how many the run's hosts say they have."""

    hosts: dict[str, str]
    announced: int


def gather(ledger: Ledger) -> Gathered:
    leaving = {entry.key[len(KEY_LEAVING) :] for entry in ledger.read(KEY_LEAVING).entries}
    hosts, announced = {}, 0
    for entry in ledger.read(KEY_SERVERS).entries:
        with suppress(ProtocolError):
            registration = Registration.decode(entry.value)
            if registration.id not in leaving:
                hosts[registration.id] = registration.host
    for entry in ledger.read(KEY_HOSTS).entries:
        with suppress(ProtocolError):
            announced += decode_whole(entry.value, "servers")
    return Gathered(hosts=hosts, announced=announced)
