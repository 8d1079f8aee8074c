"""What hostile participants send, for drills and for papers: each attack says what it knows and what it does.

`attack(honest, f, seed)` takes the honest updates of a round, stacked (h, d), and gives the f hostile ones, (f, d).
Attacks on data take the place of a participant's own data. Loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.byzantine.attacks.blind import Doubled, Dropped, Gaussian, NaNBomb, SignFlip
    from holdfast.byzantine.attacks.colluding import (
        Apart,
        InnerProduct,
        LittleIsEnough,
        Mimic,
        MinMax,
        MinSum,
        ModelReplacement,
    )
    from holdfast.byzantine.attacks.data import BackdoorTrigger, LabelFlip
    from holdfast.byzantine.attacks.optimising import Optimised, Split
    from holdfast.byzantine.attacks.port import Attack, Knowledge
    from holdfast.byzantine.attacks.words import ATTACKS, attack_named

_ROOMS = {
    "blind": ("Doubled", "Dropped", "Gaussian", "NaNBomb", "SignFlip"),
    "colluding": ("Apart", "InnerProduct", "LittleIsEnough", "Mimic", "MinMax", "MinSum", "ModelReplacement"),
    "data": ("BackdoorTrigger", "LabelFlip"),
    "optimising": ("Optimised", "Split"),
    "port": ("Attack", "Knowledge"),
    "words": ("ATTACKS", "attack_named"),
}
_HOMES = {name: f"holdfast.byzantine.attacks.{room}" for room, names in _ROOMS.items() for name in names}

__all__ = [
    "ATTACKS",
    "Apart",
    "Attack",
    "BackdoorTrigger",
    "Doubled",
    "Dropped",
    "Gaussian",
    "InnerProduct",
    "Knowledge",
    "LabelFlip",
    "LittleIsEnough",
    "Mimic",
    "MinMax",
    "MinSum",
    "ModelReplacement",
    "NaNBomb",
    "Optimised",
    "SignFlip",
    "Split",
    "attack_named",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.byzantine.attacks' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
