"""Elastic training with TensorFlow: `elastic.run`, `elastic.TensorFlowState`, `elastic.TensorFlowKerasState`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from holdfast.horovod.elastic import State as State
from holdfast.horovod.elastic import run_fn
from holdfast.horovod.tensorflow.bridge import own_errors, to_numpy, to_torch
from holdfast.horovod.tensorflow.functions import plain_variable
from holdfast.horovod.torch.elastic.parts import ObjectState as ObjectState
from holdfast.horovod.torch.elastic.parts import PartsState

Variables = Callable[[], Sequence[Any]]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for the function that trains; its first argument is the state."""

    @functools.wraps(func)
    def with_own_errors(state: State, *args: Any, **kwargs: Any) -> Any:
        with own_errors():
            return func(state, *args, **kwargs)

    return run_fn(with_own_errors)


class _VariablesPart:
    """Variables as a part of a state: their values, in their order."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def state_dict(self) -> dict[str, Any]:
        ours = [plain_variable(one) for one in self._variables()]
        return {str(number): to_torch(np.array(one.numpy())) for number, one in enumerate(ours)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ours = [plain_variable(one) for one in self._variables()]
        if len(state) != len(ours):
            raise ValueError(f"the state has {len(state)} variables, and there are {len(ours)} here")
        for number, one in enumerate(ours):
            one.assign(to_numpy(state[str(number)]))


class _VariablesState(PartsState):
    def on_reset(self) -> None:
        with own_errors():  # a reset callback may compute
            super().on_reset()


class TensorFlowState(_VariablesState):
    """A list of variables, and plain values."""

    def __init__(
        self, variables: Sequence[Any] | None = None, session: object = None, allow_pickle: bool = False, **kwargs: Any
    ) -> None:
        self.variables = list(variables if variables is not None else tf.compat.v1.global_variables())
        super().__init__({"variables": _VariablesPart(lambda: self.variables)}, kwargs, allow_pickle=allow_pickle)


class TensorFlowKerasState(_VariablesState):
    """A Keras model and its optimizer, and plain values.

    The optimizer's variables are made here if it has none yet: no step is needed before.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: object = None, allow_pickle: bool = False, **kwargs: Any
    ) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet: call model.build(input_shape), or the model on a batch")
        self.model = model
        self.optimizer: Any = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        parts = {"model": _VariablesPart(lambda: self.model.variables)}
        if self.optimizer is not None:
            if not self.optimizer.built:
                self.optimizer.build(model.trainable_variables)
            parts["optimizer"] = _VariablesPart(lambda: self.optimizer.variables)
        super().__init__(parts, kwargs, allow_pickle=allow_pickle)


__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
