"""Attacks on updates by their words, for command lines."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

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
from holdfast.byzantine.attacks.optimising import Optimised, Split
from holdfast.byzantine.attacks.port import Attack
from holdfast.byzantine.rules.columns import TrimmedMean
from holdfast.byzantine.rules.port import Rule
from holdfast.core.errors import ConfigError

ATTACKS: Mapping[str, Callable[[], Attack]] = {
    kind.word: kind
    for kind in (
        SignFlip,
        Gaussian,
        LittleIsEnough,
        InnerProduct,
        Mimic,
        MinMax,
        MinSum,
        ModelReplacement,
        Dropped,
        Doubled,
        NaNBomb,
        Split,
        Apart,
    )
}
SEARCHED: Mapping[str, Callable[[Rule], Attack]] = {
    "alie*": lambda rule: Optimised(LittleIsEnough(), rule),
    "ipm*": lambda rule: Optimised(InnerProduct(), rule),
}


def attack_named(word: str, rule: Rule | None = None) -> Attack:
    """The attack of this name; `alie*` and `ipm*` search for the strength that does this rule the most harm."""
    if word in SEARCHED:
        return SEARCHED[word](rule or TrimmedMean())
    if word in ATTACKS:
        return ATTACKS[word]()
    known = [*ATTACKS, *SEARCHED]
    near = difflib.get_close_matches(word, known, n=1)
    raise ConfigError(
        f"there is no attack {word!r}", hint=f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    )
