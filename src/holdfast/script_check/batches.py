"""A batch as something to compare: what is in it, and where it lies. And one that lies elsewhere. Owns nothing."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import xxhash

from holdfast.core.errors import HoldfastError
from holdfast.data.alignment import ALIGNMENT_BYTES, BatchWalk, Moved
from holdfast.state.layout import memory_of, readable

ODD_BYTES = 16  # after a cache line: where NumPy's memory may well begin


def described(batch: Any) -> list[tuple[str, str]]:
    """(values, form) of each tensor and array, in the order in which they are come upon."""
    found: list[tuple[str, str]] = []

    def tensor(value: torch.Tensor, moved: Moved) -> None:
        if value.device.type != "cpu" or value.layout != torch.strided:
            return
        try:
            digest = xxhash.xxh3_64_hexdigest(memory_of(readable(value.contiguous(), "a batch")))
        except HoldfastError:  # a kind of tensor that nobody can read
            return
        place = value.data_ptr() % ALIGNMENT_BYTES if value.numel() else 0
        form = f"{place} bytes after a cache line, strides {value.stride()}"
        found.append((f"{value.dtype} {tuple(value.shape)} {digest}", form))

    def array(value: numpy.ndarray[Any, Any]) -> Any:
        if not value.dtype.hasobject:
            place = value.ctypes.data % ALIGNMENT_BYTES if value.size else 0
            form = f"{place} bytes after a cache line, strides {value.strides}"
            found.append((f"{value.dtype} {value.shape} {xxhash.xxh3_64_hexdigest(value.tobytes())}", form))
        return value

    BatchWalk(tensor, array).through(batch)
    return found


def misplaced(batch: Any) -> Any:
    """The same batch, whose memory begins where a cache line does not."""
    return BatchWalk(_misplace_tensor, _misplace_array).through(batch)


def _misplace_tensor(tensor: torch.Tensor, moved: Moved) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
        return
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    if start not in moved:
        moved[start] = torch.from_numpy(_odd_memory(storage.nbytes())).untyped_storage()
        moved[start].copy_(storage)
    twin = torch.empty(0, dtype=tensor.dtype)
    twin.set_(moved[start], tensor.storage_offset(), tensor.size(), tensor.stride())
    tensor.data = twin


def _misplace_array(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    if array.dtype.hasobject or type(array) is not numpy.ndarray or not array.size:
        return array
    twin = numpy.ndarray(array.shape, array.dtype, buffer=_odd_memory(array.nbytes).data, order="C")
    twin[...] = array
    return twin if array.flags.c_contiguous else array


def _odd_memory(size: int) -> numpy.ndarray[Any, Any]:
    memory = numpy.empty(size + 2 * ALIGNMENT_BYTES, dtype=numpy.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES + ODD_BYTES
    return memory[start : start + size]
