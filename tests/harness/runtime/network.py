"""The simulated network: streams that keep order and take their time, break, and are cut; and who answers a call.

What runs over it is what ships: meetings, groups, knocks, and the desks that serve snapshots and means.
"""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import PeerError
from holdfast.core.words import Registration, host_of
from holdfast.net.dialling import CONNECT_S, address_from
from holdfast.net.greeting import NO_NUMBER, Hello
from holdfast.net.groups import Connection
from holdfast.net.listener import HandedOver
from holdfast.reduce.arena import Arena
from tests.harness.runtime.kernel import VirtualKernel, Waiters

if TYPE_CHECKING:
    from tests.harness.runtime.process import Process
    from tests.harness.runtime.world import World

DELAYS_S = {
    "quick": (0.0002, 0.0002, 0.001, 0.001, 0.005, 0.03),
    "slow": (0.001, 0.01, 0.01, 0.03, 0.1, 0.3),
}
ENDED = select.POLLIN | select.POLLRDHUP | select.POLLHUP
AGAIN_S = 0.05


class VirtualSocket:
    """One end of a stream. What its other end sends arrives in order, and later."""

    family = socket.AF_UNIX

    def __init__(self, network: Network, owner: str, peer: str) -> None:
        self._network = network
        self._timeline = network.timeline
        self.owner, self.peer = owner, peer
        self.other: VirtualSocket
        self.waiters = Waiters(self._timeline)
        self._sent: deque[bytes | None] = deque()  # on its way here, in order; None: the end
        self._arrived = bytearray()
        self._at_end = False
        self._error: OSError | None = None
        self._last_at = 0.0
        self.closed = False
        self._timeout_s: float | None = None
        self._fd = len(network.descriptors)
        network.descriptors[self._fd] = self

    # ---- on the way

    def carry(self, data: bytes | None) -> None:
        """The other end has sent this, or has closed."""
        self._sent.append(data)
        self.expect()

    def expect(self) -> None:
        if self._sent and self._network.passes(self.peer, self.owner):
            when = self._last_at = max(self._last_at, self._timeline.now + self._network.delay())
            self._timeline.at(when, self._arrive)

    def _arrive(self) -> None:
        if not self._sent or not self._network.passes(self.peer, self.owner):
            return  # it waits where the way is cut, and is expected again when it is not
        data = self._sent.popleft()
        if data is None:
            self._at_end = True
        else:
            self._arrived += data
        self.waiters.wake()

    def fail(self, reason: str) -> None:
        """The connection breaks here."""
        self._error = ConnectionResetError(errno.ECONNRESET, reason)
        self.waiters.wake()

    def readiness(self) -> int:
        if self.closed:
            return select.POLLNVAL
        ready = select.POLLOUT
        if self._arrived:
            ready |= select.POLLIN
        if self._error is not None or (self._at_end and not self._arrived):
            ready |= ENDED
        return ready

    # ---- as a socket

    def fileno(self) -> int:
        return -1 if self.closed else self._fd

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def send(self, data: Any) -> int:
        if self.closed or self._error is not None:
            raise self._error or OSError(errno.EBADF, "closed")
        if self._at_end:
            raise BrokenPipeError(errno.EPIPE, "the other side has closed")
        self.other.carry(bytes(data))
        return len(data)

    def sendmsg(self, views: Sequence[Any]) -> int:
        return self.send(b"".join(bytes(view) for view in views))

    def recv(self, size: int) -> bytes:
        self._wait_readable()
        data = bytes(self._arrived[:size])
        del self._arrived[:size]
        return data

    def recv_into(self, view: memoryview) -> int:
        data = self.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        return (self.recv_into(next(view for view in views if len(view))),)

    def _wait_readable(self) -> None:
        until = self._timeline.now + self._timeout_s if self._timeout_s is not None else None
        while not self._arrived and not self._at_end:
            if self.closed:
                raise OSError(errno.EBADF, "closed")
            if self._error is not None:
                raise self._error
            if self._timeout_s == 0.0:
                raise BlockingIOError
            if until is not None and self._timeline.now >= until:
                raise TimeoutError("timed out")
            self.waiters.wait(until - self._timeline.now if until is not None else None)

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.other.carry(None)
            self.waiters.wake()


class Network:
    def __init__(self, world: World) -> None:
        self._world = world
        self.timeline = world.timeline
        self._delays_s = DELAYS_S[world.schedule.network]
        self.descriptors: dict[int, Any] = {}
        self.sockets: dict[str, list[VirtualSocket]] = {}
        self._cuts: dict[tuple[str, str], int] = {}  # (from, to), of workers or hosts -> how many cuts

    def delay(self) -> float:
        rng = self.timeline.rng
        return rng.choice(self._delays_s) * (0.5 + rng.random())

    # ---- cuts

    def passes(self, source: str, target: str) -> bool:
        return not self._cuts or not (
            (source, target) in self._cuts or (host_of(source), host_of(target)) in self._cuts
        )

    def reaches(self, one: str, other: str) -> bool:
        return self.passes(one, other) and self.passes(other, one)

    def cut(self, ways: Sequence[tuple[str, str]]) -> None:
        for way in ways:
            self._cuts[way] = self._cuts.get(way, 0) + 1

    def heal(self, ways: Sequence[tuple[str, str]]) -> None:
        for way in ways:
            self._cuts[way] -= 1
            if not self._cuts[way]:
                del self._cuts[way]
        for ends in self.sockets.values():
            for end in ends:
                for _ in range(len(end._sent)):
                    end.expect()

    # ---- connections

    def pair(self, one: str, other: str) -> tuple[VirtualSocket, VirtualSocket]:
        near, far = VirtualSocket(self, one, other), VirtualSocket(self, other, one)
        near.other, far.other = far, near
        for end in (near, far):
            ends = self.sockets.setdefault(end.owner, [])
            ends[:] = [known for known in ends if not known.closed]
            ends.append(end)
        return near, far

    def process_ended(self, worker: str) -> None:
        """Its kernel closes what it had open."""
        for end in self.sockets.pop(worker, []):
            end.close()

    def call(self, caller: str, target: str) -> Process:
        """The process that answers, after a moment. PeerError if none does."""
        timeline, until = self.timeline, self.timeline.now + CONNECT_S
        caller_kernel = self._world.processes[caller].kernel
        while True:
            caller_kernel.sleep(2 * self.delay())
            process = self._world.processes.get(target)
            reached = self.reaches(caller, target)
            if reached and (process is None or not process.alive or process.purposes is None):
                raise PeerError(f"cannot connect: {target} is not there")
            if reached and process is not None and process.stopped_until <= timeline.now:
                return process
            if timeline.now >= until:
                raise PeerError(f"cannot connect: {target} does not answer")
            caller_kernel.sleep(AGAIN_S)


class _PeersArena(Arena):
    """Another process's memory, mapped here: closing it closes only this mapping."""

    def __init__(self, arena: Arena) -> None:
        vars(self).update(vars(arena))

    def close(self) -> None: ...


class VirtualWires:
    """A worker's way to the others (net/wires.py)."""

    def __init__(self, network: Network, me: str, kernel: VirtualKernel) -> None:
        self.host = host_of(me) or "here"
        self.kernel: Any = kernel
        self._network = network
        self._me = me

    def dial(self, registration: Registration, hello: Hello, *, memory: Any = None) -> Connection:
        process = self._network.call(self._me, registration.id)
        assert process.purposes is not None
        near, far = self._network.pair(self._me, registration.id)
        purpose = process.purposes[hello.purpose]
        assert isinstance(purpose, HandedOver)
        memory = memory if address_from(self.host, registration).startswith("unix:") else None
        if hello.number == NO_NUMBER:
            far.close()
        else:
            theirs = _PeersArena(memory) if memory is not None else None
            purpose.take(hello.number, Connection(self._me, far, theirs))  # type: ignore[arg-type]
        shared = process.arena if memory is not None else None
        return Connection(registration.id, near, _PeersArena(shared) if shared is not None else None)  # type: ignore[arg-type]

    def ask(self, registration: Registration, hello: Hello) -> Any:
        process = self._network.call(self._me, registration.id)
        assert process.purposes is not None
        near, far = self._network.pair(self._me, registration.id)
        purpose = process.purposes[hello.purpose]
        process.kernel.start(f"serves {hello.purpose}", lambda: process.serve(purpose, hello.number, far))
        return near
