"""port.Watch on etcd: a stream of one member's changes, and another member's when that one fails.

A thread reads the stream and queues whole revisions; `next` takes them out. Where a stream breaks, the next one begins
after the last revision that was queued, so that nothing is missing and nothing comes twice.

A member that is stopped or cut off leaves its streams open and silent. So while someone waits in `next` and the member
has not shown for a second that it has a majority behind it, it is asked to: a read with a short deadline. If that
fails, the stream is dropped and the thread goes to another member. Keep-alives through the same client count as signs
too, so that the watch of a worker asks nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from holdfast.core.errors import HoldfastError, LedgerUnavailable, WatchGap
from holdfast.ledger.etcd import rpc_pb2 as rpc
from holdfast.ledger.etcd.answers import Elsewhere, TokenOld, failure_of, handshake_refused, refusal
from holdfast.ledger.etcd.endpoints import PAUSE_S, RANGE, TRY_S, WATCH, Endpoint, Endpoints
from holdfast.ledger.port import Change

PROBE_S = 1.0
_QUEUED_CHANGES_MAX = 1024  # beyond this the stream is not read; etcd keeps what follows
_REFUSALS_MAX = 3
_JOIN_S = 1.0


class EtcdWatch:
    """`next` is for one thread at a time; `close` may come from any."""

    def __init__(
        self, endpoints: Endpoints, span: tuple[bytes, bytes], cut: int, revision: int, forget: Callable[[Any], None]
    ) -> None:
        """Changes after `revision` of the keys in `span`, whose first `cut` bytes are not the caller's business."""
        self._endpoints = endpoints
        self._span = span
        self._cut = cut
        self._forget = forget
        self._changed = threading.Condition()  # guards what follows
        self._revision = revision  # everything up to here has been queued
        self._queue: deque[Change] = deque()
        self._trouble: LedgerUnavailable | None = None  # no endpoint serves, and this is why
        self._end: HoldfastError | None = None  # the thread has ended, and this is why
        self._closed = False
        self._endpoint: Endpoint | None = None  # whose stream is open
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="holdfast-etcd-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        deadline = time.monotonic() + timeout_s
        self._endpoints.check_open()
        while True:
            probe_at = self._probe_if_due()
            with self._changed:
                if self._closed:
                    raise LedgerUnavailable("this watch is closed")
                if self._queue:
                    changes = tuple(self._queue)
                    self._queue.clear()
                    self._changed.notify_all()
                    return changes
                if self._end is not None:
                    raise self._end
                now = time.monotonic()
                if now >= deadline:
                    if self._trouble is not None:
                        raise self._trouble
                    return ()
                self._changed.wait(max(0.001, min(deadline, probe_at) - now))

    def close(self) -> None:
        if self._endpoints.forked:
            return
        with self._changed:
            self._closed = True
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()
        self._forget(self)

    def join(self) -> None:
        """Wait a little for the thread of a closed watch: it may be in the middle of a question."""
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    # -- whoever waits

    def _probe_if_due(self) -> float:
        """Have the member asked whether it still serves, if it has long said nothing; when to look again."""
        endpoint = self._endpoint
        now = time.monotonic()
        if endpoint is None:
            return now + PROBE_S
        due = endpoint.answered_at + PROBE_S
        if now < due:
            return due
        self._endpoints.probe(endpoint)
        return now + PROBE_S

    # -- the thread

    def _run(self) -> None:
        troubles: dict[Endpoint, Elsewhere] = {}  # since a stream was last up
        refusals: list[TokenOld] = []

        def served() -> None:
            troubles.clear()
            refusals.clear()
            self._say(None)

        while not self._closed:
            endpoint = None
            try:
                endpoint = self._endpoints.current()
                self._follow(endpoint, served)
            except Elsewhere as trouble:
                assert endpoint is not None
                self._endpoints.failed(endpoint)
                again = endpoint in troubles
                troubles[endpoint] = trouble
                if len(troubles) == len(self._endpoints.all):
                    if all(found.tls for found in troubles.values()):
                        return self._finish(handshake_refused(trouble.reason))
                    self._say(self._endpoints.unavailable(troubles))
                if again or len(self._endpoints.all) == 1:
                    self._pause()
            except TokenOld as error:
                refusals.append(error)
                if len(refusals) >= _REFUSALS_MAX:
                    return self._finish(refusal(str(error)))
            except HoldfastError as error:
                return self._finish(error)
        return None

    def _follow(self, endpoint: Endpoint, served: Callable[[], None]) -> None:
        """Queue what this endpoint streams. Ends by an exception, or because the watch was closed."""
        self._check_reached(endpoint)
        key, range_end = self._span
        create = rpc.WatchCreateRequest(key=key, range_end=range_end, start_revision=self._revision + 1, fragment=True)
        stream = self._endpoints.open_stream(endpoint, WATCH, rpc.WatchRequest(create_request=create))
        with self._changed:
            self._stream, self._endpoint = stream, endpoint
        changes: list[Change] = []
        try:
            for reply in () if self._closed else stream:
                if reply.canceled:
                    raise self._cancellation(reply)
                if reply.created:
                    served()
                changes += map(self._change, reply.events)
                if changes and not reply.fragment:
                    self._enqueue(changes)
                    changes = []
            if not self._closed:
                raise Elsewhere("it ended the watch")
        except grpc.RpcError as error:
            if not self._closed:
                raise failure_of(error) from None
        finally:
            with self._changed:
                self._stream = self._endpoint = None
            self._endpoints.close_stream(endpoint, stream)

    def _check_reached(self, endpoint: Endpoint) -> None:
        """Has this member a majority, and has the ledger reached our revision? etcd would wait for it for ever."""
        request = rpc.RangeRequest(key=self._span[0], count_only=True)
        reached = self._endpoints.ask(endpoint, RANGE, request, TRY_S).header.revision
        if reached < self._revision:
            raise WatchGap(f"revision {self._revision} is asked for, this ledger has only reached {reached}")

    def _cancellation(self, reply: rpc.WatchResponse) -> Exception:
        if reply.compact_revision:
            return WatchGap(
                f"changes after revision {self._revision} are asked for, those from {reply.compact_revision} are kept"
            )
        if "permission denied" in reply.cancel_reason or "auth" in reply.cancel_reason:
            self._endpoints.forget_token()
            return TokenOld(reply.cancel_reason)
        return Elsewhere(reply.cancel_reason or "it ended the watch")

    def _change(self, event: rpc.Event) -> Change:
        key = event.kv.key[self._cut :].decode(errors="replace")
        if event.type == rpc.Event.DELETE:
            return Change("delete", key, b"", event.kv.mod_revision)
        return Change("put", key, event.kv.value, event.kv.mod_revision)

    def _enqueue(self, changes: list[Change]) -> None:
        with self._changed:
            while len(self._queue) >= _QUEUED_CHANGES_MAX and not self._closed:
                self._changed.wait()
            self._queue += changes
            self._revision = changes[-1].revision
            self._changed.notify_all()

    def _say(self, trouble: LedgerUnavailable | None) -> None:
        with self._changed:
            self._trouble = trouble

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, PAUSE_S)

    def _finish(self, error: HoldfastError) -> None:
        with self._changed:
            self._end = error
            self._changed.notify_all()
        self._forget(self)
