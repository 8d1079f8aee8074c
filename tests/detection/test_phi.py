"""Suspicion grows with silence, is learned from the past, and forgives what turned out harmless."""

from __future__ import annotations

import math
import statistics

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.detection.phi import INTERVAL_S_MAX, IntervalHistory, Intervals, phi, tail

times = st.floats(0.0, 1000.0)
lists = st.lists(times, min_size=1, max_size=60)


@given(lists, st.integers(1, 20))
@example([600.0, 0.01, 0.01, 0.01], 2)
def test_the_history_is_that_of_the_last_intervals(intervals: list[float], window: int) -> None:
    kept = Intervals(window)
    for one in intervals:
        kept.add(one)
    last = [min(one, INTERVAL_S_MAX) for one in intervals][-window:]
    history = kept.history()
    assert history.count == len(intervals)
    assert history.longest_s == max(last)
    assert math.isclose(history.mean_s, statistics.fmean(last), rel_tol=1e-6, abs_tol=1e-6)
    assert math.isclose(history.deviation_s, statistics.pstdev(last), rel_tol=1e-2, abs_tol=2e-3)


@given(lists, times, times)
def test_suspicion_never_falls_while_the_silence_lasts(intervals: list[float], one: float, other: float) -> None:
    kept = Intervals()
    for interval in intervals:
        kept.add(interval)
    history = kept.history()
    shorter, longer = sorted((one, other))
    assert phi(shorter, history, deviation_s_min=0.05) <= phi(longer, history, deviation_s_min=0.05) + 1e-9


@given(st.floats(-30.0, 5000.0))
def test_far_out_it_is_a_number_still(deviations: float) -> None:
    assert 0.0 <= tail(deviations) < math.inf


def test_the_two_formulas_meet() -> None:
    assert abs(tail(6.0) - tail(5.999999)) < 0.05
    assert 8.0 < tail(5.7) < 8.5  # one in a hundred million


def test_who_is_always_there_is_suspected_soon_and_who_is_not_later() -> None:
    steady, fickle = Intervals(), Intervals()
    for number in range(100):
        steady.add(0.1)
        fickle.add(0.1 if number % 5 else 1.0)
    assert phi(0.5, steady.history(), deviation_s_min=0.05) > 8.0
    assert phi(0.5, fickle.history(), deviation_s_min=0.05) < 1.0


def test_a_long_gap_that_was_harmless_makes_for_patience() -> None:
    kept = Intervals()
    for _ in range(50):
        kept.add(0.1)
    before = phi(3.0, kept.history(), deviation_s_min=0.05)
    kept.add(20.0)
    after = phi(3.0, kept.history(), deviation_s_min=0.05)
    assert before > 8.0 > after


def test_nothing_is_suspicious_without_a_past() -> None:
    assert phi(1e6, IntervalHistory(), deviation_s_min=0.05) == 0.0
