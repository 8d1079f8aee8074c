"""Whoever decides where slices are: replaces replicas that are gone for good, and has other wishes now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.log import messages as m

if TYPE_CHECKING:
    from tests.harness.log_simulator.servers import Server
    from tests.harness.log_simulator.world import World

LOOK_S = 1.0


class Operator:
    def __init__(self, world: World) -> None:
        self._world = world
        world.after(LOOK_S, self._look)

    def wish(self, number: int, wish: m.Wish) -> None:
        configuration = self._world.ledger.read(number)[0]
        if isinstance(wish, m.RemoveReplica) and not self._can_remove(number, wish.server):
            return
        primary = self._world.named(configuration.primary)
        if primary is not None:
            self._world.tell(primary.place, wish, number=number)

    def add(self, number: int, server: Server) -> None:
        replicas = self._world.ledger.read(number)[0].replicas
        if server.alive and server.name not in replicas and len(replicas) <= self._world.schedule.replicas:
            self.wish(number, m.AddReplica(server.name))

    def remove(self, number: int, server: Server) -> None:
        if len(self._world.ledger.read(number)[0].replicas) > self._world.schedule.replicas:
            self.wish(number, m.RemoveReplica(server.name))

    def _can_remove(self, number: int, server: str) -> bool:
        """What is left must have a majority that is not lost."""
        rest = [one for one in self._world.ledger.read(number)[0].replicas if one != server]
        return sum(self._world.is_kept(one) for one in rest) >= len(rest) // 2 + 1

    def _look(self) -> None:
        for number in range(self._world.schedule.slices):
            self._mend(number)
        self._world.after(LOOK_S, self._look)

    def _mend(self, number: int) -> None:
        """A replica that is lost is replaced: first another one is added, then it is removed."""
        replicas = self._world.ledger.read(number)[0].replicas
        lost = [one for one in replicas if not self._world.is_kept(one)]
        if not lost:
            return
        spare = [one for one in self._world.servers.values() if one.alive and one.name not in replicas]
        if spare and len(replicas) <= self._world.schedule.replicas:
            self.wish(number, m.AddReplica(self._world.rng.choice(spare).name))
        else:
            self.wish(number, m.RemoveReplica(lost[0]))
