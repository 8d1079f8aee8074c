"""The simulated ledger, and the agent that serves it: strongly consistent, sometimes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.core.words import View
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import LedgerState, Registered

if TYPE_CHECKING:
    from holdfast.testing.simulator.world import World


class Ledger:
    """The simulated ledger and the agent that serves it: strongly consistent, sometimes away."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.revision = 0
        self.view: View | None = None
        self.view_revision = 0
        self.created: dict[str, int] = {}
        self.rolls: dict[str, Roll] = {}
        self.dead: frozenset[str] = frozenset()
        self.size = world.schedule.workers
        self.done = False
        self._waiting: list[Callable[[], None]] = []

    def state(self) -> LedgerState:
        registered = tuple(Registered(id, created) for id, created in sorted(self.created.items(), key=lambda i: i[1]))
        return LedgerState(self.view, self.view_revision, registered, self.dead, self.size, "", self.done, dict(self.rolls))

    def changed(self) -> None:
        self.revision += 1
        if self.up:
            state = self.state()
            for worker in self.world.workers.values():
                self.world.notify(worker, state)

    def when_up(self, act: Callable[[], None]) -> None:
        if self.up:
            act()
        else:
            self._waiting.append(act)

    def go_down(self) -> None:
        self.up = False

    def come_up(self) -> None:
        self.up = True
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()
        self.changed()

    def register(self, id: str) -> None:
        if id not in self.created and id not in self.dead:
            self.created[id] = self.revision + 1
            self.changed()

    def deregister(self, id: str, *, dead: bool) -> None:
        if dead:
            self.dead |= {id}
        self.rolls.pop(id, None)
        if self.created.pop(id, None) is not None or dead:
            self.changed()

    def publish(self, id: str, roll: Roll) -> None:
        if id in self.created:  # it is under the worker's lease
            self.rolls[id] = roll
            self.changed()

    def compare_and_set_view(self, view: View, expected: int) -> None:
        if self.view_revision != expected:
            return
        self.world.check_view(self.view, view)
        self.view = view
        self.view_revision = self.revision + 1
        self.changed()
