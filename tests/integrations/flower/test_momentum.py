"""The momentum of clients: what WorkerMomentum computes, kept where Flower keeps a client's state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict

from holdfast.byzantine import WorkerMomentum
from holdfast.core.errors import ConfigError
from holdfast.integrations.flower import ClientMomentum
from holdfast.integrations.flower.momentum import KEPT
from tests.harness.flower_grid import ScriptedGrid


@pytest.fixture(autouse=True)
def identity() -> None:
    ScriptedGrid({})


def context() -> Context:
    return Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={}, series_id=1)


def asked(arrays: dict[str, Any], kind: str = "train") -> Message:
    record = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    return Message(RecordDict({"arrays": record}), 7, kind)


def adding(update: dict[str, Any]) -> Any:
    def app(message: Message, _: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        made = {name: Array(np.asarray(one.numpy() + update[name])) for name, one in arrays.items()}
        content = RecordDict({"arrays": ArrayRecord(made), "metrics": MetricRecord({"num-examples": 3})})
        return Message(content, reply_to=message)

    return app


def test_it_sends_what_worker_momentum_would() -> None:
    mod, theirs, place = ClientMomentum(0.9), WorkerMomentum(0.9), context()
    generator = np.random.default_rng(0)
    model = {"w": generator.normal(size=(3, 2)).astype(np.float32), "n": np.array([4, 5])}
    for _ in range(4):
        update = {"w": generator.normal(size=(3, 2)).astype(np.float32), "n": np.array([1, 2])}
        reply = mod(asked(model), place, adding(update))
        sent = {name: one.numpy() for name, one in reply.content.array_records["arrays"].items()}
        expected = theirs.apply({"w": torch.from_numpy(update["w"])})
        assert isinstance(expected, dict)
        np.testing.assert_allclose(sent["w"] - model["w"], expected["w"].numpy(), atol=1e-6)
        assert sent["n"].tolist() == (model["n"] + update["n"]).tolist(), "whole numbers are sent as they are"
        assert sent["w"].dtype == np.float32 and reply.content.metric_records["metrics"]["num-examples"] == 3
        model = sent
    assert set(place.state.array_records[KEPT]) == {"w"}


def test_another_model_begins_anew_and_zero_is_no_momentum() -> None:
    place = context()
    ClientMomentum(0.9)(asked({"w": np.zeros(3)}), place, adding({"w": np.ones(3)}))
    reply = ClientMomentum(0.9)(asked({"w": np.zeros(2)}), place, adding({"w": np.ones(2)}))
    assert reply.content.array_records["arrays"]["w"].numpy().tolist() == [1.0, 1.0]
    for value in (2.0, 5.0):
        reply = ClientMomentum(0.0)(asked({"w": np.zeros(2)}), place, adding({"w": np.full(2, value)}))
        assert reply.content.array_records["arrays"]["w"].numpy().tolist() == [value, value]


def test_what_is_not_a_trained_model_goes_through_as_it_is() -> None:
    place, mod = context(), ClientMomentum()

    def fails(message: Message, _: Context) -> Message:
        return Message(Error(1, "no"), reply_to=message)

    def odd(message: Message, _: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord({"other": Array(np.ones(2))})}), reply_to=message)

    def other_shape(message: Message, _: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(3))})}), reply_to=message)

    model = {"w": np.zeros(2)}
    assert mod(asked(model), place, fails).has_error()
    assert "other" in mod(asked(model), place, odd).content.array_records["arrays"]
    assert mod(asked(model), place, other_shape).content.array_records["arrays"]["w"].shape == (3,)
    assert mod(asked(model, "evaluate"), place, adding({"w": np.ones(2)})).has_content()
    assert KEPT not in place.state


def test_a_beta_without_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="beta"):
        ClientMomentum(1.0)
