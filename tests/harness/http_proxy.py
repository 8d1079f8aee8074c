"""A proxy in front of an HTTP server that does to its clients what networks and overloaded servers do.

    with HttpProxy(server.address) as proxy:
        storage = open_storage(server.uri("bucket/run", endpoint=proxy.endpoint))
        proxy.trouble(answer=503)                       # every request from now on
        proxy.trouble(cut_request_at=100_000, times=1)  # the next request ends in the middle of its body
        proxy.trouble(cut_answer_at=0, method="PUT")    # done by the server, but nobody hears of it
        proxy.trouble(stall=True)                       # connections stay open, and nothing comes
        proxy.heal()

One request for each connection: what a client keeps open is a matter between it and a healthy server.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from dataclasses import dataclass

HEAD_BYTES_MAX = 65536
CHUNK_BYTES = 65536
IDLE_S_MAX = 60.0  # after which a connection is given up, so that no thread stays behind
_BODY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    answer: int = 0  # a status, instead of asking the server
    cut_request_at: int | None = None  # bytes of the body that still pass
    cut_answer_at: int | None = None  # bytes of the whole answer that still pass
    stall: bool = False
    method: str = ""  # only such requests
    times: int | None = None  # so often; None: until healed


class HttpProxy:
    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._trouble: Trouble | None = None
        self._left = 0
        self._healed = threading.Event()
        self._closed = False
        self._open: set[socket.socket] = set()
        self.requests = 0
        self.troubled = 0  # requests that met trouble
        self.body_bytes = 0  # of requests, passed on
        threading.Thread(target=self._accept, name="http-proxy", daemon=True).start()

    def __enter__(self) -> HttpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def trouble(
        self,
        *,
        answer: int = 0,
        cut_request_at: int | None = None,
        cut_answer_at: int | None = None,
        stall: bool = False,
        method: str = "",
        times: int | None = None,
    ) -> None:
        with self._lock:
            self._trouble = Trouble(
                answer=answer,
                cut_request_at=cut_request_at,
                cut_answer_at=cut_answer_at,
                stall=stall,
                method=method,
                times=times,
            )
            self._left = times if times is not None else -1
            self._healed.clear()

    def heal(self) -> None:
        """What stalls is cut, and everything after that passes."""
        with self._lock:
            self._trouble = None
            self._healed.set()

    def close(self) -> None:
        self._closed = True
        self.heal()
        for end in (self._listener, *self._open):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="http-proxy-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.add(client)
        try:
            with client:
                client.settimeout(IDLE_S_MAX)
                self._one_request(client)
        except OSError:
            pass
        finally:
            self._open.discard(client)

    def _one_request(self, client: socket.socket) -> None:
        head, body = _read_head(client)
        if not head:
            return
        trouble = self._due(head.split(b" ", 1)[0].decode())
        length = re.search(rb"(?im)^content-length:\s*(\d+)", head)
        left = int(length[1]) - len(body) if length else 0
        if trouble.stall:
            self._healed.wait(IDLE_S_MAX)
            return
        if trouble.answer:
            while left > 0 and (chunk := client.recv(min(left, CHUNK_BYTES))):
                left -= len(chunk)
            line = f"HTTP/1.1 {trouble.answer} Trouble\r\nConnection: close\r\nContent-Length: {len(_BODY)}\r\n\r\n"
            client.sendall(line.encode() + _BODY)
            return
        with socket.create_connection(self._target, timeout=IDLE_S_MAX) as server:
            server.sendall(re.sub(rb"(?im)^connection:.*\r\n", b"", head)[:-2] + b"Connection: close\r\n\r\n")
            if self._pass_body(client, server, body, left, trouble.cut_request_at):
                _pass_answer(server, client, trouble.cut_answer_at)

    def _due(self, method: str) -> Trouble:
        """What happens to this request."""
        with self._lock:
            self.requests += 1
            trouble = self._trouble
            if trouble is None or not self._left or trouble.method not in ("", method):
                return Trouble()
            self._left -= 1
            self.troubled += 1
            return trouble

    def _pass_body(
        self, client: socket.socket, server: socket.socket, first: bytes, left: int, cut: int | None
    ) -> bool:
        """Whether it went through."""
        chunk, passed = first, 0
        while True:
            if cut is not None and passed + len(chunk) >= cut:
                server.sendall(chunk[: cut - passed])
                _reset(client)
                return False
            server.sendall(chunk)
            passed += len(chunk)
            with self._lock:
                self.body_bytes += len(chunk)
            if left <= 0:
                return True
            chunk = client.recv(min(left, CHUNK_BYTES))
            if not chunk:
                return False
            left -= len(chunk)


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """The request up to its body, and what came of the body with it. Nothing if the client is gone."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = client.recv(CHUNK_BYTES)
        if not chunk or len(received) > HEAD_BYTES_MAX:
            return b"", b""
        received += chunk
    head, end, body = received.partition(b"\r\n\r\n")
    return head + end, body


def _pass_answer(server: socket.socket, client: socket.socket, cut: int | None) -> None:
    passed = 0
    while chunk := server.recv(CHUNK_BYTES):
        if cut is not None and passed + len(chunk) >= cut:
            client.sendall(chunk[: cut - passed])
            _reset(client)
            return
        client.sendall(chunk)
        passed += len(chunk)


def _reset(end: socket.socket) -> None:
    """Close so that the other side sees a broken connection, not an end."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
