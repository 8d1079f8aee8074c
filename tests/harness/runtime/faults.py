"""What goes wrong in a simulated run: one method for each kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.core.words import host_of
from holdfast.membership.phases import Phase
from tests.harness.runtime.process import Process

if TYPE_CHECKING:
    from tests.harness.runtime.world import World

ANYWHERE = (
    *("kill", "kill", "kill", "stop", "stop", "hang", "reset", "cut", "agent", "join", "join", "leave"),
    *("leader", "outage", "gap", "lag", "lease"),
)
BETWEEN_HOSTS = ("partition", "partition", "isolate")
STEADY = ("join", "agent", "leader", "outage")  # members that train together go on doing so
# Where an ambush waits for a worker, and what is done there besides what may happen anywhere.
MOMENTS: dict[Phase, tuple[str, ...]] = {
    Phase.FORMING: ("kill", "reset"),
    Phase.LOADING: ("kill", "reset"),
    Phase.RECEIVING: ("kill", "reset"),
    Phase.STOPPING: ("kill", "reset", "join"),
    Phase.GATHERING: ("kill", "stop", "join"),
    Phase.REDUCING: ("kill", "reset", "kill", "reset"),
    Phase.APPLYING: ("kill", "reset", "join"),
    Phase.TURNING: ("outage", "outage", "leader", "agent", "kill"),
}
SPRINGS = 0.3  # of the worker's turns in that moment


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.timeline.rng
        self._ambushes: list[tuple[Phase, str]] = []

    def strike(self) -> None:
        """Something goes wrong with somebody, now or in a moment of the protocol that comes."""
        world, rng = self._world, self._rng
        living = [process for process in world.living() if process.stopped_until <= world.timeline.now]
        if world.is_done or not living:
            return
        kinds = ANYWHERE + BETWEEN_HOSTS if world.schedule.hosts > 1 else ANYWHERE
        if world.schedule.ambushes and rng.random() < world.schedule.ambushes:
            moment = rng.choice(list(MOMENTS))
            kind = rng.choice(MOMENTS[moment] if rng.random() < 0.7 else kinds)
            if moment is Phase.TURNING:
                self.do("join", rng.choice(living))  # else nobody turns
            self._ambushes.append((moment, world.schedule.fault or kind))
            world.timeline.after_turn = self._spring
        else:
            self.do(world.schedule.fault or rng.choice(kinds), rng.choice(living))

    def _spring(self, process: Process) -> None:
        """A process has had its turn. Whoever is struck then is that one, or another that is with it."""
        world, phase = self._world, process.phase
        for ambush in self._ambushes:
            if ambush[0] is phase and self._rng.random() < SPRINGS:
                self._ambushes.remove(ambush)
                living = [one for one in world.living() if one.stopped_until <= world.timeline.now]
                victim = process if self._rng.random() < 0.6 or not living else self._rng.choice(living)
                if not world.is_done and process.alive:
                    self.do(ambush[1], victim)
                return

    def do(self, kind: str, process: Process, for_s: float | None = None) -> None:
        self._world.trace("fault:", kind, process.id)
        self._world.books.disturbed()
        if kind not in STEADY:
            self._world.steadiness.disturbed()
        getattr(self, kind)(process, for_s)

    def _later(self, delay_s: float, act: Callable[[], object]) -> None:
        def end() -> None:
            self._world.books.disturbed()
            self._world.steadiness.disturbed()
            act()

        self._world.timeline.after(delay_s, end)

    # ---- workers

    def kill(self, process: Process, for_s: float | None) -> None:
        process.kill()

    def stop(self, process: Process, for_s: float | None) -> None:
        """The whole process stands still, and wakes."""
        for_s = for_s if for_s is not None else self._rng.choice((0.3, 1.0, 3.0, 6.0))
        process.stopped_until = self._world.timeline.now + for_s
        self._later(for_s, lambda: None)

    def hang(self, process: Process, for_s: float | None) -> None:
        """Its script's lines take long."""
        for_s = for_s if for_s is not None else self._rng.choice((0.5, 2.0, 6.0))
        process.hangs_until = self._world.timeline.now + for_s
        self._later(for_s, lambda: None)

    def reset(self, process: Process, for_s: float | None) -> None:
        """A connection breaks; both ends live."""
        ends = [end for end in self._world.network.sockets.get(process.id, []) if not end.closed]
        if ends:
            end = self._rng.choice(ends)
            end.fail("reset")
            end.other.fail("reset")

    def join(self, process: Process, for_s: float | None) -> None:
        self._world.agent.grow(host_of(process.id))

    def leave(self, process: Process, for_s: float | None) -> None:
        """SIGTERM, unless nobody would be left."""
        if sum(not one.is_leaving for one in self._world.living()) > 1:
            process.leave()

    def agent(self, process: Process, for_s: float | None) -> None:
        """Its agent is killed, and with it the ledger where that one serves it."""
        for_s = for_s if for_s is not None else self._rng.choice((0.5, 2.0, 4.0))
        self._world.agent.away_until = self._world.timeline.now + for_s
        self._ledger_away(for_s) if self._world.schedule.hosts == 1 else self._later(for_s, lambda: None)

    # ---- the ledger

    def _ledger_away(self, for_s: float) -> None:
        ledger = self._world.ledger
        if ledger.up:
            ledger.go_down()
            self._later(for_s, ledger.come_up)

    def leader(self, process: Process, for_s: float | None) -> None:
        if self._rng.random() < 0.3:
            self._world.ledger.forget()
        self._ledger_away(for_s if for_s is not None else self._rng.uniform(0.2, 1.5))

    def outage(self, process: Process, for_s: float | None) -> None:
        self._ledger_away(for_s if for_s is not None else self._rng.choice((5.0, 15.0)))

    def gap(self, process: Process, for_s: float | None) -> None:
        """Watches that are behind have a gap."""
        process.watch_lags_until = self._world.timeline.now + self._rng.choice((0.5, 2.0))
        self._later(self._rng.choice((0.1, 1.0)), self._world.ledger.forget)

    def lag(self, process: Process, for_s: float | None) -> None:
        """It watches a member of the ledger that is behind."""
        for_s = for_s if for_s is not None else self._rng.choice((1.0, 4.0))
        process.watch_lags_until = self._world.timeline.now + for_s
        self._later(for_s, lambda: None)

    def lease(self, process: Process, for_s: float | None) -> None:
        """Its lease is gone though it lives."""
        service = self._world.ledger
        if process.run is not None:
            lease = process.run._feed._lease
            service.do(lambda: service.commit(service.machine.revoke(lease)))

    def cut(self, process: Process, for_s: float | None) -> None:
        """It cannot reach the ledger for a while."""
        process.cut_from_ledger += 1

        def heal() -> None:
            process.cut_from_ledger -= 1

        self._later(for_s if for_s is not None else self._rng.choice((0.5, 3.0, 5.0)), heal)

    # ---- hosts

    def partition(self, process: Process, for_s: float | None) -> None:
        """Its host and the others cannot reach each other, though all reach the ledger; perhaps one way only."""
        host, network = host_of(process.id), self._world.network
        ways = [(host, other) for other in self._world.agent.sizes if other != host]
        if self._rng.random() < 0.6:
            ways += [(other, one) for one, other in ways]
        network.cut(ways)
        self._later(for_s if for_s is not None else self._rng.choice((0.5, 4.0, 12.0)), lambda: network.heal(ways))

    def isolate(self, process: Process, for_s: float | None) -> None:
        """Its host loses its network: no ledger, no other host."""
        for_s = for_s if for_s is not None else self._rng.choice((1.0, 6.0))
        self.partition(process, for_s)
        for one in self._world.living():
            if host_of(one.id) == host_of(process.id):
                self.cut(one, for_s)
