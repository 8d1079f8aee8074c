"""Plan and seed -> faults: always the same, always within the time, outages one after another."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.durations import parse_duration
from holdfast.core.errors import ConfigError
from holdfast.drills.plan import WINDOWS_SHARE, DrillPlan, SlowWorker, option_names, parse_plan, read_plan
from holdfast.drills.schedule import AFTER_OUTAGE_S, draw

OUTAGES = ("partition", "ledger-down", "storage-down", "disk-full")


@st.composite
def plans(draw_value: st.DrawFn) -> DrillPlan:
    for_s = draw_value(st.floats(5.0, 600.0))
    lasting = [draw_value(st.one_of(st.just(0.0), st.floats(0.5, for_s * WINDOWS_SHARE / 4))) for _ in range(4)]
    workers = draw_value(st.integers(3, 32))
    slow = draw_value(st.lists(st.integers(0, workers - 1), unique=True, max_size=3))
    return DrillPlan(
        workers=workers,
        hosts=2,
        for_s=for_s,
        seed=draw_value(st.integers(0, 2**63)),
        kill_every_s=draw_value(st.floats(1.0, for_s)),
        stop=draw_value(st.integers(0, 5)),
        slow=tuple(SlowWorker(worker, 2.0) for worker in slow),
        partition_s=lasting[0],
        ledger_down_s=lasting[1],
        storage_down_s=lasting[2],
        disk_full_s=lasting[3],
        corrupt=draw_value(st.sampled_from(["", "gradient", "parameter", "optimizer"])),
    ).validate()


@given(plans())
def test_a_schedule_is_a_function_of_plan_and_seed(plan: DrillPlan) -> None:
    assert draw(plan) == draw(replace(plan))


def test_another_seed_is_another_schedule() -> None:
    plan = DrillPlan(kill_every_s=2.0)
    assert len({draw(replace(plan, seed=seed)) for seed in range(20)}) == 20


@given(plans())
def test_faults_come_by_time_within_the_drill_and_to_somebody_who_exists(plan: DrillPlan) -> None:
    faults = draw(plan)
    assert list(faults) == sorted(faults)
    for fault in faults:
        assert 0.0 <= fault.at_s <= plan.for_s + 1e-3 and fault.end_s <= plan.for_s + 1e-3
        assert -1 <= fault.target < (plan.hosts if fault.kind == "partition" else plan.workers)
        assert fault.kind in plan.kinds and fault.sentence().startswith(fault.kind)


@given(plans())
def test_outages_come_once_each_and_one_after_another(plan: DrillPlan) -> None:
    outages = [fault for fault in draw(plan) if fault.kind in OUTAGES]
    assert sorted(fault.kind for fault in outages) == sorted(kind for kind in plan.kinds if kind in OUTAGES)
    assert all(one.end_s <= other.at_s + 1e-3 for one, other in pairwise(outages))


@given(plans())
def test_nobody_dies_while_the_membership_cannot_change(plan: DrillPlan) -> None:
    faults = draw(plan)
    away = [fault for fault in faults if fault.kind in ("partition", "ledger-down")]
    for fault in faults:
        if fault.kind in ("kill", "stop"):
            assert not any(one.at_s <= fault.at_s <= one.end_s + AFTER_OUTAGE_S - 1e-2 for one in away)


@given(st.floats(0.2, 30.0), st.integers(0, 2**32))
def test_as_many_kills_as_the_time_has_periods(period_s: float, seed: int) -> None:
    faults = draw(DrillPlan(for_s=60.0, kill_every_s=period_s, seed=seed))
    assert len(faults) == int(60.0 / period_s + 1e-9)
    assert len({fault.target for fault in faults} - set(range(4))) == 0


def test_durations() -> None:
    for text, seconds in (("500ms", 0.5), ("10s", 10.0), ("2m", 120.0), ("1.5 min", 90.0), ("1h", 3600.0), ("7", 7.0)):
        assert parse_duration("--for", text) == seconds
    for text in ("", "soon", "-3s", "3 weeks", "True"):
        with pytest.raises(ConfigError):
            parse_duration("--for", text)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "no faults"),
        ({"kill-every": "10s", "workers": 1}, "--workers is 1"),
        ({"kill-every": "10s", "workers": "many"}, "--workers is 'many'"),
        ({"kill-every": "2m", "for": "1m"}, "--kill-every is 120"),
        ({"ledger-down": "50s", "for": "1m"}, "has room for"),
        ({"slow": ["1"]}, "--slow is '1'"),
        ({"slow": ["9:5x"]}, "--slow, the worker"),
        ({"slow": ["1:5x", "1:2x"]}, "twice"),
        ({"corrupt": "disk"}, "--corrupt is 'disk'"),
        ({"corrupt": "gradient", "workers": 2}, "needs 3 workers"),
        ({"partition": "5s", "hosts": 1}, "at least 2 hosts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_that_cannot_be_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_plan(options)


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'workers = 3\nkill-every = "10s"\nslow = ["1:5x"]\ndisk-full = true\npartition = "5s"\nfor = "2m"\n'
    )
    plan = parse_plan({**read_plan(path), "seed": 7})
    assert plan == DrillPlan(
        workers=3,
        hosts=2,
        kill_every_s=10,
        slow=(SlowWorker(1, 5.0),),
        disk_full_s=10,
        partition_s=5,
        for_s=120,
        seed=7,
    )
    assert set(plan.kinds) == {"kill", "slow", "disk-full", "partition"}
    path.write_text("kil-every = 3\n")
    with pytest.raises(ConfigError, match="'kil-every'"):
        read_plan(path)
    path.write_text("kill-every = \n")
    with pytest.raises(ConfigError, match="not a plan"):
        read_plan(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_plan(tmp_path / "none.toml")


def test_the_names_of_options() -> None:
    assert {"for", "kill-every", "ledger-down", "seed", "slow", "save-every"} <= option_names()
