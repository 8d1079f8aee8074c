"""What a drill of parameter servers concludes from events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import ConfigError
from holdfast.drills.plan import parse_plan
from holdfast.drills.server_drill import ServerDrill, conduct_servers
from holdfast.drills.server_promises import check_served, unchecked


def events(
    versions: list[int], *, ahead: int = 2, missing: int = 0, left: int = 0, more: tuple[dict[str, Any], ...] = ()
) -> list[Any]:
    told = {"kind": "staleness", "updates": {"0": 4, "2": 6}, "ahead": ahead, "missing": missing, "bound": 4}
    return [told, *more, {"kind": "captured", "versions": versions, "left": left}]


def broken(found: list[Any], code: int = 0) -> list[str]:
    return [verdict.promise for verdict in check_served(found, code) if verdict.held is False]


def test_as_many_updates_as_were_acknowledged_break_nothing() -> None:
    assert broken(events([10, 10])) == []


@pytest.mark.parametrize(
    ("found", "promise"),
    [
        (events([10, 9]), "no acknowledged update lost"),
        (events([10, 11]), "no update applied twice"),
        (events([10, 10], left=1), "every step is made"),
        (events([10, 10], ahead=5), "staleness bound kept"),
        (events([10, 10], missing=1), "staleness bound kept"),
    ],
)
def test_each_promise_can_be_broken(found: list[Any], promise: str) -> None:
    assert broken(found) == [promise]


def test_an_update_too_many_proves_nothing_where_a_worker_was_lost() -> None:
    lost = {"kind": "worker_exited", "worker": "w0.1", "reason": "killed"}
    assert broken(events([11, 11], more=(lost,))) == []
    assert broken(events([9, 11], more=(lost,))) == ["no acknowledged update lost"]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([{"kind": "progress", "step": 40}], "trains dense parameters on the servers"),
        (events([10, 10])[:1], "no state of all slices was read"),
        ([{**events([0])[0], "updates": {}}, {"kind": "captured", "versions": [0], "left": 0}], "no worker pushed"),
    ],
)
def test_what_could_not_be_checked_is_no_promise_that_held(found: list[Any], why: str) -> None:
    verdicts = check_served(found, 0)
    assert why in unchecked(verdicts)
    assert not unchecked(check_served(events([10, 10]), 0))


@pytest.mark.parametrize(("found", "code"), [([{"kind": "progress", "step": 40}], 1), (events([10, 10]), 0)])
def test_a_drill_that_could_check_nothing_fails_and_says_so(
    found: list[Any],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def go(drill: ServerDrill, script: Sequence[str]) -> int:
        drill.took_s = [0.4]
        return 0

    monkeypatch.setattr(ServerDrill, "go", go)
    monkeypatch.setattr("holdfast.drills.server_drill.read_events", lambda directory: found)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    report = tmp_path.with_name("report.json")
    assert conduct_servers(parse_plan({"servers": 3, "kill-servers-every": "5s"}), ["train.py"], report) == code
    assert json.loads(report.read_text())["held"] is not bool(code)
    assert ("nothing was checked" in capsys.readouterr().out) is bool(code)


@pytest.mark.parametrize(
    "options",
    [
        {"servers": 3},
        {"kill-servers-every": "5s"},
        {"servers": 2, "kill-servers-every": "5s"},
        {"servers": 3, "kill-servers-every": "5s", "kill-every": "5s"},
    ],
)
def test_a_plan_for_servers_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_plan(options)
