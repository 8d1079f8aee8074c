"""Bringing the members of a view together: who dials whom, and what to do with a connection that comes too early.

The member behind dials the one before it, so each pair has one connection. Another worker may learn of a view
sooner and dial before we know that view: its connection is parked until we do. One for a view that is over is closed.
Belongs to the thread of the user's loop; dialling happens in short-lived threads that report to the mailbox.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from holdfast.core.errors import PeerError
from holdfast.core.words import Registration, View
from holdfast.net.dialling import address_from
from holdfast.net.greeting import Hello, SharedMemory
from holdfast.net.groups import Connection, Decode, Group
from holdfast.net.mailbox import Mailbox
from holdfast.net.wires import Wires

GROUP = "group"  # the purpose of these connections; a Hello's number is the view's
PARKED_VIEWS_MAX = 8


@dataclass(frozen=True)
class Connected:
    view: int
    connection: Connection


@dataclass(frozen=True)
class Unreachable:
    view: int
    peer: str
    reason: str


class Meeting:
    """`decode` reads what members say to each other (groups.py). `memory` is what we share with peers on this host;
    None where everything travels over connections.
    """

    def __init__(self, me: str, wires: Wires, mailbox: Mailbox, decode: Decode, memory: SharedMemory | None) -> None:
        self._me = me
        self._wires = wires
        self._mailbox = mailbox
        self._decode = decode
        self._memory = memory
        self._registrations: Mapping[str, Registration] = {}
        self._group: Group | None = None
        self._newest = 0
        self._parked: dict[int, dict[str, Connection]] = {}

    def open(self, view: View, registrations: Mapping[str, Registration]) -> Group:
        """Start to connect to all members. Connections and failures arrive in the mailbox."""
        group = self._group = Group(view, self._me, self._decode, self._wires.kernel)
        self._newest = view.number
        self._registrations = registrations
        group.watch(self._mailbox.fd)
        for number in [number for number in self._parked if number < view.number]:
            for connection in self._parked.pop(number).values():
                connection.close()
        for connection in self._parked.pop(view.number, {}).values():
            self._adopt(group, connection)
        for peer in view.members[: view.rank(self._me)]:
            registration = registrations.get(peer)
            if registration is None:
                self._mailbox.put(Unreachable(view.number, peer, "it is not registered"))
                continue
            self._wires.kernel.start(f"holdfast-dial-{peer}", partial(self._dial, view, registration))
        return group

    def connected(self, item: Connected) -> None:
        """A connection was made: it is for the group, for a view to come, or for one that is over."""
        group = self._group
        if group is not None and item.view == group.view.number and not group.closed:
            self._adopt(group, item.connection)
        elif item.view <= self._newest or len(self._parked) >= PARKED_VIEWS_MAX:  # fence: an old view is over
            item.connection.close()
        else:
            parked = self._parked.setdefault(item.view, {})
            if (former := parked.pop(item.connection.peer, None)) is not None:
                former.close()  # it dialled again, so it has given that one up
            parked[item.connection.peer] = item.connection

    def _adopt(self, group: Group, connection: Connection) -> None:
        peer = connection.peer
        if peer not in group.view.members or peer in group.connections:
            connection.close()
        elif self._memory is not None and connection.memory is None and self._is_near(connection):
            connection.close()
            self._mailbox.put(Unreachable(group.view.number, peer, "it did not share its memory"))
        else:
            group.add(connection)

    def _is_near(self, connection: Connection) -> bool:
        """Whether it is of a worker on this host, whose memory we need."""
        registration = self._registrations.get(connection.peer)
        if registration is None:
            return connection.sock.family == socket.AF_UNIX
        return address_from(self._wires.host, registration).startswith("unix:")

    def _dial(self, view: View, registration: Registration) -> None:
        try:
            hello = Hello(GROUP, view.number, self._me)
            connection = self._wires.dial(registration, hello, memory=self._memory)
            if connection.peer != registration.id:
                connection.close()
                raise PeerError(f"{connection.peer} answered instead")
            self._mailbox.put(Connected(view.number, connection))
        except PeerError as error:
            self._mailbox.put(Unreachable(view.number, registration.id, error.message))
