"""One shard of a step by the model's own train_step, whatever that does, up to the point where it would update.

While it runs, the model's optimizer is a GradientCollector, which keeps the gradients instead of applying them. So a
train_step that a person wrote works as the one that Keras has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.integrations.variables.port import Framework


class GradientCollector:
    """Stands for the optimizer in a train_step. What it is asked besides, the optimizer answers."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._variables = variables
        self._taken: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if self._taken is not None:
            raise ConfigError(
                "train_step has updated the model twice",
                hint="let it call self.optimizer.apply once, with the gradients of all that is trained",
            )
        whose = self._variables if trainable_variables is None else list(trainable_variables)
        by_variable = {id(one): grad for one, grad in zip(whose, grads, strict=True)}
        self._taken = [by_variable.get(id(one)) for one in self._variables]

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        self.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
        return self._optimizer.iterations

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, list[Any]]:
        """On JAX: the gradients leave train_step where the optimizer's variables would."""
        self.apply(grads, None)
        return trainable_variables, list(grads)

    def taken(self) -> list[Any]:
        taken, self._taken = self._taken, None
        if taken is None:
            raise ConfigError(
                "train_step has not updated the model",
                hint="let it call self.optimizer.apply(gradients, self.trainable_variables)",
            )
        return taken


class ShardStep(ABC):
    """Computes a shard. The variables have their first values when it is called, and those of the shard afterwards."""

    def __init__(self, model: Any, framework: Framework) -> None:
        self.model = model
        self.framework = framework
        self.variables = list(model.trainable_variables)
        self.collector = GradientCollector(model.optimizer, self.variables)

    @abstractmethod
    def __call__(self, data: Any) -> tuple[list[Any], Mapping[str, Any]]:
        """The gradients, and what train_step has returned."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        # Past Keras, which looks at everything that is assigned to a model.
        attributes = vars(self.model)
        optimizer, attributes["optimizer"] = attributes["optimizer"], self.collector
        try:
            yield
        finally:
            attributes["optimizer"] = optimizer


class TorchShardStep(ShardStep):
    """Its backward pass leaves the gradients where the engine looks for them."""

    def __call__(self, data: Any) -> tuple[list[Any], Mapping[str, Any]]:
        with self.collecting():
            logs = self.model.train_step(data)
        return self.collector.taken(), logs


class TensorFlowShardStep(ShardStep):
    """As one graph, compiled as the model is."""

    def __init__(self, model: Any, framework: Framework) -> None:
        import tensorflow as tf

        super().__init__(model, framework)

        def shard(data: Any) -> tuple[list[Any], Any]:
            with self.collecting():
                logs = model.train_step(data)
            gradients = self.collector.taken()
            dense = [tf.convert_to_tensor(one) if one is not None else None for one in gradients]
            return dense, logs

        whole = tf.autograph.experimental.do_not_convert(shard)
        if not model.run_eagerly:
            whole = tf.function(whole, reduce_retracing=True, jit_compile=model.jit_compile)
        self._shard = whole

    def __call__(self, data: Any) -> tuple[list[Any], Mapping[str, Any]]:
        return self._shard(data)  # type: ignore[no-any-return]


class JaxShardStep(ShardStep):
    """JAX' train_step is a function of all variables; what it makes of those that are not trained is assigned."""

    def __init__(self, model: Any, framework: Framework) -> None:
        import jax

        super().__init__(model, framework)

        def shard(state: Any, data: Any) -> tuple[Any, Any, Any, Any]:
            with self.collecting():
                logs, (_, others, gradients, metrics) = model.train_step(state, data)
            self.collector.taken()
            return gradients, others, metrics, logs

        self._shard = jax.jit(shard) if not model.run_eagerly and model.jit_compile else shard

    def __call__(self, data: Any) -> tuple[list[Any], Mapping[str, Any]]:
        model = self.model
        kinds = (self.variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables)
        state = tuple([one.value for one in kind] for kind in kinds)
        gradients, others, metrics, logs = self._shard(state, data)
        for variable, value in zip((*kinds[1], *kinds[3]), (*others, *metrics), strict=True):
            variable.assign(value)
        return list(gradients), logs


def framework_of(backend: str) -> tuple[Framework, type[ShardStep]]:
    """Of the backend that Keras computes with."""
    if backend == "tensorflow":
        from holdfast.integrations.variables.on_tensorflow import OnTensorFlow

        return OnTensorFlow(), TensorFlowShardStep
    if backend == "jax":
        from holdfast.integrations.variables.on_jax import OnJax

        return OnJax(), JaxShardStep
    if backend == "torch":
        from holdfast.integrations.variables.on_torch import OnTorch

        return OnTorch(), TorchShardStep
    raise ConfigError(f"Keras computes with {backend}", hint="KERAS_BACKEND=tensorflow, jax or torch")
