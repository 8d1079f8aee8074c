"""The record of a run and the picture of it: what a person would read out of its events, and that it stays small."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.events import KINDS
from holdfast.events.telling import describe
from holdfast.observe import lanes, recent, series
from holdfast.observe.fold import RunRecord, record_of
from holdfast.observe.lanes import STATES, Lane
from holdfast.observe.picture import crew, goodput_of, header, lane_seconds, picture, state_of, steps_per_s
from holdfast.observe.series import Mark, Marks, Series

Event = dict[str, Any]


def event(at: float, who: str, kind: str, **fields: Any) -> Event:
    return {"t": at, "who": who, "kind": kind, **fields}


def begin(workers: int = 2, spares: int = 0) -> list[Event]:
    """An agent, its workers, and the first view."""
    ids = [f"w{slot}.1" for slot in range(workers + spares)]
    events = [event(0, "agent", "agent_started", pid=1, workers=workers, spares=spares, script="train.py")]
    events += [event(0.1, "agent", "worker_started", worker=worker, pid=10 + slot) for slot, worker in enumerate(ids)]
    events += [event(1, worker, "registered", address="unix:x") for worker in ids]
    members = ids[:workers]
    events += [event(2, worker, "view", view=1, members=members, reason="the first", step=0) for worker in members]
    return [*events, progress(3, members[0], view=1, step=10)]


def progress(at: float, who: str, *, view: int, step: int, **metrics: float) -> Event:
    return event(
        at, who, "progress", view=view, step=step, steps=100, metrics=metrics or {"loss": 0.5}, samples_per_s=80.0
    )


KILL = [
    event(4, "w0.1", "lost", view=1, peer="w1.1", reason="connection closed", step=11),
    event(4.01, "agent", "worker_exited", worker="w1.1", pid=11, signal=9, reason="killed"),
    event(4.02, "agent", "worker_started", worker="w1.2", pid=12),
    event(4.05, "w0.1", "view", view=2, members=["w0.1"], reason="w1.1 is gone", step=11),
    event(4.1, "w0.1", "recovered", view=2, step=11, duration_s=0.1),
    event(6, "w1.2", "registered", address="unix:y"),
    event(6.1, "w0.1", "view", view=3, members=["w0.1", "w1.2"], reason="w1.2 joins", step=20),
    event(6.2, "w1.2", "joined", view=3, step=20, duration_s=0.1, bytes=1000),
    progress(7, "w0.1", view=3, step=30),
]


def states(record: RunRecord, lane: str) -> list[tuple[str, str]]:
    return [(state, worker) for _, state, worker in record.workers.lanes[lane].stretches]


def test_a_killed_worker_and_its_replacement_are_one_lane() -> None:
    record = record_of([*begin(), *KILL])
    assert states(record, "w1") == [
        ("joining", "w1.1"),
        ("computing", "w1.1"),
        ("dead", "w1.1"),
        ("joining", "w1.2"),
        ("computing", "w1.2"),
    ]
    assert [state for state, _ in states(record, "w0")] == ["joining", "computing", "recovering", "computing"]
    told = header(record, now=8)
    assert told["failures"] == 1 and told["recoveries"] == 1 and told["recovery_worst_s"] == 0.1
    assert (told["step"], told["steps"], told["view"], told["members"]) == (30, 100, 3, 2)
    assert [(mark.kind, mark.worker, mark.at) for mark in record.marks.all] == [("failure", "w1.1", 4.01)]
    assert crew(record)[1]["pid"] == 12


def test_the_time_of_all_lanes_adds_up() -> None:
    record = record_of([*begin(), *KILL])
    seconds = lane_seconds(record, now=8)
    assert abs(sum(seconds.values()) - 2 * 6) < 1e-9  # since the first view
    good = seconds["computing"] / sum(seconds.values())
    assert goodput_of(record, now=8) == good and 0.6 < good < 0.9


def test_spares_wait_and_cost_nothing() -> None:
    record = record_of(begin(workers=2, spares=1))
    assert states(record, "w2") == [("joining", "w2.1"), ("spare", "w2.1")]
    spent = goodput_of(record, now=3), goodput_of(record, now=3 + 1e-9)
    record.feed(event(4, "w0.1", "view", view=2, members=["w0.1", "w2.1"], reason="w1.1 is gone", step=11))
    assert states(record, "w2")[-1] == ("joining", "w2.1") and states(record, "w1")[-1] == ("paused", "w1.1")
    assert spent[0] is not None


def test_slow_paused_and_leaving() -> None:
    record = record_of(begin())
    record.feed(event(4, "w0.1", "slow", step=12, worker="w1.1", times=3.0, since_s=5, costs=0.2, shards=2))
    assert record.workers.lanes["w1"].state == "slow" and crew(record)[1]["slow"] == 3.0
    record.feed(event(5, "w1.1", "waiting", step=12, reason="cut off"))
    assert record.workers.lanes["w1"].state == "paused" and header(record, 5)["waiting"] == "cut off"
    record.feed(progress(6, "w0.1", view=1, step=20))
    assert record.workers.lanes["w1"].state == "slow" and header(record, 6)["waiting"] is None
    record.feed(event(7, "w0.1", "no_longer_slow", step=20, worker="w1.1"))
    record.feed(event(8, "w1.1", "left", step=21, reason="asked to"))
    record.feed(event(8.1, "agent", "worker_exited", worker="w1.1", pid=11, exit_code=0, reason="left"))
    assert [state for state, _ in states(record, "w1")][-2:] == ["computing", "gone"]
    assert record.workers.failures == 0


def test_the_states_of_a_run() -> None:
    assert state_of(RunRecord()) == "starting"
    record = record_of(begin())
    assert state_of(record) == "running"
    assert state_of(record, agent=False, lives=True) == "unattended"
    assert state_of(record, agent=False, lives=False) == "stopped"
    for worker in ("w0.1", "w1.1"):
        record.feed(event(9, worker, "finished", step=100, digest="xxh3:1", view=1))
    record.feed(event(9.5, "agent", "agent_stopped", reason="finished", exit_code=0))
    assert state_of(record, agent=False, lives=False) == state_of(record) == "finished"
    assert header(record, 9.5)["digest"] == "xxh3:1" and header(record, 9.5)["eta_s"] is None


def test_how_long_it_will_take() -> None:
    record = record_of(begin())
    for number in range(1, 20):
        record.feed(progress(3 + number, "w0.1", view=1, step=10 + 2 * number))
    assert steps_per_s(record) == 2.0
    assert header(record, 22)["eta_s"] == (100 - 48) / 2


def test_a_picture_and_its_changes_are_the_next_picture() -> None:
    """What the page does: put the changes upon what it has."""
    source = random.Random(3)
    record, shown = RunRecord(), picture(RunRecord(), 0.0)
    events = [*begin(8, 2), *KILL, *noise(source, 3000)]
    for number, one in enumerate(events):
        record.feed(one)
        if source.random() < 0.02 or number == len(events) - 1:
            shown = patched(shown, json.loads(json.dumps(picture(record, 50.0, shown["number"]))))
    whole = json.loads(json.dumps(picture(record, 50.0)))
    for name in ("header", "marks", "checkpoints", "crew", "counts"):
        assert shown[name] == whole[name], name
    assert {name: lane["points"] for name, lane in shown["series"].items()} == {
        name: lane["points"] for name, lane in whole["series"].items()
    }
    assert by_name(shown["lanes"]) == by_name(whole["lanes"])
    kept = {one["n"] for one in shown["events"]}
    assert {one["n"] for one in whole["events"]} <= kept


def by_name(lanes: list[Event]) -> dict[tuple[str, str], Event]:
    return {(lane["group"], lane["name"]): lane for lane in lanes}


def patched(shown: Event, change: Event) -> Event:
    result = {**shown, **change}
    result["lanes"] = list((by_name(shown["lanes"]) | by_name(change["lanes"])).values())
    result["series"] = dict(shown["series"])
    for name, part in change["series"].items():
        before = shown["series"].get(name, {"points": []})["points"]
        result["series"][name] = {"points": before[: part["from"]] + part["points"]}
    result["events"] = change["events"] + shown["events"]
    return result


def noise(source: random.Random, count: int) -> list[Event]:
    """Anything that may be in a log, in any order."""
    workers = [f"w{slot}.{number}" for slot in range(10) for number in (1, 2, 3)]
    values: dict[str, Any] = {
        "worker": "w1.2",
        "peer": "w2.1",
        "members": workers[:8],
        "steps": 5000,
        "metrics": {"loss": 0.3, "accuracy": 0.5},
        "shards": {"w0.1": 3},
        "paces_s": {"w0.1": 0.1},
        "liars": ["w1.1"],
        "signal": 9,
    }
    events = []
    for at in range(count):
        kind = source.choice(sorted(KINDS))
        fields = {name: values.get(name, source.randrange(1, 50)) for name in KINDS[kind]}
        if kind == "worker_exited":
            fields["reason"] = source.choice(["killed", "left", "evicted"])
        if "worker" in fields:
            fields["worker"] = source.choice(workers)
        events.append(event(8 + at / 100, source.choice(workers), kind, **fields))
    return events


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(
    sorted({name for names in KINDS.values() for name in names})), JUNK)), max_size=12))  # fmt: skip
def test_nothing_in_a_log_is_a_reason_to_fail(some: list[tuple[str, Event]]) -> None:
    record = record_of(begin())
    for number, (kind, fields) in enumerate(some):
        record.feed(event(5.0 + number, "w0.1", kind, **fields))
    json.dumps(picture(record, 20.0), allow_nan=False)


def test_every_kind_has_a_sentence() -> None:
    for kind in KINDS:
        described = describe(event(1, "w0.1", kind))
        assert described["text"] and "_" not in described["text"]
    assert describe(event(1, "a", "something_new"))["text"] == "something new"
    long = describe(event(1, "w0.1", "hung", reason="r" * 10_000, stacks="s" * 100_000))
    assert len(json.dumps(long)) < 20_000


def test_every_reason_is_shown_once_and_makes_a_decision() -> None:
    """Beside the sentence, or in it: the filter for decisions passes over neither."""
    stacks = 'Thread 0x1 (most recent call first):\n  File "train.py", line 7 in step'
    for kind in KINDS:
        described = describe(event(1, "w0.1", kind, reason="so it is", stacks=stacks))
        inside = "so it is" in described["text"]
        assert described.get("decided", False) == inside and (described.get("reason") == "so it is") != inside
        assert not {"reason", "decided"} & set(describe(event(1, "w0.1", kind)))


def test_what_was_recorded_outside_the_shards_stays_beside_the_means() -> None:
    record = RunRecord()
    told = event(4.0, "w0.1", "recorded", step=8, metrics={"val_loss": 0.25}, best=False)
    for one in (*begin(), progress(3.0, "w0.1", view=1, step=8, loss=1.0), told, {**told, "who": "w1.1"}):
        record.feed(one)
    record.feed(progress(5.0, "w0.1", view=1, step=9, loss=0.5))
    assert record.metrics == {"val_loss": 0.25, "loss": 0.5}
    assert [point[1:3] for point in record.series["val_loss"].points] == [[8, 0.25]]


def test_what_all_tell_is_listed_once() -> None:
    record = record_of(begin(workers=8))
    assert [one["kind"] for one in record.events.newest()].count("view") == 1
    assert record.events.counts["view"] == 8


def test_it_stays_small() -> None:
    """However long the run: after 60,000 events of noise and failures it is as large as after 20,000."""
    source = random.Random(1)
    record, sizes = RunRecord(), []
    for at, one in enumerate(noise(source, 10_000) * 6):
        record.feed({**one, "t": float(at)})
        if at in (20_000, 59_999):
            sizes.append(len(json.dumps(picture(record, 1e6))))
    assert sizes[1] < sizes[0] * 1.3 < 1_000_000
    assert len(record.events._told) <= recent.TOLD_MAX
    assert all(len(lane.stretches) <= lanes.STRETCHES_MAX for lane in record.workers.lanes.values())
    assert len(record.marks.all) <= series.MARKS_MAX
    assert all(len(one.points) <= series.POINTS_MAX for one in record.series.values())
    assert sys.getsizeof(record.checkpoints) < 10_000


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(STATES), st.integers(1, 3)), max_size=400))
def test_a_lane_keeps_the_time_of_each_state(moves: list[tuple[float, str, int]]) -> None:
    lane, at = Lane("w0", ("", 0)), 1.0
    expected: dict[str, float] = {}
    for passed, state, incarnation in moves:
        if lane.stretches:
            expected[lane.state] = expected.get(lane.state, 0.0) + passed
        at += passed
        lane.move(state, f"w0.{incarnation}", at, 1)
    seconds = lane.seconds(at)
    assert all(abs(seconds.get(state, 0.0) - value) < 1e-6 for state, value in expected.items())
    starts = [since for since, _, _ in lane.stretches]
    assert starts == sorted(starts) and len(starts) <= lanes.STRETCHES_MAX
    if lane.stretches:
        assert lane.stretches[-1][1:] == (lane.state, lane.worker)


def test_a_lane_forgets_the_shortest_first() -> None:
    lane = Lane("w0", ("", 0))
    for number in range(400):
        lane.move("computing", "w0.1", 10.0 * number, 1)
        lane.move("slow", "w0.1", 10.0 * number + 0.001, 1)
        if number == 20:
            lane.move("dead", "w0.1", 205.0, 1)
    assert ("dead", "w0.1") in [stretch[1:] for stretch in lane.stretches]


@settings(max_examples=20)
@given(st.lists(st.floats(-1e6, 1e6), max_size=3000))
def test_a_series_keeps_extremes_and_the_mean(values: list[float]) -> None:
    line = Series()
    for number, value in enumerate(values):
        line.add(float(number), number, value, number + 1)
    assert len(line.points) <= series.POINTS_MAX
    if values:
        assert min(point[3] for point in line.points) == min(values)
        assert max(point[4] for point in line.points) == max(values)
        counts = [line.stride] * (len(line.points) - 1)
        counts.append(len(values) - sum(counts))
        mean = sum(point[2] * count for point, count in zip(line.points, counts, strict=True)) / len(values)
        assert abs(mean - sum(values) / len(values)) < 1e-3
    line.add(1e9, 1, float("nan"), 10**6)
    assert all(point[2] == point[2] for point in line.points)


def test_marks_that_are_many_are_counted_together() -> None:
    marks = Marks()
    for number in range(1000):
        marks.add(Mark(float(number), "failure" if number % 3 else "rewound", "w0.1", "x", 1), number)
    assert len(marks.all) <= series.MARKS_MAX
    assert sum(mark.count for mark in marks.all) == 1000
    assert all(mark.until >= mark.at for mark in marks.all)


def test_where_the_time_went_adds_up() -> None:
    """By the workers' own accounts: of each slot, over all workers that it has had, and of the run."""
    record = record_of([*begin(), *KILL])
    assert "accounts" not in picture(record, 8.0)
    spent = {"joining": 2.0, "computing": 4.0, "waiting": 0.5}
    record.feed(event(7.5, "w0.1", "spent", seconds=spent, doing="computing"))
    accounts = picture(record, 8.0)["accounts"]
    assert set(accounts["slots"]) == {"w0", "w1"}
    assert accounts["slots"]["w0"]["waiting"] == 0.5
    for slot, seconds in accounts["slots"].items():
        assert abs(sum(seconds.values()) - 7.9) < 0.05, slot  # from the start of its process until now
    both = sum(sum(seconds.values()) for seconds in accounts["slots"].values())
    assert abs(sum(accounts["run"].values()) - both) < 0.05
    assert "accounts" not in picture(record, 8.0, since=record.number)


def test_who_was_left_out_by_a_robust_rule_and_how_often_is_shown_and_who_was_evicted_for_it() -> None:
    counts = {"shards": {"w0.1": 8, "w1.1": 8}, "left_out": {"w0.1": 1, "w1.1": 8}}
    told = event(5, "w0.1", "left_out", step=12, **counts, suspicion={"w0.1": 0.0, "w1.1": 0.9})
    reason = "8 of its 8 shards in 4 steps were left out"
    gone = [event(6, who, "distrusted", step=13, worker="w1.1", reason=reason) for who in ("w0.1", "w1.1")]
    record = record_of([*begin(), told, *gone])
    shown = {one["worker"]: one["left_out"] for one in crew(record)}
    assert shown["w1.1"] == {"shards": 8, "left_out": 8, "suspicion": 0.9} and shown["w0.1"]["left_out"] == 1
    assert record.workers.distrusted == {"w1.1": reason}
    marks = [mark for mark in picture(record, 7)["marks"] if "distrusted" in str(mark)]
    assert len(marks) == 1  # though both have told it
    assert "w1.1 8 of 8" in describe(told)["text"] and reason in str(describe(gone[0]))


SERVED = [
    *begin(),
    event(3.1, "agent", "server_started", server="s0.1", pid=20),
    event(3.1, "agent", "server_started", server="s1.1", pid=21),
    event(3.5, "agent", "placed", slice="parameters/0", primary="s0.1", servers=["s0.1", "s1.1"], epoch=1, reason=""),
    event(
        3.6,
        "s0.1",
        "serving",
        slices={"parameters/0": ["primary", 1, 4]},
        leads=1,
        entries=4,
        log_bytes=4096,
        updates=30,
        lags_s={"s1.1": 0.25},
    ),
    event(3.6, "s1.1", "serving", slices={}, leads=0, entries=4, log_bytes=4096, updates=0, lags_s={}),
    event(5, "agent", "server_exited", server="s0.1", pid=20, signal=9, reason="killed"),
    event(5.4, "agent", "failover", slice="parameters/0", primary="s1.1", was="s0.1", epoch=2, reason="s0.1 is gone"),
    event(5.5, "agent", "server_started", server="s0.2", pid=22),
    event(9, "agent", "server_slow", server="s1.1", times=6.5, noticed_by="", reason="late"),
]


def test_servers_and_slices_have_lanes_that_say_who_led_when() -> None:
    record = record_of(SERVED)
    servers = record.servers
    assert [(state, who) for _, state, who in servers.lanes["s0"].stretches] == [
        ("joining", "s0.1"),
        ("serving", "s0.1"),
        ("dead", "s0.1"),
        ("joining", "s0.2"),
    ]
    assert [(at, state, who) for at, state, who in servers.slice_lanes["parameters/0"].stretches] == [
        (3.5, "serving", "s0.1, epoch 1"),
        (5, "recovering", "no primary"),
        (5.4, "serving", "s1.1, epoch 2"),
    ]
    assert [(mark.kind, mark.at) for mark in record.marks.all] == [("failure", 5), ("failover", 5.4)]
    shown = picture(record, 10.0)
    assert [(lane["group"], lane["name"]) for lane in shown["lanes"]] == [
        ("workers", "w0"),
        ("workers", "w1"),
        ("servers", "s0"),
        ("servers", "s1"),
        ("slices", "parameters/0"),
    ]
    first, second = shown["servers"]
    assert (first["server"], first["state"], first["leads"]) == ("s0.2", "joining", 0)
    assert (second["server"], second["state"], second["slow"]) == ("s1.1", "slow", 6.5)
    [one] = shown["slices"]
    assert (one["primary"], one["epoch"], one["failovers"], one["others"]) == ("s1.1", 2, 1, ["s0.1"])
    assert servers.updates == 30, "what a dead server acknowledged counts"
    assert header(record, 10.0)["failovers"] == 1
    assert all(not who.startswith("s") for who in record.time.workers(10.0)), "servers' time is nobody's step"


def test_a_picture_has_servers_only_where_they_have_changed() -> None:
    record = record_of(SERVED)
    since = record.number
    record.feed(progress(11, "w0.1", view=1, step=12))
    assert "servers" not in picture(record, 11.0, since)
    record.feed(event(12, "agent", "server_no_longer_slow", server="s1.1"))
    assert picture(record, 12.0, since)["servers"][1]["state"] == "serving"


def test_servers_and_slices_stay_few_however_many_there_were() -> None:
    record = RunRecord()
    for number in range(3000):
        server = f"s0.{number}"
        record.feed(event(number, "agent", "server_started", server=server, pid=number))
        record.feed(event(number, server, "serving", slices={}, leads=0, entries=0, log_bytes=0, updates=1, lags_s={}))
        name = f"table/t/{number}"
        record.feed(event(number, "agent", "placed", slice=name, primary=server, servers=[server], epoch=1, reason=""))
        record.feed(event(number, "agent", "server_exited", server=server, pid=number, reason="killed", signal=9))
    assert record.servers.updates == 3000
    assert len(record.servers.known) < 600 and len(record.servers.slices) <= 256
    assert len(record.servers.slice_lanes) <= 64
