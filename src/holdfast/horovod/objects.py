"""Python objects as bytes and back, for broadcast_object and allgather_object.

They travel by the codec of snapshots (state/codec.py): plain values, tensors and numpy values, and nothing that could
run code. A script that says `allow_pickle` trusts the members of its own run: then what the codec cannot carry is
pickled, and ranks that have said the same unpickle it. Nobody else does.
"""

from __future__ import annotations

import pickle  # for a script that says allow_pickle, and for no other
import struct
from typing import Any

import torch

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.state.codec import flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.layout import TensorSpec, allocate, memory_of, spec_of

_HEAD = struct.Struct("<cQ")
_PLAIN, _PICKLED = b"p", b"x"
_HINT = "keep plain values and tensors in it, or say allow_pickle=True, which trusts every worker of the run"


def encode(value: Any, *, allow_pickle: bool = False) -> torch.Tensor:
    """ConfigError if it cannot travel."""
    try:
        tree, tensors = flatten(value, path="the object")
    except ConfigError as error:
        if not allow_pickle:
            raise ConfigError(f"{error.message}: it cannot be sent to other ranks", hint=_HINT) from error
        data = pickle.dumps(value)
        return torch.frombuffer(bytearray(_HEAD.pack(_PICKLED, len(data)) + data), dtype=torch.uint8)
    specs = [spec_of(tensor) for tensor in tensors]
    text = pack_tree([tree, [spec.to_json() for spec in specs]])
    size = _HEAD.size + len(text) + sum(spec.nbytes for spec in specs)
    memory = bytearray(size)
    memory[: _HEAD.size + len(text)] = _HEAD.pack(_PLAIN, len(text)) + text
    at = _HEAD.size + len(text)
    for tensor, spec in zip(tensors, specs, strict=True):
        memory[at : at + spec.nbytes] = memory_of(tensor, spec)
        at += spec.nbytes
    return torch.frombuffer(memory, dtype=torch.uint8)


def decode(data: torch.Tensor, *, allow_pickle: bool = False) -> Any:
    """What `encode` wrote, whoever sent it. ProtocolError for anything else."""
    memory = memoryview(data.contiguous().numpy())  # type: ignore[arg-type]
    try:
        mark, length = _HEAD.unpack_from(memory)
    except struct.error as error:
        raise ProtocolError("a rank sent something else than an object") from error
    if mark == _PICKLED:
        if not allow_pickle:
            raise ConfigError("another rank has pickled an object, and this one has not said allow_pickle", hint=_HINT)
        return pickle.loads(memory[_HEAD.size : _HEAD.size + length])
    text = unpack_tree(memory[_HEAD.size : _HEAD.size + length])
    if not isinstance(text, list) or len(text) != 2 or not isinstance(text[1], list):
        raise ProtocolError("a rank sent something else than an object")
    specs = [TensorSpec.from_json(one) for one in text[1]]
    at = _HEAD.size + length
    if at + sum(spec.nbytes for spec in specs) != len(memory):
        raise ProtocolError("a rank sent an object of another size than it says")
    tensors = allocate(specs)
    for tensor, spec in zip(tensors, specs, strict=True):
        memory_of(tensor, spec)[:] = memory[at : at + spec.nbytes]
        at += spec.nbytes
    return unflatten(text[0], [tensor.clone() for tensor in tensors])
