"""Whether a parameter server hangs, by its heartbeats: the pure part, in invented time."""

from __future__ import annotations

from dataclasses import replace

from holdfast.agent.servers.server_hearts import ServerLimits, Sight, judge, see
from holdfast.detection.beat import Activity, Beat
from holdfast.detection.phi import IntervalHistory

LIMITS = ServerLimits(silent_s=5.0, stuck_s=5.0)
BEAT = Beat(number=1, at=1.0, activity=Activity.WAITING, entered=7, moved_at=1.0)


def seen(beats: list[Beat], passed_s: float = 0.5) -> Sight:
    sight, was = Sight(), None
    for beat in beats:
        sight, was = see(sight, was, beat, passed_s), beat
    return sight


def test_one_that_beats_and_turns_is_fine() -> None:
    beats = [replace(BEAT, number=number, moved_at=float(number)) for number in range(1, 40)]
    assert judge(seen(beats), LIMITS) == ""


def test_one_that_does_not_beat_any_more_hangs() -> None:
    assert judge(seen([BEAT] * 10), LIMITS) == "", "4.5 s"
    assert judge(seen([BEAT] * 13), LIMITS) == "no heartbeat for 6.0 s"


def test_one_whose_heart_beats_and_whose_thread_stands_still_hangs() -> None:
    beats = [replace(BEAT, number=number) for number in range(1, 14)]
    assert "its thread stands still for 6.0 s" in judge(seen(beats), LIMITS)
    assert judge(seen(beats), ServerLimits(silent_s=5.0, stuck_s=None)) == ""


def test_long_turns_make_for_patience() -> None:
    long = IntervalHistory(20, 1.0, 0.5, 4.0)
    beats = [replace(BEAT, number=number, usual=long) for number in range(1, 20)]
    assert judge(seen(beats), LIMITS) == "", "9 s, and a turn has taken 4 s before"
    assert judge(seen([*beats, *(replace(BEAT, number=number, usual=long) for number in range(20, 30))]), LIMITS)


def test_one_that_starts_or_ends_is_not_judged() -> None:
    for activity in (Activity.STARTING, Activity.CLOSED):
        assert seen([replace(BEAT, activity=activity)] * 100) == Sight()
