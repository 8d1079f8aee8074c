"""What a group of ranks tells its machine of a step: only what holds in all of its planes. Pure.

A plane is the ranks of one number in all groups of a view: they have the same part of the model, and add up the
gradients of that part. The machine speaks for the group, so what it is told must hold for every rank. It hears that a
step is reduced when every plane is; one plane that is not makes the whole group's reduction fail, and then none of its
ranks commits. The state of a group is there when every rank has its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.membership import messages as m

Outcome = m.Loaded | m.SourcesDiffer | m.PeerLost | m.End


@dataclass(frozen=True)
class Reduction:
    """How one plane's of a step has ended on this group's rank."""

    step: int
    peer: str = ""  # with whom it failed
    reason: str = ""  # why; empty: the sums are added up


def reduced_in_all(planes: Sequence[Reduction]) -> m.Reduced | m.ReductionFailed:
    """Of one step, in the order of ranks."""
    assert len({plane.step for plane in planes}) == 1, f"planes of several steps: {planes}"
    failed = next((plane for plane in planes if plane.reason), None)
    if failed is not None:
        return m.ReductionFailed(failed.step, failed.peer, failed.reason)
    return m.Reduced(planes[0].step)


def loaded_in_all(ranks: Sequence[Outcome]) -> Outcome:
    """In the order of ranks. A rank whose part cannot be used any more ends its group: parts would be of two states."""
    ends = [one for one in ranks if isinstance(one, m.End)]
    in_vain = [one for one in ranks if not isinstance(one, m.Loaded)]
    return next(iter([*ends, *in_vain]), ranks[0])
