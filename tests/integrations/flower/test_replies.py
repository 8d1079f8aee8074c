"""A reply of every malformed kind, as Flower delivers it: it costs that client its place in the round, no more."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from holdfast.byzantine import Mean, TrimmedMean
from holdfast.core.errors import ConfigError
from holdfast.integrations.flower import Rounds
from holdfast.integrations.flower.model_record import Model, Spec, Unfit, read_array
from holdfast.integrations.flower.reputation import Conduct
from tests.harness.flower_grid import Client, ScriptedGrid
from tests.integrations.flower.training import InVirtualTime, honest, hostile, model, tensors, trained

BAD = 9


def arrays_with(**changed: Array | None) -> Callable[[RecordDict], Any]:
    def change(content: RecordDict) -> None:
        kept = dict(content.array_records["arrays"].items())
        for name, array in changed.items():
            kept.pop(name, None)
            if array is not None:
                kept[name] = array
        content["arrays"] = ArrayRecord(kept)

    return change


def metrics_with(**metrics: Any) -> Callable[[RecordDict], Any]:
    return lambda content: content.__setitem__(
        "metrics", MetricRecord({k.replace("_", "-"): v for k, v in metrics.items()})
    )


def npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def npy_header(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode() + body


def raw(data: bytes, dtype: str = "float32", shape: tuple[int, ...] = (2, 3), stype: str = "numpy.ndarray") -> Array:
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


GOOD = np.ones((2, 3), dtype=np.float32)
HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
KINDS: dict[str, tuple[Callable[[RecordDict], Any], str]] = {
    "an extra array": (arrays_with(more=Array(GOOD)), "has an array 'more' that the model does not have"),
    "a missing array": (arrays_with(bias=None), "has no array 'bias'"),
    "no arrays at all": (lambda content: content.__setitem__("arrays", ArrayRecord()), "has no array 'weight'"),
    "another shape": (
        arrays_with(weight=Array(GOOD.T.copy())),
        r"'weight' is float32 \[3, 2\] instead of float32 \[2, 3\]",
    ),
    "fewer dimensions": (arrays_with(weight=Array(GOOD.ravel())), r"'weight' is float32 \[6\] instead"),
    "another dtype": (arrays_with(weight=Array(GOOD.astype(np.float64))), r"float64 \[2, 3\] instead of float32"),
    "whole numbers": (arrays_with(weight=Array(GOOD.astype(np.int32))), "int32"),
    "complex numbers": (arrays_with(weight=Array(GOOD.astype(np.complex64))), "complex64"),
    "text": (arrays_with(weight=Array(np.full((2, 3), "x"))), "<U1"),
    "the other byte order": (arrays_with(weight=raw(npy(GOOD.astype(">f4")))), "are >f4"),
    "a NaN": (arrays_with(weight=Array(np.full((2, 3), np.nan, np.float32))), "'weight' is not finite"),
    "an infinity": (arrays_with(bias=Array(np.array(np.inf))), "'bias' is not finite"),
    "a NaN in half precision": (arrays_with(half=Array(np.array([np.nan, 1], np.float16))), "'half' is not finite"),
    "bytes of another shape": (arrays_with(weight=raw(npy(np.ones((3, 2), np.float32)))), r"are float32 \[3, 2\]"),
    "a header that promises a terabyte": (arrays_with(weight=raw(npy_header(HUGE, b"\0" * 24))), "are float32"),
    "a header that is code": (
        arrays_with(weight=raw(npy_header("__import__('os').abort()", b"\0" * 24))),
        "are no array",
    ),
    "a header cut short": (arrays_with(weight=raw(npy(GOOD)[:9] + b"\0" * 40)), "are no array"),
    "a header of Python 2": (
        arrays_with(
            weight=raw(npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }", b"\0" * 24))
        ),
        "are no array|are float32",
    ),
    "an unknown version": (arrays_with(weight=raw(npy_header("{}", b"\0" * 40, b"\x09\x00"))), "are no array"),
    "a zip archive": (arrays_with(weight=raw(b"PK\x03\x04" + b"\0" * 60)), "are no array"),
    "a pickle": (arrays_with(weight=raw(b"\x80\x04" + b"." * 60)), "are no array"),
    "too few bytes": (arrays_with(weight=raw(npy(GOOD)[:-4])), "instead of"),
    "no bytes": (arrays_with(weight=raw(b"")), "has 0 bytes"),
    "a megabyte too many": (arrays_with(weight=raw(npy(GOOD) + b"\0" * (1 << 20))), "bytes, and float32"),
    "another serialization": (arrays_with(weight=raw(npy(GOOD), stype="torch.save")), "serialized as 'torch.save'"),
    "two records of arrays": (lambda content: content.__setitem__("also", ArrayRecord()), "2 records of arrays"),
    "no record of arrays": (lambda content: content.__delitem__("arrays"), "0 records of arrays"),
    "arrays that are a config": (lambda content: content.__setitem__("arrays", ConfigRecord()), "0 records of arrays"),
    "no record of metrics": (lambda content: content.__delitem__("metrics"), "0 records of metrics"),
    "two records of metrics": (lambda content: content.__setitem__("also", MetricRecord()), "2 records of metrics"),
    "no number of examples": (metrics_with(loss=1.0), "does not say 'num-examples'"),
    "a list of examples": (metrics_with(num_examples=[1, 2]), r"is \[1, 2\], not a number"),
    "negative examples": (metrics_with(num_examples=-5), "is -5, which nobody can have trained on"),
    "examples that are not a number": (metrics_with(num_examples=float("nan")), "nan, not a number|nan, which nobody"),
    "infinitely many examples": (metrics_with(num_examples=float("inf")), "inf, not a number"),
    "absurdly many examples": (metrics_with(num_examples=10**13), "which nobody can have trained on"),
    "thousands of metrics": (metrics_with(**{f"m{i}": 1.0 for i in range(2000)}), "2000 metrics"),
    "nothing": (lambda content: [content.__delitem__(name) for name in list(content)], "0 records of arrays"),
}


def crashes(message: Message) -> Message:
    raise ValueError("out of memory")


def says_no(message: Message) -> Message:
    return Message(Error(17, "no\nwish   to"), reply_to=message)


def undecodable(message: Message) -> Message:
    """Flower's own inflation stumbles over it: a child object that the head does not name."""
    content = trained(message, BAD)

    class Broken(RecordDict):
        def deflate(self) -> bytes:
            return super().deflate().replace(b"RecordDict", b"RecordDicu", 1)

    broken = Broken(dict(content.items()))
    broken.__class__.__qualname__ = "RecordDict"
    return Message(broken, reply_to=message)


OTHERS: dict[str, tuple[Client, str, Conduct]] = {
    "it raises": (crashes, "error 2: .*out of memory", Conduct.FAILED),
    "it reports an error": (says_no, "error 17: no wish to", Conduct.FAILED),
    "Flower cannot decode it": (undecodable, "cannot be decoded", Conduct.MALFORMED),
    "it does not answer": (lambda message: None, "no answer within", Conduct.SILENT),
}


def run_with(
    bad: Client | None, caplog: pytest.LogCaptureFixture, rounds: int = 2
) -> tuple[dict[str, torch.Tensor], Any]:
    clients = {number: honest(number) for number in (1, 2, 3, 4)}
    if bad is not None:
        clients[BAD] = bad
    grid = ScriptedGrid(clients)
    strategy = InVirtualTime(TrimmedMean(f=1), rounds=Rounds(deadline_s=30.0, late_s=5.0))
    with caplog.at_level("INFO", logger="flwr"):
        result = strategy.start(grid, model(), num_rounds=rounds)
    return tensors(result.arrays), strategy


ALL: dict[str, tuple[Client, str, Conduct]] = {
    **{kind: (hostile(BAD, change), reason, Conduct.MALFORMED) for kind, (change, reason) in KINDS.items()},
    **OTHERS,
}


@pytest.mark.parametrize("kind", ALL)
def test_it_costs_that_client_its_place_and_nothing_else(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, reason, conduct = ALL[kind]
    without, _ = run_with(None, caplog)
    caplog.clear()
    found, strategy = run_with(bad, caplog)
    assert {name: one.tolist() for name, one in found.items()} == {name: one.tolist() for name, one in without.items()}
    told = [record.getMessage() for record in caplog.records if f"without client {BAD}" in record.getMessage()]
    assert len(told) == 2 and conduct.value in told[0]
    assert re.search(reason, told[0]), told[0]
    assert strategy.book.standings[BAD].strikes == 2


def test_numbers_that_are_not_the_weights_are_left_away_but_cost_nobody_a_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = metrics_with(num_examples=10, loss=float("nan"), other=float("inf"), many=[1.0, 2.0])
    _, strategy = run_with(hostile(BAD, odd), caplog)
    assert strategy.book.standings[BAD].strikes == 0


def test_a_config_record_beside_is_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    _, strategy = run_with(hostile(BAD, lambda content: content.__setitem__("notes", ConfigRecord({"a": 1}))), caplog)
    assert strategy.book.standings[BAD].strikes == 0


def test_a_weight_counts_four_times_the_median_at_most(caplog: pytest.LogCaptureFixture) -> None:
    """What somebody claims moves the mean no further than that."""

    def moved(examples: float) -> float:
        def change(content: RecordDict) -> None:
            arrays_with(bias=Array(np.array(100.5)))(content)
            content["metrics"] = MetricRecord({"num-examples": examples})

        clients = {number: honest(number) for number in (1, 2, 3, 4)} | {BAD: hostile(BAD, change)}
        strategy = InVirtualTime(Mean(f=0), rounds=Rounds(deadline_s=30.0))
        result = strategy.start(ScriptedGrid(clients), model(), num_rounds=1)
        return float(result.arrays["bias"].numpy())

    assert moved(10.0) < moved(13 * 4) and moved(13 * 4) == moved(1e6) == moved(1e12) < 100.5


def test_whole_numbers_do_not_wrap_around() -> None:
    record = ArrayRecord({"small": Array(np.array([250, 5], dtype=np.uint8))})
    whole = Model.of(record)
    update = whole.difference(ArrayRecord({"small": Array(np.array([5, 250], dtype=np.uint8))}))
    assert update["small"].tolist() == [-245, 245]
    assert whole.moved(update).state["small"].tolist() == [5, 250]
    assert whole.moved({"small": update["small"] * 2}).state["small"].tolist() == [0, 255]


def test_arrays_stored_by_columns_are_read_as_they_are() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    found = read_array(Array(array), Spec((2, 3), np.dtype("<f4")), "weight")
    assert found.tolist() == array.tolist() and found.flags.c_contiguous


@pytest.mark.parametrize(
    "array", [np.ones(2, bool), np.ones(2, np.complex64), np.ones(2, np.uint64), np.array([np.inf])]
)
def test_a_model_that_no_rule_can_combine_is_refused_at_the_start(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="of the model"):
        Model.of(ArrayRecord({"it": Array(array)}))
    with pytest.raises(ConfigError, match="0 arrays"):
        Model.of(ArrayRecord())


def test_the_model_travels_both_ways_with_the_same_bits() -> None:
    there = Model.of(model())
    assert Model.of(there.record()).digest() == there.digest()
    assert not there.difference(there.record())["weight"].any()
    with pytest.raises(Unfit):
        there.difference(ArrayRecord({"weight": Array(GOOD)}))
