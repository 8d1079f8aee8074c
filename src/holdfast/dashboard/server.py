"""The dashboard's server: on loopback, from the standard library, read-only unless it has a token for actions.

Threads: `holdfast-dashboard` accepts, and each connection has a thread of its own, at most CONNECTIONS_MAX of them.
They only read: pictures from the keeper, the page from memory. An action goes through agent/asking.py.

Who may ask, and what is said with every answer: page_handler.py.
"""

from __future__ import annotations

import hmac
import json
import re
import sys
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

from holdfast.agent.asking import ask_to_save, ask_to_stop, drain
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.dashboard.keeper import RecordKeeper
from holdfast.dashboard.page_handler import TYPES, PageHandler, encode, files_in
from holdfast.net.small_server import SmallServer
from holdfast.observe.prometheus import CONTENT_TYPE
from holdfast.placement.directory import RunDirectory

HOST = "127.0.0.1"
CONNECTIONS_MAX = 64
STREAMS_MAX = 16
BODY_BYTES_MAX = 4096
PERIOD_S = 0.4  # between two messages of a stream, at least
QUIET_S = 10.0  # then a comment tells that the stream lives
TOKEN_HEADER = "X-Holdfast-Token"
PAGE = Path(__file__).parent / "page"


class Dashboard(SmallServer):
    """Serves one run's page until it is closed. `token`: what actions need; empty: there are none."""

    def __init__(self, directory: RunDirectory, port: int, *, token: str = "") -> None:
        self.token = token
        self.directory = directory
        self.streams = threading.Semaphore(STREAMS_MAX)
        self.files = files_in(PAGE)
        self.files["/"] = self.files["/static/index.html"]
        try:
            super().__init__(HOST, port, Handler, connections=CONNECTIONS_MAX, name="holdfast-dashboard")
        except OSError as error:
            raise ConfigError(
                f"the dashboard cannot listen on port {port}: {error.strerror or error}",
                hint="choose another one with --port, or 0 for any that is free",
            ) from error
        except OverflowError as error:
            raise ConfigError(f"{port} is not a port", hint="ports are from 1 to 65535; 0 is any free one") from error
        self.keeper = RecordKeeper(directory)
        self.begin()

    @property
    def url(self) -> str:
        address = f"http://{HOST}:{self.server_port}/"
        return f"{address}#token={self.token}" if self.token else address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error; anything else is shown on the page."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.keeper.trouble = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        self.keeper.close()
        super().close()


class Handler(PageHandler):
    server: Dashboard

    # -- requests ------------------------------------------------------------------------------------------

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return
        if path == "/story.json":
            self._send(HTTPStatus.OK, "application/json", encode(self.server.keeper.picture()))
        elif path == "/metrics":
            self._send(HTTPStatus.OK, CONTENT_TYPE, self.server.keeper.metrics().encode())
        elif path == "/events":
            self._stream(self.server.streams, lambda: self._follow(*self._resumes_after()))
        elif path in self.server.files:
            kind = TYPES[Path(path).suffix or ".html"]
            self._send(HTTPStatus.OK, kind, self.server.files[path])
        elif path.startswith("/actions/"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "an action is asked for with POST")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here; the page is at /")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = self._path()
        if path is None:
            return
        if not path.startswith("/actions/"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this can only be read")
            return
        body = self._body()
        if body is None:
            return
        if not self.server.token:
            self._refuse(HTTPStatus.FORBIDDEN, "this dashboard is read-only; start it with --actions")
            return
        given = (self.headers.get(TOKEN_HEADER) or "").encode(errors="replace")
        if not hmac.compare_digest(given, self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "the token is missing or wrong; open the address that was printed")
            return
        self._act(path.removeprefix("/actions/"), body)

    def _act(self, action: str, body: dict[str, Any]) -> None:
        directory = self.server.directory
        try:
            if action == "stop":
                said = ask_to_stop(directory, "the dashboard")
            elif action == "save":
                said = ask_to_save(directory, "the dashboard")
            elif action == "drain":
                worker = body.get("worker")
                if not isinstance(worker, str) or not worker:
                    self._refuse(HTTPStatus.BAD_REQUEST, "which worker?")
                    return
                said = drain(directory, worker)
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "there is no such action")
                return
        except ConfigError as error:
            self._refuse(HTTPStatus.CONFLICT, error.message)
        except (HoldfastError, OSError) as error:
            self._refuse(HTTPStatus.CONFLICT, f"the run did not take it: {str(error).partition(chr(10))[0]}")
        else:
            self._send(HTTPStatus.OK, "application/json", encode({"said": said}))

    # -- the stream ----------------------------------------------------------------------------------------

    def _resumes_after(self) -> tuple[int, int]:
        epoch, _, number = (self.headers.get("Last-Event-ID") or "").partition("-")
        if epoch == self.server.keeper.epoch and re.fullmatch(r"\d{1,15}", number):
            return int(number), -1
        return 0, -1

    def _follow(self, since: int, facts: int) -> None:
        keeper = self.server.keeper
        last = time.monotonic()
        while not keeper.is_closed:
            picture = keeper.picture(since, facts)
            since, facts = picture["number"], picture["facts_number"]
            self.wfile.write(b"id: %s-%d\ndata: %s\n\n" % (keeper.epoch.encode(), since, encode(picture)))
            last = time.monotonic()
            time.sleep(PERIOD_S)
            while not keeper.is_closed and not keeper.wait(since, facts, QUIET_S):
                if time.monotonic() - last >= QUIET_S:
                    self.wfile.write(b": still here\n\n")

    # -- parts ---------------------------------------------------------------------------------------------

    def _body(self) -> dict[str, Any] | None:
        self.close_connection = True  # whatever is left of a body that is refused is not a request
        length = self.headers.get("Content-Length") or ""
        if not re.fullmatch(r"\d{1,6}", length) or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "an action needs a body of a known length")
            return None
        if int(length) > BODY_BYTES_MAX:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "an action is a few words")
            return None
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "an action is JSON")
            return None
        try:
            value = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "that is no JSON object")
            return None
        return value
