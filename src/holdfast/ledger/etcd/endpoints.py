"""The members of an etcd cluster as one thing that can be asked: channels, short tries, failover, authentication.

One channel for each endpoint, made when it is first needed. A question goes to the endpoint that answered last; if
that does not answer within a short try, to the next, and so on until the caller's deadline. The tries are short
because a member whose leader just died, or that is stopped, holds a question until its deadline: a lease of two seconds
must survive two such members. They may be repeated because everything that is asked through here may be: ledger.py
sees to that.

Threads: any. `_guard` covers which endpoint is current, the token, and the open streams; it is never held while
waiting for the network.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import grpc

from holdfast.core.errors import LedgerRefused, LedgerUnavailable
from holdfast.ledger.etcd import rpc_pb2 as rpc
from holdfast.ledger.etcd.address import Address, Credentials, EtcdUrl
from holdfast.ledger.etcd.answers import Elsewhere, TokenOld, failure_of, handshake_refused, refusal

TRY_S = 0.5
KEEP_ALIVE_TRY_S = 0.4
FIRST_TRY_S = 1.5  # with proving oneself: etcd hashes passwords slowly, on purpose
PAUSE_S = 0.05  # after every endpoint failed once
_MESSAGE_BYTES_MAX = 64 * 1024 * 1024
_TOKEN_TRIES_MAX = 3

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Method(Generic[Request, Reply]):
    """One of etcd's calls."""

    def __init__(self, path: str, request: type[Request], reply: type[Reply], *, try_s: float = TRY_S) -> None:
        self.path = path
        self.try_s = try_s
        self.serialize: Callable[[Request], bytes] = request.SerializeToString  # type: ignore[attr-defined]
        self.parse: Callable[[bytes], Reply] = reply.FromString  # type: ignore[attr-defined]


RANGE = Method("/etcdserverpb.KV/Range", rpc.RangeRequest, rpc.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", rpc.TxnRequest, rpc.TxnResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", rpc.LeaseGrantRequest, rpc.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", rpc.LeaseRevokeRequest, rpc.LeaseRevokeResponse)
# Streams to etcd, but one question and one answer are a stream too.
KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive",
    rpc.LeaseKeepAliveRequest,
    rpc.LeaseKeepAliveResponse,
    try_s=KEEP_ALIVE_TRY_S,
)
WATCH = Method("/etcdserverpb.Watch/Watch", rpc.WatchRequest, rpc.WatchResponse)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", rpc.AuthenticateRequest, rpc.AuthenticateResponse)
STATUS = Method("/etcdserverpb.Maintenance/Status", rpc.StatusRequest, rpc.StatusResponse)
MEMBER_LIST = Method("/etcdserverpb.Cluster/MemberList", rpc.MemberListRequest, rpc.MemberListResponse)

# Members that know of no leader say so at once, and end streams, rather than keep us waiting.
_LEADER_REQUIRED = ("hasleader", "true")


class Endpoint:
    """One member's address, its channel, and the streams that are open on it."""

    def __init__(self, address: Address, url: EtcdUrl, credentials: Credentials) -> None:
        self.address = address
        self.answered_at = 0.0  # when it last showed that it has a majority behind it
        self.streams: set[Any] = set()
        self.probing = False
        self._url = url
        self._credentials = credentials
        self._making = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._callables: dict[str, Any] = {}
        self._closed = False

    def callable(self, method: Method[Request, Reply]) -> Any:
        """What grpc makes of the method on this endpoint's channel."""
        with self._making:
            if self._closed:
                raise LedgerUnavailable("this ledger is closed")
            if self._channel is None:
                self._channel = _make_channel(self.address, self._url.tls, self._credentials)
            if method.path not in self._callables:
                make = self._channel.unary_stream if method is WATCH else self._channel.unary_unary
                self._callables[method.path] = make(
                    method.path, request_serializer=method.serialize, response_deserializer=method.parse
                )
            return self._callables[method.path]

    def close(self) -> None:
        with self._making:
            self._closed = True
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class Endpoints:
    def __init__(self, url: EtcdUrl, credentials: Credentials, *, first: int = 0) -> None:
        self.all = [Endpoint(address, url, credentials) for address in url.addresses]
        self._credentials = credentials
        self._guard = threading.Lock()
        self._current = first % len(self.all)
        self._token = ""
        self._token_wanted = bool(credentials.user)
        self._cluster = 0
        self._closing = threading.Event()
        self._process = os.getpid()

    # -- asking

    def call(
        self,
        method: Method[Request, Reply],
        request: Request,
        deadline: float,
        *,
        lost: Callable[[], None] = lambda: None,
    ) -> Reply:
        """The answer of whichever endpoint gives one. May send the request several times.

        `lost` is told each time that one was sent without an answer: it may still arrive. Raises LedgerUnavailable at
        the deadline, LedgerRefused, and what answers.py names.
        """
        troubles: dict[Endpoint, Elsewhere] = {}
        old_tokens = 0
        while True:
            endpoint = self.current()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self.unavailable(troubles)
            try:
                return self.ask(endpoint, method, request, min(self._try_s(method), left_s))
            except TokenOld as error:
                old_tokens += 1
                if old_tokens >= _TOKEN_TRIES_MAX:
                    raise refusal(str(error)) from error
            except Elsewhere as trouble:
                lost()
                self.check_open()
                self.failed(endpoint)
                again = endpoint in troubles
                troubles[endpoint] = trouble
                if len(troubles) == len(self.all):
                    if all(found.tls for found in troubles.values()):
                        raise handshake_refused(trouble.reason) from trouble
                    if again or len(self.all) == 1:
                        self._closing.wait(min(PAUSE_S, max(0.0, deadline - time.monotonic())))

    def ask(self, endpoint: Endpoint, method: Method[Request, Reply], request: Request, timeout_s: float) -> Reply:
        """One try at one endpoint. Raises Elsewhere if it does not serve."""
        until = time.monotonic() + timeout_s
        metadata, token = self._metadata(endpoint, timeout_s)
        if method is STATUS:
            metadata = metadata[1:]  # also one without a leader shall answer
        try:
            reply = endpoint.callable(method)(request, timeout=max(until - time.monotonic(), 0.001), metadata=metadata)
        except grpc.RpcError as error:
            raise self._failure(error, token) from None
        except ValueError as error:  # the channel was closed under us
            raise Elsewhere(str(error)) from None
        self._check_cluster(endpoint, reply)
        if method is not STATUS:
            endpoint.answered_at = time.monotonic()
        return reply  # type: ignore[no-any-return]

    def open_stream(self, endpoint: Endpoint, method: Method[Request, Reply], request: Request) -> Any:
        """A stream of answers on this endpoint, cancelled as soon as anyone finds that it does not serve."""
        metadata, _ = self._metadata(endpoint, self._try_s(method))
        try:
            stream = endpoint.callable(method)(request, metadata=metadata)
        except ValueError as error:
            raise Elsewhere(str(error)) from None
        with self._guard:
            endpoint.streams.add(stream)
        return stream

    def close_stream(self, endpoint: Endpoint, stream: Any) -> None:
        with self._guard:
            endpoint.streams.discard(stream)
        stream.cancel()

    # -- which endpoint

    def current(self) -> Endpoint:
        self.check_open()
        with self._guard:
            return self.all[self._current]

    def failed(self, endpoint: Endpoint) -> None:
        """It does not serve: the next one is current, and its streams look for another."""
        with self._guard:
            endpoint.answered_at = 0.0
            if self.all[self._current] is endpoint:
                self._current = (self._current + 1) % len(self.all)
            streams = tuple(endpoint.streams)
            endpoint.streams.clear()
        for stream in streams:
            stream.cancel()

    def probe(self, endpoint: Endpoint) -> None:
        """Find out, without waiting for it, whether this endpoint has a majority behind it."""
        with self._guard:
            if endpoint.probing:
                return
            endpoint.probing = True
            token = self._token
        metadata = (_LEADER_REQUIRED, ("token", token)) if token else (_LEADER_REQUIRED,)
        try:
            request = rpc.RangeRequest(key=b"/holdfast/", count_only=True)
            call = endpoint.callable(RANGE).future(request, timeout=TRY_S, metadata=metadata)
        except (ValueError, LedgerUnavailable):  # closed under us
            endpoint.probing = False
            return
        call.add_done_callback(lambda done: self._probed(endpoint, done))

    def _probed(self, endpoint: Endpoint, call: Any) -> None:
        endpoint.probing = False
        if self._closing.is_set():
            return
        if call.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            endpoint.answered_at = time.monotonic()
        else:
            self.failed(endpoint)

    @staticmethod
    def unavailable(troubles: Mapping[Endpoint, Elsewhere]) -> LedgerUnavailable:
        reasons = "; ".join(f"{endpoint.address}: {trouble.reason}" for endpoint, trouble in troubles.items())
        return LedgerUnavailable(f"the ledger does not answer ({reasons or 'no time was left to ask'})")

    # -- the end

    def check_open(self) -> None:
        if self.forked:
            raise LedgerUnavailable("this ledger was opened before this process was forked, and is its parent's")
        if self._closing.is_set():
            raise LedgerUnavailable("this ledger is closed")

    @property
    def forked(self) -> bool:
        """In a child process there are neither grpc's threads nor ours, and locks may be held for ever."""
        return os.getpid() != self._process

    def close(self) -> None:
        self._closing.set()
        for endpoint in self.all:
            endpoint.close()

    # -- inside

    def _try_s(self, method: Method[Request, Reply]) -> float:
        return FIRST_TRY_S if self._token_wanted and not self._token else method.try_s

    def _metadata(self, endpoint: Endpoint, timeout_s: float) -> tuple[tuple[tuple[str, str], ...], str]:
        if not self._token_wanted:
            return (_LEADER_REQUIRED,), ""
        token = self._token or self._authenticate(endpoint, timeout_s)
        return (_LEADER_REQUIRED, ("token", token)) if token else (_LEADER_REQUIRED,), token

    def _authenticate(self, endpoint: Endpoint, timeout_s: float) -> str:
        """Two threads may both do this; either token will do."""
        request = rpc.AuthenticateRequest(name=self._credentials.user, password=self._credentials.password)
        try:
            reply = endpoint.callable(AUTHENTICATE)(request, timeout=timeout_s, metadata=(_LEADER_REQUIRED,))
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                self._token_wanted = False  # it asks nobody for a password
                return ""
            raise failure_of(error) from None
        except ValueError as error:
            raise Elsewhere(str(error)) from None
        self._token = reply.token
        return self._token

    def forget_token(self, token: str = "") -> None:
        """Authenticate anew before the next question, unless that has happened since `token` was used."""
        with self._guard:
            if not token or self._token == token:
                self._token = ""

    def _failure(self, error: grpc.RpcError, token: str) -> Exception:
        failure = failure_of(error)
        if isinstance(failure, TokenOld):
            self.forget_token(token)
        elif self._credentials.user and not self._token_wanted and "user name is empty" in str(failure):
            self._token_wanted = True  # authentication was enabled after we looked
            return TokenOld(str(failure))
        return failure

    def _check_cluster(self, endpoint: Endpoint, reply: Any) -> None:
        """Endpoints of two clusters would be two ledgers, each with a majority of its own."""
        cluster = reply.header.cluster_id
        with self._guard:
            self._cluster = self._cluster or cluster
            same = self._cluster == cluster
        if not same:
            raise LedgerRefused(
                f"{endpoint.address} belongs to another etcd cluster than the one that answered before",
                hint="name members of one cluster only; a cluster whose data was deleted is another one",
            )


def _make_channel(address: Address, tls: bool, credentials: Credentials) -> grpc.Channel:
    options: Sequence[tuple[str, int]] = (
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # this file's business
        ("grpc.service_config_disable_resolution", 1),
        # After an outage, however long, the next attempt to connect is never far.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", 1000),  # how long one attempt may take
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        # etcd takes pings more frequent than every 5 s for an attack. The timeout is also TCP's for unacknowledged
        # data, which is what ends a connection over a link that was cut.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 2_000),
        ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    )
    if not tls:
        return grpc.insecure_channel(_target(address), options=options)
    secrets = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.cert)
    return grpc.secure_channel(_target(address), secrets, options=options)


def _target(address: Address) -> str:
    if ":" in address.host:
        host = address.host.replace("%", "%25")  # of a zone: grpc takes this for a URL
        return f"ipv6:[{host}]:{address.port}"
    if address.host.replace(".", "").isdigit():
        return f"ipv4:{address.host}:{address.port}"
    return f"dns:///{address.host}:{address.port}"
