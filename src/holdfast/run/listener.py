"""The accepting side of connections between workers: one thread for all who knock, until they have proved themselves.

Whoever cannot prove itself, says nothing in time or says nonsense costs one descriptor for at most GREETING_S. There
are at most UNPROVEN_MAX such connections; when one more comes, the oldest of those that have proved least is closed,
so that strangers who wait crowd out each other and not a peer, which needs milliseconds. A connection for a group is
handed over as soon as its Hello is there. One that fetches a snapshot, or reads what the host keeps in memory, is
served by a thread of its own, of which there are at most SNAPSHOTS_MAX.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from holdfast.core.errors import PeerError
from holdfast.reduce.arena import Arena
from holdfast.reduce.groups import Connection
from holdfast.run.greeting import BLOCKED, NO_VIEW, Greeting, Hello, send_hello
from holdfast.run.sockets import prepare
from holdfast.trust.keys import Keys

GREETING_S = 2.0
UNPROVEN_MAX = 256
SNAPSHOTS_MAX = 16
ACCEPTS_PER_TURN = 64
_PAUSE_S = 0.05


class Listener:
    """Accepts on all `servers`. `on_group` gets connections for groups, `on_snapshot` serves those for snapshots,
    `on_memory` those for what the host keeps in memory, if it keeps anything, `on_mean` those for the mean of a step.

    `arena` goes to peers that came through a unix socket: they are on this host and can map it.
    """

    def __init__(
        self,
        servers: Sequence[socket.socket],
        keys: Keys,
        me: str,
        *,
        arena: Arena | None,
        on_group: Callable[[int, Connection], None],
        on_snapshot: Callable[[int, socket.socket], None],
        on_memory: Callable[[socket.socket], None] | None = None,
        on_mean: Callable[[int, socket.socket], None] | None = None,
    ) -> None:
        self._servers = servers
        self._keys = keys
        self._me = me
        self._arena = arena
        self._on_group = on_group
        self._on_snapshot = on_snapshot
        self._on_memory = on_memory
        self._on_mean = on_mean
        self._room = threading.BoundedSemaphore(SNAPSHOTS_MAX)
        self._unproven: set[Greeting] = set()
        self._selector = selectors.DefaultSelector()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
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
        self._selector.register(self._woken, selectors.EVENT_READ)
        for server in self._servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ, server)
        while not self._closed:
            for key, _ in self._selector.select(self._patience_s()):
                if isinstance(key.data, Greeting):
                    if key.data in self._unproven:  # not closed earlier in this turn
                        self._advance(key.data)
                elif key.data is not None:
                    self._accept(key.data)
            now = time.monotonic()
            for late in [one for one in self._unproven if one.deadline <= now]:
                self._drop(late)
        for greeting in tuple(self._unproven):
            self._drop(greeting)
        for server in self._servers:
            server.close()
        self._selector.close()

    def _patience_s(self) -> float | None:
        if not self._unproven:
            return None
        return max(0.0, min(one.deadline for one in self._unproven) - time.monotonic())

    def _accept(self, server: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = server.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it hung up before we looked
            except OSError:
                # Out of descriptors: give back one of a stranger's, or wait until somebody else does.
                if not self._make_room():
                    time.sleep(_PAUSE_S)
                return
            if len(self._unproven) >= UNPROVEN_MAX:
                self._make_room()
            try:
                greeting = Greeting(sock, self._keys, time.monotonic() + GREETING_S)
            except (OSError, ValueError):
                sock.close()
                continue
            self._unproven.add(greeting)
            self._selector.register(greeting.sock, greeting.waits_for, greeting)

    def _make_room(self) -> bool:
        if not self._unproven:
            return False
        self._drop(min(self._unproven, key=lambda one: (one.stage, one.deadline)))
        return True

    def _drop(self, greeting: Greeting) -> None:
        self._forget(greeting)
        greeting.close()

    def _forget(self, greeting: Greeting) -> None:
        self._unproven.discard(greeting)
        with suppress(KeyError, ValueError):
            self._selector.unregister(greeting.sock)

    def _advance(self, greeting: Greeting) -> None:
        before = greeting.waits_for
        try:
            found = greeting.advance()
            if found is not None:
                self._forget(greeting)
                self._hand_over(greeting.sock, *found)
            elif greeting.waits_for != before:
                self._selector.modify(greeting.sock, greeting.waits_for, greeting)
        except (PeerError, OSError, ValueError):
            self._drop(greeting)

    def _hand_over(self, sock: socket.socket, hello: Hello, arena: Arena | None) -> None:
        """To the group's or the snapshot's owner. What is raised here closes the connection."""
        try:
            prepare(sock)
            if hello.purpose == "group":
                local = sock.family == socket.AF_UNIX
                send_hello(sock, Hello("group", hello.view, self._me), self._arena if local else None)
                connection = Connection(hello.sender, sock, arena)
                if hello.view == NO_VIEW:
                    connection.close()  # a knock: it was answered here, since the loop may be busy for long
                else:
                    self._on_group(hello.view, connection)
                return
        except BLOCKED as error:
            raise PeerError("the other side does not read") from error
        except BaseException:
            if arena is not None:
                arena.close()
            raise
        if arena is not None:
            arena.close()
        if not self._room.acquire(blocking=False):
            raise PeerError("too many fetch snapshots at once")
        threading.Thread(target=self._serve, args=(hello, sock), name="holdfast-snapshot", daemon=True).start()

    def _serve(self, hello: Hello, sock: socket.socket) -> None:
        try:
            if hello.purpose == "snapshot":
                self._on_snapshot(hello.view, sock)
            elif hello.purpose == "mean":
                if self._on_mean is not None:
                    self._on_mean(hello.view, sock)
            elif self._on_memory is not None:
                self._on_memory(sock)
        except (PeerError, OSError, ValueError):
            pass  # the joiner is gone; it says so itself
        finally:
            sock.close()
            self._room.release()
