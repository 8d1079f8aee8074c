"""TensorFlow's variables and tensors. Memory is shared only while it is read: a variable's may be replaced at any time,
and what is assigned to a variable may become its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import tensorflow as tf
import torch
from torch.utils.dlpack import from_dlpack

from holdfast.core.errors import ConfigError
from holdfast.integrations.variables.one_thread import INTER, INTRA, threads_said
from holdfast.integrations.variables.port import Framework


class OnTensorFlow(Framework):
    """See the port."""

    name = "tensorflow"

    def __init__(self) -> None:
        self._applies: dict[int, Any] = {}
        self._generator: Any = None  # TensorFlow's global one, once this has prepared it

    def prepare(self, threads: int) -> None:
        threading = tf.config.threading
        for get, put, variable in (
            (threading.get_intra_op_parallelism_threads, threading.set_intra_op_parallelism_threads, INTRA),
            (threading.get_inter_op_parallelism_threads, threading.set_inter_op_parallelism_threads, INTER),
        ):
            if get() == threads:
                continue
            try:
                put(threads)
            except RuntimeError as error:  # it has begun to compute
                if get() or threads_said(variable) != threads:
                    now = get() or threads_said(variable) or "as many as there are processors"
                    raise ConfigError(
                        f"TensorFlow has begun to compute with {now} threads, and threads is {threads}",
                        hint="import holdfast.integrations before the first tensor, and for more than one thread say "
                        f"{INTRA}={threads} {INTER}={threads} in the environment",
                    ) from error
        tf.config.experimental.enable_op_determinism()
        self._generator = tf.random.Generator.from_seed(0)
        tf.random.set_global_generator(self._generator)

    def tensor(self, value: Any) -> torch.Tensor:
        raw = _raw(value)
        if isinstance(raw, tf.IndexedSlices):  # of an embedding: rows that occur twice are added in their order
            raw = tf.convert_to_tensor(raw)
        if isinstance(raw, tf.Variable):
            raw = raw.read_value()
        if raw.dtype in (tf.bool, tf.uint16, tf.uint32, tf.uint64):  # which do not pass this way
            return torch.from_numpy(raw.numpy())
        return from_dlpack(tf.experimental.dlpack.to_dlpack(raw))

    def write(self, variable: Any, tensor: torch.Tensor) -> None:
        _raw(variable).assign(self.value(tensor))

    def value(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.bfloat16:
            return tf.bitcast(tf.constant(tensor.detach().view(torch.int16).numpy()), tf.bfloat16)
        return tf.constant(tensor.detach().numpy())

    def seed(self, number: int) -> None:
        # Not tf.random.set_seed: it throws away every compiled function, and a shard would take ten times as long.
        if self._generator is not None:
            self._generator.reset_from_seed(number & 0x7FFF_FFFF_FFFF_FFFF)

    def batch(self, arrays: Any) -> Any:
        return tf.convert_to_tensor(numpy.asarray(arrays))

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """As one graph: an optimizer's many small operations take longer one by one than the step."""
        present = [gradient is not None for gradient in gradients]
        known = self._applies.get(id(optimizer))
        if known is None or known[1] != present:

            @tf.function(autograph=False)  # type: ignore[untyped-decorator, unused-ignore]
            def update(given: list[Any]) -> None:
                rest = iter(given)
                optimizer.apply([next(rest) if there else None for there in present], variables)

            known = self._applies[id(optimizer)] = (update, present, optimizer)
        known[0]([gradient for gradient in gradients if gradient is not None])


def _raw(value: Any) -> Any:
    """What a variable of Keras is made of."""
    return value.value if hasattr(value, "value") and not isinstance(value, (tf.Tensor, tf.Variable)) else value
