"""Validation in a fit, shared out over the workers: each batch by one of them, the logged means the same bits on all.

For HoldfastStrategy(spread_evaluation=True). The trainer's validation loop then has one iteration, in which all batches
are measured wherever they fall, and what validation_step has logged is put together. So validation_step may only log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

from holdfast.core.errors import ConfigError
from holdfast.integrations.lightning.shard_logging import MEANT, words_of
from holdfast.integrations.loaders.driving import Driver
from holdfast.integrations.loaders.evaluating import Batches, only

COUNT = "holdfast.batches"
_BY_ITSELF = "HoldfastStrategy(spread_evaluation=False), with which every worker evaluates by itself"


class WholeEvaluation:
    """Stands for all batches in the trainer's validation loop."""

    def __init__(self, loader: Any, *, batches_max: int | None) -> None:
        self._loader = loader
        self._batches_max = batches_max

    def batches(self, trainer: Trainer) -> Batches:
        at_most = self._batches_max
        if trainer.sanity_checking:
            few = int(trainer.num_sanity_val_steps)
            at_most = few if at_most is None else min(at_most, few)
        return Batches(self._loader, batches_max=at_most)


def evaluate(
    driver: Driver, trainer: Trainer, whole: WholeEvaluation, validation_step: Callable[[Any, int], Any]
) -> None:
    """Log the means over all batches, as validation_step would have done batch by batch."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    told: dict[str, Any] = {}

    def measure(numbered: tuple[int, Any]) -> dict[str, tuple[float, float]]:
        number, batch = numbered
        results, loop._results = loop._results, _ResultCollection(training=False)
        own = loop._results
        own.batch = batch
        try:
            validation_step(batch, number)
        finally:
            loop._results = results
        told.update({key: words_of(metric.meta) for key, metric in own.items()})
        return {COUNT: (1.0, 1.0), **{key: _weighed(metric) for key, metric in own.items()}}

    found = driver.run.evaluate(whole.batches(trainer), measure, batch_size=1, collate_fn=only)
    collectives = driver.run.engine.collectives
    assert collectives is not None
    for one in collectives.gather(told):
        told |= one
    for key in sorted(told):
        loop._results.log(
            told[key]["fx"],
            value=torch.tensor(found[key], dtype=torch.get_default_dtype()),
            batch_size=1,
            **{name: told[key][name] for name in MEANT},
        )


def _weighed(metric: _ResultMetric) -> tuple[float, float]:
    name = metric.meta.name
    if not metric.is_tensor or not metric.meta.is_mean_reduction or metric.meta.on_step or not metric.meta.on_epoch:
        raise ConfigError(
            f"validation_step logs {name!r} otherwise than as a mean over the epoch, which cannot be shared out",
            hint=_BY_ITSELF,
        )
    return float(metric.value), float(metric.cumulated_batch_size)
