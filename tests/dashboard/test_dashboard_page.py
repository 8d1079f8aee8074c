"""The page in a real browser: a run that goes on, a worker that is killed, a server that restarts, narrow and dark.

One run of real workers serves all tests that need one. It is held at a step by a file, so that nothing is over too
early. Screenshots are in build/screenshots.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboards import Writers, shown

from holdfast.dashboard.server import Dashboard
from holdfast.testing.observed_run import ObservedRun
from tests.harness.browser import MISSING, browsing, chromium
from tests.harness.gate import Gate

pytest.importorskip("playwright.sync_api")

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason=MISSING),
    pytest.mark.processes,
    pytest.mark.xdist_group("dashboard"),
]
SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WAIT_S = 60.0
TOKEN = "a-token-of-this-test"
STEPS = 150


class HeldRun(ObservedRun):
    """Three workers, one of them a spare, that do not go beyond the step in the file `gate`."""

    def __init__(self, home: Path) -> None:
        gate = Gate(home / "gate")
        self.let_go = gate.open_to
        self.let_go(10)
        script = ["-m", "tests.trainings.exactness_training", "--steps", str(STEPS), "--gate", str(gate.path)]
        options = ["--workers", "2", "--spares", "1", "--save-every", "1h", "--dashboard", "0"]
        super().__init__(home, "shown", options, script)


class Seen:
    """One page, and what it said and asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(WAIT_S * 1000)
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def open(self, dashboard: Dashboard) -> Any:
        self.page.goto(dashboard.url)
        self.wait("document.querySelector('#link').dataset.link === 'live'")
        return self.page

    def step(self) -> int:
        return int(re.sub(r"\D", "", self.page.inner_text("#step")) or 0)

    def wait(self, condition: str) -> None:
        """Until this holds in the page. Asked from outside: the page's policy forbids `eval`, also to us."""
        deadline = time.monotonic() + WAIT_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, (condition, self.page.inner_text("body")[:2000])
            self.page.wait_for_timeout(50)

    def shoot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as made:
        yield made


@pytest.fixture
def seen(browser: Any) -> Iterator[Seen]:
    """A page that asks nobody but this host and has nothing to complain about."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    made = Seen(context.new_page())
    yield made
    context.close()
    assert all(url.startswith("http://127.0.0.1:") for url in made.asked), made.asked
    assert made.errors == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldRun]:
    made = HeldRun(tmp_path_factory.mktemp("home"))
    made.start()
    try:
        made.wait(lambda: len(made.registered) == 3 and len(made.members) == 2 and made.step > 0, "the first steps")
        yield made
    finally:
        made.end()


@pytest.fixture
def dashboard(run: HeldRun) -> Iterator[Dashboard]:
    with shown(run.directory) as made:
        yield made


@pytest.fixture(scope="module")
def killed(run: HeldRun) -> str:
    """The worker that was killed; the spare has taken its place."""
    victim = run.members[0]
    os.kill(run.pids[victim], signal.SIGKILL)
    run.let_go(30)
    run.wait(lambda: victim not in run.members and len(run.members) == 2 and run.step > 12, "the spare")
    return victim


def test_the_agent_serves_the_page_itself(run: HeldRun, seen: Seen) -> None:
    address = re.search(r"dashboard: (http://127\.0\.0\.1:\d+/)", run.log())
    assert address is not None
    seen.page.goto(address[1])
    seen.wait("document.querySelector('#state').dataset.state === 'running'")
    assert not seen.page.is_visible("#actions")


def test_it_moves_with_the_run(run: HeldRun, dashboard: Dashboard, seen: Seen) -> None:
    page = seen.open(dashboard)
    seen.wait("document.querySelector('#state').dataset.state === 'running'")
    seen.wait("document.querySelectorAll('.lanes path.s-computing').length === 1")
    before = seen.step()
    run.let_go(20)
    seen.wait(f"Number(document.querySelector('#step').textContent) > {before}")
    assert page.inner_text("#name") == "shown" and page.title().startswith("step ")
    assert page.inner_text("#workers") == "2 of 2" and "1 spare" in page.inner_text("#workers-note")
    seen.wait("document.querySelectorAll('#crew tbody tr').length === 3")
    seen.wait("[...document.querySelectorAll('#crew tbody tr')].every(row => / MB$/.test(row.cells[6].textContent))")
    assert not page.is_visible("#actions")


def test_a_killed_worker_and_the_spare(killed: str, dashboard: Dashboard, seen: Seen) -> None:
    page = seen.open(dashboard)
    lane = killed.partition(".")[0]
    seen.wait("document.querySelector('#failures').textContent === '1'")
    seen.wait("document.querySelectorAll('#throughput-chart [data-kind=failure]').length === 1")
    assert page.locator(".lanes path.s-dead").count() == 1
    # Its replacement is in the same lane; the one that was a spare computes.
    replacement = page.locator(f"#crew tbody tr[data-key={lane}] td").first.inner_text()
    assert replacement.startswith(f"{lane}.") and replacement != killed
    seen.wait(
        "[...document.querySelectorAll('#crew tbody tr')].filter(row => row.cells[1].textContent === 'computing')"
        ".length === 2"
    )
    page.fill("#filter", f"{killed} signal")
    assert page.locator("#list li").count() == 1
    assert "killed, signal 9" in page.locator("#list li").inner_text()
    page.fill("#filter", "")
    page.select_option("#kind", "view")
    assert "because" in page.locator("#list li .why").first.evaluate(
        "node => getComputedStyle(node, '::before').content"
    )
    page.select_option("#kind", "")
    seen.shoot("killed")


def test_it_finds_its_way_back(run: HeldRun, killed: str, seen: Seen) -> None:
    with shown(run.directory) as first:
        port = first.server_address[1]
        seen.open(first)
        seen.wait("document.querySelector('#failures').textContent === '1'")
    seen.wait("document.querySelector('#link').dataset.link === 'reconnecting'")
    assert seen.page.inner_text("#failures") == "1"  # what was known stays
    seen.shoot("reconnecting")
    run.let_go(60)
    with shown(run.directory, port=port):
        seen.wait("document.querySelector('#link').dataset.link === 'live'")
        seen.wait("Number(document.querySelector('#step').textContent) > 32")
    seen.errors = [text for text in seen.errors if "ERR_" not in text]  # of the time in between


def test_narrow_and_dark(killed: str, dashboard: Dashboard, seen: Seen) -> None:
    page = seen.page
    page.set_viewport_size({"width": 360, "height": 740})
    seen.open(dashboard)
    seen.wait("document.querySelectorAll('#list li').length > 3")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    beyond = page.evaluate(
        "[...document.querySelectorAll('main > *, .tile, .timeline svg, .events li')]"
        ".filter(node => node.getBoundingClientRect().right > 360.5).length"
    )
    assert beyond == 0
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    seen.shoot("narrow")
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert brightness(light) > 200 and brightness(dark) < 40
    page.set_viewport_size({"width": 1280, "height": 900})
    seen.shoot("dark")


def brightness(color: str) -> float:
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_by_keyboard(killed: str, dashboard: Dashboard, seen: Seen) -> None:
    page = seen.open(dashboard)
    seen.wait("document.querySelectorAll('#list li').length > 3")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("no such thing")
    assert page.is_visible("#events-empty") and page.inner_text("#events-empty") == "No event matches."
    page.keyboard.press("Escape")
    assert page.locator("#list li").count() > 3
    page.focus("#lanes")
    page.keyboard.press("ArrowDown")
    said = page.text_content("#spoken")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#tip") and page.text_content("#spoken") != said
    page.keyboard.press("Escape")
    assert not page.is_visible("#tip")


def test_actions_need_the_token(run: HeldRun, killed: str, seen: Seen) -> None:
    run.wait(lambda: len(run.living_registered()) == 3, "the replacement, as a spare")
    with shown(run.directory, token=TOKEN) as dashboard:
        page = seen.page
        page.goto(dashboard.url.partition("#")[0])
        seen.wait("document.querySelector('#link').dataset.link === 'live'")
        assert not page.is_visible("#save")
        refused = page.evaluate(
            "fetch('/actions/stop', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{}'})"
            ".then(answer => answer.status)"
        )
        assert refused == 403
        seen.errors.clear()  # the browser says that it was refused

        page.goto("about:blank")
        seen.asked.clear()
        seen.open(dashboard)
        assert TOKEN not in page.url
        page.click("#save")
        page.wait_for_selector("#toast:not([hidden])")
        assert page.inner_text("#toast") == "run shown is asked to save after its next step"
        run.let_go(90)
        page.wait_for_selector("#saves tbody tr")
        leaving = run.members[1]
        page.click(f"button[aria-label='drain {leaving}']")
        seen.shoot("actions")
        page.click("#sure-yes")
        seen.wait(f"document.querySelector('#toast').textContent.startsWith('{leaving}')")
        run.let_go(120)
        run.wait(lambda: leaving not in run.members and leaving not in run.pids and len(run.members) == 2, "the drain")


def test_a_run_that_is_over(run: HeldRun, killed: str, seen: Seen) -> None:
    """The same page, of the same run: it is let go and finishes."""
    with shown(run.directory) as dashboard:
        page = seen.open(dashboard)
        run.let_go(STEPS + 1)
        seen.wait("document.querySelector('#state').dataset.state === 'finished'")
    run.finish(60)
    with shown(run.directory) as dashboard:
        page.goto(dashboard.url)
        seen.wait("document.querySelector('#state').dataset.state === 'finished'")
        assert seen.step() == STEPS and page.inner_text("#failures") == "1"
        assert "same weights" in page.inner_text("#alerts")
        seen.shoot("finished")
        assert page.locator(".lanes path.s-computing").count() == 1
    seen.errors = [text for text in seen.errors if "ERR_" not in text]  # between the two servers


def test_before_the_first_step(tmp_path: Path, seen: Seen) -> None:
    writers = Writers(tmp_path)
    with shown(writers.directory) as dashboard:
        page = seen.open(dashboard)
        assert page.is_visible("#timeline-empty") and page.is_visible("#events-empty")
        assert page.is_visible("#crew-empty") and page.is_visible("#saves-empty")
        seen.shoot("empty")
        writers.begin()
        seen.wait("document.querySelectorAll('.lanes path').length > 0")
        assert not page.is_visible("#timeline-empty")
    writers.close()
    seen.errors = [text for text in seen.errors if "ERR_" not in text]


def test_names_from_the_log_stay_text(tmp_path: Path, seen: Seen) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    writers = Writers(tmp_path)
    writers.begin()
    writers.progress(2, **{evil[:60]: 1.0, "loss": 0.5})
    writers.write("w0.1", "warning", text=evil)
    writers.write("w0.1", "waiting", step=2, reason=evil)
    writers.write("agent", "worker_exited", worker="w1.1", pid=1, signal=9, reason="killed")
    with shown(writers.directory) as dashboard:
        page = seen.open(dashboard)
        seen.wait("document.querySelectorAll('#list li').length > 3")
        assert evil in page.text_content("#list")
        assert page.locator("#list img, #list script, #alerts img, #metric img").count() == 0
    writers.close()
    seen.errors = [text for text in seen.errors if "ERR_" not in text]


def test_servers_and_slices_have_lanes_and_tables(tmp_path: Path, seen: Seen) -> None:
    writers = Writers(tmp_path)
    writers.begin()
    servers = ["s0.1", "s1.1", "s2.1"]
    for number, server in enumerate(servers):
        writers.write("agent", "server_started", server=server, pid=20_000_000 + number)
    for number, server in enumerate(servers):
        name, others = f"parameters/{number}", [*servers[number:], *servers[:number]]
        writers.write("agent", "placed", slice=name, primary=server, servers=others, epoch=1, reason="")
        told = {"slices": {name: ["primary", 1, 4]}, "leads": 1, "entries": 12, "log_bytes": 81920, "updates": 40}
        writers.write(server, "serving", lags_s={one: 0.0004 for one in servers if one != server}, **told)
    with shown(writers.directory) as dashboard:
        page = seen.open(dashboard)
        seen.wait("document.querySelectorAll('#servers tbody tr').length === 3")
        assert page.inner_text("#lanes-title") == "Workers, servers and slices"
        names = page.locator(".lanes .lane-name").all_text_contents()
        assert names == ["w0", "w1", "s0", "s1", "s2", "slice 0", "slice 1", "slice 2"]
        page.wait_for_timeout(700)  # lanes need some width to be seen
        writers.write("agent", "server_exited", server="s0.1", pid=20_000_000, signal=9, reason="killed")
        seen.wait("document.querySelectorAll('.lanes path.s-recovering').length === 1")
        page.wait_for_timeout(300)
        fields = {"primary": "s1.1", "was": "s0.1", "epoch": 2, "reason": "s0.1 is gone"}
        writers.write("agent", "failover", slice="parameters/0", **fields)
        writers.write("agent", "server_slow", server="s2.1", times=6.5, noticed_by="", reason="late")
        seen.wait("document.querySelector('#slices tbody tr').cells[3].textContent === '2'")
        first = page.locator("#slices tbody tr").first.locator("td").all_text_contents()
        assert first == ["parameters/0", "s1.1", "s0.1, s2.1", "2"]
        assert "1 failover" in page.inner_text("#serving-note")
        assert page.locator(".lanes path.handed").count() == 1, "the change of primaries can be seen"
        assert page.locator("path.mark[data-kind='failover']").count() == 2, "in both curves"
        rows = [row.split("\t")[:2] for row in page.locator("#servers tbody tr").all_inner_texts()]
        assert [[text.strip() for text in row] for row in rows] == [
            ["s0.1", "dead"],
            ["s1.1", "serving"],
            ["s2.1", "slow"],
        ]
        assert "s0.1 is gone" in page.inner_text("#list")
        seen.shoot("servers")
    writers.close()
    seen.errors = [text for text in seen.errors if "ERR_" not in text]
