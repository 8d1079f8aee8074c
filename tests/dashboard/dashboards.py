"""A run directory with an event log but without processes, and a dashboard that shows it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.dashboard.server import Dashboard
from holdfast.events import EventLog
from holdfast.placement.directory import RunDirectory


class Writers:
    """The event logs of a run that somebody only pretends to have."""

    def __init__(self, home: Path, name: str = "r") -> None:
        self.directory = RunDirectory(home, name, "")
        self.directory.create()
        self.directory.write({"name": name})
        self._logs: dict[str, EventLog] = {}

    def write(self, who: str, kind: str, **fields: Any) -> None:
        if who not in self._logs:
            self._logs[who] = EventLog(self.directory.events / f"{who}.jsonl", who)
        self._logs[who].write(kind, **fields)

    def begin(self, workers: int = 2) -> None:
        self.write("agent", "agent_started", pid=1, workers=workers, spares=0, script="train.py")
        members = [f"w{slot}.1" for slot in range(workers)]
        for slot, worker in enumerate(members):
            self.write("agent", "worker_started", worker=worker, pid=10_000_000 + slot)
            self.write(worker, "registered", address="unix:x")
        for worker in members:
            self.write(worker, "view", view=1, members=members, reason="the run starts", step=0)
        self.progress(1)

    def progress(self, step: int, **metrics: float) -> None:
        told = metrics or {"loss": 1 / step}
        self.write("w0.1", "progress", view=1, step=step, steps=100, metrics=told, samples_per_s=64.0, workers=2)

    def finish(self) -> None:
        self.write("w0.1", "finished", step=100, digest="xxh3:abc", view=1)
        self.write("agent", "run_finished", step=100, digest="xxh3:abc", exit_code=0)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


@contextmanager
def shown(directory: RunDirectory, *, port: int = 0, token: str = "") -> Iterator[Dashboard]:
    dashboard = Dashboard(directory, port, token=token)
    try:
        yield dashboard
    finally:
        dashboard.close()


def ask(
    dashboard: Dashboard, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One request; status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.server_address[1], timeout=20)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


class Stream:
    """The reading side of server-sent events, as a browser is."""

    def __init__(self, dashboard: Dashboard, last: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", dashboard.server_address[1], timeout=20)
        self._connection.request("GET", "/events", headers={"Last-Event-ID": last} if last else {})
        self.answer = self._connection.getresponse()
        self.id = last

    def next(self) -> dict[str, Any]:
        """The next picture."""
        while line := self.answer.readline():
            if line.startswith(b"id: "):
                self.id = line[4:].strip().decode()
            if line.startswith(b"data: "):
                picture = json.loads(line[6:])
                assert isinstance(picture, dict)
                return picture
        raise EOFError("the stream has ended")

    def until(self, wanted: Any) -> dict[str, Any]:
        """The first picture for which this holds."""
        while not wanted(picture := self.next()):
            pass
        return picture

    def close(self) -> None:
        self._connection.close()
