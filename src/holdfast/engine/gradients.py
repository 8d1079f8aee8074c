"""What this worker brings to a step, what its peers say they bring, and the mean that comes of it.

Owns the sums, the notes of the view, the way gradients travel in it, and the kept mean of the last step. All of it
belongs to the thread of the user's loop. `interrupted` is asked while bulk data is stuck; it names who is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.engine.bringing import AlreadyHere, Bringing
from holdfast.engine.carrying import CarrierNews, ProcessGroups
from holdfast.membership import messages as m
from holdfast.membership.codec import encode
from holdfast.modes.capture import GradientCapture
from holdfast.net.groups import Gone, Group
from holdfast.reduce.aggregators import Aggregator
from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout
from holdfast.reduce.paths import BY_ITSELF, check_coverage, make_path, takes_two_rounds
from holdfast.reduce.reduction import (
    Brought,
    KeptMean,
    Number,
    Path,
    ReductionTerms,
    all_gathered,
    bring,
    metrics_of,
    present_in,
)
from holdfast.reduce.sums import Sums

TENSORS_MAX = 1 << 20
Shares = tuple[tuple[str, tuple[int, ...]], ...]  # who brings which shards, in rank order


@dataclass(frozen=True)
class Way:
    """How gradients travel in this run."""

    kind: str  # see core/config.py; or reduce/paths.py BY_ITSELF
    small: bool  # every member adds everything itself
    whole: bool  # a step has all its shards

    @property
    def two_rounds(self) -> bool:
        return takes_two_rounds(self.kind, small=self.small)

    @property
    def parities(self) -> int:
        """Sets of slots: where a peer may still read the sums of the step before, two."""
        return 2 if self.kind == "host" and self.small else 1


class Gradients:
    """See the module."""

    def __init__(
        self,
        me: str,
        *,
        arena: Arena,
        sums: Sums,
        capture: GradientCapture,
        way: Way,
        aggregator: Aggregator,
        bringing: Bringing | None = None,
        carrying: ProcessGroups | None = None,
    ) -> None:
        """`bringing`: None: the sums grow in the arena. `carrying`: None: no process group carries them."""
        self.passed: frozenset[int] = frozenset()  # steps to which nobody brings anything
        self.sums = sums
        self.kept: KeptMean | None = None
        self.why_not_in_all: Callable[[int, str], str] = lambda step, peer: ""  # other ranks lack their parts of a mean
        self.counted: dict[int, Shares] = {}  # of the last step that was reduced here: whose shards were added
        self.too_few = (-1, 0, 0)  # the last step that changed nothing, its shards, and how many it would have needed
        self.metrics: dict[str, dict[int, Number]] = {}  # of my shards of this step: name -> shard -> value
        self.ahead = ""  # what I bring for the step after this one: see modes/port.py
        self.gathered: dict[int, str] = {}  # of my shards of this step: what their lines gave to step.gather
        self.seed = 0  # of the run: what an aggregator draws by chance follows from it and the step
        self.leaf_of: Callable[[int], int] = lambda shard: shard  # where a shard is a bundle: this rank's of it
        self._carrying = carrying
        self._me = me
        self._shards = sums.shards
        self._aggregator = aggregator
        self._way = way
        self._arena = arena
        self._capture = capture
        self._bringing: Bringing = bringing or AlreadyHere()
        self._layout: Layout | None = None
        self._path: Path | None = None
        self._notes: dict[int, dict[str, Brought]] = {}  # step -> member -> what it brings

    @property
    def shared_arena(self) -> Arena | None:
        """What members of this host may read."""
        return None if self._way.kind in ("network", BY_ITSELF) else self._arena

    def forget_view(self) -> None:
        """What was said in one view means nothing in the next."""
        self._path = None
        self._notes = {}
        if self._carrying is not None:
            self._carrying.close()

    def begin(self, step: int, view: int) -> None:
        """Shards of this step will be computed, or more of them in another view."""
        self._layout = self._capture.layout()
        if self.sums.step != step:
            self.metrics, self.gathered, self.ahead = {}, {}, ""
        self._arena.set_stamp(view, step)  # before a slot is touched
        self.sums.begin(step, self._layout)

    def bring(self) -> None:
        """The shards are computed: what they leave goes where others may read it, and is there when `is_brought`."""
        self._bringing.begin(self.metrics)

    def is_brought(self) -> bool:
        return self._bringing.is_done()

    def record(self, metrics: Mapping[str, Mapping[int, Number]]) -> None:
        """The metrics of a shard that counts."""
        for name, values in metrics.items():
            self.metrics.setdefault(name, {}).update({self.leaf_of(shard): one for shard, one in values.items()})

    def gather(self, shard: int, text: str) -> None:
        """What the lines of a shard that counts gave to step.gather."""
        self.gathered[self.leaf_of(shard)] = text

    def brings(self) -> tuple[int, ...]:
        """The shards of this step whose sums are here."""
        return tuple(shard for node, _ in self.sums.nodes() for shard in range(*node))

    def say_ready(self, group: Group, message: m.Ready, interrupted: Callable[[], str]) -> list[Gone]:
        """To all, with what I bring; where bulk data follows on the connection, with a mark that it does."""
        assert self.is_brought(), "others would read sums that are not there yet"
        metrics = {
            name: {shard: float(value) for shard, value in values.items()} for name, values in self.metrics.items()
        }
        path = self._path_in(group, interrupted)
        carried = self._carrying is not None and self._carrying.carrier is not None
        brought = bring(self.sums, metrics, dict(self.gathered), self.ahead, carried=carried)
        self.heard_note(message.step, self._me, brought)
        marked = {peer: peer in path.bulk for peer in group.connections}
        data = {bulk: encode(message, brought.encode(bulk=bulk)) for bulk in set(marked.values())}
        said = [group.send(peer, data[bulk], bulk=bulk) for peer, bulk in marked.items()]
        return [gone for gone in said if gone is not None]

    def heard(self, peer: str, message: m.Ready, note: Any) -> None:
        """ProtocolError if the note makes no sense."""
        self.heard_note(message.step, peer, Brought.decode(note, slots=self._arena.slots, tensors=TENSORS_MAX))

    def note(self) -> Brought:
        """What I bring, for the other ranks of my group, who bring as much in the same slots."""
        return bring(self.sums, self.metrics, dict(self.gathered), self.ahead)  # type: ignore[arg-type]

    def note_of(self, step: int, member: str) -> Brought | None:
        return self._notes.get(step, {}).get(member)

    def heard_note(self, step: int, member: str, note: Brought) -> None:
        self._notes.setdefault(step, {})[member] = note

    def ends_by(self, replace_me: Callable[[str], object]) -> None:
        """What is done when a process group that was given up does not end."""
        if self._carrying is not None:
            self._carrying.replace_me = replace_me

    def carries(self, message: object) -> bool:
        """Whether it is of a peer that builds the process group of this view, and was heard."""
        if isinstance(message, m.Stored) and self._carrying is not None:
            self._carrying.heard(message)
        return isinstance(message, m.Stored)

    def news_of_carrier(self, news: CarrierNews, group: Group | None) -> list[m.PeerLost]:
        return self._carrying.take(news, group) if self._carrying is not None else []

    def reduce(self, group: Group, effect: m.Reduce, interrupted: Callable[[], str]) -> frozenset[str]:
        """Add what all have brought. Returns the peers whose connection carried bulk data; BrokenGroup."""
        layout = self._layout
        assert layout is not None
        notes = self._notes.pop(effect.step)
        path = self._path_in(group, interrupted)
        ahead = next((notes[member].ahead for member, _ in effect.shards if notes[member].ahead), "")
        count = sum(len(brought) for _, brought in effect.shards)
        shards = None if self._way.whole else tuple(sorted(one for _, brought in effect.shards for one in brought))
        if effect.step in self.passed or count < self._aggregator.least:
            nothing = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
            self.counted = {}
            if effect.step not in self.passed and count:  # their samples are used up all the same: the run gets on
                self.too_few = (effect.step, count, self._aggregator.least)
            self.kept = KeptMean(
                effect.step, layout, nothing, frozenset(), {}, lambda: True, shards, effect.over, ahead=ahead
            )
            return path.bulk
        assert not self._way.whole or count == self._shards, f"step {effect.step} has the shards {effect.shards}"
        check_coverage(self.sums.tree, effect.shards, notes)
        self.counted = {effect.step: effect.shards}
        memory, is_intact = path.reduce(effect.step, layout, group.view.members, notes)
        present, gathered = present_in(layout, notes), all_gathered(notes)
        metrics = metrics_of(notes, self._aggregator)
        said = effect.over, gathered, ahead
        self.kept = KeptMean(effect.step, layout, memory, present, metrics, is_intact, shards, *said)
        return path.bulk

    def judged(self, step: int) -> tuple[Shares, tuple[bool, ...] | None]:
        """Whose shards this step was made of, and which of them, in their order, the aggregator trusted."""
        brought = self.counted.get(step)
        if brought is None or self._path is None:
            return (), None
        return brought, self._path.trusted()

    def give(self, group: Group, effect: m.Give, interrupted: Callable[[], str]) -> bool:
        """Send the mean of the last step to one that lacks it. False: it is no longer whole; BrokenGroup."""
        kept = self.kept
        assert kept is not None
        copy = kept.memory.clone()  # it may lie in a neighbour's memory, which may be used again at any time
        if kept.step != effect.step or not kept.is_intact():
            return False
        group.send(effect.to, encode(m.GivenMean(effect.step), kept.note()), bulk=True)
        data: memoryview = copy.numpy().data
        group.exchange([(effect.to, [data])], [], interrupted=interrupted)
        group.release(effect.to)  # if that finds it gone, so does the next poll
        return True

    def receive(self, group: Group, peer: str, message: m.GivenMean, note: Any, interrupted: Callable[[], str]) -> None:
        """The mean of a step that others have applied. Not into my result area: it may be theirs to read.

        PeerError if it does not come, or not to all ranks of my group: then it is not kept.
        """
        layout = self._capture.layout()
        memory = torch.empty(layout.slot_bytes, dtype=torch.uint8)
        data: memoryview = memory.numpy().data
        kept = KeptMean.received(message.step, layout, memory, note)
        known = kept.shards is not None and all(0 <= shard < self._shards for shard in kept.shards)
        if known is self._way.whole:
            raise ProtocolError(f"a peer sent a mean of the shards {str(kept.shards)[:40]}")
        group.exchange([], [(peer, [data])], interrupted=interrupted)
        if why := self.why_not_in_all(message.step, peer):
            raise PeerError(why)
        self.kept = kept

    def _path_in(self, group: Group, interrupted: Callable[[], str]) -> Path:
        if self._path is None:
            terms = ReductionTerms(
                self._shards, self._way.small, interrupted, self._aggregator, self._carrying, self.seed
            )
            self._path = make_path(self._way.kind, group, self._arena, terms)
        return self._path
