"""Connections that others have made to a server, and what they may ask for.

    op         from       what it is
    log        a server   a message of the log's machine, with the payloads of its entries
    push       a worker   an update; answered when it is committed
    read       a worker   a query of the state, which may wait for up to `wait_s`
    retire     a worker   another worker is gone; answered when that is in the log
    snapshot   a server   the state as it is now
    hold       a worker   take no new update, and say which are taken
    room       a worker   whether there is memory here for what a slice begins with
    capture    a worker   capture the state when everything up to these limits is in it
    captured   a worker   what was captured; or drop it

Every request but `log` has an `id`, which comes back with the answer. Nothing that comes in is trusted: fields are
checked one by one, and what nobody would send ends the connection.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ProtocolError
from holdfast.net.greeting import Greeting, Hello
from holdfast.servers.buffers import Buffer, KeptPayload
from holdfast.servers.frames import FrameStream, Head, Later
from holdfast.servers.free_memory import free_bytes
from holdfast.servers.holding import Limits
from holdfast.servers.links import LOG
from holdfast.servers.needed_memory import state_bytes
from holdfast.servers.replica import Replica
from holdfast.servers.replicated import INITIAL, Author
from holdfast.servers.worker_memory import NoMemory, WorkerMemory
from holdfast.trust.keys import Keys

if TYPE_CHECKING:
    from holdfast.servers.server import SliceServer

SLICES = "slices"  # the purpose of connections of workers
WAIT_S_MAX = 30.0
READS_MAX = 4096  # of one connection, with a part of its memory each
HOLD_S = 5.0  # updates wait no longer than this for a capture
LARGE_BYTES = 64 << 20  # of an update: more than any slice has, if its parameters can be cut
NUMBER_MAX = 1 << 62
NAME_CHARACTERS_MAX = 200


class ServerGreeting(Greeting):
    """An accepted connection of a worker or of another server, until it has said its Hello."""

    def __init__(self, sock: socket.socket, keys: Keys, deadline: float) -> None:
        super().__init__(sock, keys, deadline, purposes=(LOG, SLICES), memory=NoMemory())


class Inbound:
    """One connection. What is said on it goes to `requests`."""

    def __init__(
        self, number: int, sock: socket.socket, hello: Hello, requests: Requests, memory: WorkerMemory | None
    ) -> None:
        self.number = number
        self.sender = hello.sender
        self.is_server_log = hello.purpose == LOG
        self._requests = requests
        self.memory = memory
        self._answers: dict[int, tuple[int, int]] = {}  # request -> the part of the memory that its answer goes to
        self._buffer: Buffer | None = None  # of the body that is being read
        self.stream = FrameStream(sock, self._place)

    def _place(self, head: Head, nbytes: int) -> Sequence[memoryview] | None:
        self._buffer = self._requests.room_for(self, head, nbytes)
        return None if self._buffer is None else [self._buffer.view]

    def take(self, head: Head, nbytes: int) -> None:
        buffer, self._buffer = self._buffer, None
        self._requests.take(self, head, buffer, nbytes)

    def answer_through(self, request: int, part: object) -> None:
        """The answer's body goes there, if it fits exactly."""
        if self.memory is None or not isinstance(part, list) or len(part) != 2:
            raise ProtocolError("an answer through memory that is not shared")
        self._answers[request] = self.memory.check(*part)
        while len(self._answers) > READS_MAX:
            del self._answers[next(iter(self._answers))]

    def shared_answer(self, request: int, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Put the answer into the shared memory where that was asked for; what is left to send."""
        start, nbytes = self._answers.pop(request, (0, -1))
        if self.memory is None or nbytes != sum(view.nbytes for view in views):
            return views
        self.memory.copy_in(start, list(views))
        return ()

    def close(self) -> None:
        self.stream.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None


class Requests:
    def __init__(self, server: SliceServer) -> None:
        self._server = server

    def room_for(self, inbound: Inbound, head: Head, nbytes: int) -> Buffer | None:
        """Memory for a body; None: it is not wanted. Raises Later while the log is full."""
        server = self._server
        if inbound.is_server_log:
            return server.pool.get(nbytes)  # the primary sends no more than a replica may have under way
        if head.get("op") != "push":
            raise ProtocolError("a body where none belongs")
        replica = server.replicas.get(str(head.get("slice")))
        if replica is None or not replica.leads:
            return None
        if self._too_large(head, nbytes):
            return None
        if not server.has_room_for(replica, nbytes):
            raise Later
        return server.pool.get(nbytes, server.led)

    def _too_large(self, head: Head, nbytes: int) -> str:
        """Why this does not fit here.

        What a slice begins with is in its log for a while, and becomes its state; the optimizers' part of that comes
        with the first step, also in the slices that are here already.
        """
        payload = head.get("payload")
        begins = payload if isinstance(payload, dict) and payload.get("kind") == INITIAL else None
        if begins is None and nbytes < LARGE_BYTES:
            return ""
        free, needed = free_bytes(), nbytes
        if begins is not None:
            free = max(0, free - sum(replica.to_come_bytes for replica in self._server.replicas.values()))
            needed += max(nbytes, _state_bytes(begins))
        if needed <= free:
            return ""
        have = f"{self._server.me} has {free / 1e9:.2f} GB of memory left"
        return f"{have}, and {head.get('slice')} needs {needed / 1e9:.2f} GB"

    def take(self, inbound: Inbound, head: Head, buffer: Buffer | None, nbytes: int) -> None:
        # Now, and not when the turn began: this process may have stood still until a moment ago, and what has come
        # since then must not be answered under a lease that was held before.
        self._server.now = time.monotonic()
        operation = head.get("op")
        replica = self._server.replica_for(name_in(head, "slice"))
        if inbound.is_server_log:
            if operation != "log" or replica is None:
                raise ProtocolError("a message that no server would send")
            replica.heard(inbound.sender, head.get("message"), buffer, self._server.now)
            return
        client = f"{inbound.number}:{whole_in(head, 'id')}"
        if replica is None:
            self._server.answer(client, {"refused": "there is no such slice here", "kind": "later", "primary": ""})
        elif operation == "push":
            if "memory" in head:
                buffer, nbytes = self._from_memory(inbound, replica, head)
            self._push(client, replica, head, buffer, nbytes)
        elif operation == "read":
            wait_s = head.get("wait_s", 0.0)
            if type(wait_s) not in (int, float) or not 0 <= wait_s <= WAIT_S_MAX:
                raise ProtocolError("a read that waits for ever")
            now, query = self._server.now, fields_in(head, "query")
            if "memory" in head:
                inbound.answer_through(whole_in(head, "id"), head["memory"])
            replica.read(client, fresh=head.get("fresh") is not False, query=query, deadline=now + wait_s, now=now)
        elif operation == "retire":
            worker, incarnation = name_in(head, "worker"), whole_in(head, "incarnation")
            replica.goodbye(client, worker, incarnation, self._server.now)
        elif operation == "room":
            reason = self._too_large(head, whole_in(head, "nbytes"))
            self._server.answer(client, {"refused": reason, "kind": "too large"} if reason else {})
        elif operation == "snapshot":
            replica.snapshot_asked(client)
        else:
            self._capture(client, replica, head)

    def _capture(self, client: str, replica: Replica, head: Head) -> None:
        operation, token = head.get("op"), name_in(head, "token")
        if operation == "hold":
            replica.capturing.hold(client, token, self._server.now + HOLD_S)
        elif operation == "capture":
            replica.capturing.capture_at(client, token, limits_in(head), self._server.now)
        elif operation == "captured":
            replica.capturing.captured(client, token, drop=head.get("drop") is True)
        else:
            raise ProtocolError(f"a request for {str(operation)[:20]!r}")

    def _from_memory(self, inbound: Inbound, replica: Replica, head: Head) -> tuple[Buffer | None, int]:
        """A payload that lies in the worker's memory: it is copied, since the log keeps it longer than the worker."""
        part = head["memory"]
        if inbound.memory is None or not isinstance(part, list) or len(part) != 2:
            raise ProtocolError("a payload in memory that is not shared")
        start, nbytes = inbound.memory.check(*part)
        server = self._server
        if not replica.leads or self._too_large(head, nbytes) or not server.has_room_for(replica, nbytes):
            return None, nbytes
        buffer = server.pool.get(nbytes, server.led)
        inbound.memory.copy_out(start, [buffer.view])
        return buffer, nbytes

    def _push(self, client: str, replica: Replica, head: Head, buffer: Buffer | None, nbytes: int) -> None:
        if nbytes and buffer is None and replica.leads and (reason := self._too_large(head, nbytes)):
            self._server.answer(client, {"refused": reason, "kind": "too large"})
            return
        if nbytes and buffer is None:  # it was thrown away, or left where it was
            known = replica.machine.configuration
            primary, epoch = (known.primary, known.epoch) if known is not None else ("", 0)
            is_full = "memory" in head and replica.leads
            me = self._server.me
            reason = (
                f"{me} has no room for it among the updates that it holds" if is_full else f"{me} is not the primary"
            )
            self._server.answer(client, {"refused": reason, "kind": "later", "primary": primary, "epoch": epoch})
            return
        try:
            payload = fields_in(head, "payload")
            author = Author(name_in(head, "worker"), whole_in(head, "incarnation"), whole_in(head, "sequence"))
            if author.sequence < 1:
                raise ProtocolError("a sequence before the first")
        except ProtocolError:
            if buffer is not None:
                buffer.release()
            raise
        replica.push(client, author, KeptPayload(payload, buffer), self._server.now)


def _state_bytes(payload: Head) -> int:
    """0: it is of another kind, or is going to be refused for what it is."""
    try:
        return state_bytes(payload)
    except ProtocolError:
        return 0


def name_in(fields: Head, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARACTERS_MAX:
        raise ProtocolError(f"a request with the {name} {str(value)[:20]!r}")
    return value


def whole_in(fields: Head, name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise ProtocolError(f"a request with the {name} {str(value)[:20]!r}")
    return value


def fields_in(fields: Head, name: str) -> dict[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise ProtocolError(f"a request with the {name} {str(value)[:20]!r}")
    return value


def limits_in(fields: Head) -> Limits:
    rows = fields.get("limits")
    if not isinstance(rows, list):
        raise ProtocolError("a capture without limits")
    found = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
            raise ProtocolError("a capture with what is no limit")
        if not all(type(one) is int and 0 <= one <= NUMBER_MAX for one in row[1:]):
            raise ProtocolError("a capture with what is no limit")
        found[row[0], row[1]] = row[2]
    return found
