"""One client's reply, checked: what of it can be used, or a named reason why nothing can. Owns nothing.

A reply is a stranger's. Whatever is wrong with it costs that client its place in the round, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from flwr.app import Message, MetricRecord, RecordDict

from holdfast.integrations.flower.model_record import Model, State, Unfit
from holdfast.integrations.flower.reputation import Conduct

EXAMPLES_MAX = 1e12  # nobody has trained on more
METRICS_MAX = 64
REASON_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class Refusal:
    """Why a client has no part in this round."""

    conduct: Conduct
    reason: str


@dataclass(frozen=True)
class Update:
    """What a client brought: how far its model is from the round's, from how many examples, and what it measured."""

    numbers: State
    examples: float
    metrics: Mapping[str, float]


def content_of(reply: Message) -> RecordDict:
    """The records of a reply; Unfit if it has none. An error that a client reports is `failed_words`' business."""
    if not reply.has_content():
        raise Unfit("it has neither content nor an error")
    return reply.content


def failed_words(reply: Message) -> str:
    reason = " ".join((reply.error.reason or "no reason given").split())
    return f"error {reply.error.code}: {reason}"[:REASON_CHARACTERS_MAX]


def read_update(content: RecordDict, model: Model, weighted_by: str) -> Update:
    """A model like the round's, and metrics; Unfit with the reason otherwise."""
    arrays = list(content.array_records.values())
    if len(arrays) != 1:
        raise Unfit(f"it has {len(arrays)} records of arrays instead of one")
    examples, metrics = read_metrics(content, weighted_by)
    return Update(model.difference(arrays[0]), examples, metrics)


def read_metrics(content: RecordDict, weighted_by: str) -> tuple[float, dict[str, float]]:
    """How many examples, and what else was measured; numbers that are not finite are left away, lists too."""
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise Unfit(f"it has {len(records)} records of metrics instead of one")
    record = records[0]
    if len(record) > METRICS_MAX:
        raise Unfit(f"it has {len(record)} metrics, more than {METRICS_MAX}")
    examples = _examples(record, weighted_by)
    numbers = {name[:100]: value for name, value in record.items() if _is_number(value) and name != weighted_by}
    return examples, {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _examples(record: MetricRecord, weighted_by: str) -> float:
    if weighted_by not in record:
        raise Unfit(f"it does not say {weighted_by!r}")
    value = record[weighted_by]
    if not _is_number(value):
        raise Unfit(f"its {weighted_by!r} is {value!r:.40}, not a number")
    if not 0 <= value <= EXAMPLES_MAX:
        raise Unfit(f"its {weighted_by!r} is {value!r:.40}, which nobody can have trained on")
    return float(value)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def medians(reported: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Of every metric that at least half of the clients report, the median, which a minority does not move far."""
    named: dict[str, list[float]] = {}
    for metrics in reported.values():
        for name, value in metrics.items():
            named.setdefault(name, []).append(value)
    found = {}
    for name in sorted(named):
        values = sorted(named[name])
        if 2 * len(values) >= len(reported):
            middle = len(values) // 2
            found[name] = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2.0
    return found
