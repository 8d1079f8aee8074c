"""The worker's line to the ledger: two threads, so that the user's loop never waits for it.

The watch thread reads what changes and puts a new LedgerState into the mailbox. The command thread registers,
proposes, and keeps the lease alive. While the ledger is away both try again; training goes on.

A write whose answer did not come may have been done or not. The feed does not find out: the watch tells what holds,
and the machine asks again for what it still misses. Commands of one kind replace each other while they wait, so a
ledger that is away for long leaves no queue behind.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.core.errors import LeaseGone, LedgerError, LedgerUnavailable, ProtocolError
from holdfast.core.rewinds import Rewinds
from holdfast.core.words import (
    KEY_DEAD,
    KEY_DONE,
    KEY_HOSTS,
    KEY_REWINDS,
    KEY_ROLLS,
    KEY_SIZE,
    KEY_STOP,
    KEY_VIEW,
    KEY_WORKERS,
    Registration,
    View,
    decode_json,
    decode_whole,
)
from holdfast.events import EventLog
from holdfast.ledger.port import Change, Entry, Ledger, Reading
from holdfast.ledger.watching import RETRY_S, follow
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import LedgerState, Registered
from holdfast.net.kernel import SYSTEM, Kernel, Running
from holdfast.net.mailbox import Mailbox

CLOSE_WAIT_S = 2.0


@dataclass(frozen=True)
class LedgerNews:
    """What the machine must know, and where the workers can be reached."""

    state: LedgerState
    registrations: dict[str, Registration]
    rewinds: Rewinds = field(default_factory=Rewinds)


class LedgerFeed:
    """Owns the ledger's client, the lease and both threads. All methods may be called from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        registration: Registration,
        mailbox: Mailbox,
        events: EventLog,
        *,
        lease_s: float,
        outage_s: float = 0.0,
        kernel: Kernel = SYSTEM,
    ) -> None:
        self._kernel = kernel
        self._ledger = ledger
        self._registration = registration
        self._mailbox = mailbox
        self._events = events
        self._lease_s = lease_s
        self._outage_s = outage_s  # how long to train on without the ledger
        self._close_wait_s = CLOSE_WAIT_S
        self._parent = os.getppid()
        self._lease = 0
        self._stopping = kernel.event()
        self._registered_under = 0  # the lease under which our registration was last seen to stand
        self._asked = kernel.condition()  # something is to be done; guards what that is
        self._commands: deque[str] = deque()  # kinds of commands, in order
        self._waiting: dict[str, Callable[[], None]] = {}  # the latest of each kind
        self._entries: dict[str, Entry] = {}
        self._threads: list[Running] = []
        self.down_since: float | None = None
        self.last_contact = self._kernel.now()  # when the last renewal began that the ledger answered

    def start(self) -> None:
        for name, run in (("watch", self._watch), ("command", self._command)):
            self._threads.append(self._kernel.start(f"holdfast-ledger-{name}", run))

    # ---- commands

    def register(self, while_view: int | None = None) -> None:
        self._ask("register", lambda: self._register(while_view))

    def deregister(self) -> None:
        self._ask("deregister", self._deregister)

    def propose(self, view: View, expected: int) -> None:
        self._ask("propose", lambda: self._propose(view, expected))

    def publish(self, roll: Roll) -> None:
        self._ask("publish", lambda: self._publish(roll))

    def put(self, key: str, value: bytes) -> None:
        self._ask(f"put {key}", lambda: self._put(key, value))

    def delete(self, key: str) -> None:
        self._ask(f"put {key}", lambda: self._delete(key))

    def put_at_last(self, key: str, value: bytes) -> None:
        """What must stand there when this worker is gone. The agent sees to that, too; without one this worker stays
        for a ledger that is away, for as long as it would have trained on without it."""
        unattended = os.getppid() != self._parent
        if unattended and self._outage_s:
            self._close_wait_s = self._outage_s
            if self.down_since is not None:
                self._events.write(
                    "waiting",
                    reason=f"waiting {self._outage_s:g} s at most for the ledger, to tell it that the run is finished",
                )
        deadline = self._kernel.now() + self._close_wait_s
        self._ask(f"put {key}", lambda: self._put_until(key, value, deadline))

    def compare_and_set(self, key: str, value: bytes, expected: int) -> None:
        """Once; `entry` tells what came of it, if anything did."""
        self._ask(f"set {key}", lambda: self._compare_and_set(key, value, expected))

    def entry(self, key: str) -> Entry | None:
        """By the ledger as it was last seen."""
        return self._entries.get(key)

    def who(self) -> tuple[dict[str, Registration], frozenset[str]]:
        """Who is registered, and the hosts whose agents live, by the ledger as it was last seen."""
        entries = dict(self._entries)  # at once: the watch thread changes it
        hosts = frozenset(key[len(KEY_HOSTS) :] for key in entries if key.startswith(KEY_HOSTS))
        with suppress(ProtocolError):
            return read_news(entries).registrations, hosts
        return {}, hosts

    def close(self) -> None:
        """Carry out what was asked for, as far as the ledger answers in time, and end the threads."""
        self._ask("stop", self._stopping.set)
        self._threads[1].join(self._close_wait_s)
        self._stopping.set()
        self._ledger.close()
        for thread in self._threads:
            thread.join(0.5)

    def _ask(self, kind: str, command: Callable[[], None]) -> None:
        with self._asked:
            if kind not in self._waiting:
                self._commands.append(kind)
            self._waiting[kind] = command
            self._asked.notify()

    def _command(self) -> None:
        renew_at = self._kernel.now()
        while not self._stopping.is_set():
            command = self._keep_alive
            now = self._kernel.now()
            if now >= renew_at:  # whatever else waits: a slow ledger must not cost us the lease
                renew_at = now + self._lease_s / 4
            else:
                with self._asked:
                    if not self._asked.wait_for(lambda: self._commands, renew_at - now):
                        continue
                    command = self._waiting.pop(self._commands.popleft())
            try:
                command()
            except LedgerError as error:
                if not self._stopping.is_set():
                    self._note_down(error)

    def _keep_alive(self) -> None:
        if self._lease:
            began = self._kernel.now()
            try:
                self._ledger.keep_alive(self._lease)
                self.last_contact = began
            except LeaseGone:
                self._lease = 0  # the machine sees that the registration is gone and asks for another

    def _register(self, while_view: int | None) -> None:
        """Any answer may have been lost, and what it would have told may hold: so look first, and know the lease.

        A lease that nobody knows of runs out, and with it whatever was put under it. So a registration of mine under
        another lease is taken over: nobody else has my id. With `while_view` it is done only if the view's revision is
        still that, at the same moment: a look before would not do, a newer view may come in between.
        """
        me, key = self._registration, KEY_WORKERS + self._registration.id
        began = self._kernel.now()
        try:
            if self._lease:
                self._ledger.keep_alive(self._lease)
            else:
                self._lease = self._ledger.grant(self._lease_s)  # mine from here on, whatever comes of the rest
            entry = self._ledger.get(key)
            if entry is None or entry.lease != self._lease:
                expected = entry.revision if entry is not None else 0
                while_at = None if while_view is None else (KEY_VIEW, while_view)
                written = self._ledger.compare_and_set(
                    key, me.encode(), expected=expected, lease=self._lease, while_at=while_at
                )
                if written is None:
                    return  # the machine asks again, if it still should
        except LeaseGone:
            self._lease = 0  # the machine sees that the registration is missing and asks again
            return
        self.last_contact = began
        if self._registered_under != self._lease:
            self._registered_under = self._lease
            self._events.write("registered", address=me.address)

    def _deregister(self) -> None:
        lease, self._lease = self._lease, 0
        if lease:
            self._ledger.revoke(lease)

    def _propose(self, view: View, expected: int) -> None:
        self._ledger.compare_and_set(KEY_VIEW, view.encode(), expected=expected)

    def _publish(self, roll: Roll) -> None:
        if self._lease:
            with suppress(LeaseGone):
                self._ledger.put(KEY_ROLLS + self._registration.id, roll.encode(), lease=self._lease)

    def _put(self, key: str, value: bytes) -> None:
        self._ledger.put(key, value)

    def _delete(self, key: str) -> None:
        self._ledger.delete(key)

    def _put_until(self, key: str, value: bytes, deadline: float) -> None:
        while True:
            try:
                return self._put(key, value)
            except LedgerUnavailable:
                if self._kernel.now() >= deadline or self._stopping.wait(RETRY_S):
                    raise

    def _compare_and_set(self, key: str, value: bytes, expected: int) -> None:
        self._ledger.compare_and_set(key, value, expected=expected)

    # ---- the watch

    def _watch(self) -> None:
        follow(
            self._ledger,
            self._stopping,
            whole=self._take_all,
            changed=self._take,
            away=self._note_down,
            back=self._note_up,
        )

    def _take_all(self, reading: Reading) -> None:
        self._entries = {entry.key: entry for entry in reading.entries}
        self._deliver()

    def _take(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._apply(change)
        self._deliver()

    def _apply(self, change: Change) -> None:
        if change.kind == "delete":
            self._entries.pop(change.key, None)
            return
        old = self._entries.get(change.key)
        created = old.created if old else change.revision
        self._entries[change.key] = Entry(change.key, change.value, change.revision, created)

    def _deliver(self) -> None:
        with suppress(ProtocolError):  # a key that makes no sense is not news
            self._mailbox.put(read_news(self._entries))

    def _note_down(self, error: LedgerError) -> None:
        if self.down_since is None:
            self.down_since = self._kernel.now()
            self._events.write("ledger_down", reason=error.message)

    def _note_up(self) -> None:
        if self.down_since is not None:
            self._events.write("ledger_up", down_s=round(self._kernel.now() - self.down_since, 3))
            self.down_since = None


def read_news(entries: dict[str, Entry]) -> LedgerNews:
    """The ledger's entries as the machine wants them."""
    view = entries.get(KEY_VIEW)
    registrations = {}
    registered = []
    rolls = {}
    for key, entry in entries.items():
        if key.startswith(KEY_WORKERS):
            registration = Registration.decode(entry.value)
            registrations[registration.id] = registration
            registered.append(Registered(registration.id, entry.created))
        elif key.startswith(KEY_ROLLS):
            with suppress(ProtocolError):
                rolls[key[len(KEY_ROLLS) :]] = Roll.decode(entry.value)
    registered.sort(key=lambda worker: worker.created)
    sizes = [decode_whole(entry.value, "workers", 1) for key, entry in entries.items() if key.startswith(KEY_SIZE)]
    stop = decode_json(entries[KEY_STOP].value).get("reason", "stopped") if KEY_STOP in entries else ""
    rewinds = entries.get(KEY_REWINDS)
    state = LedgerState(
        view=View.decode(view.value) if view else None,
        view_revision=view.revision if view else 0,
        registered=tuple(registered),
        dead=frozenset(key[len(KEY_DEAD) :] for key in entries if key.startswith(KEY_DEAD)),
        size=sum(sizes) if sizes else 1,
        stop=str(stop),
        done=KEY_DONE in entries,
        rolls=rolls,
        rewound=rewinds is not None and view is not None and rewinds.revision > view.revision,
    )
    return LedgerNews(state, registrations, Rewinds.decode(rewinds.value) if rewinds else Rewinds())
