"""The ledger as servers see it: a compare-and-set whose answer may be lost, and which may be carried out late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.log.configuration import Configuration
from holdfast.log.messages import Propose

if TYPE_CHECKING:
    from tests.harness.log_simulator.servers import Server
    from tests.harness.log_simulator.world import World


class Ledger:
    def __init__(self, world: World) -> None:
        self._world = world
        self.up = True
        self._entries: dict[int, tuple[Configuration, int]] = {}
        self._revision = 0
        self.under_way: list[tuple[int, Propose]] = []  # proposals that may still be carried out

    def read(self, number: int) -> tuple[Configuration, int]:
        return self._entries[number]

    def begin(self, number: int, configuration: Configuration) -> None:
        self._revision += 1
        self._entries[number] = (configuration, self._revision)

    def propose(self, server: Server, number: int, effect: Propose) -> None:
        rng = self._world.rng
        if not self.reaches(server):
            return
        request = (number, effect)
        self.under_way.append(request)
        late = rng.random() < 0.1 and self._world.faulty
        self._world.after(rng.uniform(0.5, 4.0) if late else rng.uniform(0.005, 0.03), lambda: self._carry_out(request))

    def _carry_out(self, request: tuple[int, Propose]) -> None:
        self.under_way.remove(request)
        number, effect = request
        if not self.up or self._entries[number][1] != effect.expected_revision:
            return
        self.begin(number, effect.configuration)
        self._world.trace("ledger:", number, effect.configuration)
        for server in self._world.servers.values():
            self._world.after(self._world.rng.uniform(0.005, 0.1), server.read_ledger)

    def reaches(self, server: Server) -> bool:
        return self.up and not server.cut_from_ledger
