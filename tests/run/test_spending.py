"""A worker's account of its time: what its thread enters, where its machine is, and what it tells of both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import spending as s
from holdfast.detection.beat import Activity
from holdfast.engine.spending import HeldUp, Spending
from holdfast.engine.transfer.checkpointing import NoCheckpoints, RunCheckpoints
from holdfast.events import EventLog, read_events
from holdfast.membership.phases import Phase


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def told(directory: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(directory) if event["kind"] == "spent"]


def test_the_life_of_a_worker(tmp_path: Path, clock: Clock) -> None:
    spending = Spending(EventLog(tmp_path / "w0.1.jsonl", "w0.1"), clock)

    def then(seconds: float, call: Callable[[], object]) -> None:
        clock.now += seconds
        call()

    then(1, lambda: spending.enter(Activity.WAITING, 0))  # joining until the first loop
    then(2, lambda: spending.look(Phase.FORMING, broken=False))  # stood by
    then(3, lambda: spending.go_on(broken=False))  # was let in
    spending.enter(Activity.LOADING, 0)
    then(4, lambda: spending.enter(Activity.SHARD, 0))  # loaded
    then(5, lambda: spending.enter(Activity.WAITING, 0))  # computed
    spending.look(Phase.GATHERING, broken=False)
    then(6, lambda: spending.look(Phase.BROKEN, broken=True))  # waited, then lost somebody
    then(7, lambda: spending.look(Phase.FORMING, broken=True))
    then(7, lambda: spending.go_on(broken=True))
    spending.enter(Activity.SHARD, 0)
    then(7, lambda: spending.enter(Activity.WAITING, 0))  # computed the lost one's shards: recovering all the same
    began = clock.now
    then(7, lambda: spending.took(s.REDUCING, began))
    spending.go_on(broken=False)
    began = clock.now
    then(4, lambda: spending.took(s.CHECKPOINTING, began))  # within the other one
    then(8, lambda: spending.took(s.REDUCING, began))
    with spending.during(s.CHECKPOINTING):
        clock.now += 5
    spending.enter(Activity.SCRIPT, 0)
    then(10, lambda: spending.enter(Activity.WAITING, 1))  # the update
    spending.look(Phase.COMPUTING, broken=False)
    then(11, lambda: spending.go_on(broken=False))  # paused without the ledger
    spending.enter(Activity.ENDED, 1)
    clock.now += 12
    spending.reduced_bytes += 77
    spending.tell()
    last = told(tmp_path)[-1]
    assert last["seconds"] == {
        s.JOINING: 4.0,
        s.STANDBY: 2.0,
        s.LOADING: 4.0,
        s.COMPUTING: 15.0,
        s.WAITING: 6.0,
        s.RECOVERING: 39.0,
        s.REDUCING: 8.0,
        s.CHECKPOINTING: 9.0,
        s.SCRIPT: 12.0,
    }
    assert sum(last["seconds"].values()) == clock.now - 100.0
    assert last["doing"] == s.SCRIPT and last["bytes"] == 77 and last["memory_bytes"] > 1 << 20


def test_it_tells_once_a_second_and_later_less_often(tmp_path: Path, clock: Clock) -> None:
    spending = Spending(EventLog(tmp_path / "w0.1.jsonl", "w0.1", wall_clock=clock), clock)
    for _ in range(4000):
        clock.now += 0.5
        spending.look(Phase.GATHERING, broken=False)
    times = [event["t"] - 100.0 for event in told(tmp_path)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 1.0 and gaps[0] == 1.0 and max(gaps) == gaps[-1] == 10.0 and 200 < len(times) < 700


@given(
    moves=st.lists(
        st.one_of(
            st.sampled_from(list(Activity)),
            st.tuples(st.sampled_from(list(Phase)), st.booleans()),
            st.sampled_from([s.REDUCING, s.CHECKPOINTING, "end"]),
            st.floats(0.0, 2.0),
        ),
        max_size=30,
    )
)
def test_whatever_it_enters_all_is_accounted_for(moves: list[Any]) -> None:
    spending = Spending()
    began = spending._account._began
    open_ones = []
    for move in moves:
        if isinstance(move, Activity):
            spending.enter(move, 0)
        elif isinstance(move, tuple):
            spending.look(move[0], broken=move[1])
        elif isinstance(move, float):
            spending.took(s.REDUCING, time.monotonic() - move)
        elif move != "end":
            open_ones.append(spending.during(move))
            open_ones[-1].__enter__()
        elif open_ones:
            open_ones.pop().__exit__(None, None, None)
    now = spending._account._since + 1.0
    assert math.isclose(sum(spending._account.spent(now).values()), now - began)
    assert spending._account.doing in s.OWN


def test_what_holds_training_up_is_on_the_account_and_everything_is_passed_on() -> None:
    calls = []

    class Inner(NoCheckpoints):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattribute__(name)

            def call(*args: Any, **kwargs: Any) -> float | None:
                calls.append((name, spending._account.doing))
                return 0.001 if name == "wait_copied" else None

            if name in ("keeps", "saving"):
                call()
            return call

    spending = Spending()
    held = HeldUp(Inner(), spending)
    names = [name for name in vars(NoCheckpoints) if not name.startswith("_")]
    own = {name for name in vars(HeldUp) if not name.startswith("_")}
    handed_on = {*HeldUp.AS_THEY_ARE, *HeldUp._ON_ACCOUNT, "keeps", "saving"}
    assert (own - {"AS_THEY_ARE"}) | handed_on == set(names)
    held.save(1, (), {})
    held.save_last(1, (), {})
    held.prepare(("w0.1",))
    held.wait_copied()
    held.settle_up_to(1)
    held.settle(1)
    held.leave(1, (), {}, save=True)
    assert {doing for name, doing in calls if name not in ("prepare", "wait_copied")} == {s.CHECKPOINTING}
    assert len(calls) == 7 and spending._account.spent(time.monotonic())[s.CHECKPOINTING] > 0
    calls.clear()
    held.member_lost()
    held.arrived(1)
    held.note(1, {})
    held.close()
    held.search_at(None)
    held.is_search_due(1.0)
    held.is_due(1, first=True)
    held.search()
    held.newest()
    assert (
        held.keeps
        and held.saving
        and {name for name, _ in calls}
        == set(names) - {*("save", "save_last", "prepare", "wait_copied", "settle_up_to", "settle", "leave")}
    )
    assert issubclass(RunCheckpoints, NoCheckpoints)
