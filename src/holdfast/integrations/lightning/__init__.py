"""Lightning on Holdfast: Trainer(strategy=HoldfastStrategy()) trains with all workers of a run.

docs/how-to/lightning.md. Lightning is imported when a name of this is first used; where it is not installed, one
sentence says what to do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.integrations.lightning.strategy import HoldfastStrategy, run_of

__all__ = ["HoldfastStrategy", "run_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.integrations.lightning' has no attribute {name!r}")
    try:
        home = import_module("holdfast.integrations.lightning.strategy")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "lightning":
            raise
        raise ConfigError(
            f"holdfast.integrations.lightning.{name} needs Lightning, and there is no lightning here",
            hint="pip install 'holdfast[lightning]'",
        ) from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
