"""`holdfast federate --dashboard`: accuracy over rounds and who is trusted, in the browser while the trainings go on.

Threads: whoever trains tells the record (`FederationRecord.add`), under its lock; `holdfast-federation` accepts, and
each connection has a thread that reads pictures of it. The page has no actions, and is served on loopback only.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError
from holdfast.dashboard.page_handler import TYPES, PageHandler, encode, files_in
from holdfast.net.small_server import SmallServer

if TYPE_CHECKING:
    from holdfast.byzantine.federation.choices import Cell, Choices
    from holdfast.byzantine.federation.rounds import RoundSeen

HOST = "127.0.0.1"
CONNECTIONS_MAX = 32
STREAMS_MAX = 8
PERIOD_S = 0.3  # between two messages of a stream, at least
QUIET_S = 10.0  # then a comment tells that the stream lives
LAST_S = 2.0  # for browsers to be told that it is over
PAGE = Path(__file__).parent / "federation_page"
SHARED = Path(__file__).parent / "page"


class FederationRecord:
    """What all trainings have come to so far, in order; for any thread. `epoch` tells its numbers from another's."""

    def __init__(self, choices: Choices) -> None:
        self.epoch = secrets.token_hex(4)
        self._choices, self._cells = choices, [cell.name for cell in choices.cells()]
        self._numbers = {name: number for number, name in enumerate(self._cells)}
        self._news = threading.Condition()
        self._points: list[tuple[int, int, float]] = []  # cell, rounds, accuracy
        self._trusted: dict[int, list[int]] = {}  # of each cell, in how many rounds every client was
        self._counted: dict[int, int] = {}
        self._now = -1
        self._is_over = False
        for name, training in choices.found.items():
            if (number := self._numbers.get(name)) is not None:
                rounds = len(training.accuracies)
                self._points += [(number, place + 1, one) for place, one in enumerate(training.accuracies)]
                self._trusted[number] = [round(part * rounds) for part in training.trusted]
                self._counted[number] = rounds

    def add(self, cell: Cell, seen: RoundSeen) -> None:
        with self._news:
            number = self._now = self._numbers[cell.name]
            self._points.append((number, seen.rounds, seen.accuracy))
            counts = self._trusted.get(number) or [0] * len(seen.trusted)
            if seen.trusted:  # else the round was left out
                counts = [count + one for count, one in zip(counts, seen.trusted, strict=True)]
            self._trusted[number] = counts
            self._counted[number] = seen.rounds
            self._news.notify_all()

    def finish(self) -> None:
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def picture(self, since: int = 0) -> dict[str, Any]:
        """What has come since so many points; what never changes only in the first."""
        with self._news:
            points = self._points[since:]
            about = self._about() if since == 0 else {}
            touched = {number for number, _, _ in points}
            trusted = {
                str(number): [count / max(1, self._counted[number]) for count in self._trusted[number]]
                for number in sorted(touched)
            }
            state = {"number": len(self._points), "now": self._now, "state": "finished" if self._is_over else "running"}
            return {**about, **state, "points": points, "trusted": trusted}

    def wait(self, since: int, timeout_s: float) -> bool:
        """Whether there is more than so many points, or the end."""
        with self._news:
            return self._news.wait_for(lambda: len(self._points) > since or self._is_over, timeout_s)

    def _about(self) -> dict[str, Any]:
        choices = self._choices
        cells = [(cell.aggregator, cell.attack, cell.seed) for cell in choices.cells()]
        settings = {"clients": choices.settings.clients, "hostile": choices.settings.byzantine}
        return {
            "words": choices.words,
            "cells": cells,
            "aggregators": list(choices.aggregators),
            "attacks": list(choices.attacks),
            "rounds": choices.settings.rounds,
            "epsilons": list(choices.epsilons),
            **settings,
        }


class FederationDashboard(SmallServer):
    """Serves the page until it is closed."""

    def __init__(self, choices: Choices, port: int) -> None:
        self.record = FederationRecord(choices)
        self.streams = threading.Semaphore(STREAMS_MAX)
        self.files = files_in(SHARED, "style.css", "format.js", "icon.svg") | files_in(PAGE)
        self.files["/"] = self.files["/static/index.html"]
        try:
            super().__init__(HOST, port, _Handler, connections=CONNECTIONS_MAX, name="holdfast-federation")
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the dashboard cannot listen on port {port}: {why}", hint="--dashboard 0 takes any that is free"
            ) from error
        self.begin()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def close(self) -> None:
        """When all who look have been told that it is over, or have had time for it."""
        self.record.finish()
        until = time.monotonic() + LAST_S
        for _ in range(STREAMS_MAX):
            self.streams.acquire(timeout=max(0.0, until - time.monotonic()))
        super().close()


class _Handler(PageHandler):
    server: FederationDashboard

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return
        if path == "/story.json":
            self._send(HTTPStatus.OK, "application/json", encode(self.server.record.picture()))
        elif path == "/events":
            self._stream(self.server.streams, self._follow)
        elif path in self.server.files:
            self._send(HTTPStatus.OK, TYPES[Path(path).suffix or ".html"], self.server.files[path])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here; the page is at /")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.close_connection = True
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this can only be read")

    def _follow(self) -> None:
        """Until all is told, and it is over."""
        record = self.server.record
        since = self._resumes_after()
        while True:
            picture = record.picture(since)
            since = picture["number"]
            self.wfile.write(b"id: %s-%d\ndata: %s\n\n" % (record.epoch.encode(), since, encode(picture)))
            if picture["state"] == "finished":
                return
            time.sleep(PERIOD_S)
            while not record.wait(since, QUIET_S):
                self.wfile.write(b": still here\n\n")

    def _resumes_after(self) -> int:
        epoch, _, number = (self.headers.get("Last-Event-ID") or "").partition("-")
        return int(number) if epoch == self.server.record.epoch and re.fullmatch(r"\d{1,15}", number) else 0
