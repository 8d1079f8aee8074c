"""Hardware that lies, for drills and tests: flips one bit of one number in tensors that somebody else owns."""

from __future__ import annotations

import random

import torch

# What is rounded away heals: an optimizer's averages forget, and a small parameter is soon another. Of a low bit
# nothing may be left a few steps later, and no harm done. So the bit that is flipped lasts until it is compared.
LOWEST_BIT = {"gradient": 0, "parameter": 4, "optimizer": 16}
SMALLEST = {"gradient": 0.0, "parameter": 0.01, "optimizer": 0.0}


def flip(tensors: list[torch.Tensor], kind: str, rng: random.Random, bit: int = -1) -> str:
    """Flip one bit of one number that is not zero, and say which. `kind` is a gradient, a parameter or the optimizer's
    state; `bit` -1: any that lasts. IndexError: there is no such number of 32 bits."""
    floats = [tensor for tensor in tensors if tensor.dtype == torch.float32]
    candidates = [tensor for tensor in floats if bool((tensor.detach().abs() > SMALLEST[kind]).any())]
    tensor = rng.choice(candidates).detach()
    bits = tensor.view(torch.int32)
    places = (tensor.abs() > SMALLEST[kind]).nonzero().tolist()
    place = tuple(rng.choice(places))
    bit = bit if bit >= 0 else rng.randrange(LOWEST_BIT[kind], 32)
    before = float(tensor[place])
    bits[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    return f"bit {bit} of {tuple(tensor.shape)}{list(place)}: {before!r} -> {float(tensor[place])!r}"
