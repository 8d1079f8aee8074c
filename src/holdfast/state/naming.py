"""The names of a model's tensors and modules as the user's code has them, whether or not it is compiled.

`torch.compile(model)` is a module around the model, whose names then begin with `_orig_mod.`; a part of a model may be
compiled, too. Names in snapshots, checkpoints and digests are without it, so that a run resumes with and without.
Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

COMPILED = "_orig_mod"  # where torch.compile keeps the module that it was given


def plain_name(name: str) -> str:
    """The name without what torch.compile puts into it."""
    return name if COMPILED not in name else ".".join(part for part in name.split(".") if part != COMPILED)


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return _plain(model.named_parameters())


def named_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return _plain(model.named_buffers())


def named_state(model: torch.nn.Module) -> dict[str, Any]:
    """Its state_dict, in its order."""
    return _plain(model.state_dict().items())


def with_names_of(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict with plain names, as `module`, which may be compiled, wants it."""
    own = {plain_name(name): name for name in module.state_dict()}
    return {own.get(name, name): value for name, value in state.items()}


def _plain(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in named}
