"""Every element in one slice, slices of even size, cuts on cache lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.servers.slicing import LINE_BYTES, Segment, Size, Slice, cut

SIZES = st.lists(st.builds(Size, st.integers(0, 5000), st.sampled_from([2, 4, 8])), max_size=12)


@given(SIZES, st.integers(1, 9))
def test_every_element_is_in_one_slice(sizes: list[Size], slices: int) -> None:
    reached = [0] * len(sizes)
    for one in cut(sizes, slices):
        for segment in one.segments:
            assert reached[segment.parameter] == segment.start < segment.stop
            reached[segment.parameter] = segment.stop
    assert reached == [size.elements for size in sizes]


@given(SIZES, st.integers(1, 9))
def test_slices_are_even_and_none_is_empty(sizes: list[Size], slices: int) -> None:
    found, total = cut(sizes, slices), sum(size.nbytes for size in sizes)
    assert 1 <= len(found) <= slices and [one.number for one in found] == list(range(len(found)))
    assert total == 0 or all(one.segments for one in found)
    if len(found) == slices:
        assert all(abs(one.nbytes(sizes) - total / slices) <= LINE_BYTES for one in found)


@given(SIZES, st.integers(1, 9))
def test_cuts_are_on_cache_lines_of_a_parameter(sizes: list[Size], slices: int) -> None:
    starts = [(segment.start, segment.parameter) for one in cut(sizes, slices) for segment in one.segments]
    assert all(start * sizes[parameter].itemsize % LINE_BYTES == 0 for start, parameter in starts)


def test_a_small_model() -> None:
    weight, bias = Size(100, 4), Size(10, 4)
    assert cut([weight, bias], 2) == (
        Slice(0, (Segment(0, 0, 48),)),
        Slice(1, (Segment(0, 48, 100), Segment(1, 0, 10))),
    )
    assert cut([], 3) == (Slice(0, ()),)
    assert cut([Size(1, 4)], 3) == (Slice(0, (Segment(0, 0, 1),)),)
