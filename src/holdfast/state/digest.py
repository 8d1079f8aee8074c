"""Digests of tensors, models and snapshots: xxh3_128 over names, dtypes, shapes and raw bytes.

They find corruption and divergence, at memory speed; they are no defence against forgery, which the
authenticated connection is. Tensors are hashed where they lie; the GIL is released meanwhile. Owns nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from holdfast.devices.copies import CPU, here
from holdfast.state.layout import TensorSpec, dense, memory_of, spec_of
from holdfast.state.local import whole
from holdfast.state.naming import named_state

if TYPE_CHECKING:
    from holdfast.state.snapshot import Snapshot

# One update holds no lock that matters, but a bounded one lets a stop request through on huge tensors.
_PIECE_BYTES = 64 * 2**20


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """32 hex digits. The memory layout does not count: a channels_last tensor has the digest of its row-major twin.

    Each tensor in this process's memory is let go before the next is asked for. Those on a device come in one go.
    """
    hasher = xxhash.xxh3_128()
    coming: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        found = dense(tensor, name)
        if coming or found.device != CPU:
            coming.append((name, found))
        else:
            _update(hasher, name, found)
        del tensor, found
    for (name, _), found in zip(coming, here([one for _, one in coming]), strict=True):
        _update(hasher, name, found)
    return hasher.hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """Of a model's parameters and buffers, in the order of its state_dict. For all ranks of a group at once, each of
    which holds one whole tensor after the other."""
    return digest_tensors(
        (name, whole(value)) for name, value in named_state(model).items() if isinstance(value, torch.Tensor)
    )


def state_digest(snapshot: Snapshot) -> str:
    """Of everything in a snapshot: step, tree, specs, and the digests of its chunks."""
    specs = [spec_of(tensor).to_json() for tensor in snapshot.tensors]
    hasher = xxhash.xxh3_128()
    hasher.update(json.dumps([snapshot.step, len(snapshot.tree), specs]).encode())
    hasher.update(snapshot.tree)
    for _, digest in sorted(snapshot.chunk_digests().items()):
        hasher.update(digest)
    return hasher.hexdigest()


def _update(hasher: Any, name: str, found: torch.Tensor) -> None:
    tensor = found.contiguous()
    spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
    # A JSON line ends where it ends: no two lists of (name, spec, bytes) run together to the same stream.
    hasher.update(json.dumps([name, *spec.to_json()]).encode())
    memory = memory_of(tensor, spec)
    for start in range(0, len(memory), _PIECE_BYTES):
        hasher.update(memory[start : start + _PIECE_BYTES])
