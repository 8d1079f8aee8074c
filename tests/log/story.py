"""Replicas of one slice, told what happens one sentence at a time: for tests that read like a story.

Messages wait until they are delivered, so that a test says which arrive. What is stored in memory is stored at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

from holdfast.log.configuration import Configuration
from holdfast.log.machine import ReplicaMachine
from holdfast.log.messages import (
    Acknowledge,
    Apply,
    Effect,
    Event,
    FetchSnapshot,
    Heard,
    LedgerSaw,
    Message,
    Persisted,
    Propose,
    Pushed,
    ReadAsked,
    Refuse,
    RefuseRead,
    Send,
    Serve,
    SnapshotFetched,
    SnapshotTaken,
    Store,
    TakeSnapshot,
    Tell,
    Tick,
    Update,
)
from holdfast.log.rules import Rules

Wanted = TypeVar("Wanted")


class Story:
    def __init__(self, *names: str, rules: Rules | None = None, outside: tuple[str, ...] = ()) -> None:
        self.now = 100.0
        self.rules = rules or Rules(snapshot_every=1000)
        self.machines = {name: ReplicaMachine(name, self.rules, now=self.now) for name in (*names, *outside)}
        self.told: list[tuple[str, Effect]] = []
        self.letters: deque[tuple[str, str, Message]] = deque()
        self.state: dict[str, list[Any]] = {name: [] for name in self.machines}
        self.stores: dict[str, list[Store]] = {name: [] for name in self.machines}
        self.ledger = (Configuration(1, names[0], names), 1)
        self.show_ledger()

    def __getitem__(self, name: str) -> ReplicaMachine:
        return self.machines[name]

    def happens(self, name: str, event: Event) -> list[Effect]:
        effects = self.machines[name].handle(event, self.now)
        for effect in effects:
            self.told.append((name, effect))
            self._perform(name, effect)
        return effects

    def _perform(self, name: str, effect: Effect) -> None:
        if isinstance(effect, Send):
            self.letters.append((name, effect.peer, effect.message))
        elif isinstance(effect, Store):
            self.stores[name].append(effect)
            if not effect.durable:
                self.sync(name)
        elif isinstance(effect, Apply):
            self.state[name].append(effect.update.payload)
        elif isinstance(effect, Propose) and effect.expected_revision == self.ledger[1]:
            self.ledger = (effect.configuration, self.ledger[1] + 1)
        elif isinstance(effect, TakeSnapshot):
            self.happens(name, SnapshotTaken(effect.snapshot))
        elif isinstance(effect, FetchSnapshot):
            self.state[name] = list(self.state[effect.peer][: effect.snapshot.end.index])
            self.happens(name, SnapshotFetched(effect.snapshot, effect.snapshot))

    def sync(self, name: str) -> None:
        """Everything that was handed to the disk of this server is on it."""
        stores, self.stores[name] = self.stores[name], []
        if stores:
            self.happens(name, Persisted(stores[-1].ticket))

    def deliver(self, *, lost: tuple[str, ...] = ()) -> None:
        """Deliver everything, and what comes of it, but to or from those that are cut off."""
        for _ in range(1000):
            if not self.letters:
                return
            sender, receiver, message = self.letters.popleft()
            if receiver in self.machines and not {sender, receiver} & set(lost):
                self.happens(receiver, Heard(sender, message))
        raise AssertionError("they do not stop talking")

    def show_ledger(self, *names: str) -> None:
        for name in names or tuple(self.machines):
            self.happens(name, LedgerSaw(*self.ledger))

    def pass_time(self, seconds: float, *, lost: tuple[str, ...] = ()) -> None:
        """In small steps, with ticks for everybody. Nobody reads the ledger by itself."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            for name in self.machines:
                if name not in lost:
                    self.happens(name, Tick())
            self.deliver(lost=lost)

    def push(self, name: str, sequence: int, payload: str, *, worker: str = "w0", incarnation: int = 1) -> None:
        self.happens(name, Pushed("client", Update(worker, incarnation, sequence, payload)))

    def push_bytes(self, name: str, sequence: int, nbytes: int) -> None:
        self.happens(name, Pushed("client", Update("w0", 1, sequence, sequence, nbytes)))

    def read(self, name: str, *, fresh: bool = True) -> Serve | RefuseRead:
        answer = self.happens(name, ReadAsked("client", fresh))[0]
        assert isinstance(answer, Serve | RefuseRead)
        return answer

    def heard(self, kind: type[Wanted], name: str = "") -> list[Wanted]:
        """The effects of this kind so far, of one server or of all."""
        return [effect for who, effect in self.told if isinstance(effect, kind) and name in ("", who)]

    def acknowledged(self) -> list[Any]:
        return [effect.update.payload for effect in self.heard(Acknowledge)]

    def refusals(self) -> list[str]:
        return [effect.reason for effect in self.heard(Refuse)]

    def decisions(self, name: str) -> list[str]:
        return [f"{effect.decision}: {effect.reason}" for effect in self.heard(Tell, name)]
