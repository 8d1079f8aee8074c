"""Tensors as bytes: what describes one (`TensorSpec`), how its memory is read and written in place.

A tensor that is dense under some order of its dimensions (row-major, channels_last, transposed) is read where it
lies, and its twin gets the same strides, because kernels choose their path, and so their bits, by strides.
Only a tensor with gaps or overlaps is copied. Owns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import ConfigError, ProtocolError

_ALIGNMENT = 64
_DIMENSIONS_MAX = 64
_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in _DTYPE_NAMES if hasattr(torch, n)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor's bytes mean. `order` lists the dimensions from the slowest to the fastest; empty is row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def to_json(self) -> list[Any]:
        fields: list[Any] = [_NAMES[self.dtype], list(self.shape)]
        return [*fields, list(self.order)] if self.order else fields

    @classmethod
    def from_json(cls, value: Any) -> TensorSpec:
        """Reads what `to_json` wrote; anything else is a ProtocolError."""
        if not isinstance(value, list) or len(value) not in (2, 3):
            raise ProtocolError(f"not a tensor's description: {value!r:.80}")
        name, shape, order = value[0], value[1], value[2] if len(value) == 3 else []
        if not isinstance(name, str) or name not in DTYPES:
            raise ProtocolError(f"not a tensor's dtype: {name!r:.80}")
        if not _is_sizes(shape) or len(shape) > _DIMENSIONS_MAX or math.prod(filter(None, shape)) >= 2**59:
            raise ProtocolError(f"not a tensor's shape: {shape!r:.80}")
        if not _is_sizes(order) or (len(value) == 3 and sorted(order) != list(range(len(shape)))):
            raise ProtocolError(f"not an order of {len(shape)} dimensions: {order!r:.80}")
        return cls(DTYPES[name], tuple(shape), tuple(order))


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32, also for dtypes whose tensors do not travel."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def readable(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The same values in dense memory of this process: `tensor` itself, detached, wherever that is possible.

    Waits for a device. Of many tensors take what is `dense`, and bring that here in one go (devices/copies.py).
    """
    return dense(tensor, path).cpu()


def dense(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The same values in dense memory, on the device where they are. ConfigError if they cannot travel."""
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES or tensor.device.type == "meta":
        raise ConfigError(
            f"{path} is a {str(tensor.layout).removeprefix('torch.')} tensor of {dtype_name(tensor.dtype)} "
            f"on {tensor.device.type}, which cannot travel in a snapshot",
            hint="keep plain dense tensors in the model, the optimizer and everything else with a state_dict",
        )
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        raise ConfigError(
            f"{path} is a {type(plain).__name__}, which cannot travel in a snapshot",
            hint="keep plain dense tensors in the model, the optimizer and everything else with a state_dict",
        )
    plain = plain.resolve_conj().resolve_neg()
    if plain.is_contiguous() or _dense_order(plain):
        return plain
    return plain.contiguous()


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...]:
    # Dimensions of size 1 go last: their strides say nothing, and may differ between twins.
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: (tensor.shape[d] == 1, -strides[d], d))
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Describes a tensor that `dense` returned, or any other: one with gaps counts as row-major."""
    order = () if tensor.is_contiguous() else _dense_order(tensor)
    return TensorSpec(tensor.dtype, tuple(tensor.shape), order)


def memory_of(tensor: torch.Tensor, spec: TensorSpec | None = None) -> memoryview:
    """The tensor's own bytes, without a copy. The view keeps the memory alive."""
    if not tensor.numel():
        return memoryview(bytearray())  # whose strides may be anything
    flat: Any = as_bytes(tensor, spec).numpy()
    return memoryview(flat)


def as_bytes(tensor: torch.Tensor, spec: TensorSpec | None = None) -> torch.Tensor:
    """The same as a flat tensor, wherever it is. It has at least one element, and is such as `dense` returns."""
    spec = spec or spec_of(tensor)
    physical = tensor.detach().permute(spec.order) if spec.order else tensor.detach()
    assert physical.is_contiguous(), "it needs what dense() returned"
    return physical.view(-1).view(torch.uint8)


def allocate(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Uninitialised tensors in one block of memory. The caller has checked the total against its maximum."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(end, dtype=torch.uint8)
    tensors = []
    for spec, offset in zip(specs, offsets, strict=True):
        order = spec.order or tuple(range(len(spec.shape)))
        flat = block[offset : offset + spec.nbytes].view(spec.dtype)
        inverse = [order.index(d) for d in range(len(order))]
        tensors.append(flat.view([spec.shape[d] for d in order]).permute(inverse))
    return tensors
