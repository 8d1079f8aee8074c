"""A training that tests can count on: clients pull a model of a few numbers towards targets of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict

from holdfast.integrations.flower import RobustStrategy
from holdfast.integrations.flower.desk import GridDesk
from tests.harness.flower_grid import Client, ScriptedGrid


def model() -> ArrayRecord:
    return ArrayRecord(
        {
            "weight": Array(np.arange(6, dtype=np.float32).reshape(2, 3)),
            "bias": Array(np.array(0.5, dtype=np.float64)),
            "half": Array(np.array([1.0, 2.0], dtype=np.float16)),
            "seen": Array(np.array([0, 7], dtype=np.int64)),
            "none": Array(np.zeros((0, 4), dtype=np.float32)),
        }
    )


def trained(message: Message, client: int) -> RecordDict:
    """A step towards what this client wants, which depends on its number and the round."""
    number = int(message.content["config"]["server-round"])  # type: ignore[arg-type, call-overload]
    generator = np.random.default_rng([client, number])
    arrays = message.content["arrays"]
    assert isinstance(arrays, ArrayRecord)
    made = {}
    for name, array in arrays.items():
        was = array.numpy()
        step = generator.normal(1.0, 0.1, was.shape)
        made[name] = Array(np.asarray(was + (step if was.dtype.kind == "f" else 3), dtype=was.dtype))
    metrics = MetricRecord({"num-examples": 10 + client, "loss": 1.0 / number})
    return RecordDict({"arrays": ArrayRecord(made), "metrics": metrics})


def honest(client: int) -> Client:
    return lambda message: Message(trained(message, client), reply_to=message)


def hostile(client: int, change: Callable[[RecordDict], Any]) -> Client:
    """`change` is done to what an honest client would send."""

    def reply(message: Message) -> Message:
        content = trained(message, client)
        change(content)
        return Message(content, reply_to=message)

    return reply


def context(node: int, run: int = 1) -> Context:
    return Context(run_id=run, node_id=node, node_config={}, state=RecordDict(), run_config={}, series_id=run)


class InVirtualTime(RobustStrategy):
    """With the grid's own time."""

    def open_desk(self, grid: Any, number: int, within_s: float) -> GridDesk:
        assert isinstance(grid, ScriptedGrid)
        return GridDesk(grid, number, self._rounds, within_s=within_s, clock=grid.clock, sleep=grid.sleep)


def tensors(record: ArrayRecord) -> dict[str, torch.Tensor]:
    return dict(record.to_torch_state_dict())
