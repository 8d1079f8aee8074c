"""What a group tells its machine: what holds in all of its planes."""

from __future__ import annotations

import pytest

from holdfast.membership import messages as m
from holdfast.membership.planes import Reduction, loaded_in_all, reduced_in_all


def test_a_step_is_reduced_when_every_plane_is() -> None:
    assert reduced_in_all([Reduction(7)] * 4) == m.Reduced(7)


@pytest.mark.parametrize("rank", range(4))
def test_one_plane_that_is_not_fails_the_whole_group(rank: int) -> None:
    planes = [Reduction(7)] * 4
    planes[rank] = Reduction(7, "w2.1", "it has moved on")
    assert reduced_in_all(planes) == m.ReductionFailed(7, "w2.1", "it has moved on")


def test_planes_of_two_steps_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="several steps"):
        reduced_in_all([Reduction(7), Reduction(8)])


def test_a_state_is_here_when_every_rank_has_its_part() -> None:
    loaded, lost = m.Loaded(7), m.PeerLost(3, "w2.1", "it cannot be reached")
    assert loaded_in_all([loaded, loaded]) == loaded
    assert loaded_in_all([loaded, lost]) == lost
    assert loaded_in_all([m.SourcesDiffer(7), loaded]) == m.SourcesDiffer(7)


def test_a_rank_that_cannot_go_on_ends_its_group_whatever_the_others_found() -> None:
    end = m.End("evicted", "the snapshot did not arrive")
    assert loaded_in_all([m.PeerLost(3, "w2.1", "it cannot be reached"), m.Loaded(7), end]) == end
