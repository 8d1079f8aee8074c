"""The embedded ledger's client: port.Ledger over the server's unix socket or, from other hosts, its TCP port.

Every call has a deadline, within which the client connects anew if it must, for instance because the agent was
replaced. What can be repeated without harm is repeated when the connection breaks. A write whose request may have
arrived is not: it raises LedgerUnavailable, and the caller reads to learn what happened.

Threads: calls from any thread take turns on one connection. A watch has a connection of its own and belongs to one
thread; closing it, or the ledger, may come from any thread and wakes whoever waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import LedgerUnavailable, PeerError, ProtocolError
from holdfast.ledger import wire
from holdfast.ledger.channel import RETRY_S_MIN, Channel, check_socket_path, connect
from holdfast.ledger.machine import check_prefix
from holdfast.ledger.port import Change, Reading
from holdfast.ledger.requests import RequestedLedger
from holdfast.ledger.wire import Request
from holdfast.trust.keys import Keys

TIMEOUT_S = 2.0
_REPEATABLE = ("get", "read", "keep_alive", "revoke")
_HANDSHAKE_S_MIN = 0.25  # a watch that is only polled still gives a server this long to prove itself


class EmbeddedLedger(RequestedLedger):
    """The ledger that an EmbeddedServer serves on `socket_path`, or on TCP (`at`). It connects with the first call."""

    def __init__(self, socket_path: Path, secret: bytes, *, timeout_s: float = TIMEOUT_S) -> None:
        check_socket_path(socket_path)
        self._reach(f"unix:{socket_path}", Keys.from_secret(secret), timeout_s)

    @classmethod
    def at(cls, address: str, keys: Keys, *, timeout_s: float = TIMEOUT_S) -> EmbeddedLedger:
        """`address` is the server's own word for where it listens for other hosts, tcp:HOST:PORT."""
        ledger = cls.__new__(cls)
        ledger._reach(address, keys, timeout_s)
        return ledger

    def _reach(self, address: str, keys: Keys, timeout_s: float) -> None:
        self._address = address
        self._keys = keys
        self._timeout_s = timeout_s
        self._turn = threading.Lock()  # whoever holds it owns the connection and the ids
        self._channel: Channel | None = None
        self._last_id = 0
        self._closed = False
        self._opening = threading.Lock()  # so that no watch is opened behind the back of `close`
        self._watches: weakref.WeakSet[EmbeddedWatch] = weakref.WeakSet()

    def watch(self, prefix: str, *, revision: int) -> EmbeddedWatch:
        check_prefix(prefix)
        with self._opening:
            if self._closed:
                raise LedgerUnavailable("this ledger is closed")
            watch = EmbeddedWatch(self._address, self._keys, prefix, revision)
            self._watches.add(watch)
            return watch

    def close(self) -> None:
        with self._opening:
            self._closed = True
            watches = tuple(self._watches)
        for watch in watches:
            watch.close()
        channel = self._channel
        if channel is not None:
            channel.interrupt()  # wakes a call that waits for its answer
        with self._turn:
            self._drop()

    # -- inside

    def _ask(self, request: Request) -> Any:
        deadline = time.monotonic() + self._timeout_s
        if not self._turn.acquire(timeout=self._timeout_s):
            raise LedgerUnavailable("other calls to the ledger are still waiting for their answers")
        try:
            while True:
                channel = self._connected(deadline)
                self._last_id += 1
                try:
                    channel.send(wire.encode_request(replace(request, id=self._last_id)), deadline)
                except OSError as error:
                    # It did not leave us whole, so the server cannot have acted on it: repeat whatever it is.
                    self._drop()
                    _check_time(deadline, error)
                    continue
                try:
                    return _DECODERS[request.op](self._result(channel, deadline))
                except (OSError, PeerError) as error:
                    self._drop()  # a late answer must not be taken for that of the next call
                    if request.op not in _REPEATABLE:
                        raise LedgerUnavailable(f"the {request.op} may or may not have happened: {error}") from error
                    _check_time(deadline, error)
                    time.sleep(RETRY_S_MIN)
        finally:
            self._turn.release()

    def _connected(self, deadline: float) -> Channel:
        if self._closed:
            raise LedgerUnavailable("this ledger is closed")
        if self._channel is None:
            self._channel = connect(self._address, self._keys, deadline, deadline, closed=lambda: self._closed)
        return self._channel

    def _result(self, channel: Channel, deadline: float) -> Any:
        """The `result` of the reply, or its message with the entries of all its frames."""
        entries: list[Any] = []
        while True:
            message = channel.receive(deadline)
            if message is None:
                raise TimeoutError("no answer in time")
            if message.get("id") != self._last_id:
                raise ProtocolError("the server answered another request")
            error = wire.decode_error(message)
            if error is not None:
                raise error
            if "result" in message:
                return message["result"]
            more = message.get("entries")
            if not isinstance(more, list):
                raise ProtocolError("the server answered without a result")
            entries += more
            if not message.get("more"):
                return {**message, "entries": entries}

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class EmbeddedWatch:
    """port.Watch. It connects with the first `next`, and anew whenever the connection broke.

    A server that is stopped, but not dead, looks like one where nothing changes: calls to the ledger tell.
    """

    def __init__(self, address: str, keys: Keys, prefix: str, revision: int) -> None:
        self._address = address
        self._keys = keys
        self._prefix = prefix
        self._revision = revision  # everything up to here has been handed out
        self._turn = threading.Lock()  # whoever holds it owns the connection
        self._channel: Channel | None = None
        self._closed = False

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        deadline = time.monotonic() + timeout_s
        try:
            with self._turn:
                return self._next(deadline)
        finally:
            self._drop_if_closed()

    def close(self) -> None:
        self._closed = True
        channel = self._channel
        if channel is not None:
            channel.interrupt()
        self._drop_if_closed()

    def _next(self, deadline: float) -> tuple[Change, ...]:
        while True:
            if self._closed:
                raise LedgerUnavailable("this watch is closed")
            try:
                if self._channel is None:
                    self._channel = self._connected(deadline)
                message = self._channel.receive(deadline)
                if message is None:
                    return ()
                error = wire.decode_error(message)
                if error is not None:
                    self._drop()
                    raise error
                changes, self._revision = wire.decode_changes(message)
                if changes:
                    return changes
            except (OSError, PeerError) as error:
                self._drop()
                if not self._closed:
                    _check_time(deadline, error)

    def _connected(self, deadline: float) -> Channel:
        patience = max(deadline, time.monotonic() + _HANDSHAKE_S_MIN)
        channel = connect(self._address, self._keys, deadline, patience, closed=lambda: self._closed)
        try:
            request = Request(op="watch", prefix=self._prefix, revision=self._revision)
            channel.send(wire.encode_request(request), patience)
        except BaseException:
            channel.close()
            raise
        return channel

    def _drop_if_closed(self) -> None:
        """Both `close` and a `next` that it woke end here; whoever comes last finds the turn free."""
        if self._closed and self._turn.acquire(blocking=False):
            self._drop()
            self._turn.release()

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _decode_reading(message: Any) -> Reading:
    if not isinstance(message, dict):
        raise ProtocolError("the server answered without entries")
    return Reading(wire.decode_entries(message.get("entries")), wire.decode_integer(message.get("revision")))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "get": lambda row: None if row is None else wire.decode_entry(row),
    "read": _decode_reading,
    "put": wire.decode_integer,
    "compare_and_set": lambda result: None if result is None else wire.decode_integer(result),
    "delete": bool,
    "grant": wire.decode_integer,
    "keep_alive": wire.decode_seconds,
    "revoke": bool,
}


def _check_time(deadline: float, error: Exception) -> None:
    if time.monotonic() >= deadline:
        raise LedgerUnavailable(f"the ledger does not answer: {error}") from error
