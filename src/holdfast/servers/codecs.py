"""How gradients travel over slow links: as narrow numbers, or only the largest of them. Pure.

    fp16       16 bits; what is larger than they can say is cut to the largest
    bf16       16 bits with the range of 32
    int8       8 bits, and a scale for each block of elements
    top-k:F    the part F of the elements that is largest, with their places; the others are 0

Updates are in the log as they came, and every replica decodes them. Decoding is a function of the bytes alone, element
by element, and so gives the same bits everywhere. What a codec cannot say of a gradient its worker keeps
(compressing.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from holdfast.core.errors import ConfigError, ProtocolError

Kinds = list[tuple[torch.dtype, int]]  # the pieces of a message: what they are of, and how many
BLOCK = 256  # elements that share a scale
NAME_MAX = 40
_HINT = 'compress is "fp16", "bf16", "int8", or "top-k:0.01" for the largest hundredth of the elements'


class Codec(ABC):
    """Of flat tensors of float32 or float64, which are finite."""

    name: str

    @abstractmethod
    def kinds(self, elements: int) -> Kinds: ...

    @abstractmethod
    def encode(self, values: torch.Tensor) -> list[torch.Tensor]: ...

    @abstractmethod
    def decode(self, pieces: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
        """In float32. ProtocolError for pieces that `encode` never gives; numbers may be such that are not finite."""


class Narrow(Codec):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._most = torch.finfo(dtype).max

    def kinds(self, elements: int) -> Kinds:
        return [(self._dtype, elements)]

    def encode(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [values.clamp(-self._most, self._most).to(self._dtype)]

    def decode(self, pieces: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
        return pieces[0].to(torch.float32)


class Scaled(Codec):
    """Whole numbers from -127 to 127, times what is the largest of the block by 127."""

    name = "int8"
    _MOST = 127

    def kinds(self, elements: int) -> Kinds:
        return [(torch.float32, -(-elements // BLOCK)), (torch.int8, elements)]

    def encode(self, values: torch.Tensor) -> list[torch.Tensor]:
        blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scales = (blocks.abs().amax(1) / self._MOST).to(torch.float32)
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
        levels = (blocks / divisors.unsqueeze(1)).round().clamp(-self._MOST, self._MOST)
        return [scales, levels.to(torch.int8).view(-1)[: values.numel()].contiguous()]

    def decode(self, pieces: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
        scales, levels = pieces
        return levels.to(torch.float32) * scales.repeat_interleave(BLOCK)[:elements]


class Largest(Codec):
    """The largest elements and their places, which rise."""

    def __init__(self, part: float) -> None:
        self.name = f"top-k:{part:g}"
        self._part = part

    def _count(self, elements: int) -> int:
        return min(elements, max(1, math.ceil(self._part * elements)))

    def kinds(self, elements: int) -> Kinds:
        count = self._count(elements)
        return [(torch.int32, count), (torch.float32, count)]

    def encode(self, values: torch.Tensor) -> list[torch.Tensor]:
        places = values.abs().topk(self._count(values.numel()), sorted=False).indices.sort().values
        return [places.to(torch.int32), values[places].to(torch.float32)]

    def decode(self, pieces: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
        places, values = pieces[0].to(torch.int64), pieces[1]
        if places.numel() and (places[0] < 0 or places[-1] >= elements or bool((places.diff() <= 0).any())):
            raise ProtocolError("an update whose elements have places that it cannot have")
        return torch.zeros(elements, dtype=torch.float32).index_copy_(0, places, values)


def codec_of(name: object) -> Codec:
    """ConfigError for what is none."""
    if isinstance(name, str) and len(name) <= NAME_MAX:
        if name in ("fp16", "bf16"):
            return Narrow(name, torch.float16 if name == "fp16" else torch.bfloat16)
        if name == "int8":
            return Scaled()
        kind, colon, part = name.partition(":")
        if kind == "top-k" and colon:
            return Largest(_part(name, part))
    raise ConfigError(f"compress is {name!r:.60}", hint=_HINT)


def _part(name: str, words: str) -> float:
    try:
        part = float(words)
    except ValueError:
        part = math.nan
    if not 0.0 < part <= 1.0:
        raise ConfigError(
            f"compress is {name!r}, and {words or 'nothing'} is no part of the elements",
            hint='"top-k:0.01" sends the largest hundredth of them: a number above 0, and 1 at most',
        )
    return part
