"""What is written is what is read; half a record, or anything else, is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.detection.beat import RECORD_BYTES, Activity, Beat
from holdfast.detection.phi import IntervalHistory

finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(-(2**63), 2**63 - 1)
histories = st.builds(IntervalHistory, whole, finite, finite, finite)
beats = st.builds(
    Beat,
    number=whole,
    at=finite,
    step=whole,
    activity=st.sampled_from(Activity),
    entered=whole,
    since=finite,
    moved_at=finite,
    thread=whole,
    cost_s=finite,
    pace=histories,
    usual=histories,
)


@given(beats)
def test_there_and_back(beat: Beat) -> None:
    data = beat.encode()
    assert len(data) == RECORD_BYTES and Beat.decode(data + b"rest of the page") == beat


@given(beats, beats, st.integers(1, RECORD_BYTES - 1))
def test_half_old_and_half_new_is_none(old: Beat, new: Beat, cut: int) -> None:
    torn = new.encode()[:cut] + old.encode()[cut:]
    assert Beat.decode(torn) in (None, old, new)


@given(st.binary(max_size=2 * RECORD_BYTES))
def test_anything_else_is_none(data: bytes) -> None:
    assert Beat.decode(data) is None


def test_a_page_that_nothing_was_written_to() -> None:
    assert Beat.decode(bytes(4096)) is None


def test_numbers_that_make_no_sense() -> None:
    assert Beat.decode(Beat(number=1, at=float("nan")).encode()) is None
    assert Beat.decode(Beat(number=1, at=0.0, pace=IntervalHistory(1, float("inf"))).encode()) is None
