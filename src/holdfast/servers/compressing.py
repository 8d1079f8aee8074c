"""A worker's gradients on their way into narrow updates, with what each update leaves out added to the next.

For each parameter the worker keeps what the servers have not been told of it yet (error feedback: Seide et al. 2014,
Karimireddy et al. 2019). So the sum of the updates that servers decode is the sum of the gradients but for that rest. A
worker that starts, or starts again, begins with nothing left: a lost worker's rest is lost, as is its push under way.

Belongs to the thread that pushes. Needs as much memory as the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.servers.codecs import Codec
from holdfast.servers.slice_state import first_not_finite

_WIDEST = torch.finfo(torch.float32).max  # that codecs can say


class Compressor:
    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._rests: dict[int, torch.Tensor] = {}  # by parameter, flat

    def takes(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """False: numbers are not finite. They are sent as they are, for the servers to refuse, and none is kept."""
        return first_not_finite(gradients) is None

    def encode(self, parameter: int, gradient: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        """Some elements of a flat gradient that is finite, as they travel."""
        rest = self.rest(parameter, gradient)[start:stop]
        most = min(torch.finfo(gradient.dtype).max, _WIDEST) / 2  # so that no rounding on the way is beyond the dtypes
        rest.add_(gradient[start:stop]).clamp_(-most, most)
        pieces = self.codec.encode(rest)
        rest.sub_(self.codec.decode(pieces, stop - start).to(gradient.dtype))
        return pieces

    def rest(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """What is still to be sent of it. `gradient`: one like those of this parameter."""
        if parameter not in self._rests:
            wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
            self._rests[parameter] = torch.zeros(gradient.numel(), dtype=wide)
        return self._rests[parameter]
