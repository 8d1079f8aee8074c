"""A simulated worker's line to the ledger. Mirrors engine/ledger_feed.py: one command at a time, and a watch.

A call may fail before or after it was carried out, be carried out late, or twice. The feed does not find out: after a
call that failed it just goes on, the watch tells what holds, and the machine asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from holdfast.core.words import KEY_DEAD, KEY_DONE, KEY_REWINDS, KEY_ROLLS, KEY_SIZE, KEY_VIEW, KEY_WORKERS, View
from holdfast.membership import messages as m
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import LedgerState, Registered
from tests.harness.simulator.ledger import LEASE_S, Entry

if TYPE_CHECKING:
    from tests.harness.simulator.worker import Worker

CALL_S = 2.0  # then a call has failed
UNAVAILABLE = object()
Operation = Callable[[], Any]
Command = Generator[Operation, Any, None]


class Feed:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.world = worker.world
        self.lease = 0
        self.lagging_until = 0.0  # it is served by a member of the ledger that is behind
        self._waiting: dict[str, Callable[[], Command]] = {}  # kind -> its latest command, in order
        self._running = False
        self._entries: dict[str, Entry] = {}
        self._revision = -1  # up to which it has read; -1: it has not read at all
        self._looking = False

    def start(self) -> None:
        self.wake()
        self._keep_alive_now_and_then()

    # ---- commands

    def register(self, while_view: int | None) -> None:
        self._ask("register", lambda: self._register(while_view))

    def deregister(self) -> None:
        self._ask("deregister", self._deregister)

    def propose(self, view: View, expected: int) -> None:
        self._ask("propose", lambda: self._propose(view, expected))

    def publish(self, roll: Roll) -> None:
        self._ask("publish", lambda: self._publish(roll))

    def _register(self, while_view: int | None) -> Command:
        ledger, key = self.world.ledger, KEY_WORKERS + self.worker.id
        if self.lease and not (yield lambda: ledger.keep_alive(self.lease)):
            self.lease = 0
        if not self.lease:
            self.lease = yield ledger.grant
        lease = self.lease
        entry = yield lambda: ledger.entries.get(key)
        if entry is None or entry.lease != lease:
            expected = entry.revision if entry else 0
            while_at = None if while_view is None else (KEY_VIEW, while_view)
            yield lambda: ledger.compare_and_set(key, self.worker.id, expected, lease, while_at)

    def _deregister(self) -> Command:
        lease, self.lease = self.lease, 0
        if lease:
            yield lambda: self.world.ledger.revoke(lease)

    def _propose(self, view: View, expected: int) -> Command:
        yield lambda: self.world.ledger.compare_and_set(KEY_VIEW, view, expected)

    def _publish(self, roll: Roll) -> Command:
        lease = self.lease
        if lease:
            yield lambda: self.world.ledger.put(KEY_ROLLS + self.worker.id, roll, lease)

    def _ask(self, kind: str, command: Callable[[], Command]) -> None:
        self._waiting[kind] = command
        if not self._running:
            self._next_command()

    def _next_command(self) -> None:
        self._running = bool(self._waiting)
        if self._running:
            kind = next(iter(self._waiting))
            self._advance(self._waiting.pop(kind)(), None)

    def _advance(self, command: Command, answer: Any) -> None:
        if not self.worker.runs_threads:
            return
        if self.worker.stopped:
            self.world.after(0.05, lambda: self._advance(command, answer))
            return
        if answer is UNAVAILABLE:
            self.failed(command)
            self._next_command()
            return
        try:
            operation = command.send(answer)
        except StopIteration:
            self._next_command()
            return
        self._call(operation, lambda answer: self._advance(command, answer))

    def failed(self, command: Command) -> None:
        """Whether it was carried out is not known. The watch will tell."""
        command.close()

    def _call(self, operation: Operation, then: Callable[[Any], None]) -> None:
        """One request and its answer; `then` is called once, with UNAVAILABLE at the latest after CALL_S."""
        world, rng = self.world, self.world.rng
        answered = False

        def answer(result: Any) -> None:
            nonlocal answered
            if not answered:
                answered = True
                then(result)

        luck = rng.random()

        def carry_out() -> None:
            result = operation()
            if luck < 0.03:
                world.after(rng.uniform(0.05, 0.5), lambda: answer(UNAVAILABLE))  # the answer is lost
            elif luck < 0.05:  # so it is, and the request is sent again
                world.after(rng.uniform(0.05, 0.5), lambda: world.ledger.when_up(lambda: answer(operation())))
            else:
                world.after(0.001, lambda: answer(result) if world.ledger.up and not self.worker.cut else None)

        def arrive() -> None:
            if self.worker.cut:
                return
            if world.ledger.up or luck > 0.5:
                world.ledger.when_up(carry_out)  # perhaps late

        world.after(rng.choice((0.001, 0.005, 0.05)), arrive)
        world.after(CALL_S, lambda: answer(UNAVAILABLE))

    def _keep_alive_now_and_then(self) -> None:
        worker = self.worker
        if not worker.runs_threads:
            return
        asks = self.lease and not (worker.stopped or worker.cut) and self.world.ledger.up
        if asks and not self.world.ledger.keep_alive(self.lease):
            self.lease = 0
        self.world.after(LEASE_S / 4, self._keep_alive_now_and_then)

    # ---- the watch

    def wake(self) -> None:
        """Something has changed, or it has just begun to watch."""
        if self._looking or not self.worker.alive:
            return
        self._looking = True
        delay = self.world.rng.choice((0.001, 0.003, 0.03, 0.2))
        if self.world.now < self.lagging_until:
            delay += self.lagging_until - self.world.now
        up_to = self.world.ledger.revision
        self.world.after(delay, lambda: self._look(up_to))

    def _look(self, up_to: int) -> None:
        worker, ledger = self.worker, self.world.ledger
        if not worker.runs_threads:
            return
        if worker.cut or worker.stopped or not ledger.up:
            self.world.after(0.1, lambda: self._look(up_to))
            return
        self._looking = False
        if self._revision < ledger.floor or self._revision < 0:
            self.read_anew()
        else:
            for change in ledger.changes(self._revision, up_to):
                if change.entry is None:
                    self._entries.pop(change.key, None)
                else:
                    self._entries[change.key] = change.entry
            self._revision = max(self._revision, up_to)
        worker.take(m.LedgerSaw(self._state()))
        if ledger.revision > self._revision:
            self.wake()

    def read_anew(self) -> None:
        """The watch has a gap: changes were missed for good."""
        self._entries = dict(self.world.ledger.entries)
        self._revision = self.world.ledger.revision

    def roll_of(self, worker: str) -> Roll | None:
        entry = self._entries.get(KEY_ROLLS + worker)
        return entry.value if entry else None

    def is_registered(self, worker: str) -> bool:
        return KEY_WORKERS + worker in self._entries

    def _state(self) -> LedgerState:
        entries = self._entries
        view = entries.get(KEY_VIEW)
        registered, dead, rolls, size = [], [], {}, 0
        for key, entry in entries.items():
            if key.startswith(KEY_WORKERS):
                registered.append(Registered(entry.value, entry.created))
            elif key.startswith(KEY_DEAD):
                dead.append(key[len(KEY_DEAD) :])
            elif key.startswith(KEY_ROLLS):
                rolls[key[len(KEY_ROLLS) :]] = entry.value
            elif key.startswith(KEY_SIZE):
                size += entry.value
        registered.sort(key=lambda worker: worker.created)
        return LedgerState(
            view=view.value if view else None,
            view_revision=view.revision if view else 0,
            registered=tuple(registered),
            dead=frozenset(dead),
            size=size,
            done=KEY_DONE in entries,
            rolls=rolls,
            rewound=KEY_REWINDS in entries and view is not None and entries[KEY_REWINDS].revision > view.revision,
        )
