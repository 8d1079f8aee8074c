"""How a loader process hands a batch over: small tensors by value, in the message itself.

torch hands every tensor over as a file descriptor of shared memory, for which two processes meet on a socket: about a
millisecond of the receiver's time for each, whatever its size. A small tensor is copied through the pipe in a fraction
of that. A batch with a larger tensor goes as torch sends it, and so does one with tensors that share memory, since they
are to share it afterwards too.

Invariant: what arrives has the same values, shapes, types and strides. Owns nothing.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

SMALL_BYTES = 256 * 1024


@dataclass(frozen=True)
class Packed:
    """A batch as bytes."""

    data: bytes

    def batch(self) -> Any:
        return pickle.loads(self.data)  # from a process that this worker has forked


def packed(batch: Any) -> Any:
    """The batch, or what stands for it on the way. It is the batch itself where that is as well."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(batch)
    except Exception:  # for torch's way; or it cannot be pickled, and the DataLoader says what is wrong
        return batch
    return Packed(buffer.getvalue())


class _AsItIs(Exception):
    pass


class _Pickler(ForkingPickler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._storages: set[int] = set()

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if not _is_small_and_plain(thing) or thing.data_ptr() in self._storages:
            raise _AsItIs
        self._storages.add(thing.data_ptr())
        return _tensor, (thing.reshape(-1).view(torch.uint8).numpy().tobytes(), thing.dtype, tuple(thing.shape))


def _is_small_and_plain(tensor: torch.Tensor) -> bool:
    """Whether its values, type and shape are all that there is of it."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    size = tensor.nelement() * tensor.element_size()
    if not 0 < size <= SMALL_BYTES or tensor.untyped_storage().nbytes() != size or not tensor.is_contiguous():
        return False
    return not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)  # begins on a cache line
    memory: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    memory[:] = data
    return tensor
