"""Keras on JAX: a variable holds an array that never changes, and is given another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.utils.dlpack import from_dlpack

from holdfast.core.errors import ConfigError
from holdfast.integrations.variables.one_thread import JAX, threads_said
from holdfast.integrations.variables.port import Framework


class OnJax(Framework):
    """See the port. JAX has no process-wide generators."""

    name = "jax"

    def __init__(self) -> None:
        self._applies: dict[int, Any] = {}

    def prepare(self, threads: int) -> None:
        """JAX reads the number of threads when it begins to compute, and nobody can ask it afterwards."""
        if jax.default_backend() != "cpu":
            raise ConfigError(
                f"JAX computes on {jax.default_backend()}, and its bits are compared on the CPU",
                hint="JAX_PLATFORMS=cpu",
            )
        if threads_said(JAX) != threads:
            raise ConfigError(
                f"JAX computes with {threads_said(JAX) or 'as many'} threads, and threads is {threads}",
                hint="import holdfast.integrations.keras before the first array, and for more than one thread say "
                f"{JAX}={threads} in the environment",
            )

    def tensor(self, value: Any) -> torch.Tensor:
        array = value if isinstance(value, jax.Array) else value.value
        return from_dlpack(array)

    def write(self, variable: Any, tensor: torch.Tensor) -> None:
        variable.assign(self.value(tensor))

    def value(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.bfloat16:
            bits = jax.numpy.array(tensor.detach().view(torch.int16).numpy())
            return jax.lax.bitcast_convert_type(bits, jax.numpy.bfloat16)
        return jax.numpy.array(tensor.detach().numpy())

    def seed(self, number: int) -> None:
        pass

    def batch(self, arrays: Any) -> Any:
        return jax.numpy.array(arrays)

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Compiled: an optimizer's many small operations take longer one by one than the step."""
        if id(optimizer) not in self._applies:
            self._applies[id(optimizer)] = (jax.jit(optimizer.stateless_apply), optimizer)
        update = self._applies[id(optimizer)][0]
        state = [one.value for one in optimizer.variables]
        changed, state = update(state, list(gradients), [one.value for one in variables])
        for variable, value in zip((*variables, *optimizer.variables), (*changed, *state), strict=True):
            variable.assign(value)
