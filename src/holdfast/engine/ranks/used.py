"""Which parameters a shard's backward has reached on this rank.

FSDP2 gives zeros to a parameter that some ranks' leaves use and others' do not, and so also to one that none uses: then
an optimizer would decay it, as with one rank it does not. So what autograd has accumulated is watched, where FSDP2
keeps it: in the whole parameters, which a module has while it computes. Belongs to the thread of the user's loop, and
to autograd's while that waits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from holdfast.state.local import is_sharded


class UsedParameters:
    """Of one model that is sharded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._reached: set[int] = set()
        self._watched: dict[int, torch.Tensor] = {}  # whole parameters, which live as long as the model does
        for module in model.modules():
            parts = {name: id(one) for name, one in module._parameters.items() if one is not None and is_sharded(one)}
            if parts:
                module.register_forward_pre_hook(partial(self._watch, parts))

    def open(self) -> None:
        """A shard begins."""
        self._reached.clear()

    def has_say(self, parameter: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether the shard has a gradient of it, of which `grad` is this rank's part. One that was not seen to be
        used, perhaps since no module has it while it computes, has none only if that is zero."""
        return id(parameter) in self._reached or bool(grad.any())

    def _watch(self, parts: dict[str, int], module: torch.nn.Module, args: Any) -> None:
        for name, part in parts.items():
            now = module._parameters.get(name)
            if now is not None and now.requires_grad and not is_sharded(now) and id(now) not in self._watched:
                self._watched[id(now)] = now
                now.register_post_accumulate_grad_hook(partial(self._accumulated, part))  # type: ignore[no-untyped-call]

    def _accumulated(self, part: int, whole: torch.Tensor) -> None:
        self._reached.add(part)
