"""Gradients of all ranks: DistributedGradientTape, and what it has in common with the optimizer.

All dense gradients go in one collective, when the last of them is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from holdfast.horovod.basics import Average
from holdfast.horovod.exchange.words import Op
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.tensorflow.bridge import unconverted
from holdfast.horovod.tensorflow.compression import Compression, Compressor
from holdfast.horovod.tensorflow.local_variables import LocalVariables, variables_of
from holdfast.horovod.tensorflow.reductions import grouped_allreduce, is_sparse
from holdfast.horovod.tensorflow.without_effect import check

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class Reducing:
    """How gradients become those of all ranks."""

    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: Op = Average
    gradient_predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=hvd.Average")

    def __call__(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """None stays None: a variable that has no gradient here has none on any rank."""
        there = [index for index, one in enumerate(gradients) if one is not None]
        if not there or not self.process_set.included():
            return list(gradients)
        brought = [self._dense_if_wanted(gradients[index]) for index in there]
        factor = self.gradient_predivide_factor
        found = grouped_allreduce(
            brought,
            compression=self.compression,
            op=Op(self.op),
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )
        of = dict(zip(there, found, strict=True))
        return [of.get(index) for index in range(len(gradients))]

    def but(self, local: LocalVariables, gradients: Sequence[Tensor | None], variables: Sequence[Any]) -> list[Any]:
        """Those of local variables stay what they are on this rank."""
        if not local:
            return self(gradients)
        stays = local.among(variables)
        found = self([None if own else one for own, one in zip(stays, gradients, strict=True)])
        return [
            local.scaled(mine, self.process_set) if own else all_ranks
            for own, mine, all_ranks in zip(stays, gradients, found, strict=True)
        ]

    def _dense_if_wanted(self, gradient: Tensor) -> Tensor:
        return tf.convert_to_tensor(gradient) if self.sparse_as_dense and is_sparse(gradient) else gradient


def check_groups(num_groups: int, groups: Any) -> None:
    """Groups have no effect: everything that is dense goes in one collective."""
    if num_groups:
        warnings.warn("num_groups is old: give groups", DeprecationWarning, stacklevel=3)
    if groups is not None and not isinstance(groups, list) and not (isinstance(groups, int) and groups >= 0):
        raise ValueError("groups is a whole number, or a list of lists of variables")


class _Distributed(tf.GradientTape):  # type: ignore[misc]
    """Takes over what the user's tape has recorded."""

    def __init__(self, tape: Any, reducing: Reducing, *, scale_local: bool) -> None:
        self.__dict__.update(tape.__dict__)
        self._reducing = reducing
        self._local = LocalVariables(scale=scale_local)

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable is not reduced."""
        self._local.add(source)

    @unconverted  # type: ignore[untyped-decorator, unused-ignore]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of all ranks together."""
        mine = super().gradient(target, sources, output_gradients, unconnected_gradients)
        if not isinstance(mine, list | tuple | dict):
            return self._reducing.but(self._local, [mine], [sources])[0]
        found = self._reducing.but(self._local, tf.nest.flatten(mine), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(mine, found)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs of a variable and its gradient: those that stay on this rank, and those of all ranks."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        stays = self._local.among([variable for variable, _ in pairs])
        local = [pair for own, pair in zip(stays, pairs, strict=True) if own]
        return local, [pair for own, pair in zip(stays, pairs, strict=True) if not own]


def DistributedGradientTape(
    gradtape: Any,
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    **without_effect: Any,
) -> Any:
    """A tape with what this one has recorded, whose gradients are those of all ranks."""
    scale_local = bool(without_effect.pop("scale_local_gradients", True))
    check(without_effect)
    check_groups(num_groups, groups)
    reducing = Reducing(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=Op(op),
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    return _Distributed(gradtape, reducing, scale_local=scale_local)


def PartialDistributedGradientTape(gradtape: Any, *, local_layers: Any = None, **options: Any) -> Any:
    """A DistributedGradientTape that leaves the gradients of these layers alone."""
    local = variables_of(local_layers)
    tape = DistributedGradientTape(gradtape, **options)
    for variable in local:
        tape.register_local_source(variable)
    return tape
