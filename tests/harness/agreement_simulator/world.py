"""Time, and how everything is put together: servers, clients, the network between them, faults, what is checked."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from itertools import count

from holdfast.byzantine.agreement import messages as m
from holdfast.byzantine.agreement.canonical import digest_of
from holdfast.byzantine.agreement.checking import Checker, Signer
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.machine import ServerMachine
from tests.harness.agreement_simulator.books import Books
from tests.harness.agreement_simulator.clients import Client
from tests.harness.agreement_simulator.faults import Faults
from tests.harness.agreement_simulator.keys import KeyRing
from tests.harness.agreement_simulator.schedule import Schedule, Violation
from tests.harness.agreement_simulator.servers import Server

FAULTS_FOR_S = 4.0
CALM_S_MAX = 60.0  # after the last fault has ended, all rounds are over within this time


class World:
    def __init__(self, schedule: Schedule, *, machine_class: type[ServerMachine], keep_trace: bool) -> None:
        self.schedule = schedule
        self.machine_class = machine_class
        self.rng = random.Random(f"agreement run {schedule.seed}")
        self.now = 0.0
        self.faulty = bool(schedule.faults or schedule.loss or schedule.doubling)
        self.is_over = False
        self.decider_trap = False  # the next server that sees a round decided is cut off
        self.lines: list[str] | None = [] if keep_trace else None
        self.cuts: Counter[tuple[str, str]] = Counter()
        self.slow: Counter[str] = Counter()
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.first_model = b"the first model"
        ring = KeyRing()
        servers = [f"s{number}" for number in range(schedule.servers)]
        clients = [f"c{number}" for number in range(len(schedule.clients))]
        self.signers: dict[str, Signer] = {}
        public: dict[str, bytes] = {}
        for name in (*servers, *clients, "stranger"):
            public[name], self.signers[name] = ring.create(name)
        self.federation = Federation(
            name="simulated",
            f=schedule.f,
            servers={name: public[name] for name in servers},
            clients={name: public[name] for name in clients},
            rule="digest",
            hostile=0,
            updates_min=2,
            model=digest_of(self.first_model),
        )
        self.checker = Checker(self.federation, ring.verify)
        self.books = Books(self)
        liars = dict(zip(self.rng.sample(servers, len(schedule.liars)), schedule.liars, strict=True))
        self.servers = {name: Server(self, name, liars.get(name, "")) for name in servers}
        self.clients = {
            name: Client(self, name, kind)
            for name, kind in zip((*clients, "stranger"), (*schedule.clients, "stranger"), strict=True)
        }
        self.faults = Faults(self)
        for _ in range(schedule.faults):
            self.after(self.rng.uniform(0.02, FAULTS_FOR_S), self.faults.strike)

    # -- time

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._order), act))

    def run(self) -> None:
        self._run_until(FAULTS_FOR_S if self.schedule.faults else 0.5)
        self.faulty = self.decider_trap = False
        deadline = self.now + 3.5 + CALM_S_MAX  # faults last for 3.5 s at the most
        while self.now < deadline and not self._is_done():
            self._run_until(self.now + 0.2)
        self.is_over = True
        if not self._is_done():
            waits = "; ".join(
                f"{one} waits for {one.machine.waits_for()}" for one in self.servers.values() if not one.liar
            )
            stuck = [one.name for one in self.clients.values() if not one.is_done]
            raise Violation(f"after {CALM_S_MAX} s without faults {stuck} are not done: {waits}")

    def _run_until(self, time: float) -> None:
        agenda = self._agenda
        while agenda and agenda[0][0] <= time:
            self.now, _, act = heapq.heappop(agenda)
            act()
        self.now = time

    def _is_done(self) -> bool:
        """Every honest server has published every round and has the model, and every client has accepted it."""
        rounds = self.schedule.rounds
        return all(one.liar or (one.alive and one.is_complete(rounds)) for one in self.servers.values()) and all(
            one.is_done for one in self.clients.values()
        )

    # -- messages

    def send(self, sender: str, to: str, message: m.Message) -> None:
        rng, copies = self.rng, 1
        if self.faulty:
            if rng.random() < self.schedule.loss:
                return
            copies += rng.random() < self.schedule.doubling
        for _ in range(copies):
            delay = 0.002 + 0.03 * rng.random()
            if self.faulty and rng.random() < 0.03:
                delay = 0.1 + 2.0 * rng.random()
            if self.slow[sender] > 0 or self.slow[to] > 0:
                delay += 0.1 + 0.5 * rng.random()
            self.after(delay, lambda: self._deliver(sender, to, message))

    def _deliver(self, sender: str, to: str, message: m.Message) -> None:
        if self.cuts[sender, to] > 0:
            return
        server = self.servers.get(to)
        if server is not None:
            server.take(m.Heard(sender, message))
        else:
            self.clients[to].take(sender, message)

    def trace(self, *words: object) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now:8.3f} " + " ".join(str(word)[:400] for word in words))
