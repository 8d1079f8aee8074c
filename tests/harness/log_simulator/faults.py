"""What goes wrong in a simulated schedule: one method for each kind of fault, drawn by `strike`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from holdfast.log import messages as m
from tests.harness.log_simulator.servers import Server

if TYPE_CHECKING:
    from tests.harness.log_simulator.network import Way
    from tests.harness.log_simulator.world import World

KINDS = (
    *("crash", "crash", "crash_primary", "crash_primary", "lose_disk", "stop", "stop_primary", "outage", "cut_ledger"),
    *("isolate", "isolate_primary", "isolate_primary", "one_way", "one_way_primary", "split", "slow", "full_disk"),
    *("worker", "add", "remove", "hand_over", "move"),
)
LONELY = (
    "crash_opening",
    "crash_opening",
    "last_words",
    "last_words_primary",
)  # which leave entries that one has alone


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world
        self._for_who_opens = 0  # crashes that wait for the next server that begins to lead

    def strike(self) -> None:
        world = self._world
        kind = world.rng.choice(world.schedule.only or (KINDS + LONELY if world.schedule.lonely else KINDS))
        server = world.rng.choice([world.servers[place] for place in sorted(world.servers)])
        if kind.endswith("_primary"):
            kind = kind.removesuffix("_primary")
            server = self._primary() or server
        world.trace("fault:", kind, server.name)
        getattr(self, f"_{kind}")(server)

    def _primary(self) -> Server | None:
        number = self._world.rng.randrange(self._world.schedule.slices)
        return self._world.named(self._world.ledger.read(number)[0].primary)

    def _later(self, choices_s: tuple[float, ...], act: Callable[[], None]) -> None:
        self._world.after(self._world.rng.choice(choices_s), act)

    # -- processes

    def _crash(self, server: Server, *, loses_storage: bool = False) -> None:
        world = self._world
        loses = loses_storage or not world.schedule.durable
        if not server.alive or (loses and not world.can_lose(server.name)):
            return
        exited = m.Exited(server.name, server.starts)
        server.crash(loses_storage=loses_storage)
        if world.schedule.agent_tells:
            for place in world.servers:
                world.after(world.rng.uniform(0.01, 0.2), partial(world.tell, place, exited))
        self._later((0.05, 0.5, 2.0, 5.0), server.start)

    def _crash_opening(self, server: Server) -> None:
        """Whoever leads next ends while nobody, or a single other one, has the first entry of its epoch."""
        self._for_who_opens += 1

    def opened(self, server: Server) -> None:
        if self._for_who_opens and self._world.faulty:
            self._for_who_opens -= 1
            self._world.trace("fault:", "crash_opening", server.name)
            others = self._others(server)
            silent_to = self._world.rng.sample(others, self._world.rng.randint(0, len(others)))
            self._end_unheard(server, silent_to, self._world.rng.uniform(0.03, 0.2))

    def _last_words(self, server: Server) -> None:
        """It ends, and what it said last nobody has heard: entries that it alone has."""
        self._end_unheard(server, self._others(server), self._world.rng.uniform(0.05, 0.4))

    def _end_unheard(self, server: Server, silent_to: list[str], after_s: float) -> None:
        ways = [(server.place, one) for one in silent_to]
        self._world.network.cut(ways)
        self._world.after(after_s, lambda: self._crash(server))
        self._world.after(after_s + 0.04, lambda: self._world.network.heal(ways))

    def _lose_disk(self, server: Server) -> None:
        self._crash(server, loses_storage=True)

    def _stop(self, server: Server) -> None:
        if server.alive and not server.stopped:
            server.stopped = True
            self._later((0.3, 1.2, 2.5, 5.0), server.wake)

    def _full_disk(self, server: Server) -> None:
        server.disk_full += 1

        def room() -> None:
            server.disk_full -= 1

        self._later((0.2, 1.0, 3.0), room)

    def _worker(self, server: Server) -> None:
        self._world.rng.choice(self._world.clients).die()

    # -- the ledger

    def _outage(self, server: Server) -> None:
        ledger = self._world.ledger
        if ledger.up:
            ledger.up = False

            def back() -> None:
                ledger.up = True

            self._later((0.5, 2.0, 5.0), back)

    def _cut_ledger(self, server: Server) -> None:
        server.cut_from_ledger += 1

        def heal() -> None:
            server.cut_from_ledger -= 1

        self._later((0.5, 2.0, 5.0), heal)

    # -- the network

    def _cut(self, ways: list[Way]) -> None:
        self._world.network.cut(ways)
        self._later((0.4, 1.5, 3.0, 6.0), lambda: self._world.network.heal(ways))

    def _others(self, server: Server) -> list[str]:
        return [place for place in self._world.servers if place != server.place]

    def _isolate(self, server: Server) -> None:
        """From the other servers, sometimes from the ledger too. Clients still reach it."""
        others = self._others(server)
        self._cut([way for one in others for way in ((server.place, one), (one, server.place))])
        if self._world.rng.random() < 0.5:
            self._cut_ledger(server)

    def _one_way(self, server: Server) -> None:
        others = self._others(server)
        if self._world.rng.random() < 0.5:
            others = [self._world.rng.choice(others)] if others else []
        out = self._world.rng.random() < 0.5
        self._cut([(server.place, one) if out else (one, server.place) for one in others])

    def _split(self, server: Server) -> None:
        places = sorted(self._world.servers)
        self._world.rng.shuffle(places)
        edge = self._world.rng.randrange(1, len(places)) if len(places) > 1 else 0
        left, right = places[:edge], places[edge:]
        self._cut([way for one in left for two in right for way in ((one, two), (two, one))])

    def _slow(self, server: Server) -> None:
        self._world.network.slow[server.place] += 1

        def quick() -> None:
            self._world.network.slow[server.place] -= 1

        self._later((1.0, 4.0), quick)

    # -- wishes

    def _add(self, server: Server) -> None:
        self._world.operator.add(self._world.rng.randrange(self._world.schedule.slices), server)

    def _remove(self, server: Server) -> None:
        self._world.operator.remove(self._world.rng.randrange(self._world.schedule.slices), server)

    def _hand_over(self, server: Server) -> None:
        self._world.operator.wish(self._world.rng.randrange(self._world.schedule.slices), m.HandOver(server.name))

    def _move(self, server: Server) -> None:
        """Add one, hand the slice over to it, remove the old primary: each when the one before is done."""
        number = self._world.rng.randrange(self._world.schedule.slices)
        old = self._world.ledger.read(number)[0].primary
        operator = self._world.operator
        operator.add(number, server)
        self._world.after(1.5, lambda: operator.wish(number, m.HandOver(server.name)))
        self._world.after(3.0, lambda: operator.wish(number, m.RemoveReplica(old)))
