"""One value as text or bytes and back, exactly: what workers gather from each other, and samples. No pickle.

A value is what a state_dict may hold: see codec.py. Owns nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from typing import Any

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.state.codec import flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.layout import TensorSpec, allocate, memory_of, spec_of

_HEAD = struct.Struct("<I")


def pack_object(value: Any, *, path: str, bytes_max: int) -> str:
    """ConfigError if it cannot travel, or is too large for that."""
    tree, tensors = flatten(value, sort=False, path=path)
    specs = [spec_of(tensor) for tensor in tensors]
    size = sum(spec.nbytes for spec in specs)
    if size <= bytes_max:
        data = [base64.b64encode(memory_of(tensor, spec)).decode() for tensor, spec in zip(tensors, specs, strict=True)]
        text = json.dumps([pack_tree(tree).decode(), [spec.to_json() for spec in specs], data], separators=(",", ":"))
        size = len(text)
    if size > bytes_max:
        raise ConfigError(
            f"{path} has {size} bytes, at most {bytes_max} can be gathered at once",
            hint="gather less at a time, or keep it in storage that all workers share",
        )
    return text


def object_bytes(value: Any, *, path: str) -> bytes:
    """As short as can be, of any size. ConfigError if it cannot travel."""
    tree, tensors = flatten(value, sort=False, path=path)
    specs = [spec_of(tensor) for tensor in tensors]
    head = json.dumps([pack_tree(tree).decode(), [spec.to_json() for spec in specs]], separators=(",", ":")).encode()
    data = [memory_of(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True)]
    return b"".join([_HEAD.pack(len(head)), head, *data])


def object_from_bytes(data: bytes | memoryview) -> Any:
    """Reads what `object_bytes` wrote, whoever sent it. ProtocolError for anything else."""
    try:
        (length,) = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        tree, described = json.loads(bytes(data[_HEAD.size : start]))
        specs = [TensorSpec.from_json(one) for one in described]
        if sum(spec.nbytes for spec in specs) != len(data) - start:
            raise ProtocolError("a peer's object has tensors of another size than it says")
        tensors = allocate(specs)
        for tensor, spec in zip(tensors, specs, strict=True):
            memory_of(tensor, spec)[:] = data[start : start + spec.nbytes]
            start += spec.nbytes
        return unflatten(unpack_tree(tree.encode()), [tensor.clone() for tensor in tensors])
    except (ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ProtocolError(f"a peer sent something else than an object: {bytes(data[:80])!r}") from error


def unpack_object(text: str) -> Any:
    """Reads what `pack_object` wrote, whoever sent it. ProtocolError for anything else."""
    try:
        tree, described, data = json.loads(text)
        specs = [TensorSpec.from_json(one) for one in described]
        parts = [base64.b64decode(one, validate=True) for one in data]
        if [spec.nbytes for spec in specs] != [len(part) for part in parts]:
            raise ProtocolError("a peer's object has tensors of another size than it says")
        tensors = allocate(specs)
        for tensor, spec, part in zip(tensors, specs, parts, strict=True):
            memory_of(tensor, spec)[:] = part
        return unflatten(unpack_tree(tree.encode()), [tensor.clone() for tensor in tensors])
    except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise ProtocolError(f"a peer sent something else than an object: {text[:80]!r}") from error
