"""Hugging Face on Holdfast: distribute(trainer) for transformers.Trainer, Accelerator for a loop of one's own.

docs/how-to/hugging-face.md. transformers and accelerate are imported when a name of this is first used; where one is
not installed, one sentence says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.integrations.names import load

if TYPE_CHECKING:
    from holdfast.integrations.huggingface.accelerating import Accelerator
    from holdfast.integrations.huggingface.distributing import distribute, run_of

_HINT = "pip install 'holdfast[huggingface]'"
_HOMES = {"distribute": "distributing", "run_of": "distributing", "Accelerator": "accelerating"}
__all__ = ["Accelerator", "distribute", "run_of"]


def __getattr__(name: str) -> Any:
    return load(__name__, _HOMES, name, of=("transformers", "accelerate"), needs="{}", hint=_HINT)


def __dir__() -> list[str]:
    return sorted(__all__)
