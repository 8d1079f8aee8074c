"""For graphs that are run in sessions, as `tf.compat.v1` still has them: the optimizer, and variables at the beginning.

Nothing orders the operations of such a graph but what depends on what, so each of these is one collective.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from holdfast.core.errors import ConfigError
from holdfast.horovod.process_sets import global_process_set
from holdfast.horovod.tensorflow.bridge import on_host, spec_of
from holdfast.horovod.tensorflow.functions import sent
from holdfast.horovod.tensorflow.gradients import Reducing

v1 = tf.compat.v1


def broadcast_global_variables(root_rank: int) -> Any:
    """An operation of this graph, by which all its variables become the root's."""
    if tf.executing_eagerly():
        raise ConfigError(
            "there are no global variables in TensorFlow 2",
            hint="hvd.broadcast_variables(model.variables, root_rank=0)",
        )
    ours = v1.global_variables()
    if not ours:
        return tf.no_op()
    values = [one.read_value() if hasattr(one, "read_value") else tf.convert_to_tensor(one) for one in ours]
    specs = [spec_of(one) for one in values]
    found = on_host(lambda brought: sent(brought, root_rank, global_process_set), values, specs)
    return tf.group(*[v1.assign(variable, value) for variable, value in zip(ours, found, strict=True)])


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):  # type: ignore[misc, name-defined, unused-ignore]
    """When a MonitoredSession begins, all variables become the root's."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph is not v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


class SessionOptimizer(v1.train.Optimizer):  # type: ignore[misc, name-defined, unused-ignore]
    """An optimizer of tf.compat.v1, whose gradients are those of all ranks."""

    def __init__(self, optimizer: Any, reducing: Reducing) -> None:
        super().__init__(name=f"Distributed{type(optimizer).__name__}", use_locking=False)
        self._inner = optimizer
        self._reducing = reducing

    def compute_gradients(self, *arguments: Any, **options: Any) -> list[tuple[Any, Any]]:
        gradients, variables = zip(*self._inner.compute_gradients(*arguments, **options), strict=True)
        return list(zip(self._reducing(gradients), variables, strict=True))

    def apply_gradients(self, *arguments: Any, **options: Any) -> Any:
        return self._inner.apply_gradients(*arguments, **options)

    def get_slot(self, *arguments: Any, **options: Any) -> Any:
        return self._inner.get_slot(*arguments, **options)

    def get_slot_names(self, *arguments: Any, **options: Any) -> Any:
        return self._inner.get_slot_names(*arguments, **options)

    def variables(self) -> Any:
        return self._inner.variables()
