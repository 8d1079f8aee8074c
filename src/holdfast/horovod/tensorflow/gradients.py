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

    def __init__(self, tape: Any, reducing: Reducing) -> None:
        self.__dict__.update(tape.__dict__)
        self._reducing = reducing

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
            return self._reducing([mine])[0]
        flat = tf.nest.flatten(mine)
        return tf.nest.pack_sequence_as(mine, self._reducing(flat))


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
    without_effect.pop("scale_local_gradients", None)
    check(without_effect)
    check_groups(num_groups, groups)
    reducing = Reducing(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=Op(op),
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    return _Distributed(gradtape, reducing)
