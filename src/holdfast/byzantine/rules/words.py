"""Rules by their words, for command lines: `median`, `nnm+trimmed-mean`, `bucketing:2+geometric-median`,
`clip:10+arc+mda`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from holdfast.byzantine.rules.before import (
    AdaptiveClipping,
    Bucketing,
    Clipping,
    DistinctUpdates,
    NearestNeighbourMixing,
)
from holdfast.byzantine.rules.centres import CenteredClipping, CovarianceFilter, GeometricMedian, Mean
from holdfast.byzantine.rules.columns import MeaMed, Median, TrimmedMean
from holdfast.byzantine.rules.port import Rule
from holdfast.byzantine.rules.selecting import Bulyan, Krum, MinimumDiameter, MultiKrum
from holdfast.core.errors import ConfigError

LAST: Mapping[str, Callable[[], Rule]] = {
    kind.word: kind
    for kind in (
        Mean,
        Median,
        TrimmedMean,
        MeaMed,
        GeometricMedian,
        Krum,
        MultiKrum,
        Bulyan,
        CenteredClipping,
        MinimumDiameter,
        CovarianceFilter,
    )
}
BEFORE: Mapping[str, Callable[[str, Rule], Rule]] = {
    "nnm": lambda number, then: NearestNeighbourMixing(then=then),
    "bucketing": lambda number, then: Bucketing(size=int(number or 2), then=then),
    "clip": lambda number, then: Clipping(norm=float(number or 1.0), then=then),
    "arc": lambda number, then: AdaptiveClipping(then=then),
    "distinct": lambda number, then: DistinctUpdates(then=then),
}
NUMBERED = {"bucketing", "clip", "centered-clipping"}


def parse(text: str) -> Rule:
    """The rule that these words say, from what comes first to the rule at the end."""
    *before, last = text.split("+")
    rule = _last(last)
    for word in reversed(before):
        name, number = _split(word)
        if name not in BEFORE:
            where = "only be the last" if name in LAST else "not be"
            raise ConfigError(f"{name!r} can {where} in {text!r}", hint=_hint(name, list(BEFORE)))
        rule = _made(word, lambda made=BEFORE[name], number=number, then=rule: made(number, then))  # type: ignore[misc]
    return rule


def _last(word: str) -> Rule:
    name, number = _split(word)
    if name in BEFORE:
        raise ConfigError(f"{word!r} needs a rule after it", hint=f"for example {word}+trimmed-mean")
    if name not in LAST:
        raise ConfigError(f"there is no rule {name!r}", hint=_hint(name, list(LAST)))
    if name == CenteredClipping.word and number:
        return _made(word, lambda: CenteredClipping(radius=float(number)))
    return LAST[name]()


def _split(word: str) -> tuple[str, str]:
    name, colon, number = word.strip().partition(":")
    if colon and (name not in NUMBERED or not number):
        raise ConfigError(f"{word!r} does not take a number", hint=f"with a number: {', '.join(sorted(NUMBERED))}")
    return name, number


def _made(word: str, make: Callable[[], Rule]) -> Rule:
    try:
        return make()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{word!r} does not end with a number that fits", hint="for example bucketing:2") from error


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
