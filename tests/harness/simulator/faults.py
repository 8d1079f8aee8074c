"""What goes wrong in a simulated run: one method for each kind of fault, drawn by `strike`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.core.words import KEY_SIZE, KEY_WORKERS
from holdfast.membership import messages as m
from tests.harness.simulator.worker import Worker

if TYPE_CHECKING:
    from tests.harness.simulator.hosts import Host
    from tests.harness.simulator.world import World

ANYWHERE = (
    *("crash", "crash", "stop", "stop", "reset", "cut", "agent", "join", "leave"),
    *("leader", "leader", "outage", "gap", "lag", "lease", "eve"),
)
BETWEEN_HOSTS = ("partition", "partition", "partition", "power", "isolate")
NEVER = 1e9


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world

    def strike(self) -> None:
        world = self._world
        living = [worker for worker in world.living() if not worker.stopped]
        if world.done or not living:
            return
        several = len(world.hosts) > 1
        kind = world.rng.choice(ANYWHERE + BETWEEN_HOSTS if several else ANYWHERE)
        kind = world.schedule.fault or kind
        worker = world.rng.choice(living)
        world.trace("fault:", kind, worker.id)
        world.books.disturbed()
        getattr(self, f"_{kind}")(worker)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        """The end of a fault is a disturbance too."""

        def end() -> None:
            self._world.books.disturbed()
            act()

        self._world.after(delay_s, end)

    # ---- workers

    def _crash(self, worker: Worker) -> None:
        worker.agent.crash(worker)

    def _stop(self, worker: Worker) -> None:
        worker.stopped = True

        self._later(self._world.rng.choice((0.3, 1.0, 3.0, 6.0)), lambda: self._wake(worker))

    def _wake(self, worker: Worker) -> None:
        worker.stopped = False
        worker.hampered_at = self._world.now
        if not worker.busy:
            worker.drain()

    def pause(self, rng: random.Random) -> None:
        """A worker's loop stands still: its script waits for something. Or its process does, and is woken again."""
        living = [worker for worker in self._world.living() if not worker.stopped]
        if self._world.done or not living:
            return
        worker = rng.choice(living)
        for_s = rng.choice((0.4, 1.0, 2.0, 5.0))
        self._world.trace("pause:", worker.id, for_s)
        self._world.books.disturbed()
        worker.paused_until = self._world.now + for_s
        if rng.random() < 0.3:
            worker.stopped = True
            self._later(for_s, lambda: self._wake(worker))

    def _reset(self, worker: Worker) -> None:
        """A connection breaks; both ends live."""
        network = self._world.network
        number = network.view_of(worker.id)
        peers = [peer for peer in self._world.views[number].members if peer != worker.id] if number > 0 else []
        if peers:
            peer = self._world.rng.choice(peers)
            network.deliver(worker.id, peer, number, m.PeerLost(number, worker.id, "reset"))
            network.deliver(peer, worker.id, number, m.PeerLost(number, peer, "reset"))

    def _join(self, worker: Worker) -> None:
        host = worker.agent
        host.size += 1
        size = host.size
        host.write(lambda: self._world.ledger.put(KEY_SIZE + host.name, size))
        host.spawn(host.slots)

    def _leave(self, worker: Worker) -> None:
        staying = [other for other in self._world.living() if not other.machine.leave_asked]
        if any(other is not worker for other in staying):
            worker.take(m.LeaveAsked())

    def _agent(self, worker: Worker) -> None:
        """An agent is killed, and with it the ledger where that one serves it; another one takes over later."""
        host = worker.agent
        host.agents_away += 1
        if len(self._world.hosts) == 1:
            self._ledger_away(self._world.rng.choice((0.5, 2.0, 4.0)), lambda: self._agent_back(host))
        else:
            self._later(self._world.rng.choice((0.5, 2.0, 4.0)), lambda: self._agent_back(host))

    def _agent_back(self, host: Host) -> None:
        host.agents_away -= 1

    # ---- the ledger

    def _ledger_away(self, duration_s: float, then: Callable[[], None] | None = None) -> None:
        ledger, books = self._world.ledger, self._world.books
        if ledger.up:
            ledger.go_down()
            books.watch_outage()

            def back() -> None:
                if then is not None:
                    then()
                ledger.come_up()

            self._later(duration_s, back)
        elif then is not None:
            self._later(duration_s, then)

    def _leader(self, worker: Worker) -> None:
        """Nobody leads for a while. Watches may have to begin anew at the next one."""
        if self._world.rng.random() < 0.3:
            self._world.ledger.forget()
        self._ledger_away(self._world.rng.uniform(0.2, 1.5))

    def _outage(self, worker: Worker) -> None:
        self._ledger_away(self._world.rng.choice((5.0, 15.0, 40.0)))

    def _eve(self, worker: Worker) -> None:
        """The ledger goes away just after a joiner has registered: the members know of it and cannot take it in."""
        host = worker.agent
        slot = host.slots
        self._join(worker)

        def look() -> None:
            joiners = [other for other in self._world.workers.values() if other.agent is host and other.slot == slot]
            if any(KEY_WORKERS + joiner.id in self._world.ledger.entries for joiner in joiners):
                self._world.after(self._world.rng.choice((0.0, 0.01, 0.1, 0.4)), lambda: self._ledger_away(15.0))
            elif not self._world.done:
                self._world.after(0.01, look)

        look()

    def _gap(self, worker: Worker) -> None:
        """Watches that are behind have a gap."""
        worker.feed.lagging_until = self._world.now + self._world.rng.choice((0.5, 2.0))
        self._later(self._world.rng.choice((0.1, 1.0)), self._world.ledger.forget)

    def _lag(self, worker: Worker) -> None:
        """It watches a member of the ledger that is behind."""
        worker.feed.lagging_until = self._world.now + self._world.rng.choice((1.0, 4.0))

    def _lease(self, worker: Worker) -> None:
        """Its lease is gone though it lives."""
        lease = worker.feed.lease
        self._world.ledger.when_up(lambda: self._world.ledger.revoke(lease))

    def _cut(self, worker: Worker) -> None:
        """The worker cannot reach the ledger for a while."""
        worker.cuts += 1

        def heal() -> None:
            worker.cuts -= 1
            worker.hampered_at = self._world.now

        self._later(self._world.rng.choice((0.5, 3.0, 5.0)), heal)

    # ---- hosts

    def _power(self, worker: Worker) -> None:
        host = worker.agent
        if sum(not other.off for other in self._world.hosts) > 1 and not host.off:
            host.lose_power(self._world.rng.choice((2.0, 8.0, 20.0)))

    def _isolate(self, worker: Worker) -> None:
        """A host loses its network: no ledger, no other host."""
        host = worker.agent
        host.cuts += 1
        mine = [other for other in self._world.workers.values() if other.agent is host]
        for other in mine:
            other.cuts += 1
        others = [other.name for other in self._world.hosts if other is not host]
        ways = [way for name in others for way in ((host.name, name), (name, host.name))]
        self._world.network.cut(ways)

        def heal() -> None:
            host.cuts -= 1
            for other in self._world.workers.values():
                if other.agent is host:
                    other.cuts = max(0, other.cuts - 1)
                    other.hampered_at = self._world.now
            self._world.network.heal(ways)

        self._later(self._world.rng.choice((1.0, 6.0, 20.0)), heal)

    def _partition(self, worker: Worker) -> None:
        """Hosts, or single workers of them, cannot reach each other though all reach the ledger. Perhaps for ever."""
        world, rng = self._world, self._world.rng
        if rng.random() < 0.8:
            names = [host.name for host in world.hosts]
            rng.shuffle(names)
            edge = rng.randrange(1, len(names))
            sides = (names[:edge], names[edge:])
        else:
            far = [other.id for other in world.living() if other.host != worker.host]
            sides = ([worker.id], [rng.choice(far)] if far else [])
        ways = [(one, other) for one in sides[0] for other in sides[1]]
        if rng.random() < 0.6:
            ways += [(other, one) for one, other in ways]
        world.trace("cut:", ways)
        world.network.cut(ways)
        for_s = rng.choice((0.5, 4.0, 12.0, 40.0, NEVER))
        if for_s < NEVER:
            self._later(for_s, lambda: world.network.heal(ways))
