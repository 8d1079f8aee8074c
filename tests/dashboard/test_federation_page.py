"""The page of `holdfast federate --dashboard`: in a real browser while trainings go on, and what its server refuses."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.byzantine.federation.choices import Choices
from holdfast.byzantine.federation.rounds import RoundSeen, Settings, Training
from holdfast.dashboard.federation import FederationDashboard, FederationRecord
from tests.harness.browser import MISSING, browsing, chromium

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WAIT_S = 60.0


def choices(found: dict[str, Training] | None = None, epsilons: tuple[float, ...] = ()) -> Choices:
    settings = Settings(clients=6, byzantine=2, rounds=4)
    made = Choices(settings, "digits", ["mean", "median"], ["none", "alie"], [0, 1], epsilons=epsilons)
    made.found.update(found or {})
    return made


# -- the record


def test_a_picture_has_what_came_since() -> None:
    compared = choices()
    record, cells = FederationRecord(compared), compared.cells()
    record.add(cells[0], RoundSeen(1, 0.5, (True, True, False, True)))
    first = record.picture()
    assert first["points"] == [(0, 1, 0.5)] and first["trusted"] == {"0": [1.0, 1.0, 0.0, 1.0]}
    assert first["clients"] == 6 and first["hostile"] == 2 and first["state"] == "running"
    record.add(cells[0], RoundSeen(2, 0.6, ()))  # the round was left out: nobody was trusted
    record.add(cells[3], RoundSeen(1, 0.1, ()))
    more = record.picture(first["number"])
    assert more["points"] == [(0, 2, 0.6), (3, 1, 0.1)] and "cells" not in more
    assert more["trusted"] == {"0": [0.5, 0.5, 0.0, 0.5], "3": []} and more["now"] == 3
    assert not record.wait(more["number"], 0.0)
    record.finish()
    assert record.wait(more["number"], 0.0) and record.picture(3)["state"] == "finished"


def test_what_was_found_before_is_there_from_the_start() -> None:
    known = {"mean | none | 0": Training((0.1, 0.2, 0.3, 0.4), None, (1.0, 0.75, 0.0, 0.0))}
    picture = FederationRecord(choices(known)).picture()
    assert picture["points"] == [(0, 1, 0.1), (0, 2, 0.2), (0, 3, 0.3), (0, 4, 0.4)]
    assert picture["trusted"] == {"0": [1.0, 0.75, 0.0, 0.0]}


# -- the server


@pytest.fixture
def dashboard() -> Iterator[FederationDashboard]:
    made = FederationDashboard(choices(), 0)
    yield made
    made.close()


def ask(
    dashboard: FederationDashboard, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.server_port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_it_serves_this_machine_and_reads_only(dashboard: FederationDashboard) -> None:
    status, headers, body = ask(dashboard, "/")
    assert status == 200 and b"Who is trusted" in body and "script-src 'self'" in headers["Content-Security-Policy"]
    for path in ("/static/federation.js", "/static/federation.css", "/static/style.css", "/static/format.js"):
        assert ask(dashboard, path)[0] == 200, path
    assert json.loads(ask(dashboard, "/story.json")[2])["rounds"] == 4
    assert ask(dashboard, "/static/page.js")[0] == 404 and ask(dashboard, "/", "POST")[0] == 405
    assert ask(dashboard, "/", Host="evil.example")[0] == 421
    assert ask(dashboard, "/", Origin="http://evil.example")[0] == 403


def test_a_stream_ends_when_all_is_told(dashboard: FederationDashboard) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.server_port, timeout=20)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    began = time.monotonic()
    dashboard.record.finish()
    assert b'"state":"finished"' in answer.read()  # to its end
    connection.close()
    assert time.monotonic() - began < 15.0


# -- in a browser


needs_browser = [
    pytest.mark.skipif(chromium() is None, reason=MISSING),
    pytest.mark.processes,
    pytest.mark.xdist_group("dashboard"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api")
    with browsing() as made:
        yield made


class Page:
    """One page, which asks nobody but this host and has nothing to complain about."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self._context = browser.new_context(reduced_motion="reduce", **options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(WAIT_S * 1000)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on(
            "console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, (condition, self.page.inner_text("body")[:2000])
            self.page.wait_for_timeout(50)

    def close(self) -> None:
        self._context.close()
        assert self.errors == [] and all(url.startswith("http://127.0.0.1:") for url in self.asked)


class TestInABrowser:
    pytestmark = needs_browser

    def test_curves_grow_and_clients_are_told_apart(self, browser: Any) -> None:
        compared = choices(epsilons=(1.0, 1.5, 2.0, 2.5))
        dashboard, seen = FederationDashboard(compared, 0), Page(browser, viewport={"width": 1100, "height": 800})
        try:
            page = seen.page
            page.goto(dashboard.url)
            seen.wait("document.querySelector('#trainings').textContent === '0 of 8'")  # drawn, not only connected
            assert page.get_attribute("#link", "data-link") == "live" and page.locator("polyline").count() == 0
            cell = next(one for one in compared.cells() if (one.aggregator, one.attack) == ("median", "alie"))
            for rounds in (1, 2):
                dashboard.record.add(cell, RoundSeen(rounds, 0.25 * rounds, (True,) * 4 + (False, rounds == 2)))
            seen.wait("document.querySelector('#now').textContent === '2 of 4 rounds'")
            assert page.inner_text("#accuracy") == "50.0 %" and page.inner_text("#epsilon") == "1.50"
            assert page.inner_text("#now-note") == "median under alie, seed 0"
            line = page.locator("polyline[data-aggregator=median]")
            assert line.count() == 1 and len(line.get_attribute("points").split()) == 2
            squares = page.locator("#trusted tbody tr .clients i")
            assert squares.count() == 6 and page.locator("#trusted .clients i.hostile").count() == 2
            said = [squares.nth(number).get_attribute("title") for number in (0, 4, 5)]
            assert said == [
                "client 0: trusted in 100 % of the rounds",
                "client 4, hostile: trusted in 0 % of the rounds",
                "client 5, hostile: trusted in 50 % of the rounds",
            ]
            dashboard.record.finish()
            seen.wait("document.querySelector('#state').dataset.state === 'finished'")
            SHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SHOTS / "federation.png", full_page=True)
        finally:
            seen.close()
            dashboard.close()

    def test_it_fits_a_narrow_screen(self, browser: Any) -> None:
        compared = choices()
        dashboard = FederationDashboard(compared, 0)
        seen = Page(browser, viewport={"width": 360, "height": 740}, color_scheme="dark")
        try:
            for cell in compared.cells():
                dashboard.record.add(cell, RoundSeen(1, 0.5, (True,) * 6))
            seen.page.goto(dashboard.url)
            seen.wait("document.querySelectorAll('#trusted tbody tr').length === 4")
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360
        finally:
            seen.close()
            dashboard.close()

    def test_the_command_shows_a_real_training_until_it_is_interrupted(self, browser: Any) -> None:
        words = [
            "federate",
            "--clients",
            "8",
            "--byzantine",
            "1",
            "--rounds",
            "1000000",
            "--aggregator",
            "trimmed-mean",
        ]
        command = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *words, "--attack", "sign-flip", "--dashboard", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        seen = Page(browser)
        try:
            assert command.stdout is not None
            address = re.fullmatch(r"dashboard: (http://127\.0\.0\.1:\d+/)\n", command.stdout.readline())
            assert address is not None
            seen.page.goto(address[1])
            seen.wait("parseFloat(document.querySelector('#accuracy').textContent) > 80")
            assert seen.page.inner_text("#trusted tbody tr td:nth-child(2)") == "sign-flip"
            hostile = seen.page.locator("#trusted .clients i.hostile").get_attribute("title")
            assert int(re.search(r"in (\d+) %", hostile)[1]) < 50  # type: ignore[index]
            command.send_signal(signal.SIGINT)
            assert command.wait(timeout=WAIT_S) == 130
            seen.wait("document.querySelector('#state').dataset.state === 'finished'")
        finally:
            command.kill()
            command.wait()
            command.stdout.close()
            seen.close()
