"""Finding out which workers can be reached: dial them all, hang up, and put what came of it into the mailbox.

A knock is a connection for the group of no view: the other side proves itself, answers, and closes it. Its listener
does that while its loop computes. One thread a peer, each of which ends in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from holdfast.core.errors import PeerError
from holdfast.core.words import Registration
from holdfast.membership.messages import Knock, Knocked
from holdfast.net.greeting import NO_NUMBER, Hello
from holdfast.net.mailbox import Mailbox
from holdfast.net.meeting import GROUP
from holdfast.net.wires import Wires

AGAIN_S = 0.25  # after a refusal


class Knocker:
    """Knocks for one worker. Any thread may call `knock`."""

    def __init__(self, me: str, wires: Wires, mailbox: Mailbox) -> None:
        self._me = me
        self._wires = wires
        self._kernel = wires.kernel
        self._mailbox = mailbox

    def knock(self, knock: Knock, registrations: Mapping[str, Registration]) -> None:
        """Returns at once. The mailbox gets one Knocked when all peers have answered, or the time is over."""
        self._kernel.start("holdfast-knock", partial(self._knock, knock, dict(registrations)))

    def _knock(self, knock: Knock, registrations: Mapping[str, Registration]) -> None:
        deadline = self._kernel.now() + knock.within_s
        reached: set[str] = set()
        threads = [
            self._kernel.start("holdfast-knock", partial(self._reach, registrations[peer], deadline, reached))
            for peer in knock.peers
            if peer in registrations
        ]
        for thread in threads:
            thread.join(max(0.0, deadline - self._kernel.now()))
        there = frozenset(reached)
        found = tuple(peer for peer in knock.peers if peer in there)
        missed = tuple(peer for peer in knock.peers if peer not in there)
        self._mailbox.put(Knocked(knock.number, found, missed))

    def _reach(self, registration: Registration, deadline: float, reached: set[str]) -> None:
        """Until it answers or the time is over: a link that flaps, or a listener that is just busy, is no cut."""
        while self._kernel.now() < deadline:
            with suppress(PeerError):
                hello = Hello(GROUP, NO_NUMBER, self._me)
                connection = self._wires.dial(registration, hello)
                connection.close()
                if connection.peer == registration.id:
                    reached.add(registration.id)
                    return
            self._kernel.sleep(min(AGAIN_S, max(0.0, deadline - self._kernel.now())))
