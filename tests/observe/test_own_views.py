"""A run in which each worker is in a view of its own: who trains, what it costs, what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.events.telling import sentence
from holdfast.observe import lanes
from holdfast.observe.fold import RunRecord, record_of
from holdfast.observe.picture import crew, header
from holdfast.observe.summary import closing_lines, inexact_because, progress_line
from holdfast.observe.terminal import Narrator

Event = dict[str, Any]


def event(at: float, who: str, kind: str, **fields: Any) -> Event:
    return {"t": at, "who": who, "kind": kind, **fields}


def own_view(at: float, who: str) -> Event:
    return event(at, who, "view", view=1, members=[who], reason="the first", step=0, own=True)


def spent(at: float, who: str, **seconds: float) -> Event:
    return event(at, who, "spent", seconds=seconds, doing="computing", bytes=0, memory_bytes=0)


def begin() -> list[Event]:
    """Two workers, of which the second comes while the first trains. Servers are there after 4 s."""
    workers = ("w0.1", "w1.1")
    return [
        event(0, "agent", "agent_started", pid=1, workers=2, spares=0, script="train.py"),
        *(event(0, "agent", "worker_started", worker=who, pid=10) for who in workers),
        *(event(1, who, "registered", address="unix:x") for who in workers),
        *(own_view(1.5, who) for who in workers),
        event(4, "w0.1", "progress", view=1, step=1, steps=100, metrics={}, samples_per_s=80.0, workers=2),
        event(5, "w0.1", "staleness", updates={"0": 3}, ahead=1, missing=0, bound=4),
        event(5, "w1.1", "staleness", updates={"1": 3}, ahead=1, missing=0, bound=4),
        spent(5, "w0.1", joining=3.0, computing=1.0),
        spent(5, "w1.1", joining=3.0, computing=0.6, waiting=0.4),
    ]


def states(record: RunRecord) -> dict[str, str]:
    return {name: lane.state for name, lane in record.workers.lanes.items()}


def test_all_that_train_are_members_and_compute() -> None:
    record = record_of(begin())
    assert record.workers.members == ("w0.1", "w1.1")
    assert states(record) == {"w0": lanes.COMPUTING, "w1": lanes.COMPUTING}
    assert header(record, 6)["members"] == 2
    assert [one["rank"] for one in crew(record)] == [0, 1]


def test_the_time_until_the_first_step_is_nobodys_loss_and_waiting_for_others_neither() -> None:
    spent_ = record_of(begin()).time.run(5)
    assert spent_.seconds["starting"] == pytest.approx(8.0), "until the servers are there"
    assert spent_.seconds["recovering"] == spent_.seconds["joining"] == 0
    assert spent_.goodput == 1.0


def test_what_servers_write_is_no_workers_time_and_different_buffers_are_no_fault() -> None:
    slices = [event(at, "s0.1", "slice", slice="parameters/0", decision="d", reason="r") for at in (0.5, 4.5)]
    ends = [event(9, who, "finished", step=100, digest=f"of {who}", view=1) for who in ("w0.1", "w1.1")]
    record = record_of([*begin(), *slices, *ends])
    assert record.time.workers(5).keys() == {"w0.1", "w1.1"}
    assert not inexact_because(record)


def test_who_is_lost_is_a_member_no_more_and_the_others_still_are() -> None:
    killed = event(6, "agent", "worker_exited", worker="w1.1", pid=10, signal=9, reason="killed")
    record = record_of([*begin(), killed])
    assert record.workers.members == ("w0.1",)
    assert states(record) == {"w0": lanes.COMPUTING, "w1": lanes.DEAD}
    back = [event(7, "w1.2", "registered", address="unix:y"), own_view(7.1, "w1.2")]
    made = event(8, "w1.2", "staleness", updates={"0": 1}, ahead=0, missing=0, bound=4)
    record = record_of([*begin(), killed, *back, made])
    assert record.workers.members == ("w0.1", "w1.2")
    assert states(record)["w1"] == lanes.COMPUTING
    assert record.workers.failures == 1


@pytest.mark.parametrize("kind", ["finished", "left", "evicted"])
def test_who_ends_is_a_member_no_more(kind: str) -> None:
    fields = {"step": 100, "digest": "d", "view": 1, "reason": "asked to"}
    assert record_of([*begin(), event(9, "w0.1", kind, **fields)]).workers.members == ("w1.1",)


def test_progress_of_one_says_nothing_of_another_that_waits() -> None:
    reason = "it has been waiting for parameters/0 (s0.1, its primary, is gone) since 3 s"
    waits = event(6, "w1.1", "waiting", step=9, reason=reason)
    goes_on = event(7, "w0.1", "progress", view=1, step=20, steps=100, metrics={}, samples_per_s=80.0, workers=2)
    record = record_of([*begin(), waits, goes_on])
    assert record.workers.waiting == {"w1.1": reason}
    assert states(record) == {"w0": lanes.COMPUTING, "w1": lanes.PAUSED}
    assert "s0.1, its primary, is gone" in progress_line(record, workers=2)
    record.feed(event(8, "w1.1", "staleness", updates={"0": 1}, ahead=0, missing=0, bound=4))
    assert not record.workers.waiting
    assert states(record)["w1"] == lanes.COMPUTING


def test_it_is_not_spoken_of_views() -> None:
    record, narrator = RunRecord(), Narrator()
    said = [narrator.sentence(one, news=record.feed(one)) for one in begin()]
    assert [one for one in said if "parameter servers" in one] == [
        "w0.1 trains on the parameter servers",
        "w1.1 trains on the parameter servers",
    ]
    assert "view" not in progress_line(record, workers=2)
    finished = event(9, "w0.1", "finished", step=100, digest="d", view=1)
    record.feed(finished)
    assert "view" not in closing_lines(record, "r")[0]
    assert sentence(own_view(0, "w0.1")) == "w0.1 trains on the parameter servers"
