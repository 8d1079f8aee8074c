"""Where the time went: every instant is in exactly one category, in a worker's account and in the fold over events."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.spending import (
    CATEGORIES,
    COMPUTING,
    DOWN,
    JOINING,
    LOST,
    OWN,
    RECOVERING,
    STANDBY,
    STARTING,
    WAITING,
    Account,
)
from holdfast.observe.accounting import Accounting, Spent

times = st.floats(0.0, 100.0).map(lambda t: round(t, 3))


@given(began=st.floats(0, 1e6), switches=st.lists(st.tuples(st.sampled_from(OWN), st.floats(0, 1e4))))
def test_an_account_adds_up_to_the_time_since_it_began(began: float, switches: list[tuple[str, float]]) -> None:
    account, now = Account(began), began
    for category, later in switches:
        now += later
        account.switch(category, now)
        if later > 5000:
            now += 3.0
            account.took(category, now - 4.0, now)  # a part of it is accounted for already, perhaps
    now += 1.0
    spent = account.spent(now)
    assert math.isclose(math.fsum(spent.values()), now - began, rel_tol=1e-9, abs_tol=1e-6)
    assert set(spent) <= set(OWN) and all(seconds > 0 for seconds in spent.values())
    assert spent[account.doing] >= 0.999


def event(t: float, who: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "who": who, "kind": kind, **fields}


def folded(*events: dict[str, Any]) -> Accounting:
    accounting = Accounting()
    for one in events:
        accounting.feed(one)
    return accounting


def seconds(spent: Spent) -> dict[str, float]:
    return {category: round(value, 6) for category, value in spent.seconds.items() if value}


def test_before_its_account_a_worker_joins_and_after_its_last_word_it_does_what_it_did() -> None:
    accounting = folded(
        event(100.0, "agent", "worker_started", worker="w0.1", pid=1),
        event(104.0, "w0.1", "view", view=1, members=["w0.1"]),
        event(110.0, "w0.1", "spent", seconds={COMPUTING: 4.0, WAITING: 2.0}, doing=WAITING),
        event(113.0, "agent", "worker_exited", worker="w0.1", reason="killed"),
    )
    assert seconds(accounting.workers()["w0.1"]) == {STARTING: 4.0, COMPUTING: 4.0, WAITING: 5.0}


def test_a_slot_without_a_worker_is_down_until_the_next_one_starts() -> None:
    events = [
        event(0.0, "agent", "agent_started", workers=2),
        event(0.0, "agent", "worker_started", worker="w0.1"),
        event(0.5, "w0.1", "view", view=1, members=["w0.1"]),
        event(10.0, "w0.1", "spent", seconds={COMPUTING: 10.0}, doing=COMPUTING),
        event(11.0, "agent", "worker_exited", worker="w0.1", reason="killed"),
    ]
    assert seconds(folded(*events).run(15.0)) == {COMPUTING: 11.0, DOWN: 4.0}
    events += [
        event(14.0, "agent", "worker_started", worker="w0.2"),
        event(20.0, "w0.2", "spent", seconds={JOINING: 1.0, COMPUTING: 3.0}, doing=COMPUTING),
    ]
    run = folded(*events).run()
    assert seconds(run) == {COMPUTING: 14.0, DOWN: 3.0, JOINING: 3.0}
    assert run.total_s == 20.0 and run.goodput == pytest.approx(0.7)


@pytest.mark.parametrize("reason", ["finished", "left", "stopped"])
def test_nobody_misses_who_left_in_order(reason: str) -> None:
    run = folded(
        event(0.0, "agent", "worker_started", worker="w0.1"),
        event(5.0, "w0.1", "spent", seconds={COMPUTING: 5.0}, doing=COMPUTING),
        event(5.0, "agent", "worker_exited", worker="w0.1", reason=reason),
    ).run(50.0)
    assert seconds(run) == {COMPUTING: 5.0} and run.goodput == 1.0


def test_while_a_spare_has_stepped_in_a_replacement_that_starts_costs_nothing() -> None:
    accounting = folded(
        event(0.0, "agent", "agent_started", workers=1, spares=1),
        event(0.0, "agent", "worker_started", worker="w0.1"),
        event(0.0, "agent", "worker_started", worker="w1.1"),
        event(4.0, "w0.1", "registered"),
        event(4.0, "w1.1", "registered"),
        event(4.0, "w0.1", "view", view=1, members=["w0.1"]),
        event(10.0, "agent", "worker_exited", worker="w0.1", reason="killed"),
        event(12.0, "w1.1", "view", view=2, members=["w1.1"]),
        event(13.0, "agent", "worker_started", worker="w0.2"),
        event(19.0, "w0.2", "registered"),
        event(20.0, "w0.2", "spent", seconds={STANDBY: 1.0}, doing=STANDBY),
    )
    # Down for the 2 s until the spare had stepped in; then one more of an empty slot and 6 of a start, for free.
    assert seconds(accounting.workers()["w0.2"]) == {STANDBY: 7.0}
    run = accounting.run()
    assert run.seconds[DOWN] == pytest.approx(2.0) and run.total_s == pytest.approx(40.0)


def test_who_died_unseen_lived_as_long_as_it_was_heard_of() -> None:
    accounting = folded(
        event(0.0, "agent", "worker_started", worker="w0.1"),
        event(3.0, "w0.1", "spent", seconds={COMPUTING: 3.0}, doing=COMPUTING),
    )
    assert seconds(accounting.run(60.0, alive=[])) == {COMPUTING: 3.0}
    accounting.feed(event(60.0, "agent", "worker_exited", worker="w0.1", reason="died while no agent ran"))
    assert seconds(accounting.run()) == {COMPUTING: 3.0, DOWN: 57.0}


def test_a_clock_that_was_set_back_takes_nothing_away() -> None:
    accounting = folded(
        event(1000.0, "agent", "worker_started", worker="w0.1"),
        event(500.0, "w0.1", "spent", seconds={COMPUTING: 7.0}, doing=COMPUTING),
        event(501.0, "agent", "worker_exited", worker="w0.1", reason="finished"),
    )
    spent = accounting.run().seconds
    assert all(value >= 0 for value in spent.values()) and spent[COMPUTING] >= 7.0


def test_nonsense_is_passed_over() -> None:
    accounting = Accounting()
    for wrong in (
        {},
        {"t": "x", "who": "w0.1", "kind": "spent"},
        event(1.0, "w0.1", "spent", seconds={COMPUTING: "many"}, doing=3),
        event(1.0, "w0.1", "spent", seconds={COMPUTING: -5.0}, doing=COMPUTING),
        event(1.0, "w0.1", "spent", seconds=[1], doing=COMPUTING),
        event(1.0, "nobody", "spent", seconds={COMPUTING: 1.0}, doing=COMPUTING),
        event(1.0, "agent", "worker_exited", worker="w9.9", reason="killed"),
    ):
        accounting.feed(wrong)
    assert accounting.run().goodput is None or accounting.run().total_s == 0


@st.composite
def lives(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Two slots over 100 s, with deaths, gaps, views, and workers that keep and tell their accounts."""
    events = [event(0.0, "agent", "agent_started", workers=draw(st.integers(1, 2)))]
    for slot in range(2):
        now = draw(times)
        for number in range(1, draw(st.integers(1, 4)) + 1):
            worker = f"w{slot}.{number}"
            events.append(event(now, "agent", "worker_started", worker=worker))
            joined = now = now + draw(times)
            account = Account(joined)
            if draw(st.booleans()):
                events.append(event(joined, worker, "registered"))
            for category in draw(st.lists(st.sampled_from(OWN), max_size=5)):
                account.switch(category, now)
                if draw(st.booleans()):
                    events.append(event(now, worker, "spent", seconds=account.spent(now), doing=account.doing))
                if draw(st.booleans()):
                    events.append(event(now, worker, "view", view=int(now * 1000), members=[worker, "w9.1"]))
                now += draw(times)
            events.append(event(now, "agent", "worker_exited", worker=worker, reason="killed"))
            now += draw(times)
    return sorted(events, key=lambda one: one["t"])


@given(events=lives())
def test_categories_add_up_to_each_life_and_to_the_lives_of_the_slots(events: list[dict[str, Any]]) -> None:
    accounting = folded(*events)
    last = max(one["t"] for one in events)
    started = {one["worker"]: one["t"] for one in events if one["kind"] == "worker_started"}
    ended = {one["worker"]: one["t"] for one in events if one["kind"] == "worker_exited"}
    for worker, spent in accounting.workers().items():
        assert spent.total_s == pytest.approx(ended[worker] - started[worker], abs=1e-6)
        assert set(spent.seconds) == set(CATEGORIES) and all(value >= -1e-9 for value in spent.seconds.values())
    run = accounting.run()
    begun = [min(t for worker, t in started.items() if worker.startswith(f"w{slot}.")) for slot in range(2)]
    assert run.total_s == pytest.approx(sum(last - start for start in begun), abs=1e-6)
    assert math.fsum(run.share(category) for category in CATEGORIES) == pytest.approx(1.0) or run.total_s == 0
    assert run.goodput is None or -1e-9 <= run.goodput <= 1 + 1e-9


def test_what_is_lost_is_named() -> None:
    assert set(LOST) == {RECOVERING, "checkpointing", JOINING, DOWN}
    spent = Spent({**dict.fromkeys(CATEGORIES, 0.0), COMPUTING: 8.0, RECOVERING: 1.0, STANDBY: 1.0})
    assert spent.goodput == pytest.approx(8 / 9)
    assert spent.words() == "computing 80.0 %, standby 10.0 %, recovering 10.0 %"
