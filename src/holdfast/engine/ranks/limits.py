"""What does not go with a sharded model yet: said before anything is started."""

from __future__ import annotations

from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError
from holdfast.data.shards import ShardPlan
from holdfast.modes.exact import Exact
from holdfast.modes.port import Mode


def check_sharded(sharded: bool, mode: Mode, config: RunConfig, plan: ShardPlan) -> None:
    """ConfigError with the first of them. Whether the group has one rank or more: the script is the same."""
    if not sharded:
        return
    several = config.ranks > 1
    for given, does_not, instead in (
        (type(mode) is not Exact, f"the mode {type(mode).__name__} does not train", "leave out mode=..."),
        (getattr(mode, "aggregate", None) is not None, "aggregate= does not look at", "leave out aggregate=..."),
        (plan.handed is not None, "an iterable does not feed", "use a dataset with __len__ and __getitem__"),
        (several and bool(config.checkpoint), "checkpoints do not hold", "leave out checkpoint=... with --ranks"),
        (
            several and config.non_finite == "rewind",
            "non_finite='rewind' does not go back with",
            "use 'skip' or 'stop'",
        ),
    ):
        if given:
            raise ConfigError(f"{does_not} models that are sharded over a group", hint=instead)
