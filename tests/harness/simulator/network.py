"""The simulated network: connections that belong to a view, keep order, and break as a whole; and cuts between hosts.

A cut goes one way or both. What is sent into it waits, as TCP would have it, and comes out when the cut is healed. Who
hears nothing gives the connection up after a while, mostly. Connecting and knocking need both ways.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from holdfast.core.words import View
from holdfast.membership import messages as m

if TYPE_CHECKING:
    from tests.harness.simulator.worker import Worker
    from tests.harness.simulator.world import World

CONNECT_S = 5.0
SILENT_S = 3.5
AGAIN_S = 0.25


class Network:
    def __init__(self, world: World) -> None:
        self._world = world
        self._arrival: dict[tuple[str, str], float] = {}
        self._groups: dict[str, int] = {}  # worker -> the view whose connections it has open; negative: had open
        self._connected: set[tuple[int, str, str]] = set()  # (view, dialled, dialling)
        self._held: dict[tuple[str, str, int], deque[m.Event]] = {}  # not delivered yet, in order
        self._blocked: dict[tuple[str, str], int] = {}  # (from, to), hosts or workers -> how many cuts

    # ---- cuts

    def passes(self, source: str, target: str) -> bool:
        if not self._blocked:
            return True
        workers = self._world.workers
        ways = ((source, target), (workers[source].host, workers[target].host))
        return not any(way in self._blocked for way in ways)

    def reaches(self, one: str, other: str) -> bool:
        return self.passes(one, other) and self.passes(other, one)

    def answers(self, knocker: str, peer: str) -> bool:
        """Its process lives and its listener runs, whatever its loop does; and packets go both ways."""
        other = self._world.workers.get(peer)
        return other is not None and other.alive and not other.stopped and self.reaches(knocker, peer)

    def cut(self, ways: list[tuple[str, str]]) -> None:
        for way in ways:
            self._blocked[way] = self._blocked.get(way, 0) + 1
        for number, first, second in sorted(self._connected):
            for deaf, peer in ((first, second), (second, first)):
                if self._groups.get(deaf) == number and not self.passes(peer, deaf):
                    self._grow_silent(deaf, peer, number, may_miss=True)

    def heal(self, ways: list[tuple[str, str]]) -> None:
        for way in ways:
            self._blocked[way] -= 1
            if not self._blocked[way]:
                del self._blocked[way]
        for source, target, number in list(self._held):
            self._flush(source, target, number)

    def _grow_silent(self, deaf: str, peer: str, number: int, *, may_miss: bool) -> None:
        """Its kernel hears nothing from the peer's. Now and then that is missed: then only knocking tells."""
        if may_miss and self._world.rng.random() < 0.25:
            return

        def give_up() -> None:
            gone = not self._world.workers[peer].alive
            if self._groups.get(deaf) == number and (gone or not self.passes(peer, deaf)):
                self._world.workers[deaf].take(m.PeerLost(number, peer, "silent"))

        self._world.after(SILENT_S + self._world.rng.uniform(0.0, 1.5), give_up)

    # ---- groups

    def view_of(self, worker: str) -> int:
        return self._groups.get(worker, 0)

    def open(self, worker: Worker, view: View) -> None:
        self._world.books.check_open(worker, view)
        self._groups[worker.id] = view.number
        for peer in view.members[: view.rank(worker.id)]:
            self._dial(worker, peer, view.number, self._world.now + CONNECT_S)
        for source, target, number in list(self._held):
            if target == worker.id and number == view.number:
                self._flush(source, target, number)

    def _dial(self, worker: Worker, peer: str, number: int, deadline: float) -> None:
        if self._groups.get(worker.id) != number or not worker.alive:
            return
        other = self._world.workers.get(peer)
        if other is not None and self.answers(worker.id, peer):
            if abs(self._groups.get(peer, 0)) > number:
                self._refuse(worker, peer, number, "it is in a newer view")
                return
            self._connected.add((number, peer, worker.id))
            self._flush(peer, worker.id, number)
            self._flush(worker.id, peer, number)
        elif other is None or (not other.alive and self.reaches(worker.id, peer) and not other.vanished):
            self._refuse(worker, peer, number, "refused")
        elif self._world.now >= deadline:
            self._refuse(worker, peer, number, "no answer")
        else:
            self._world.after(AGAIN_S, lambda: self._dial(worker, peer, number, deadline))

    def _refuse(self, worker: Worker, peer: str, number: int, reason: str) -> None:
        self._world.after(0.001, lambda: worker.take(m.PeerLost(number, peer, reason)))

    def drop(self, worker: Worker, number: int) -> None:
        if self._groups.get(worker.id) != number or number <= 0:
            return
        self._groups[worker.id] = -number
        for peer in self._world.views[number].members:
            if peer != worker.id:
                self.deliver(worker.id, peer, number, m.PeerLost(number, worker.id, "closed"))

    def vanish(self, worker: Worker) -> None:
        """Its host lost power: nobody closes its connections."""
        number = self._groups.get(worker.id, 0)
        self._groups[worker.id] = -abs(number)
        for connected, first, second in sorted(self._connected):
            if connected == number and worker.id in (first, second):
                peer = first if second == worker.id else second
                self._grow_silent(peer, worker.id, number, may_miss=False)

    def send(self, worker: Worker, peer: str, view: View, message: m.Message) -> None:
        self.deliver(worker.id, peer, view.number, m.Heard(view.number, worker.id, message))

    def deliver(self, source: str, target: str, number: int, event: m.Event) -> None:
        """In order on one connection, in any order between them; held while it is not made, cut, or not wanted yet."""
        delay = self._world.rng.choice((0.0005, 0.001, 0.002, 0.01, 0.2))
        at = max(self._world.now + delay, self._arrival.get((source, target), 0.0))
        self._arrival[(source, target)] = at

        def arrive() -> None:
            self._held.setdefault((source, target, number), deque()).append(event)
            self._flush(source, target, number)

        self._world.after(at - self._world.now, arrive)

    def _flush(self, source: str, target: str, number: int) -> None:
        held = self._held.get((source, target, number))
        if not held or abs(self._groups.get(target, 0)) < number or not self.passes(source, target):
            return
        members = self._world.views[number].members
        first, second = sorted((source, target), key=members.index)
        if (number, first, second) not in self._connected:
            return
        worker = self._world.workers[target]
        del self._held[(source, target, number)]
        for event in held:
            self.hand_over(worker, event)

    def hand_over(self, worker: Worker, event: m.Event) -> None:
        worker.take(event)
