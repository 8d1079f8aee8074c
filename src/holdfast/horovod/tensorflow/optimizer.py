"""DistributedOptimizer: the user's Keras optimizer, whose gradients are those of all ranks.

It is an optimizer of the same class, by name and module too, so that what is saved with it loads as the plain one. With
Adasum, what the optimizer does to the variables is combined, rather than gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.horovod.basics import Adasum, Average, Sum
from holdfast.horovod.exchange.words import Op
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.tensorflow.bridge import unconverted
from holdfast.horovod.tensorflow.compression import Compression, Compressor
from holdfast.horovod.tensorflow.gradients import Reducing, check_groups
from holdfast.horovod.tensorflow.keras_hooks import install_hooks
from holdfast.horovod.tensorflow.local_variables import LocalVariables, variables_of
from holdfast.horovod.tensorflow.sessions import SessionOptimizer, v1
from holdfast.horovod.tensorflow.without_effect import check


class Distributed:
    """What is put before the user's optimizer class."""

    holdfast_reducing: Reducing
    holdfast_times: float = 1.0
    holdfast_local: LocalVariables
    _holdfast_variables: Callable[[], Sequence[Any]]

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable is not reduced."""
        self.holdfast_local.add(var)

    @unconverted  # type: ignore[untyped-decorator, unused-ignore]
    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        object.__setattr__(self, "_holdfast_variables", lambda: trainable_variables)  # past Keras, which tracks lists
        is_adasum = self.holdfast_reducing.op == Adasum
        before = [one + 0 for one in trainable_variables] if is_adasum else []
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        if not is_adasum:
            return
        steps = [one - old for one, old in zip(trainable_variables, before, strict=True)]
        found = self.holdfast_reducing.but(self.holdfast_local, steps, trainable_variables)
        for one, old, step in zip(trainable_variables, before, found, strict=True):
            one.assign(old + step)

    @unconverted  # type: ignore[untyped-decorator, unused-ignore]
    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Keras clips once for each update, before it: also where it has added up several batches."""
        times = self.holdfast_times
        brought = [one if one is None or times == 1.0 else one * times for one in grads]
        if self.holdfast_reducing.op != Adasum:
            brought = self.holdfast_reducing.but(self.holdfast_local, brought, self._holdfast_variables())
        return super()._clip_gradients(brought)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    **without_effect: Any,
) -> Any:
    """An optimizer of the same class, with the same settings and state, that steps by all ranks' gradients."""
    scale_local = bool(without_effect.pop("scale_local_gradients", True))
    check_groups(without_effect.pop("num_groups", 0), groups)
    check(without_effect)
    if op not in (Average, Sum, Adasum):
        raise ValueError("an optimizer takes op=hvd.Average, hvd.Sum or hvd.Adasum")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is at least 1, not {backward_passes_per_step}")
    reducing = Reducing(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=Op(op),
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    if isinstance(optimizer, v1.train.Optimizer):
        return SessionOptimizer(optimizer, reducing)
    _check_optimizer(optimizer)
    config = optimizer.get_config()
    if name is not None:
        config["name"] = name
    times = 1.0
    if backward_passes_per_step > 1:  # Keras adds up, and divides
        config["gradient_accumulation_steps"] = backward_passes_per_step
        times = 1.0 if average_aggregated_gradients else float(backward_passes_per_step)
    return _wrapped(optimizer, config, reducing, times, scale_local)


def PartialDistributedOptimizer(optimizer: Any, *, local_layers: Any = None, **options: Any) -> Any:
    """A DistributedOptimizer that leaves the gradients of these layers alone."""
    local = variables_of(local_layers)
    found = DistributedOptimizer(optimizer, **options)
    for variable in local:
        found.register_local_var(variable)
    return found


def _check_optimizer(optimizer: Any) -> None:
    import keras

    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"an optimizer of Keras 3 is needed, not {type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"Keras computes with {keras.backend.backend()}, and Horovod's API for Keras is for TensorFlow",
            hint="set KERAS_BACKEND=tensorflow, or use holdfast.horovod.torch with torch",
        )
    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is distributed already")
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError("the inner optimizer is to be distributed: LossScaleOptimizer(hvd.DistributedOptimizer(...))")


def _wrapped(optimizer: Any, config: dict[str, Any], reducing: Reducing, times: float, scale_local: bool) -> Any:
    install_hooks()
    base = type(optimizer)
    kind: Any = type(base.__name__, (Distributed, base), {"__module__": base.__module__})
    found = kind.from_config(config)
    found.holdfast_reducing, found.holdfast_times = reducing, times
    found.holdfast_local = LocalVariables(scale=scale_local)
    if optimizer.built:
        found.build(optimizer._trainable_variables)
        if len(found.variables) != len(optimizer.variables):
            raise ValueError("backward_passes_per_step is for an optimizer that has made no step yet")
        for mine, theirs in zip(found.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    return found
