"""The report of a drill in a real browser: it needs nothing else, fits a narrow screen, has no errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.drills.checking import Outcome, PromiseVerdict
from holdfast.drills.figures import Figures, flat
from holdfast.drills.plan import DrillPlan
from holdfast.drills.plots import nice_ticks, timeline
from holdfast.drills.report import Drill, html, write_report
from holdfast.drills.schedule import DoneFault, Planned
from tests.harness.browser import MISSING, browsing, chromium

EVENTS: list[dict[str, Any]] = [
    *({"t": 90.0, "who": "agent", "kind": "worker_started", "worker": f"w{slot}.1", "pid": 1} for slot in range(4)),
    {"t": 95.0, "who": "w0.1", "kind": "view", "view": 1, "members": ["w0.1", "w1.1", "w2.1"]},
    {"t": 96.0, "who": "w0.1", "kind": "progress", "view": 1, "step": 1},
    {"t": 103.1, "who": "w0.1", "kind": "view", "view": 2, "members": ["w0.1", "w1.1", "w3.1"]},
    {"t": 103.2, "who": "agent", "kind": "worker_exited", "worker": "w2.1", "pid": 1, "reason": "killed"},
    {"t": 104.0, "who": "w0.1", "kind": "progress", "view": 2, "step": 12},
]


def drill(*, broken: bool = False, script: str = "train.py") -> Drill:
    done = (
        DoneFault(Planned(3.0, "kill", 2), 103.0, "kill -9 w2.1 (process 7)", 12, 1, ("w2.1",)),
        DoneFault(Planned(6.0, "ledger-down", duration_s=2.0), 106.0, "kill -9 the agent <now>", 24, 2, ended_at=108.0),
    )
    rates = tuple((float(second), 4.0 - second % 3) for second in range(20))
    figures = Figures(0.934, 0.9, (0.21, None), (0.21, 0.3), rates, 4.2)
    return Drill(
        plan=DrillPlan(kill_every_s=3.0),
        script=(script, "--steps", "40"),
        planned=tuple(one.planned for one in done),
        done=done,
        verdicts=(
            PromiseVerdict("exact", not broken, "after step 3, in <last>"),
            PromiseVerdict("nothing lost", None, "no"),
        ),
        figures=figures,
        flat=flat(figures, Outcome(), Outcome(), done),
        events=EVENTS,
        began=100.0,
        ended=120.0,
    )


def test_it_says_what_held_and_what_did_not() -> None:
    assert "Every promise held under 2 faults" in html(drill())
    page = html(drill(broken=True, script="<script>alert(1)</script>.py"))
    assert "Broken: exact" in page and "<script" not in page and "&lt;last&gt;" in page
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page), "it refers to nothing outside"
    assert drill(broken=True).held is False and drill().lines()[-1] == "every promise held under 2 faults"


def test_who_trained_when_is_what_the_record_of_the_run_says() -> None:
    drawn = re.findall(r'class="(waits|trains)".*?<title>(.*?)</title>', timeline(EVENTS, (), 100.0, 120.0))
    trained = {text for kind, text in drawn if kind == "trains"}
    assert {"w2.1: computing, -4.0 to 3.1 s", "w3.1: computing, 4.0 to 20.0 s"} <= trained
    assert ("waits", "w3.1: joining, 3.1 to 4.0 s") in drawn and not any("dead" in text for _, text in drawn)


def test_ticks_are_round_and_few() -> None:
    for low, high in ((0.0, 0.003), (-13.2, 71.0), (0.0, 1.0), (0.0, 86400.0)):
        ticks = nice_ticks(low, high, 9)
        assert 2 <= len(ticks) <= 10 and all(low - 1e-6 <= tick <= high + 1e-6 for tick in ticks)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if chromium() is None:
        pytest.skip(MISSING)
    with browsing() as running:
        yield running


@pytest.mark.processes
@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (360, "dark")])
def test_it_opens_in_a_browser(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    write_report(drill(), tmp_path / "drill.html")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "drill.html").as_uri())
    assert page.locator("h1").inner_text() == "Every promise held under 2 faults"
    assert page.locator("svg").count() == 3 and page.locator("svg .mark").count() == 1
    assert page.locator("svg").first.bounding_box()["height"] > 50
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "wide things scroll by themselves"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    page.screenshot(path=tmp_path / "drill.png", full_page=True)
    assert said == [] and [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()
