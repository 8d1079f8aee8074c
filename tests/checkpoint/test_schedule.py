"""When is a checkpoint due?"""

from __future__ import annotations

import math

import pytest

from holdfast.checkpoint.saving.schedule import AUTO_S_MAX, AUTO_S_MIN, COST_S_MIN, PRIOR_S, Every, Schedule
from holdfast.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("auto", Every()),
        ("500", Every(steps=500)),
        (500, Every(steps=500)),
        ("500 steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("30s", Every(seconds=30)),
        ("1.5min", Every(seconds=90)),
        ("2h", Every(seconds=7200)),
        ("5 days", Every(seconds=432_000)),
    ],
)
def test_what_can_be_said(text: str | int, meant: Every) -> None:
    assert Every.parse(text) == meant
    assert Every.parse(str(meant)) == meant


@pytest.mark.parametrize("text", ["", "0", "-5", "often", "5 moons", "1.5", "1.5 steps", "nan", "1e3", 0, "9" * 40])
def test_what_cannot(text: str | int) -> None:
    with pytest.raises(ConfigError, match="makes no sense") as caught:
        Every.parse(text)
    assert caught.value.hint


def test_steps_are_counted_by_all() -> None:
    schedule = Schedule(Every(steps=10), 0.0)
    assert [step for step in range(1, 41) if schedule.is_due(step, 0.0, first=False)][:1] == [10]
    schedule.begun(10, 0.0)
    assert not schedule.is_due(10, 0.0, first=True) and schedule.is_due(20, 0.0, first=True)
    assert schedule.is_due(21, 0.0, first=True)  # the one before was put off: not until the next ten


def test_time_is_watched_by_the_first() -> None:
    schedule = Schedule(Every(seconds=30), 100.0)
    assert not schedule.is_due(1, 129.0, first=True)
    assert schedule.is_due(1, 130.0, first=True) and not schedule.is_due(1, 130.0, first=False)
    schedule.begun(1, 130.0)
    assert not schedule.is_due(2, 150.0, first=True) and schedule.is_due(2, 160.0, first=True)


def test_auto_is_young_and_dalys_rule() -> None:
    schedule = Schedule(Every(), 0.0)
    for _ in range(40):
        schedule.cost(0.5, 1.0)
    assert schedule.interval_s(0.0) == pytest.approx(math.sqrt(2 * 0.5 * PRIOR_S), rel=0.01)


def test_auto_saves_more_often_where_more_is_lost() -> None:
    schedule = Schedule(Every(), 0.0)
    quiet = schedule.interval_s(0.0)
    assert quiet == pytest.approx(math.sqrt(2 * COST_S_MIN * PRIOR_S))
    for _ in range(3):
        schedule.lost()
    assert schedule.interval_s(0.0) == pytest.approx(max(quiet / 2, AUTO_S_MIN))
    schedule.resumed(5, 0.0)
    assert schedule.interval_s(0.0) < quiet / 2
    for _ in range(10_000):
        schedule.lost()
    assert schedule.interval_s(0.0) == AUTO_S_MIN


def test_auto_leaves_slow_storage_alone() -> None:
    schedule = Schedule(Every(), 0.0)
    schedule.cost(0.0, 60.0)
    assert schedule.interval_s(0.0) == 600.0
    schedule.cost(0.0, 6000.0)
    assert schedule.interval_s(0.0) == AUTO_S_MAX
