"""Lightning on Holdfast: Trainer(strategy=HoldfastStrategy()) trains with all workers of a run.

docs/how-to/lightning.md. Lightning is imported when a name of this is first used; where it is not installed, one
sentence says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.integrations.names import load

if TYPE_CHECKING:
    from holdfast.integrations.lightning.strategy import HoldfastStrategy, run_of

_HINT = "pip install 'holdfast[lightning]'"
_HOMES = {"HoldfastStrategy": "strategy", "run_of": "strategy"}
__all__ = ["HoldfastStrategy", "run_of"]


def __getattr__(name: str) -> Any:
    return load(__name__, _HOMES, name, of=("lightning",), needs="Lightning", hint=_HINT)


def __dir__() -> list[str]:
    return sorted(__all__)
