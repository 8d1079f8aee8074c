"""Time, and how everything is put together: servers, their ledger and network, clients, faults, and what is checked."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import count

from holdfast.log import messages as m
from holdfast.log.configuration import Configuration
from holdfast.log.machine import ReplicaMachine
from tests.harness.log_simulator.books import Books
from tests.harness.log_simulator.clients import Client
from tests.harness.log_simulator.disk import Disk
from tests.harness.log_simulator.faults import Faults
from tests.harness.log_simulator.ledger import Ledger
from tests.harness.log_simulator.network import Network
from tests.harness.log_simulator.operator import Operator
from tests.harness.log_simulator.schedule import Schedule, Violation
from tests.harness.log_simulator.servers import Replica, Server

FAULTS_FOR_S = 8.0
CALM_S_MAX = 25.0  # after the last fault has ended, everything that was asked for is done within this time


class World:
    def __init__(self, schedule: Schedule, *, machine_class: type[ReplicaMachine], keep_trace: bool) -> None:
        self.schedule = schedule
        self.rules = schedule.rules
        self.machine_class = machine_class
        self.rng = random.Random(f"log run {schedule.seed}")
        self.pressure = random.Random(f"log pressure {schedule.seed}")  # when memory is short
        self.now = 0.0
        self.faulty = True
        self.lines: list[str] | None = [] if keep_trace else None
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._disks: defaultdict[tuple[str, int], Disk] = defaultdict(Disk)
        self._bits = [0] * schedule.slices
        self.books = Books(self)
        self.network = Network(self)
        self.ledger = Ledger(self)
        rates = [1 + self.rng.choice((-1, -0.5, 0, 0.5, 1)) * schedule.drift for _ in range(schedule.servers)]
        rates = list(schedule.rates) or rates
        places = [f"s{number}" for number in range(schedule.servers)]
        for number in range(schedule.slices):
            chosen = tuple(f"{place}.1" for place in self.rng.sample(places, schedule.replicas))
            self.ledger.begin(number, Configuration(1, chosen[0], chosen))
        self.servers = {place: Server(self, place, rate) for place, rate in zip(places, rates, strict=True)}
        self.clients = [Client(self, f"w{number}") for number in range(schedule.clients)]
        self.operator = Operator(self)
        self._faults = Faults(self)
        for _ in range(schedule.faults):
            self.after(self.rng.uniform(0.3, FAULTS_FOR_S), self._faults.strike)

    # -- time

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._order), act))

    def run(self) -> None:
        self._run_until(FAULTS_FOR_S if self.schedule.faults else 0.5)
        self.faulty = False
        deadline = self.now + 6.0 + CALM_S_MAX  # faults last for 6 s at the most
        while self.now < deadline and not self._is_done():
            self._run_until(self.now + 0.5)
        if not self._is_done():
            raise Violation(f"after {CALM_S_MAX} s without faults {self._who_waits()}")
        self.books.check_nothing_is_lost()
        for client in self.clients:
            client.write_down_open_pushes()
        self.books.check_histories()

    def _run_until(self, time: float) -> None:
        agenda = self._agenda
        while agenda and agenda[0][0] <= time:
            self.now, _, act = heapq.heappop(agenda)
            act()
        self.now = time

    def _is_done(self) -> bool:
        if not all(client.is_done for client in self.clients):
            return False
        return all(self._is_whole(number) for number in range(self.schedule.slices))

    def _is_whole(self, number: int) -> bool:
        """The primary leads, and every replica of the configuration lives and has all that is committed."""
        primary = self.leading_replica(number)
        if primary is None or primary.machine.leading is None or not primary.machine.leading.is_established:
            return False
        configuration = self.ledger.read(number)[0]
        replicas = [self.named(one) for one in configuration.replicas]
        if any(one is None or not one.alive for one in replicas):
            return False
        committed = primary.machine.copy.committed
        return all(one is not None and one.replicas[number].machine.copy.committed >= committed for one in replicas)

    def _who_waits(self) -> str:
        waits = [
            f"{replica} waits for {replica.machine.waits_for(server.clock()) or 'nothing'}"
            for server in self.servers.values()
            for replica in server.replicas
            if replica.machine.is_member
        ]
        states = [self.ledger.read(number)[0] for number in range(self.schedule.slices)]
        undone = [client.name for client in self.clients if not client.is_done]
        return f"{undone} are not done; {states}; " + "; ".join(waits)

    # -- who is who

    def disk_of(self, name: str, number: int) -> Disk:
        return self._disks[name, number]

    def new_disk(self, name: str, number: int) -> Disk:
        self._disks[name, number] = Disk(before=self._disks[name, number])
        return self._disks[name, number]

    def named(self, name: str) -> Server | None:
        server = self.servers[name.split(".")[0]]
        return server if server.name == name else None

    def is_kept(self, name: str) -> bool:
        """What this server stored is not lost, whether or not it runs."""
        return self.named(name) is not None

    def can_lose(self, name: str) -> bool:
        """Each slice keeps a majority of its replicas without it, whatever is still proposed or carried out."""
        configurations = [self.ledger.read(number)[0] for number in range(self.schedule.slices)]
        configurations += [effect.configuration for _, effect in self.ledger.under_way]
        for replica in [one for server in self.servers.values() if server.alive for one in server.replicas]:
            leading = replica.machine.leading
            if leading is not None and leading.change is not None and isinstance(leading.change.wish, m.AddReplica):
                replicas = (*leading.configuration.replicas, leading.change.wish.server)
                configurations.append(leading.configuration.next("it may come", replicas=replicas))
            if leading is not None and leading.change is not None and isinstance(leading.change.wish, m.RemoveReplica):
                rest = tuple(one for one in leading.configuration.replicas if one != leading.change.wish.server)
                configurations.append(leading.configuration.next("it may go", replicas=rest))
        return all(
            sum(self.is_kept(one) and one != name for one in each.replicas) >= each.majority
            for each in configurations
            if name in each.replicas
        )

    def leading_replica(self, number: int) -> Replica | None:
        server = self.named(self.ledger.read(number)[0].primary)
        if server is None or not server.alive:
            return None
        replica = server.replicas[number]
        return replica if replica.machine.leading is not None else None

    def next_bit(self, number: int) -> int:
        self._bits[number] += 1
        return 1 << (self._bits[number] - 1)

    def opened(self, server: Server) -> None:
        """A server begins to lead."""
        self._faults.opened(server)

    # -- messages

    def send(self, sender: Server, name: str, number: int, message: m.Message) -> None:
        event = m.Heard(sender.name, message)

        def deliver() -> None:
            server = self.named(name)
            if server is not None and server.alive:
                server.take(server.replicas[number], event)

        self.network.carry((sender.place, name.split(".")[0]), deliver)

    def ask(self, client: str, place: str, number: int, event: m.Event) -> None:
        def deliver() -> None:
            server = self.servers[place]
            if server.alive:
                server.take(server.replicas[number], event)

        self.network.carry((client, place), deliver)

    def answer(self, replica: Replica, client: str, effect: object, total: int = 0) -> None:
        name = client.split(":")[0]
        receiver = next(one for one in self.clients if one.name == name)
        way = (replica.server.place, name)
        self.network.carry(way, lambda: receiver.answered(replica, effect, total))

    def tell(self, place: str, event: m.Event, number: int | None = None) -> None:
        """From outside: an agent that saw a process end, an operator with a wish."""
        server = self.servers[place]
        if server.alive:
            for replica in server.replicas:
                if number is None or replica.number == number:
                    server.take(replica, event)

    def trace(self, *words: object) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now:8.3f} " + " ".join(map(str, words)))
