"""Who hangs, and who only takes long: told apart in the situations that there are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.detection.beat import Activity, Beat
from holdfast.detection.phi import IntervalHistory
from holdfast.detection.progress import Level, Limits, Sight, patience, suspect

PACE = IntervalHistory(200, 0.1, 0.01, 0.15)
SHARDS = IntervalHistory(100, 0.02, 0.005, 0.05)
LIMITS = Limits()
ALL_LIMITS = st.builds(
    Limits,
    stuck_s=st.none() | st.floats(0.5, 100.0),
    hang_s=st.none() | st.floats(0.5, 1000.0),
    silent_s=st.floats(2.0, 100.0),
)


def level(
    activity: Activity = Activity.SHARD, usual: IntervalHistory = SHARDS, limits: Limits = LIMITS, **seen: Any
) -> Level:
    beat = Beat(number=9, at=0.0, step=7, activity=activity, pace=seen.pop("pace", PACE), usual=usual)
    return suspect(
        Sight(beat=beat, silent_s=seen.pop("silent_s", 0.1), still_s=seen.pop("still_s", 0.0), **seen), limits
    ).level


def test_a_thread_that_stands_still_in_a_shard() -> None:
    assert [level(still_s=seconds) for seconds in (0.5, 3.0, 5.1)] == [Level.OK, Level.SUSPECT, Level.HUNG]


def test_a_batch_that_does_not_come_is_given_more_time() -> None:
    assert [level(Activity.LOADING, still_s=seconds) for seconds in (5.1, 10.0, 15.1)] == [
        Level.OK,
        Level.SUSPECT,
        Level.HUNG,
    ]


def test_shards_that_always_took_long_may() -> None:
    slow = IntervalHistory(50, 20.0, 4.0, 31.0)
    assert level(usual=slow, still_s=45.0) != Level.HUNG
    assert level(usual=slow, still_s=63.0) == Level.HUNG


def test_the_first_shards_may_take_long() -> None:
    compiling = IntervalHistory(3, 0.1, 0.0, 0.1)
    assert level(usual=compiling, still_s=59.0) == Level.OK
    assert level(usual=compiling, still_s=121.0) == Level.HUNG


def test_an_evaluation_may_take_long() -> None:
    assert level(Activity.SCRIPT, still_s=59.0) == Level.OK
    assert level(Activity.SCRIPT, still_s=121.0) == Level.HUNG
    assert level(Activity.SCRIPT, limits=Limits(stuck_s=0.5), still_s=59.0) == Level.OK


@given(st.floats(0.0, 1e6), ALL_LIMITS, st.booleans(), st.booleans())
def test_who_waits_for_others_does_not_hang(still_s: float, limits: Limits, computes: bool, holds_up: bool) -> None:
    for activity in (Activity.WAITING, Activity.STARTING):
        assert level(activity, limits=limits, still_s=still_s, computes=computes, holds_up=holds_up) == Level.OK


def test_the_end_of_a_script_may_take_as_long_as_it_likes_unless_others_wait() -> None:
    assert level(Activity.ENDED, still_s=1e5) == Level.OK
    assert level(Activity.ENDED, still_s=1e5, holds_up=True) == Level.HUNG


def test_who_computes_elsewhere_is_given_the_longer_time() -> None:
    assert level(Activity.LOADING, still_s=59.0, computes=True) == Level.OK
    assert level(Activity.LOADING, still_s=121.0, computes=True) == Level.HUNG


@given(st.sampled_from(Activity), st.floats(0.0, 1e6), st.integers(0, 100))
def test_what_is_switched_off_is_never_said(activity: Activity, still_s: float, count: int) -> None:
    never = Limits(stuck_s=None, hang_s=None)
    assert level(activity, IntervalHistory(count, 0.02, 0.0, 0.05), never, still_s=still_s, holds_up=True) == Level.OK
    assert level(activity, limits=Limits(hang_s=None), still_s=still_s) < Level.HUNG
    assert level(activity, limits=Limits(hang_s=None), silent_s=still_s, state="T") < Level.HUNG


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.sampled_from("RSDT"))
def test_who_leaves_may_take_its_time(silent_s: float, still_s: float, state: str) -> None:
    assert level(Activity.CLOSED, silent_s=silent_s, still_s=still_s, state=state, holds_up=True) == Level.OK


def test_a_stopped_process_is_found_before_its_lease_ends() -> None:
    assert level(silent_s=0.7, state="T") == Level.SUSPECT
    assert level(silent_s=0.9, state="T") == Level.HUNG
    assert level(Activity.WAITING, silent_s=0.9, state="T") == Level.HUNG


def test_one_whose_beats_were_never_regular_is_given_longer() -> None:
    ragged = IntervalHistory(200, 0.4, 0.3, 1.5)
    assert level(silent_s=0.9, state="T", pace=ragged) == Level.SUSPECT
    assert level(silent_s=2.5, state="T", pace=ragged) == Level.HUNG


@pytest.mark.parametrize("seen", [{"state": "R"}, {"computes": True}, {"state": "R", "computes": True}])
def test_one_that_is_only_not_let_in_is_slow(seen: dict[str, Any]) -> None:
    """A neighbour has the processor, or its own thread has the interpreter."""
    assert level(silent_s=60.0, **seen) == Level.SLOW


def test_one_that_says_and_does_nothing() -> None:
    assert level(silent_s=1.9) == Level.SUSPECT
    assert level(silent_s=2.1) == Level.HUNG
    assert level(silent_s=2.1, limits=Limits(silent_s=10.0)) == Level.SUSPECT


@given(
    st.sampled_from(Activity),
    st.floats(0.0, 500.0),
    st.floats(0.0, 500.0),
    st.sampled_from("RSDT"),
    st.booleans(),
    ALL_LIMITS,
)
def test_more_patience_never_accuses_more(
    activity: Activity, silent_s: float, still_s: float, state: str, computes: bool, limits: Limits
) -> None:
    longer = Limits(
        stuck_s=limits.stuck_s and limits.stuck_s * 2,
        hang_s=limits.hang_s and limits.hang_s * 2,
        silent_s=limits.silent_s * 2,
    )
    seen = {"silent_s": silent_s, "still_s": still_s, "state": state, "computes": computes}
    assert level(activity, limits=longer, **seen) <= level(activity, limits=limits, **seen)


@given(st.integers(8, 1000), st.floats(0.0, 600.0), ALL_LIMITS)
def test_a_shard_is_given_twice_the_longest_at_least(count: int, longest_s: float, limits: Limits) -> None:
    if limits.stuck_s is None:
        return
    beat = Beat(number=1, at=0.0, activity=Activity.SHARD, usual=IntervalHistory(count, 0.1, 0.1, longest_s))
    given_s = patience(beat, limits, computes=False)
    assert given_s is not None and given_s >= max(limits.stuck_s, 2 * longest_s)


def test_a_reason_says_what_and_for_how_long() -> None:
    beat = Beat(number=9, at=0.0, step=7, activity=Activity.LOADING, pace=PACE, usual=SHARDS)
    found = suspect(Sight(beat=beat, silent_s=0.0, still_s=20.0), LIMITS)
    assert found.reason == "loading a batch of step 7, and the thread that trains does not move, for 20.0 s"
    assert found.standing and found.seconds == 20.0 and found.phi > 8.0
