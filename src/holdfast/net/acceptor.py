"""The accepting side of all connections: whoever knocks is attended to within somebody's loop, until it is proven.

An `Acceptor` has no thread. Its owner has a loop around a selector, gives it every event (`handle`) and, now and then,
the time (`tend`). The ledger's server, the ring of agents and the workers' listener are such owners.

Whoever cannot prove itself, says nothing in time or says nonsense costs one descriptor for at most `greeting_s`. There
are at most `unproven_max` such connections; when one more comes, the oldest of those that have proved least is closed,
so that strangers who wait crowd out each other and not a peer, which needs milliseconds. A connection that is proven
goes to `welcome`, and is the owner's from then on. Where the owner has as many as it may have, strangers make
room first.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.core.errors import PeerError
from holdfast.net.proving import STAGES, Proving

ACCEPTS_PER_TURN_MAX = 64
PAUSE_S = 0.05  # without a descriptor to spare, until it is tried again

Newcomer = TypeVar("Newcomer", bound=Proving)


@dataclass(frozen=True, kw_only=True)
class AcceptLimits:
    unproven_max: int = 256
    greeting_s: float = 2.0  # for everything until it is proven
    connections_max: int = 1 << 20  # with those that the owner has


class Acceptor(Generic[Newcomer]):
    """Accepts on `servers`, which it owns. `greet` wraps a connection, given its deadline; `welcome` takes a proven one
    over: a PeerError, OSError or ValueError that it raises closes the connection. `owned` says how many the owner has.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        servers: Sequence[socket.socket],
        *,
        greet: Callable[[socket.socket, float], Newcomer],
        welcome: Callable[[Newcomer], None],
        limits: AcceptLimits,
        owned: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selector = selector
        self._servers = servers
        self._greet = greet
        self._welcome = welcome
        self._limits = limits
        self._owned = owned
        self._clock = clock
        self._unproven: dict[Newcomer, None] = {}  # the oldest first
        # Fewer than may be unproven: whoever is let in now is not crowded out before it was read once.
        self._accepts_per_turn = max(1, min(ACCEPTS_PER_TURN_MAX, limits.unproven_max // 2))
        self._accept_again_at = 0.0
        for server in servers:
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ, self)

    def handle(self, key: selectors.SelectorKey) -> bool:
        """Do what this event of the selector asks for. False: it is not about a newcomer."""
        if isinstance(key.data, Proving):
            if key.data in self._unproven:  # not closed earlier in this turn
                self._advance(key.data)
            return True
        if key.data is self:
            self._accept(key.fileobj)
            return True
        return False

    def tend(self) -> None:
        """Close those whose time is over, and listen again after a pause. Cheap where there is nobody."""
        if not self._unproven and not self._accept_again_at:
            return
        now = self._clock()
        for late in [one for one in self._unproven if one.deadline <= now]:
            self._drop(late)
        if self._accept_again_at and now >= self._accept_again_at:
            self._accept_again_at = 0.0
            for server in self._servers:
                self._selector.register(server, selectors.EVENT_READ, self)

    @property
    def patience_s(self) -> float | None:
        """How long the owner may wait until it calls `tend`; None: until something happens."""
        ends = [one.deadline for one in self._unproven]
        if self._accept_again_at:
            ends.append(self._accept_again_at)
        return max(0.0, min(ends) - self._clock()) if ends else None

    def close(self) -> None:
        """Stop listening, and hang up on all who are not proven."""
        for newcomer in tuple(self._unproven):
            self._drop(newcomer)
        for server in self._servers:
            with suppress(KeyError, ValueError):
                self._selector.unregister(server)
            server.close()

    def _accept(self, server: socket.socket) -> None:
        for _ in range(self._accepts_per_turn):
            try:
                sock, _ = server.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it hung up before we looked
            except OSError:
                # Out of descriptors: take back a stranger's. Without one the server would be ready for ever: look away.
                if not self._make_room():
                    self._pause()
                return
            if len(self._unproven) >= self._limits.unproven_max:
                self._make_room()
            full = len(self._unproven) + self._owned() >= self._limits.connections_max
            if full and not self._make_room():
                sock.close()
                continue
            try:
                newcomer = self._greet(sock, self._clock() + self._limits.greeting_s)
            except (OSError, ValueError):
                sock.close()
                continue
            self._unproven[newcomer] = None
            self._selector.register(newcomer.sock, newcomer.waits_for, newcomer)

    def _pause(self) -> None:
        for server in self._servers:
            self._selector.unregister(server)
        self._accept_again_at = self._clock() + PAUSE_S

    def _make_room(self) -> bool:
        for stage in range(STAGES):  # almost always the first of them all: strangers show nothing
            for newcomer in self._unproven:
                if newcomer.stage == stage:
                    self._drop(newcomer)
                    return True
        return False

    def _drop(self, newcomer: Newcomer) -> None:
        self._forget(newcomer)
        newcomer.close()

    def _forget(self, newcomer: Newcomer) -> None:
        self._unproven.pop(newcomer, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(newcomer.sock)

    def _advance(self, newcomer: Newcomer) -> None:
        before = newcomer.waits_for
        try:
            if newcomer.advance():
                self._forget(newcomer)
                self._welcome(newcomer)
            elif newcomer.waits_for != before:
                self._selector.modify(newcomer.sock, newcomer.waits_for, newcomer)
        except (PeerError, OSError, ValueError):
            self._drop(newcomer)
