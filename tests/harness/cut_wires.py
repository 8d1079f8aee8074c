"""Wires between servers that can be cut: a unix socket for each way, which passes bytes on to the real one or does not.

`route(sender, to, address)` gives the address that a sender dials instead. A cut closes what is open and lets
nothing new through, until it is healed. One thread passes everything.
"""

from __future__ import annotations

import selectors
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

Way = tuple[str, str]  # from, to


class CutWires:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="holdfast-")
        self._selector = selectors.DefaultSelector()
        self._targets: dict[Way, str] = {}
        self._pairs: dict[socket.socket, tuple[Way, socket.socket]] = {}
        self._cut: set[Way] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cut-wires", daemon=True)
        self._thread.start()

    def route(self, sender: str, to: str, address: str) -> str:
        path = Path(self._directory.name) / f"{sender}-{to}"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(path))
        server.listen(64)
        server.setblocking(False)
        with self._lock:
            self._targets[sender, to] = address.removeprefix("unix:")
            self._selector.register(server, selectors.EVENT_READ, (sender, to))
        return f"unix:{path}"

    def isolate(self, name: str) -> None:
        with self._lock:
            self._cut = {way for way in self._targets if name in way}
            for sock, (way, _) in list(self._pairs.items()):
                if way in self._cut:
                    self._drop(sock)

    def heal(self) -> None:
        with self._lock:
            self._cut.clear()

    def __enter__(self) -> CutWires:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._directory.cleanup()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.05):
                assert isinstance(key.fileobj, socket.socket)
                with self._lock:
                    if key.data is None:
                        self._pass_on(key.fileobj)
                    else:
                        self._accept(key.fileobj, key.data)

    def _accept(self, server: socket.socket, way: Way) -> None:
        near, _ = server.accept()
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if way in self._cut:
                raise OSError("cut")
            far.connect(self._targets[way])
        except OSError:
            near.close()
            far.close()
            return
        for one, other in ((near, far), (far, near)):
            one.settimeout(5.0)
            self._pairs[one] = (way, other)
            self._selector.register(one, selectors.EVENT_READ, None)

    def _pass_on(self, sock: socket.socket) -> None:
        if sock not in self._pairs:
            return
        try:
            data = sock.recv(256 * 1024)
            if data:
                self._pairs[sock][1].sendall(data)
                return
        except OSError:
            pass
        self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        if sock not in self._pairs:
            return
        other = self._pairs[sock][1]
        for one in (sock, other):
            del self._pairs[one]
            with suppress(KeyError, ValueError):
                self._selector.unregister(one)
            one.close()
