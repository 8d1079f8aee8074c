"""Where a worker accepts connections of other workers: one thread for all who knock, and purposes that are registered.

A purpose is a name and what is done with a connection that asks for it. To add one, register it (engine/place.py) and
dial with its name (dialling.py): see docs/how-to/add-a-connection-purpose.md. A connection for anything else is closed.

Threads: `holdfast-listener` attends to everybody until they have said their Hello (acceptor.py). A connection that is
handed over belongs to whoever its purpose names. One that is served has a thread of its own, of which there are at most
SERVED_MAX for all purposes together.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.errors import PeerError
from holdfast.net.acceptor import AcceptLimits, Acceptor
from holdfast.net.greeting import NO_NUMBER, Greeting, Hello, SharedMemory, send_hello
from holdfast.net.groups import Connection
from holdfast.net.sockets import prepare
from holdfast.trust.keys import Keys

SERVED_MAX = 16


@dataclass(frozen=True)
class Served:
    """`serve` is given the Hello's number and the connection, in a thread of its own, and may wait. When it returns, or
    raises PeerError, OSError or ValueError, the connection is closed.
    """

    serve: Callable[[int, socket.socket], None]


@dataclass(frozen=True)
class HandedOver:
    """The connection is answered with our own Hello and memory, and `take` is given the Hello's number and the
    connection, in the listener's thread: it must not wait. One with NO_NUMBER is answered and closed: it asked whether
    we are here.
    """

    take: Callable[[int, Connection], None]


Purposes = Mapping[str, Served | HandedOver]


class Listener:
    """Accepts on all `servers`. `memory` goes to peers that came through a unix socket: they are on this host."""

    def __init__(
        self,
        servers: Sequence[socket.socket],
        keys: Keys,
        me: str,
        purposes: Purposes,
        *,
        memory: SharedMemory | None = None,
        limits: AcceptLimits | None = None,
    ) -> None:
        self._me = me
        self._purposes = purposes
        self._memory = memory
        self._room = threading.BoundedSemaphore(SERVED_MAX)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            self._selector,
            servers,
            greet=lambda sock, deadline: Greeting(sock, keys, deadline, purposes=purposes, memory=memory),
            welcome=self._welcome,
            limits=limits or AcceptLimits(),
        )
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="holdfast-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and hang up on all who have not said their Hello. Twice is no error."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._woken, 1)
            self._thread.join()
            os.close(self._woken)  # here and not there: the thread may have seen the flag before it was woken

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(self._acceptor.patience_s):
                self._acceptor.handle(key)
            self._acceptor.tend()
        self._acceptor.close()
        self._selector.close()

    def _welcome(self, greeting: Greeting) -> None:
        """What is raised here closes the connection, and the memory that came with it."""
        sock, hello = greeting.sock, greeting.hello
        prepare(sock)
        purpose = self._purposes[hello.purpose]
        if isinstance(purpose, HandedOver):
            mine = self._memory if sock.family == socket.AF_UNIX else None
            send_hello(sock, Hello(hello.purpose, hello.number, self._me), mine)
            connection = Connection(hello.sender, sock, greeting.memory)
            if hello.number == NO_NUMBER:
                connection.close()  # it was answered here, since the owner may be busy for long
            else:
                purpose.take(hello.number, connection)
            return
        if greeting.memory is not None:
            greeting.memory.close()
        if not self._room.acquire(blocking=False):
            raise PeerError("too many connections are served at once")
        name = f"holdfast-{hello.purpose}"
        threading.Thread(target=self._serve, args=(purpose, hello.number, sock), name=name, daemon=True).start()

    def _serve(self, purpose: Served, number: int, sock: socket.socket) -> None:
        try:
            purpose.serve(number, sock)
        except (PeerError, OSError, ValueError):
            pass  # the other side is gone; it says so itself
        finally:
            sock.close()
            self._room.release()
