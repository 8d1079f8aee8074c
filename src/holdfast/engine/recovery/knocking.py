"""Finding out which workers can be reached: dial them all, hang up, and put what came of it into the mailbox.

A knock is a connection for the group of no view: the other side proves itself, answers, and closes it. Its listener
does that while its loop computes. One thread a peer, each of which ends in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from holdfast.core.errors import PeerError
from holdfast.core.words import Registration
from holdfast.membership.messages import Knock, Knocked
from holdfast.net.dialling import dial
from holdfast.net.greeting import NO_NUMBER, Hello
from holdfast.net.mailbox import Mailbox
from holdfast.net.meeting import GROUP
from holdfast.trust.keys import Keys

AGAIN_S = 0.25  # after a refusal


class Knocker:
    """Knocks for one worker. Any thread may call `knock`."""

    def __init__(self, me: str, host: str, keys: Keys, mailbox: Mailbox) -> None:
        self._me = me
        self._host = host
        self._keys = keys
        self._mailbox = mailbox

    def knock(self, knock: Knock, registrations: Mapping[str, Registration]) -> None:
        """Returns at once. The mailbox gets one Knocked when all peers have answered, or the time is over."""
        threading.Thread(
            target=self._knock, args=(knock, dict(registrations)), name="holdfast-knock", daemon=True
        ).start()

    def _knock(self, knock: Knock, registrations: Mapping[str, Registration]) -> None:
        deadline = time.monotonic() + knock.within_s
        reached: set[str] = set()
        threads = [
            threading.Thread(
                target=self._reach, args=(registrations[peer], deadline, reached), name="holdfast-knock", daemon=True
            )
            for peer in knock.peers
            if peer in registrations
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        there = frozenset(reached)
        found = tuple(peer for peer in knock.peers if peer in there)
        missed = tuple(peer for peer in knock.peers if peer not in there)
        self._mailbox.put(Knocked(knock.number, found, missed))

    def _reach(self, registration: Registration, deadline: float, reached: set[str]) -> None:
        """Until it answers or the time is over: a link that flaps, or a listener that is just busy, is no cut."""
        while time.monotonic() < deadline:
            with suppress(PeerError):
                hello = Hello(GROUP, NO_NUMBER, self._me)
                connection = dial(registration, self._host, self._keys, hello)
                connection.close()
                if connection.peer == registration.id:
                    reached.add(registration.id)
                    return
            time.sleep(min(AGAIN_S, max(0.0, deadline - time.monotonic())))
