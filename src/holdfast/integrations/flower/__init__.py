"""Federated learning on Flower with clients that nobody vouches for: `RobustStrategy(parse("nnm+trimmed-mean"), f=2)`.

Names are loaded when they are first used, and Flower with them; where it is not installed, one sentence says what to
do. What clients need (`ClientMomentum`, `MaskedUpdates`) does not import torch, so that they may be without.
docs/how-to/flower.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.integrations.flower.combining import ByRule, Combiner, RoundDesk, RoundOutcome
    from holdfast.integrations.flower.masked_buckets import MaskedBuckets
    from holdfast.integrations.flower.masked_updates import MaskedUpdates
    from holdfast.integrations.flower.momentum import ClientMomentum
    from holdfast.integrations.flower.reputation import Quarantine
    from holdfast.integrations.flower.rounds import Rounds
    from holdfast.integrations.flower.strategy import RobustStrategy

_HOMES = {
    "ByRule": "combining",
    "ClientMomentum": "momentum",
    "Combiner": "combining",
    "MaskedBuckets": "masked_buckets",
    "MaskedUpdates": "masked_updates",
    "Quarantine": "reputation",
    "RobustStrategy": "strategy",
    "RoundDesk": "combining",
    "RoundOutcome": "combining",
    "Rounds": "rounds",
}

__all__ = [
    "ByRule",
    "ClientMomentum",
    "Combiner",
    "MaskedBuckets",
    "MaskedUpdates",
    "Quarantine",
    "RobustStrategy",
    "RoundDesk",
    "RoundOutcome",
    "Rounds",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.integrations.flower' has no attribute {name!r}")
    try:
        home = import_module(f"holdfast.integrations.flower.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flwr":
            raise
        raise ConfigError(
            f"holdfast.integrations.flower.{name} needs Flower 1.41, and there is no {error.name} here",
            hint="pip install 'holdfast[flower]'",
        ) from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
