"""The simulated network: connections belong to a view, keep order, and break as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.words import View
from holdfast.membership import messages as m

if TYPE_CHECKING:
    from holdfast.testing.simulator.worker import Worker
    from holdfast.testing.simulator.world import World


class Network:
    def __init__(self, world: World) -> None:
        self._world = world
        self._arrival: dict[tuple[str, str], float] = {}
        self._groups: dict[str, int] = {}  # worker -> the view whose connections it has open; negative: had open
        self._parked: dict[tuple[str, int], list[m.Event]] = {}

    def view_of(self, worker: str) -> int:
        return self._groups.get(worker, 0)

    def open(self, worker: Worker, view: View) -> None:
        self._world.views.setdefault(view.number, view)
        self._groups[worker.id] = view.number
        for event in self._parked.pop((worker.id, view.number), []):
            self._world.after(0.0, lambda event=event: worker.take(event))  # type: ignore[misc]
        for peer in view.members:
            other = self._world.workers.get(peer)
            if peer != worker.id and (other is None or not other.alive or self._groups.get(peer, 0) > view.number):
                self.deliver(peer, worker.id, view.number, m.PeerLost(view.number, peer, "refused"))

    def drop(self, worker: Worker, number: int) -> None:
        if self._groups.get(worker.id) != number or number <= 0:
            return
        self._groups[worker.id] = -number
        for peer in self._world.views[number].members:
            if peer != worker.id:
                self.deliver(worker.id, peer, number, m.PeerLost(number, worker.id, "closed"))

    def send(self, worker: Worker, peer: str, view: View, message: m.Message) -> None:
        self.deliver(worker.id, peer, view.number, m.Heard(view.number, worker.id, message))

    def knock(self, worker: Worker, knock: m.Knock) -> None:
        """A listener answers while its process lives and is not stopped, whatever its loop does."""
        give_up = self._world.now + knock.within_s
        reached: set[str] = set()

        def again() -> None:
            for peer in knock.peers:
                other = self._world.workers.get(peer)
                if other is not None and other.alive and not other.finished and not other.stopped:
                    reached.add(peer)
            if len(reached) < len(knock.peers) and self._world.now < give_up:
                self._world.after(0.25, again)
                return
            missed = tuple(peer for peer in knock.peers if peer not in reached)
            worker.take(m.Knocked(knock.number, tuple(peer for peer in knock.peers if peer in reached), missed))

        self._world.after(self._world.rng.choice((0.002, 0.01, 0.2)), again)

    def deliver(self, source: str, target: str, number: int, event: m.Event) -> None:
        """In order on one connection, in any order between them; parked while the target is not there yet."""
        delay = self._world.rng.choice((0.0005, 0.001, 0.002, 0.01, 0.2))
        at = max(self._world.now + delay, self._arrival.get((source, target), 0.0))
        self._arrival[(source, target)] = at

        def arrive() -> None:
            worker = self._world.workers.get(target)
            if worker is None or not worker.alive:
                return
            if abs(self._groups.get(target, 0)) < number:
                self._parked.setdefault((target, number), []).append(event)
            else:
                worker.take(event)

        self._world.after(at - self._world.now, arrive)
