"""Workers that push and read: they retry until they are answered, and write down what they saw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from holdfast.log import messages as m
from tests.harness.linearizability import Operation

if TYPE_CHECKING:
    from tests.harness.log_simulator.servers import Replica
    from tests.harness.log_simulator.world import World

PUSH_AGAIN_S = 0.7


@dataclass(slots=True)
class Push:
    number: int
    update: m.Update
    called_at: float
    answered: bool = False


class Client:
    """A worker, with one push under way at each slice, sometimes two, and reads in between."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.incarnation = 1
        self.left = world.schedule.pushes
        self._reads_left = world.schedule.reads
        self._sequences = [0] * world.schedule.slices
        self._pushes: list[Push] = []
        self._reads: dict[str, tuple[int, float]] = {}
        self._believed = [""] * world.schedule.slices
        self._read_count = 0
        self._later(self._push)
        self._later(self._read)

    @property
    def is_done(self) -> bool:
        return not self.left and not self._pushes

    def _later(self, act: Callable[[], None], mean_s: float = 0.5) -> None:
        self._world.after(self._world.rng.uniform(0.0, 2 * mean_s), act)

    # -- pushes

    def _push(self) -> None:
        if self.left:
            if len(self._pushes) < 2:
                self.left -= 1
                number = self._world.rng.randrange(self._world.schedule.slices)
                self._sequences[number] += 1
                update = m.Update(self.name, self.incarnation, self._sequences[number], self._world.next_bit(number))
                push = Push(number, update, self._world.now)
                self._pushes.append(push)
                self._try(push)
            self._later(self._push)

    def _try(self, push: Push) -> None:
        if push.answered or push not in self._pushes:
            return
        self._world.ask(self.name, self._target(push.number), push.number, m.Pushed(self._address(), push.update))
        self._world.after(PUSH_AGAIN_S, lambda: self._try(push))

    def _address(self) -> str:
        return f"{self.name}:{self.incarnation}"

    def _target(self, number: int) -> str:
        believed, self._believed[number] = self._believed[number], ""
        return believed or self._world.rng.choice(sorted(self._world.servers))

    def answered(self, replica: Replica, effect: object, total: int) -> None:
        if isinstance(effect, m.Acknowledge) and effect.client == self._address():
            self._believed[replica.number] = replica.server.place
            for push in [one for one in self._pushes if (one.number, one.update) == (replica.number, effect.update)]:
                push.answered = True
                self._pushes.remove(push)
                self._note(push, self._world.now)
        elif isinstance(effect, m.Refuse) and effect.primary:
            self._believed[replica.number] = effect.primary.split(".")[0]
        elif isinstance(effect, m.Serve) and effect.client in self._reads:
            number, called_at = self._reads.pop(effect.client)
            if effect.fresh:
                self._world.books.fresh_reads += 1
                read = Operation(self.name, ("read",), called_at, self._world.now, total)
                self._world.books.history[number].append(read)

    def _note(self, push: Push, returned_at: float) -> None:
        call = ("add", push.update.payload)
        self._world.books.history[push.number].append(Operation(self.name, call, push.called_at, returned_at))

    def write_down_open_pushes(self) -> None:
        for push in self._pushes:
            self._note(push, math.inf)
        self._pushes.clear()

    def die(self) -> None:
        """Its pushes may or may not happen. The next incarnation begins anew; later the servers are told."""
        gone = m.WorkerGone(self.name, self.incarnation)
        self.write_down_open_pushes()
        self._reads.clear()
        self.incarnation += 1
        self._sequences = [0] * self._world.schedule.slices
        for place in self._world.servers:
            self._world.after(self._world.rng.uniform(0.1, 1.0), partial(self._world.tell, place, gone))

    # -- reads

    def _read(self) -> None:
        if not self._reads_left:
            return
        self._reads_left -= 1
        self._read_count += 1
        rng = self._world.rng
        number = rng.randrange(self._world.schedule.slices)
        place = rng.choice(sorted(self._world.servers))
        leading = [
            one.place for one in self._world.servers.values() if one.alive and one.replicas[number].machine.leading
        ]
        if leading and rng.random() < 0.7:
            place = rng.choice(leading)  # whoever takes itself for the primary: the deposed one too
        asked = f"{self._address()}:{self._read_count}"
        self._reads[asked] = (number, self._world.now)
        self._world.ask(self.name, place, number, m.ReadAsked(asked, fresh=rng.random() < 0.7))
        self._later(self._read, 0.35)
