"""Federated learning on Flower with clients that nobody vouches for: `RobustStrategy(parse("nnm+trimmed-mean"), f=2)`.

Names are loaded when they are first used, and Flower with them; where it is not installed, one sentence says what to
do. What clients need (`ClientMomentum`, `MaskedUpdates`) does not import torch, so that they may be without.
docs/how-to/flower.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.integrations.names import load

if TYPE_CHECKING:
    from holdfast.integrations.flower.combining import ByRule, Combiner, RoundDesk, RoundOutcome
    from holdfast.integrations.flower.masked_buckets import MaskedBuckets
    from holdfast.integrations.flower.masked_updates import MaskedUpdates
    from holdfast.integrations.flower.momentum import ClientMomentum
    from holdfast.integrations.flower.reputation import Quarantine
    from holdfast.integrations.flower.rounds import Rounds
    from holdfast.integrations.flower.strategy import RobustStrategy

_HINT = "pip install 'holdfast[flower]'"
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
    return load(__name__, _HOMES, name, of=("flwr",), needs="Flower 1.41", hint=_HINT)


def __dir__() -> list[str]:
    return sorted(__all__)
