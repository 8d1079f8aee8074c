"""A reduction: what every member says with its Ready, and the ways to add what they bring.

`SharedMemory` reads the peers' slots where they lie. `Network` moves slices over the group's connections. `Hosts` does
the one within a host and the other between hosts. `ProcessGroup` has torch.distributed move them. All give the same
bits, leave the sums whole, and put the mean into memory that nobody touches until every member has applied the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from holdfast.core.errors import ProtocolError
from holdfast.reduce.aggregators import MEAN, Aggregator
from holdfast.reduce.carrier import Carrying
from holdfast.reduce.layout import Layout
from holdfast.reduce.sums import Sums
from holdfast.reduce.tree import Range

Number = float | torch.Tensor  # as recorded: on a device it is read with the step's sums, and a float from then on
SMALL_BYTES = 256 * 1024  # up to here every member adds everything itself: one round of messages instead of two


@dataclass(frozen=True)
class ReductionTerms:
    """What all members of a view reduce by. `small`: everybody gets everything, and adds it up for itself. While
    nothing moves, `interrupted()` is asked for a member that is gone."""

    shards: int
    small: bool
    interrupted: Callable[[], str] = lambda: ""
    aggregator: Aggregator = MEAN
    carrying: Carrying | None = None  # in a run whose gradients a process group carries
    seed: int = 0  # of the run

    def draw(self, step: int) -> int:
        """What an aggregator draws by chance in a step follows from this: for all members alike, also a second time."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed} in step {step}".encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Brought:
    """What one member brings to a step: its nodes, the slots they are in, which tensors are there at all."""

    nodes: tuple[tuple[Range, int], ...]
    present: tuple[int, ...] | None  # None: all
    metrics: Mapping[str, Mapping[int, float]]  # name -> shard -> value
    gathered: Mapping[int, str] = field(default_factory=dict)  # shard -> what its lines gave to step.gather
    ahead: str = ""  # what the next step needs, if it is this member's to bring that: see modes/port.py
    carried: bool = False  # its process group of this view stands

    def encode(self, *, bulk: bool) -> dict[str, Any]:
        note: dict[str, Any] = {"n": [[start, stop, slot] for (start, stop), slot in self.nodes]}
        if self.present is not None:
            note["p"] = list(self.present)
        if self.metrics:
            note["m"] = {name: list(values.items()) for name, values in self.metrics.items()}
        if self.gathered:
            note["g"] = list(self.gathered.items())
        if self.ahead:
            note["a"] = self.ahead
        if self.carried:
            note["c"] = 1
        if bulk:
            note["bulk"] = 1
        return note

    @classmethod
    def decode(cls, note: Any, *, slots: int, tensors: int) -> Brought:
        try:
            nodes = tuple(((int(start), int(stop)), int(slot)) for start, stop, slot in note["n"])
            present = tuple(map(int, note["p"])) if "p" in note else None
            metrics = {
                str(name): {int(shard): float(value) for shard, value in values}
                for name, values in note.get("m", {}).items()
            }
            gathered, ahead, carried = _gathered(note), str(note.get("a", "")), bool(note.get("c"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProtocolError("a peer's note on what it brings makes no sense") from error
        if any(not 0 <= slot < slots for _, slot in nodes):
            raise ProtocolError("a peer named a slot that there is not")
        if present is not None and any(not 0 <= index < tensors for index in present):
            raise ProtocolError("a peer named a tensor that there is not")
        return cls(nodes, present, metrics, gathered, ahead, carried)


@dataclass(frozen=True)
class KeptMean:
    """The reduced mean of a step: ours, untouched by the user, until the next step commits."""

    step: int
    layout: Layout
    memory: torch.Tensor
    present: frozenset[int]
    metrics: Mapping[str, float]
    is_intact: Callable[[], bool]  # False: the memory was used for a later step meanwhile
    shards: tuple[int, ...] | None = None  # those that it is the mean of; None: all of the step
    over: str = ""  # a member's script wants no further steps, and why
    gathered: Mapping[int, str] = field(default_factory=dict)  # shard -> what its lines gave to step.gather
    ahead: str = ""  # what the next step needs

    def note(self) -> dict[str, Any]:
        """What a member that is sent the memory must know besides."""
        note: dict[str, Any] = {"bulk": 1, "p": sorted(self.present), "m": dict(self.metrics)}
        if self.over:
            note["e"] = self.over
        if self.gathered:
            note["g"] = list(self.gathered.items())
        if self.ahead:
            note["a"] = self.ahead
        return note if self.shards is None else {**note, "v": list(self.shards)}

    @classmethod
    def received(cls, step: int, layout: Layout, memory: torch.Tensor, note: Any) -> KeptMean:
        """With the note of a peer, who may have sent anything: ProtocolError. The memory is filled afterwards."""
        try:
            present = frozenset(map(int, note["p"]))
            metrics = {str(name): float(value) for name, value in note["m"].items()}
            shards = tuple(map(int, note["v"])) if "v" in note else None
            over, gathered, ahead = str(note.get("e", "")), _gathered(note), str(note.get("a", ""))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError("a peer's note on a result makes no sense") from error
        return cls(step, layout, memory, present, metrics, lambda: True, shards, over, gathered, ahead)


class Path(Protocol):
    """How gradients travel."""

    two_rounds: bool

    @property
    def bulk(self) -> frozenset[str]:
        """Peers whose connection carries bulk data, both ways, after each Ready."""

    def reduce(
        self, step: int, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought]
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        """Add. Returns the memory with the mean, and whether it is still that."""

    def trusted(self) -> tuple[bool, ...] | None:
        """Once the step is committed: of the shards that came, in their order, which ones the aggregator trusted."""


def _gathered(note: Any) -> dict[int, str]:
    return {int(shard): str(text) for shard, text in note.get("g", ())}


def bring(
    sums: Sums,
    metrics: Mapping[str, Mapping[int, float]],
    gathered: Mapping[int, str] | None = None,
    ahead: str = "",
    *,
    carried: bool = False,
) -> Brought:
    assert sums.layout is not None
    whole = len(sums.present) == len(sums.layout.shapes)
    present = None if whole else tuple(sorted(sums.present))
    return Brought(tuple(sums.nodes()), present, metrics, gathered or {}, ahead, carried)


def present_in(layout: Layout, brought: Mapping[str, Brought]) -> frozenset[int]:
    """Tensors that at least one shard has brought."""
    found: set[int] = set()
    for one in brought.values():
        if one.nodes:
            found.update(range(len(layout.shapes)) if one.present is None else one.present)
    return frozenset(found)


def metrics_of(brought: Mapping[str, Brought], aggregator: Aggregator) -> dict[str, float]:
    """What was recorded over all shards, in the order of shards: the same on every member."""
    values: dict[str, dict[int, float]] = {}
    for one in brought.values():
        for name, by_shard in one.metrics.items():
            values.setdefault(name, {}).update(by_shard)
    return {
        name: aggregator.metric([by_shard[shard] for shard in sorted(by_shard)])
        for name, by_shard in sorted(values.items())
    }


def all_gathered(brought: Mapping[str, Brought]) -> dict[int, str]:
    """In the order of shards, whoever brought them."""
    found = {shard: text for one in brought.values() for shard, text in one.gathered.items()}
    return dict(sorted(found.items()))
