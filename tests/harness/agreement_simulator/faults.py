"""What goes wrong in a simulated schedule: one method for each kind of fault, drawn by `strike`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.harness.agreement_simulator.servers import Server

if TYPE_CHECKING:
    from tests.harness.agreement_simulator.world import World

KINDS = ("crash", "crash", "crash_at_vote", "stop", "isolate", "isolate", "one_way", "split", "slow", "isolate_decider")


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world

    def strike(self) -> None:
        world = self._world
        kind = world.rng.choice(world.schedule.only or KINDS)
        server = world.servers[world.rng.choice(sorted(world.servers))]
        world.trace("fault:", kind, server)
        getattr(self, f"_{kind}")(server)

    def _crash(self, server: Server) -> None:
        """Between two effects of whatever it handles next."""
        server.fuse = self._world.rng.choice((0, 1, 1, 2, 2, 3, 5))
        server.restart_s = self._world.rng.choice((0.01, 0.3, 1.0, 2.5))

    def _crash_at_vote(self, server: Server) -> None:
        """Just before its next vote is on disk."""
        server.dies_before_vote = True
        server.restart_s = self._world.rng.choice((0.01, 0.3))

    def _stop(self, server: Server) -> None:
        if server.alive and not server.stopped:
            server.stopped = True
            self._world.after(self._world.rng.choice((0.3, 1.0, 2.5)), server.wake)

    def _cut(self, ways: list[tuple[str, str]]) -> None:
        world = self._world
        world.cuts.update(ways)
        world.after(world.rng.choice((0.4, 1.0, 2.0, 3.5)), lambda: world.cuts.subtract(ways))

    def _isolate(self, server: Server) -> None:
        others = [name for name in self._world.servers if name != server.name]
        self._cut([way for one in others for way in ((server.name, one), (one, server.name))])

    def _isolate_decider(self, server: Server) -> None:
        """The next honest server that sees a round decided is cut off before it can tell anybody."""
        self._world.decider_trap = True

    def decided(self, server: Server) -> None:
        self._world.decider_trap = False
        self._world.trace("fault:", "isolates", server)
        self._isolate(server)

    def _one_way(self, server: Server) -> None:
        others = [name for name in self._world.servers if name != server.name]
        others = [one for one in others if self._world.rng.random() < 0.6]
        out = self._world.rng.random() < 0.5
        self._cut([(server.name, one) if out else (one, server.name) for one in others])

    def _split(self, server: Server) -> None:
        names = sorted(self._world.servers)
        self._world.rng.shuffle(names)
        edge = self._world.rng.randrange(1, len(names))
        self._cut([way for one in names[:edge] for two in names[edge:] for way in ((one, two), (two, one))])

    def _slow(self, server: Server) -> None:
        world = self._world
        world.slow.update([server.name])
        world.after(world.rng.choice((1.0, 3.0)), lambda: world.slow.subtract([server.name]))
