"""A server's line to the ledger: two threads, so that slices never wait for it.

`LedgerFollower` puts what changes into a mailbox; workers have one too. The command thread registers the server, keeps
its lease alive, and carries out proposals. A proposal whose answer did not come may have been carried out or not: what
the follower sees then tells.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.errors import LeaseGone, LedgerError
from holdfast.core.words import KEY_SERVERS, KEY_SLICE, KEY_STARTED_OVER, Registration, encode_json
from holdfast.ledger.port import Change, Ledger, Reading
from holdfast.ledger.watching import RETRY_S, WAIT_S, follow
from holdfast.log.configuration import Configuration
from holdfast.servers.log_codec import encode_configuration

PROPOSALS_MAX = 1024


@dataclass(frozen=True)
class LedgerValue:
    """What stands under a key now; None: nothing any more."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class LedgerWhole:
    """Everything, at the start and after changes were missed. First of all, whether all began anew."""

    values: tuple[LedgerValue, ...]


@dataclass(frozen=True)
class LedgerAnswers:
    """Whether it does: said when that changes."""

    answers: bool


class LedgerFollower:
    """Posts one LedgerWhole and then every LedgerValue, from a thread of its own."""

    def __init__(self, open_ledger: Callable[[], Ledger], post: Callable[[object], None], thread: str) -> None:
        self._open = open_ledger
        self._post = post
        self._ledger: Ledger | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._ledger is not None:
            self._ledger.close()  # wakes the thread
        self._thread.join(timeout=2 * WAIT_S)

    def _run(self) -> None:
        self._ledger = ledger = self._open()
        follow(ledger, self._closing, whole=self._post_whole, changed=self._post_changes)
        ledger.close()

    def _post_whole(self, reading: Reading) -> None:
        entries = sorted(reading.entries, key=lambda one: one.key != KEY_STARTED_OVER)
        self._post(LedgerWhole(tuple(LedgerValue(one.key, one.value, one.revision) for one in entries)))

    def _post_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            value = change.value if change.kind == "put" else None
            self._post(LedgerValue(change.key, value, change.revision))


class LedgerLine:
    """`open_ledger` is called once for each thread. `post` is called from both."""

    def __init__(
        self,
        open_ledger: Callable[[], Ledger],
        registration: Registration,
        post: Callable[[object], None],
        *,
        lease_s: float,
    ) -> None:
        self._open = open_ledger
        self._post = post
        self._answers = True
        self._registration = registration
        self._lease_s = lease_s
        self._closing = False
        self._asked = threading.Condition()
        self._proposals: deque[tuple[str, Configuration, int]] = deque()
        self._follower = LedgerFollower(open_ledger, post, "holdfast-server-watch")
        self._thread = threading.Thread(target=self._command, name="holdfast-server-command", daemon=True)

    def start(self) -> None:
        self._follower.start()
        self._thread.start()

    def propose(self, name: str, configuration: Configuration, expected: int) -> None:
        with self._asked:
            if len(self._proposals) < PROPOSALS_MAX:
                self._proposals.append((name, configuration, expected))
                self._asked.notify()

    def close(self) -> None:
        with self._asked:
            self._closing = True
            self._asked.notify()
        self._thread.join(timeout=2 * WAIT_S)
        self._follower.close()

    def _command(self) -> None:
        ledger, lease, renew_at = self._open(), 0, 0.0
        while not self._closing:
            try:
                now = time.monotonic()
                if now >= renew_at:
                    lease = self._renewed(ledger, lease)
                    renew_at = now + self._lease_s / 3
                    self._note(True)
                self._carry_out(ledger)
            except LeaseGone:
                lease = 0
                renew_at = 0.0
            except LedgerError:
                renew_at = time.monotonic() + RETRY_S
                self._note(False)
            with self._asked:
                if not self._closing and not self._proposals:
                    self._asked.wait(max(0.001, min(WAIT_S, renew_at - time.monotonic())))
        if lease:
            with suppress(LedgerError):  # it runs out by itself
                ledger.revoke(lease)
        ledger.close()

    def _note(self, answers: bool) -> None:
        if answers != self._answers:
            self._answers = answers
            self._post(LedgerAnswers(answers))

    def _renewed(self, ledger: Ledger, lease: int) -> int:
        if lease:
            ledger.keep_alive(lease)
            return lease
        lease = ledger.grant(self._lease_s)
        ledger.put(KEY_SERVERS + self._registration.id, self._registration.encode(), lease=lease)
        return lease

    def _carry_out(self, ledger: Ledger) -> None:
        while True:
            with self._asked:
                if not self._proposals:
                    return
                name, configuration, expected = self._proposals.popleft()
            value = encode_json(encode_configuration(configuration))
            ledger.compare_and_set(KEY_SLICE + name, value, expected=expected)
