"""Reduction between hosts: workers of one host meet in shared memory, and one stream per host crosses the network.

The first member of each host in the view's order leads it. After all Ready, leaders read the slots of all members of
their host where they lie, and exchange slices with each other, adding as they send what can be added within the host
(reduce/network.py). A leader ends with the whole mean in its own result area; the others of its host have nothing to
do, and read it there after all Done. Everything is written by its owner alone.

Always in two rounds: who does not lead must hear from its leader that the mean is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from holdfast.core.words import host_of
from holdfast.net.groups import BrokenGroup, Group
from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout
from holdfast.reduce.network import SliceExchange
from holdfast.reduce.reduction import Brought, ReductionTerms
from holdfast.reduce.shared_memory import check_stamps
from holdfast.reduce.tree import Range, leaves_over, tree_over


class Hosts:
    """The path between hosts, in one view. `arenas` are those of my host's members, mine included."""

    two_rounds = True

    def __init__(self, group: Group, arenas: Mapping[str, Arena], terms: ReductionTerms) -> None:
        self._group = group
        self._tree = leaves_over(terms.shards) if terms.aggregator.by_shard else tree_over(terms.shards)
        self._arenas = arenas
        self._hosts = by_host(group.view.members)
        self._neighbours = self._hosts[host_of(group.me)]
        leaders = tuple(members[0] for members in self._hosts.values())
        self._exchange: SliceExchange | None = None
        self._freed = False
        self.bulk: frozenset[str] = frozenset()
        if group.me in leaders:
            self._exchange = SliceExchange(group, leaders, terms)
            self.bulk = frozenset(leaders) - {group.me}

    def reduce(
        self, step: int, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought]
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        for member in self._neighbours:
            if member not in self._arenas:
                raise BrokenGroup(member, "it did not share its memory")
        home, stamp = self._arenas[self._neighbours[0]], (self._group.view.number, step)
        result = home.result(layout)
        if self._exchange is not None:
            home.claim_result(*stamp)
            here = [
                (node, self._arenas[member].slot(slot, layout))
                for member in self._neighbours
                for node, slot in brought[member].nodes
            ]
            nodes = {members[0]: self._nodes_of(members, brought) for members in self._hosts.values()}
            self._exchange.reduce(step, layout, here, nodes, result)
            # Fence: what I sent is worth nothing to the others until I say Done, and that is after this.
            check_stamps(self._arenas, self._neighbours, {stamp})
            home.note_trusted(self._exchange.trusted)
        elif not self._freed:
            self._free_own(stamp)
        return result, lambda: home.result_stamp == stamp

    def trusted(self) -> tuple[bool, ...] | None:
        """Who does not lead reads it where the mean is, after all Done."""
        return self._arenas[self._neighbours[0]].trusted()

    def _free_own(self, stamp: tuple[int, int]) -> None:
        """My own result area, of a view in which I led or all were on one host: all have applied what is in it."""
        own = self._arenas[self._group.me]
        own.claim_result(*stamp)
        own.free_result((0, 0))
        self._freed = True

    def _nodes_of(self, members: Sequence[str], brought: Mapping[str, Brought]) -> tuple[Range, ...]:
        """The fewest nodes that are what these members bring together."""
        shards = [shard for member in members for node, _ in brought[member].nodes for shard in range(*node)]
        return self._tree.cover(sorted(shards))


def by_host(members: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The members of each host, hosts and members in the order of the view."""
    hosts: dict[str, tuple[str, ...]] = {}
    for member in members:
        host = host_of(member)
        hosts[host] = (*hosts.get(host, ()), member)
    return hosts
