"""Where tensors begin in memory: on a multiple of 64 bytes from their storage's beginning, wherever they came from.

Kernels choose their path, and with it the last bits, by where their operands begin. A batch that a loader process
fetched arrives in shared memory, whose beginning is aligned; what NumPy allocates in this process lies on any multiple
of 16. So a batch is brought into one form before the script sees it: storages begin on a cache line, offsets and
strides are as the dataset made them, and arrays have the order that they would have after a journey between processes.
Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final, Literal

import numpy
import torch

ALIGNMENT_BYTES: Final = 64
_DEPTH_MAX: Final = 12
_PLAIN: Final = (str, bytes, bytearray, int, float, complex, type(None))
_OPAQUE: Final = (*_PLAIN, type, FunctionType, ModuleType, torch.nn.Module)

Moved = dict[int, torch.UntypedStorage]  # where a storage was -> what it is now: tensors that share one go on to do so


def align_tensor(tensor: torch.Tensor, moved: Moved) -> None:
    """Moves the tensor's storage if that does not begin on a cache line. The tensor stays the same object."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    if start % ALIGNMENT_BYTES == 0:
        return
    if start not in moved:
        moved[start] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        moved[start].copy_(storage)
    twin = torch.empty(0, dtype=tensor.dtype)
    twin.set_(moved[start], tensor.storage_offset(), tensor.size(), tensor.stride())
    tensor.data = twin


def pin_tensor(tensor: torch.Tensor, moved: Moved) -> None:
    """Moves the tensor to pinned memory, from which a device can copy while the script goes on."""
    if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() and not tensor.is_pinned():
        tensor.data = tensor.pin_memory()


def pin_batch(batch: Any) -> Any:
    """The batch with its tensors in pinned memory, which begins on a cache line too."""
    return BatchWalk(tensor=pin_tensor).through(batch)


def align_batch(batch: Any) -> Any:
    """The batch with all its tensors and arrays in that form. Containers are changed in place wherever they can be."""
    if type(batch) in (list, tuple) and all(type(item) is torch.Tensor and _is_in_place(item) for item in batch):
        return batch  # what most batches are
    return BatchWalk().through(batch)


def _is_in_place(tensor: torch.Tensor) -> bool:
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    if tensor.storage_offset() == 0:  # its beginning is the storage's
        return tensor.data_ptr() % ALIGNMENT_BYTES == 0
    return tensor.untyped_storage().data_ptr() % ALIGNMENT_BYTES == 0


class BatchWalk:
    """Through one batch, and aligns it, or does something else with its tensors and arrays.

    Remembers what it has seen: a batch may refer to a thing twice, or to itself.
    """

    def __init__(
        self,
        tensor: Callable[[torch.Tensor, Moved], None] = align_tensor,
        array: Callable[[numpy.ndarray[Any, Any]], Any] | None = None,
    ) -> None:
        self._tensor = tensor
        self._array = array or _align_array
        self._moved: Moved = {}
        self._done: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no number in `_done` is given to another object

    def through(self, batch: Any) -> Any:
        return self.align(batch, 0)

    def align(self, value: Any, depth: int) -> Any:
        if isinstance(value, _OPAQUE) or depth > _DEPTH_MAX:
            return value
        if id(value) not in self._done:
            self._alive.append(value)
            self._done[id(value)] = value
            self._done[id(value)] = self._aligned(value, depth + 1)
        return self._done[id(value)]

    def _aligned(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            self._tensor(value, self._moved)
            return value
        if isinstance(value, numpy.ndarray):
            return self._array(value)
        if isinstance(value, list):
            value[:] = [self.align(item, depth) for item in value]
            return value
        if isinstance(value, tuple):
            items = [self.align(item, depth) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self.align(item, depth)
            return value
        self._align_attributes(value, depth)
        return value

    def _align_attributes(self, value: Any, depth: int) -> None:
        """Of what a collate function may make: a data class, a named batch, a mapping that wraps a dict."""
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, Mapping):
            return
        for name, item in list(attributes.items()):
            new = self.align(item, depth)
            if new is not item:
                object.__setattr__(value, name, new)


def _align_array(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """A journey between processes makes an array dense; so does this, and puts it on a cache line."""
    if array.dtype.hasobject or type(array) is not numpy.ndarray or not array.size:
        return array
    dense = array.flags.c_contiguous or array.flags.f_contiguous
    if dense and array.ctypes.data % ALIGNMENT_BYTES == 0:
        return array
    order: Literal["C", "F"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    memory = torch.empty(array.nbytes, dtype=torch.uint8).numpy()
    twin = numpy.ndarray(array.shape, array.dtype, buffer=memory.data, order=order)
    twin[...] = array
    return twin
