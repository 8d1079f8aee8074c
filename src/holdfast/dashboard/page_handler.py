"""What every page of this machine has in common: who may ask, the headers of every answer, and streams of news.

Whoever asks must say in `Host` that it looks at this machine itself: another site's name that was made to lead here
(DNS rebinding) is refused. Nothing is allowed to other origins, and a page may load nothing from elsewhere.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.net.small_server import IDLE_S, LOCAL_NAME, QuietHandler

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_METHODS = ("GET", "HEAD", "POST")


def files_in(directory: Path, *names: str) -> dict[str, bytes]:
    """What a page consists of, by its path: all of it, or these."""
    kept = [path for path in directory.iterdir() if path.suffix in TYPES and (not names or path.name in names)]
    return {f"/static/{path.name}": path.read_bytes() for path in kept}


def encode(picture: dict[str, Any]) -> bytes:
    """JSON as browsers take it: numbers that are none have been left out before; should one be left, it is null."""
    try:
        text = json.dumps(picture, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(picture), separators=(",", ":"), allow_nan=False, default=str)
    return text.encode(errors="replace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class PageHandler(QuietHandler):
    """A server's handler says what there is; this one says who may have it, and how."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def _path(self) -> str | None:
        """The path of a request that may be answered; None if it was refused."""
        if not LOCAL_NAME.fullmatch(self.headers.get("Host") or ""):
            self.close_connection = True
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this page is for this machine alone: open it as 127.0.0.1")
            return None
        origin = self.headers.get("Origin")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if (origin is not None and origin != f"http://{self.headers['Host']}") or site not in ("none", "same-origin"):
            self.close_connection = True
            self._refuse(HTTPStatus.FORBIDDEN, "this page is not for other sites")
            return None
        try:
            return urlsplit(self.path).path
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "that is no address")
            return None

    def _stream(self, free: threading.Semaphore, follow: Callable[[], None]) -> None:
        """Server-sent events, as long as `follow` writes them; `free`: how many more streams there may be."""
        if self.command == "HEAD":
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "a stream has a body")
            return
        if not free.acquire(blocking=False):
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too many browsers look at this", {"Retry-After": "5"})
            return
        try:
            self.close_connection = True
            self._head(HTTPStatus.OK, "text/event-stream", {"Connection": "close", "X-Accel-Buffering": "no"})
            self.wfile.write(b"retry: 1000\n\n")
            follow()
        except OSError:
            pass  # the browser went away
        finally:
            free.release()

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self._head(status, kind, {"Content-Length": str(len(body)), **(more or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS, **more}.items():
            self.send_header(name, value)
        if self.close_connection and "Connection" not in more:
            self.send_header("Connection", "close")
        self.end_headers()

    def _refuse(self, status: HTTPStatus, sentence: str, more: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", encode({"error": sentence}), more)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library finds wrong with a request, in our words; it is always the asker's fault."""
        self.close_connection = True
        if not hasattr(self, "command") or self.command is None:
            self.command = "GET"
        if code == HTTPStatus.NOT_IMPLEMENTED:
            status, sentence = HTTPStatus.METHOD_NOT_ALLOWED, f"there is {', '.join(_METHODS)}"
            self._refuse(status, sentence, {"Allow": ", ".join(_METHODS)})
            return
        status = HTTPStatus(code) if 400 <= code < 500 else HTTPStatus.BAD_REQUEST
        self._refuse(status, "that is no request that can be answered")

    def handle(self) -> None:
        try:
            super().handle()
        except (TimeoutError, OSError):
            self.close_connection = True
