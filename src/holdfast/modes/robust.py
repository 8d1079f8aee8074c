"""What a mode has to do with a robust rule: `holdfast.join(aggregate=...)`, or the mode's own argument of that name.

Rows are shards, so f counts shards. Shards are spread evenly then: a worker's pace is its own word, and a hostile one
would claim to be fast to be given most of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.byzantine.rules.centres import CenteredClipping
from holdfast.byzantine.rules.port import Rule
from holdfast.byzantine.shard_rows import RobustShards
from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError
from holdfast.modes.port import Mode
from holdfast.reduce.aggregators import Aggregator, Mean


@dataclass(frozen=True)
class WithRule(Mode):
    """A mode whose shards a robust rule may combine. None: their mean."""

    aggregate: Rule | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        rule = self.aggregate
        if rule is None:
            return
        if not isinstance(rule, Rule):
            raise ConfigError(
                f"aggregate is {rule!r:.40}, not a rule", hint="aggregate=holdfast.byzantine.TrimmedMean(f=1), say"
            )
        if rule.f is None:
            raise ConfigError(
                f"{rule} was not told how many shards of a step may be hostile",
                hint=f"{type(rule).__name__}(f=1), for example",
            )
        if isinstance(rule, CenteredClipping) and not isinstance(rule.start, str):
            raise ConfigError("a step has no last round to start from", hint="start='median' or start='zero'")

    def check_rule(self, config: RunConfig) -> None:
        """ConfigError if a whole step has too few shards for the rule."""
        if self.aggregate is not None and config.shards < self.aggregate.least(self.aggregate.f or 0):
            rule, f = self.aggregate, self.aggregate.f or 0
            raise ConfigError(
                f"{rule} with f={f} needs at least {rule.least(f)} shards, and a step has {config.shards}",
                hint=f"join(..., shards={rule.least(f)}), a smaller f, or another rule",
            )

    def check_size(self, workers: int, shards: int) -> None:
        f, share = self.hostile, -(-shards // workers)
        if f is not None and workers > 1 and 0 < f < share:
            raise ConfigError(
                f"with {workers} workers each computes up to {share} of {shards} shards, and f={f} is fewer: "
                "one hostile worker would be too many",
                hint=f"one hostile worker needs f={share} at least; with as many workers as shards, f=1",
            )

    def aggregator(self) -> Aggregator:
        return Mean() if self.aggregate is None else RobustShards(self.aggregate, self.aggregate.f or 0)

    @property
    def hostile(self) -> int | None:
        return None if self.aggregate is None else self.aggregate.f


def with_rule(mode: Mode, aggregate: Any) -> Mode:
    """The mode with this rule; ConfigError if it has another, or takes none."""
    if aggregate is None:
        return mode
    if not isinstance(mode, WithRule) or type(mode).aggregator is not WithRule.aggregator:
        raise ConfigError(
            f"the mode {type(mode).__name__} combines shards in its own way", hint="leave out aggregate, or the mode"
        )
    if mode.aggregate is not None:
        raise ConfigError("join and its mode were each given a rule to aggregate by", hint="give it to one of them")
    return replace(mode, aggregate=aggregate)
