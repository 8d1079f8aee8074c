"""How much memory a slice of parameters takes, once its optimizers have made their state with the first step."""

from __future__ import annotations

from functools import lru_cache

import torch

from holdfast.core.errors import ProtocolError
from holdfast.core.words import decode_json, encode_json
from holdfast.servers.recipe import GroupRecipe, Settings
from holdfast.servers.replicated import Head
from holdfast.state.layout import DTYPES

TRIED_ELEMENTS = 64


def state_bytes(head: Head) -> int:
    """Of a slice that begins with what this head tells of. ProtocolError for what no worker would send."""
    try:
        groups = [(str(one["kind"]), encode_json(one["settings"])) for one in head["recipes"]]
        return sum(
            (stop - start) * (DTYPES[dtype].itemsize + _optimizer_bytes(*groups[group], dtype))
            for _, start, stop, dtype, group in head["segments"]
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProtocolError("an initial state that does not say what it is of") from error


@lru_cache(maxsize=256)
def _optimizer_bytes(kind: str, settings: bytes, dtype: str) -> int:
    """What such an optimizer keeps for one element: found out by a step of it."""
    told: Settings = decode_json(settings)
    value = torch.nn.Parameter(torch.zeros(TRIED_ELEMENTS, dtype=DTYPES[dtype]), requires_grad=False)
    optimizer = GroupRecipe(kind, told).build([value])
    value.grad = torch.zeros_like(value)
    try:
        optimizer.step()
    except Exception as error:  # whatever torch says to it
        raise ProtocolError(f"torch.optim.{kind} cannot be stepped: {str(error).splitlines()[0][:200]}") from error
    kept = [one for one in optimizer.state[value].values() if isinstance(one, torch.Tensor)]
    return sum(one.nbytes for one in kept if one.numel() == TRIED_ELEMENTS) // TRIED_ELEMENTS
