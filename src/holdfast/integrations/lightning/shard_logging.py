"""What training_step logs: taken from each shard, averaged over all of them as gradients are, and logged once a step.

While a shard is computed, self.log writes into a collection of the shard's own. What it holds goes with the shard's
sums. When the mean is there, every worker logs the same numbers into the trainer's collection, also one that had no
shard. It then needs to know how a metric is to be shown: the first steps' shards tell, and the collection travels with
the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)

from holdfast.core.errors import ConfigError
from holdfast.engine.api.step import Step

LOSS = "loss"
MEANT = ("name", "prog_bar", "logger", "on_step", "on_epoch")
_REDUCED = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}


class ShardLogging:
    """Of one trainer."""

    def __init__(self, trainer: Trainer, shards: int) -> None:
        self._trainer = trainer
        self._shards = shards
        self._own: _ResultCollection | None = None  # of the shard at hand

    def forget(self) -> None:
        """What the shard has logged so far."""
        if self._own is not None:
            self._own.clear()

    @contextmanager
    def shard(self, step: Step, batch: Any, more: Callable[[], dict[str, Any]] = dict[str, Any]) -> Iterator[None]:
        """A shard is computed in here. `more`: what it has to tell besides, with what it logs."""
        loop = self._trainer.fit_loop.epoch_loop
        whole = loop._results
        loop._results = self._own = own = _ResultCollection(training=True)
        own.batch = batch
        try:
            yield
        finally:
            loop._results, self._own = whole, None
        new: dict[str, Any] = more()
        for key, metric in own.items():
            step.record(**{key: _value_of(metric)})
            if key not in whole:
                new[key] = words_of(metric.meta)
        if new:
            step.gather(new)

    def log_means(self, step: Step, *, begins_batch: bool = True) -> None:
        """The step is reduced."""
        trainer = self._trainer
        connector = trainer._logger_connector
        results = trainer.fit_loop.epoch_loop._results
        told: dict[str, dict[str, Any]] = {key: words_of(metric.meta) for key, metric in results.items()}
        for new in step.gathered:
            told |= {key: words for key, words in new.items() if isinstance(words, dict)}
        if begins_batch and connector._first_loop_iter in (None, True):  # as self.log does for an epoch's first batch
            for fx in {words["fx"] for words in told.values()}:
                results.reset(metrics=False, fx=fx)
        for key in step.metrics:
            words = told.get(key)
            if words is None:
                continue
            scale = self._shards if words["reduce_fx"] == "sum" else 1
            results.log(
                words["fx"],
                value=torch.tensor(step.metrics[key] * scale, dtype=torch.get_default_dtype()),
                reduce_fx=_REDUCED[words["reduce_fx"]],
                batch_size=step.samples,
                **{name: words[name] for name in MEANT},
            )
            connector._current_fx = words["fx"]


def collection_state(results: _ResultCollection) -> list[dict[str, Any]]:
    """All that is logged by numbers; torchmetrics keep their own account."""
    found = []
    for key, metric in results.items():
        if metric.is_tensor:
            cache = metric._forward_cache
            sizes = metric.cumulated_batch_size.clone() if metric.meta.is_mean_reduction else None
            found.append(
                {
                    **words_of(metric.meta),
                    "key": key,
                    "value": metric.value.detach().clone(),
                    "sizes": sizes,
                    "cache": cache.detach().clone() if isinstance(cache, torch.Tensor) else None,
                    "updates": metric._update_count,
                    "has_reset": metric.has_reset,
                }
            )
    return found


def load_collection(results: _ResultCollection, state: list[Mapping[str, Any]]) -> None:
    for key in [key for key, metric in results.items() if metric.is_tensor]:
        del results[key]
    for told in state:
        meta = _Metadata(
            fx=told["fx"],
            reduce_fx=_REDUCED[told["reduce_fx"]],
            dataloader_idx=None,
            **{name: told[name] for name in MEANT},
        )
        meta.sync = _Sync(fn=_Sync.no_op)
        metric = _ResultMetric(meta, is_tensor=True)
        metric.value = told["value"].clone()
        if told["sizes"] is not None:
            metric.cumulated_batch_size = told["sizes"].clone()
        metric._forward_cache = None if told["cache"] is None else told["cache"].clone()
        metric._update_count = told["updates"]
        metric.has_reset = told["has_reset"]
        results[told["key"]] = metric


def words_of(meta: _Metadata) -> dict[str, Any]:
    return {"fx": meta.fx, "reduce_fx": meta.reduce_fx.__name__, **{name: getattr(meta, name) for name in MEANT}}


def _value_of(metric: _ResultMetric) -> float:
    name = metric.meta.name
    if not metric.is_tensor:
        raise ConfigError(
            f"training_step logs {name!r} as a torchmetrics object, which would count this worker's shards only",
            hint=f"log a number of the batch, as from torchmetrics.functional: self.log({name!r}, value)",
        )
    if not (metric.meta.is_mean_reduction or metric.meta.is_sum_reduction):
        raise ConfigError(
            f"training_step logs {name!r} with reduce_fx={metric.meta.reduce_fx.__name__}",
            hint="only means and sums are taken over the shards of a step: leave reduce_fx out",
        )
    if metric.meta.is_mean_reduction and metric.meta.on_epoch:
        return float(metric.value / metric.cumulated_batch_size)
    return float(metric.value)
