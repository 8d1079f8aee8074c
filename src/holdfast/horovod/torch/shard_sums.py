"""Gradients of a fixed number of shards (HOLDFAST_SHARDS): each backward pass is one of this rank's shards.

What a pass leaves in the gradients is taken away when the pass is over, and added up as far as the tree over all shards
allows. When the last shard is there, the nodes that are left go to the other ranks. Belongs to one optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.horovod import basics
from holdfast.horovod.exchange.handle import Handle
from holdfast.horovod.exchange.sharding import nodes_of
from holdfast.horovod.exchange.words import Kind, Op
from holdfast.horovod.process_sets import ProcessSet
from holdfast.horovod.torch.handles import ask, submit
from holdfast.reduce.tree import Range, tree_over

Tensor = torch.Tensor


class ShardSums:
    def __init__(self, parameters: Sequence[Tensor], process_set: ProcessSet, complete: Callable[[], None]) -> None:
        """`complete` is called when this rank's last shard is there, at the end of its backward pass."""
        self._parameters = list(parameters)
        self._process_set = process_set
        self._complete = complete
        self.begin()

    def begin(self) -> None:
        """Another step. Who has which shards is asked anew: the world may be another one."""
        self.passes = 0
        self._is_queued = False
        self._held: dict[int, dict[Range, Tensor]] = {id(one): {} for one in self._parameters}

    @property
    def mine(self) -> range:
        return basics.shards(self._process_set)

    @property
    def nodes(self) -> tuple[Range, ...]:
        return nodes_of(self.mine, basics.num_shards(self._process_set))

    def arrived(self) -> None:
        """A gradient is there, in the middle of a backward pass."""
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._pass_is_over)

    def _pass_is_over(self) -> None:
        self._is_queued = False
        mine = self.mine
        if self.passes >= len(mine):
            raise AssertionError(self._wrong(self.passes + 1))
        shard, self.passes = mine[self.passes], self.passes + 1
        with torch.no_grad():
            for parameter in self._parameters:
                self._keep(parameter, shard)
        if self.passes == len(mine):
            self._complete()

    def _keep(self, parameter: Tensor, shard: int) -> None:
        found, parameter.grad = parameter.grad, None
        found = torch.zeros_like(parameter) if found is None else found.to_dense() if found.is_sparse else found
        held, node = self._held[id(parameter)], (shard, shard + 1)
        parents = tree_over(basics.num_shards(self._process_set)).parents
        while node in parents and parents[node][1] in held:  # what is held is to the left
            node, sibling = parents[node]
            found = torch.add(held[sibling], found, out=held.pop(sibling))
        held[node] = found

    def _wrong(self, passes: int) -> str:
        mine, total = self.mine, basics.num_shards(self._process_set)
        return (
            f"{passes} backward passes came before step(), and of the {total} shards of HOLDFAST_SHARDS this rank has "
            f"{len(mine)}: make one for each of hvd.shards()"
        )

    def trouble(self) -> str:
        """Why there can be no step yet; empty if there can."""
        return self._wrong(self.passes) if self.passes != len(self.mine) else ""

    def rows(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """What these parameters bring: a set of tensors for each node."""
        return [[self._held[id(one)][node] for one in parameters] for node in self.nodes]


def allreduce_shards_async_(
    outputs: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor]],
    sums: ShardSums,
    name: str,
    op: Op,
    process_set: ProcessSet,
    **scales: float,
) -> int:
    """Each output becomes the sum of that tensor over all rows of all ranks; see `synchronize`."""
    total = basics.num_shards(process_set)
    request = ask(Kind.ALLREDUCE, outputs, name, process_set, op=op, shards=total, nodes=sums.nodes, **scales)

    def finish(handle: Handle) -> Any:
        for out, result in zip(outputs, handle.results, strict=True):
            if out is not result:
                out.detach().copy_(result)
        return list(outputs)

    return submit(request, [one for row in rows for one in row], finish, outputs)
