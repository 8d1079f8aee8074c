"""Reduction over a process group of torch: it carries slices to their owners and the mean back, and we add.

Each member has a slice of the gradient. All to all, everyone gets its slice of all sums, and adds them in tree order;
then all gather the slices of the mean. So NCCL and its like can move the bytes, and the bits are those of all paths.

The group is built beside the training (engine/carrying.py). Each member says with its Ready whether it stands; while
it does not stand for all of them, the step goes the way of runs that have none. All know the same notes, and so go the
same way. Always in two rounds: whoever has the mean may not commit before all others have it, since a library that
has moved all bytes of one member may still fail for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from holdfast.net.groups import BrokenGroup, Group
from holdfast.reduce.aggregators import ALONE, Cut, Work
from holdfast.reduce.arena import Arena, result_parts
from holdfast.reduce.carrier import HEAD_BYTES, Carrier, CarrierFailed, Carrying, Move
from holdfast.reduce.layout import Layout
from holdfast.reduce.network import GroupParties
from holdfast.reduce.reduction import Brought, Path, ReductionTerms
from holdfast.reduce.tree import Range

GRACE_S = 1.0  # after a failure: whose end is the reason for it is seen at our own connections within moments
Slice = tuple[int, int]  # bytes of a slot


class ProcessGroup:
    """The path over a process group, in one view. `meanwhile`: how steps go while the group does not stand."""

    two_rounds = True

    def __init__(self, group: Group, arena: Arena, terms: ReductionTerms, meanwhile: Path, carrying: Carrying) -> None:
        others = frozenset(group.view.members) - {group.me}
        self.bulk = meanwhile.bulk | (others if terms.aggregator.shares else frozenset())
        self._group = group
        self._arena = arena
        self._terms = terms
        self._meanwhile = meanwhile
        self._carrying = carrying
        self._tellers = GroupParties(group, group.view.members, terms.interrupted) if terms.aggregator.shares else ALONE
        self._trusted: Callable[[], tuple[bool, ...] | None] = meanwhile.trusted
        carrying.open(group.view)

    def reduce(
        self, step: int, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought]
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        if not all(brought[member].carried for member in members):
            self._trusted = self._meanwhile.trusted
            return self._meanwhile.reduce(step, layout, members, brought)
        carrier = self._carrying.carrier
        assert carrier is not None, "I said that it stands"
        arena, stamp = self._arena, (self._group.view.number, step)
        try:
            memory = self._reduce(carrier, stamp, layout, members, brought)
        except CarrierFailed as error:
            raise self._who_failed(error.message) from None
        self._carrying.worked()
        return memory, lambda: arena.result_stamp == stamp

    def trusted(self) -> tuple[bool, ...] | None:
        return self._trusted()

    def _reduce(
        self,
        carrier: Carrier,
        stamp: tuple[int, int],
        layout: Layout,
        members: Sequence[str],
        brought: Mapping[str, Brought],
    ) -> torch.Tensor:
        rank = members.index(self._group.me)
        slices = result_parts(layout, len(members), self._terms.aggregator.unit_bytes(layout))
        low, high = slices[rank]
        counts = [len(brought[member].nodes) for member in members]
        mine = self._packed(carrier, stamp, layout, brought[self._group.me], slices)
        sends = [HEAD_BYTES + counts[rank] * (stop - start) for start, stop in slices]
        receives = [HEAD_BYTES + count * (high - low) for count in counts]
        arrived = self._awaited(carrier.all_to_all(mine, sends, receives))
        operands: list[tuple[Range, torch.Tensor]] = []
        offset = 0
        for member, size in zip(members, receives, strict=True):
            _check_head(arrived[offset:], stamp, member)
            for index, (node, _) in enumerate(brought[member].nodes):
                begin = offset + HEAD_BYTES + index * (high - low)
                operands.append((node, arrived[begin : begin + high - low]))
            offset += size
        width = HEAD_BYTES + max(stop - start for start, stop in slices)
        handed = carrier.room("mean", width)
        _put_head(handed, stamp)
        draw = self._terms.draw(stamp[1])
        self._add(layout, operands, handed[HEAD_BYTES : HEAD_BYTES + high - low], (low, high), draw)
        arrived = self._awaited(carrier.all_gather(handed))
        self._arena.claim_result(*stamp)
        result = self._arena.result(layout)
        for number, (member, (start, stop)) in enumerate(zip(members, slices, strict=True)):
            _check_head(arrived[number * width :], stamp, member)
            begin = number * width + HEAD_BYTES
            result[start:stop].copy_(arrived[begin : begin + stop - start])
        return result

    def _packed(
        self, carrier: Carrier, stamp: tuple[int, int], layout: Layout, brought: Brought, slices: Sequence[Slice]
    ) -> torch.Tensor:
        """For each member its slice of my sums, in the order of their nodes."""
        slots = [self._arena.slot(slot, layout) for _, slot in brought.nodes]
        mine = carrier.room("mine", sum(HEAD_BYTES + len(slots) * (stop - start) for start, stop in slices))
        offset = 0
        for start, stop in slices:
            _put_head(mine[offset:], stamp)
            offset += HEAD_BYTES
            for slot in slots:
                mine[offset : offset + stop - start].copy_(slot[start:stop])
                offset += stop - start
        return mine

    def _add(
        self, layout: Layout, operands: list[tuple[Range, torch.Tensor]], mean: torch.Tensor, part: Slice, draw: int
    ) -> None:
        """My slice of all sums, in tree order."""
        operands.sort(key=lambda operand: operand[0])
        cuts = []
        for section in layout.sections:
            first, last = section.columns(part)
            size = section.dtype.itemsize
            begin = section.offset_bytes + first * size - part[0] if last > first else 0
            run = slice(begin, begin + (last - first) * size)
            vectors = [memory[run].view(section.dtype) for _, memory in operands]
            cuts.append(Cut(vectors, mean[run].view(section.dtype), first))
        work = Work(layout, cuts, tuple(node for node, _ in operands), self._terms.shards, self._tellers, draw)
        trusted = self._terms.aggregator.reduce(work)
        self._trusted = lambda: trusted

    def _awaited(self, move: Move) -> torch.Tensor:
        self._group.attend(move.is_done, interrupted=self._terms.interrupted)
        return move.arrived

    def _who_failed(self, why: str) -> BrokenGroup:
        """A library says what it saw of a peer's end, and not whose. Whose it was is seen at our own connections."""
        until = self._group.kernel.now() + GRACE_S
        try:
            self._group.attend(lambda: self._group.kernel.now() >= until, interrupted=self._terms.interrupted)
        except BrokenGroup as error:
            return error
        self._carrying.failed(why)
        return BrokenGroup("", f"the process group failed: {why}")


def _put_head(memory: torch.Tensor, stamp: tuple[int, int]) -> None:
    memory[:HEAD_BYTES].zero_()
    memory[:16].view(torch.int64).copy_(torch.tensor(stamp))


def _check_head(memory: torch.Tensor, stamp: tuple[int, int], member: str) -> None:
    found = tuple(memory[:16].view(torch.int64).tolist())
    if found != stamp:
        raise CarrierFailed(f"what came from {member} is of the view and step {found}, not {stamp}")
