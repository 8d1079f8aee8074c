"""An HTTP server for this machine's own pages: a thread of its own, few connections, and no word on the terminal."""

from __future__ import annotations

import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

CLOSE_S = 0.1  # until it is noticed that the server shall end
IDLE_S = 30.0
# What a browser calls us. Any other name was made to lead here by somebody else's site.
LOCAL_NAME: Final = re.compile(r"(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class QuietHandler(BaseHTTPRequestHandler):
    """Says neither what it runs on nor, on the terminal, who has asked."""

    server_version = "holdfast"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class SmallServer(ThreadingHTTPServer):
    """Serves until it is closed. Threads: `name` accepts; each connection has one, at most `connections` of them.

    Raises OSError, UnicodeError or OverflowError if it cannot listen there.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(
        self, host: str, port: int, handler: type[BaseHTTPRequestHandler], *, connections: int, name: str
    ) -> None:
        self._free = threading.Semaphore(connections)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(CLOSE_S,), name=name, daemon=True)

    def begin(self) -> None:
        """When all that a handler needs is there."""
        self._thread.start()

    def server_bind(self) -> None:
        """Without the name of the host, for which the usual server asks DNS."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who went away meanwhile is no error, and nothing else shall fill the agent's terminal."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=5.0)
