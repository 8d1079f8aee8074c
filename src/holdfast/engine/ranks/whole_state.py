"""A group's state in storage: whole tensors, as a run without groups saves them. So any number of ranks loads them.

Rank 0 saves and looks for checkpoints, as a worker by itself does. For that all ranks put the state together, tensor by
tensor, and take it apart again: collectives, for which rank 0 tells the others to come. Ranks that save hold the whole
state until it is copied. Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.errors import Evicted
from holdfast.engine.ranks.link import Links, Message
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.engine.transfer.wrapping import WrappedCheckpoints
from holdfast.placement.ranks import Ranks
from holdfast.state.codec import unflatten, unpack_tree
from holdfast.state.layout import TensorSpec, allocate, as_bytes, spec_of
from holdfast.state.local import is_sharded, local, whole
from holdfast.state.optimizer import sent_by_name
from holdfast.state.snapshot import Holder, Snapshot, States

Specs = Sequence[TensorSpec]


class WholeStates:
    """In rank 0, in place of the holder that a worker by itself saves from."""

    def __init__(self, holder: Holder, links: Links, ranks: int) -> None:
        self._holder = holder
        self._links = links
        self._ranks = ranks

    def capture(self, step: int) -> Snapshot:
        self._links.tell("capture", step)
        return self._holder.capture(step, of=whole)

    def state_bytes(self) -> int:
        """Room for all of it, or a little more: some of it every rank has."""
        return self._holder.state_bytes() * self._ranks

    def restore(self, snapshot: Snapshot, *, adopt: bool = False) -> None:
        specs = [spec_of(tensor) for tensor in snapshot.tensors]
        self._links.tell("restore", snapshot.step, snapshot.tree, specs)
        parts = take_apart(self._holder.parameters(), snapshot.tree, specs, list(snapshot.tensors))
        self._holder.restore(Snapshot(snapshot.step, snapshot.tree, tuple(parts)), adopt=adopt)


class LeadingCheckpoints(WrappedCheckpoints):
    """In rank 0: those of a worker by itself, and a word to the others, which wait for it in a line of the script."""

    AS_THEY_ARE = (
        *("is_due", "save", "note", "prepare", "wait_copied", "member_lost", "arrived", "settle_up_to", "settle"),
        *("newest", "close", "search_at", "is_search_due", "search"),
    )

    def __init__(self, inner: NoCheckpoints, links: Links) -> None:
        super().__init__(inner)
        self._links = links

    def save_last(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float]) -> None:
        self._inner.save_last(step, members, metrics)
        self._links.tell("through")

    def leave(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, save: bool) -> str:
        why = self._inner.leave(step, members, metrics, save=save)
        self._links.tell("through")
        return why


class FollowingCheckpoints(NoCheckpoints):
    """In the other ranks: they come when rank 0 puts the state together."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.heed_until_through: Callable[[], None] = lambda: None  # do what rank 0 says, until it has saved

    def save_last(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float]) -> None:
        self.heed_until_through()

    def leave(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, save: bool) -> str:
        try:
            self.heed_until_through()
        except Evicted:
            pass  # it has left already
        return ""


def of_group(
    ranks: Ranks,
    holder: Holder,
    following: FollowingCheckpoints,
    alone: Callable[[States], NoCheckpoints],
) -> NoCheckpoints:
    """What `alone` makes for a worker by itself, for this rank. Rank 0 saves for all."""
    if ranks.count == 1:
        return alone(holder)
    if ranks.rank:
        return following
    links = Links(ranks.links)
    return LeadingCheckpoints(alone(WholeStates(holder, links, ranks.count)), links)


def join_capture(holder: Holder, step: int) -> None:
    """Another rank's part in `WholeStates.capture`: of what comes, it keeps nothing."""

    def give(tensor: torch.Tensor) -> torch.Tensor:
        whole(tensor)
        return local(tensor)

    holder.capture(step, of=give)


def join_restore(holder: Holder, message: Message) -> None:
    """And in `WholeStates.restore`."""
    step, tree, specs = message
    parts = take_apart(holder.parameters(), tree, specs, None)
    holder.restore(Snapshot(step, tree, tuple(parts)), adopt=True)


def take_apart(
    parameters: Mapping[str, torch.nn.Parameter], tree: bytes, specs: Specs, tensors: list[torch.Tensor] | None
) -> list[torch.Tensor]:
    """Of whole tensors, which rank 0 has, each rank's part. One after the other: nobody else has all at once."""
    owners = owners_of(parameters, tree, len(specs))
    parts = []
    for number, spec in enumerate(specs):
        tensor = tensors[number] if tensors is not None else allocate([spec])[0]
        if tensor.numel():
            dist.broadcast(as_bytes(tensor, spec), src=0)
        owner: Any = owners.get(number)
        if owner is not None and is_sharded(owner) and tensor.dim() and tensor.shape == owner.shape:
            rank, rows = dist.get_rank(), -(-tensor.shape[0] // dist.get_world_size())
            start = min(rank * rows, tensor.shape[0])
            tensor = tensor[start : start + rows].clone()
        parts.append(tensor)
    return parts


def owners_of(parameters: Mapping[str, torch.nn.Parameter], tree: bytes, count: int) -> dict[int, torch.nn.Parameter]:
    """Which parameter a tensor of a snapshot is, or is an optimizer's state of, by its number there."""
    state = unflatten(unpack_tree(tree), [torch.tensor(number) for number in range(count)])
    found = {int(mark): parameters[name] for name, mark in state["parameters"].items() if name in parameters}
    for sent in sent_by_name(state["optimizer"]).values():
        numbers = chain.from_iterable(group["params"] for group in sent["packed"]["param_groups"])
        for number, name in zip(numbers, chain.from_iterable(sent["names"]), strict=True):
            of_one = sent["packed"]["state"].get(number, {})
            if name in parameters and isinstance(of_one, dict):
                marks = (mark for mark in of_one.values() if isinstance(mark, torch.Tensor))
                found.update({int(mark): parameters[name] for mark in marks})
    return found
