"""What does not go with a sharded model yet: said before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError
from holdfast.data.shards import ShardPlan
from holdfast.modes.port import Mode
from holdfast.state.local import is_sharded


def check_sharded(
    sharded: bool, mode: Mode, config: RunConfig, plan: ShardPlan, saving: CheckpointSettings, extras: Mapping[str, Any]
) -> None:
    """ConfigError with the first of them. Whether the group has one rank or more: the script is the same."""
    if not sharded:
        return
    several = config.ranks > 1
    for given, does_not, instead in (
        (not mode.in_groups, f"the mode {type(mode).__name__} does not train", "leave out mode=..."),
        (getattr(mode, "aggregate", None) is not None, "aggregate= does not look at", "leave out aggregate=..."),
        (plan.handed is not None, "an iterable does not feed", "use a dataset with __len__ and __getitem__"),
        (
            several and config.non_finite == "rewind",
            "non_finite='rewind' does not go back with",
            "use 'skip' or 'stop'",
        ),
        (several and bool(saving.memory), "hosts' memory does not keep", "leave out memory=..."),
        (several and bool(saving.keep_best), "the best checkpoint is not known of", "leave out keep_best=..."),
        (several and any(map(_has_sharded, extras.values())), "extras do not have", "leave such extras out"),
    ):
        if given:
            raise ConfigError(f"{does_not} models that are sharded over a group", hint=instead)


def _has_sharded(extra: Any) -> bool:
    found = extra.state_dict()
    return isinstance(found, dict) and any(map(is_sharded, found.values()))
