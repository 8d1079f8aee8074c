"""A run's numbers at `/metrics`: `holdfast run --metrics`, and for whoever serves them beside something else.

Events are read when somebody asks. Threads: `holdfast-metrics` accepts, one more for each question; `RunMetrics` has a
lock of its own.
"""

from __future__ import annotations

import threading
import time
from http import HTTPStatus
from typing import ClassVar

from holdfast.agent.workers.heartbeat_watch import described_limits, levels
from holdfast.core.errors import ConfigError
from holdfast.events import EventReader
from holdfast.net.small_server import LOCAL_NAME, QuietHandler, SmallServer
from holdfast.observe.fold import RunRecord
from holdfast.observe.prometheus import CONTENT_TYPE, render
from holdfast.placement.directory import RunDirectory
from holdfast.placement.proc import find_workers

IDLE_S = 10.0
CONNECTIONS_MAX = 32


class RunMetrics:
    """The numbers of one run, for any thread. A server mounts it: `text()` is the answer, of kind CONTENT_TYPE."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._reader = EventReader(directory.events)
        self._record = RunRecord()

    def text(self) -> str:
        with self._lock:
            for event in self._reader.stream():
                self._record.feed(event)
            living, suspicion = seen_here(self._directory)
            return render(self._record, time.time(), run=self._directory.name, alive=living, suspicion=suspicion)


def seen_here(directory: RunDirectory) -> tuple[set[str], dict[str, tuple[int, float]]]:
    """What this host says: the workers that live on it; their levels of suspicion, and phi."""
    seen = levels(directory.path, described_limits(directory.read()), time.monotonic())
    suspicion = {worker: (int(one.level), one.phi) for worker, (one, _) in seen.items()}
    return {found.worker for found in find_workers(directory.path)}, suspicion


class MetricsServer(SmallServer):
    """Answers GET /metrics until it is closed."""

    def __init__(self, directory: RunDirectory, host: str, port: int) -> None:
        self.metrics = RunMetrics(directory)
        self._host = host
        try:
            super().__init__(host, port, _Handler, connections=CONNECTIONS_MAX, name="holdfast-metrics")
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--metrics cannot listen on {host} port {port}: {why}",
                hint="choose another one: --metrics 127.0.0.1:0 takes any that is free",
            ) from error
        self.is_local = self.server_address[0] in ("127.0.0.1", "::1")
        self.begin()

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_port}/metrics"


class _Handler(QuietHandler):
    server: MetricsServer
    timeout: ClassVar[float] = IDLE_S

    def do_GET(self) -> None:
        if self.server.is_local and not LOCAL_NAME.fullmatch(self.headers.get("Host") or "127.0.0.1"):
            # Another site's name that was made to lead here.
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this is for this machine alone\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"the numbers are at /metrics\n")
        else:
            self._answer(HTTPStatus.OK, CONTENT_TYPE, self.server.metrics.text().encode())

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
