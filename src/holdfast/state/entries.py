"""The state entry by entry, with names for people: to say in what two workers differ. Owns nothing.

Only looked at when digests have shown that states differ. What is no tensor comes first, and of tensors as many as
there is room for: the list goes along in one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy
import torch
import xxhash

from holdfast.membership.suspecting import BUFFER, EXTRA, NUMBER, OPTIMIZER, PARAMETER, TENSOR, VALUE, StateEntry
from holdfast.state.codec import unflatten, unpack_tree
from holdfast.state.layout import memory_of, readable
from holdfast.state.snapshot import Snapshot

ROOM_BYTES = 1 << 20
NAME_MAX = 200
VALUE_MAX = 40
ENTRIES_MAX = 1 << 14
_SHORT = 4  # a longer list of values is told by its length and digest
_OWN = "holdfast."  # extras of our own
_SHOWN = (torch.float64, torch.float32, torch.int64, torch.int32, torch.bool)
_NUMBERS = 1  # a tensor of at most so many numbers is shown


def entries_of(snapshot: Snapshot) -> tuple[tuple[StateEntry, ...], bool]:
    """The entries, and whether these are all."""
    state = unflatten(unpack_tree(snapshot.tree), snapshot.tensors)
    order = {VALUE: 0, NUMBER: 1, TENSOR: 2}
    leaves = sorted(_leaves(state), key=lambda leaf: order[_kind(leaf[2])])
    entries: list[StateEntry] = []
    room = ROOM_BYTES
    for name, part, value in leaves:
        entry = StateEntry(name[:NAME_MAX], part[:NAME_MAX], _kind(value), _text(value))
        room -= sum(map(len, (entry.name, entry.part, entry.kind, entry.value))) + 16
        if room < 0 or len(entries) >= ENTRIES_MAX:
            return tuple(entries), False
        entries.append(entry)
    return tuple(entries), True


def _leaves(state: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name, value in state["parameters"].items():
        yield f"the parameter {name}", PARAMETER, value
    for name, value in state["requires_grad"].items():
        yield f"requires_grad of {name}", "requires_grad", value
    for name, value in state["buffers"].items():
        yield f"the buffer {name}", BUFFER, value
    for name, settings in state["flags"].items():
        for setting, value in settings.items():
            yield f"the setting {setting} of the module {name}", "flags", value
    for name, value in state["modules"].items():
        for path, leaf in _walk(value):
            yield f"the extra state of the module {name}{_key(path)}", "module", leaf
    yield from _of_optimizers(state["optimizer"])
    for name, value in state["extras"].items():
        for path, leaf in _walk(value):
            whose = f"the extra {name!r}" if not name.startswith(_OWN) else "Holdfast's own count of loops and losses"
            yield f"{whose}{_key(path)}", EXTRA + name, leaf


def _of_optimizers(state: dict[str, Any], title: str = "the optimizer's") -> Iterator[tuple[str, str, Any]]:
    """Of one, or of several by name."""
    if not isinstance(state.get("kind"), str):
        for name, one in state.items():
            if isinstance(one, dict):
                yield from _of_optimizers(one, f"the optimizer {name}'s")
            else:
                yield f"{title} {name}", OPTIMIZER, one
        return
    names = dict(enumerate(chain.from_iterable(state["names"])))
    for number, values in state["packed"]["state"].items():
        for path, leaf in _walk(values):
            yield f"{title} {'.'.join(path) or 'state'} of {names.get(number, number)}", OPTIMIZER, leaf
    for number, group in enumerate(state["packed"]["param_groups"]):
        for key, value in group.items():
            for path, leaf in _walk(value) if key != "params" else ():
                yield f"{title} {'.'.join((str(key), *path))} (parameter group {number})", OPTIMIZER, leaf
    for key, value in state["packed"].items():
        for path, leaf in _walk(value) if key not in ("state", "param_groups") else ():
            yield f"{title} {'.'.join((str(key), *path))}", OPTIMIZER, leaf


def _walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, str(key)))
    elif isinstance(value, list | tuple) and any(
        isinstance(item, dict | list | tuple) or _is_array(item) for item in value
    ):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, str(index)))
    else:
        yield path, value


def _key(path: tuple[str, ...]) -> str:
    return f", key {'.'.join(path)}" if path else ""


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | numpy.ndarray)


def _kind(value: Any) -> str:
    if not _is_array(value):
        return VALUE
    size = value.numel() if isinstance(value, torch.Tensor) else value.size
    return NUMBER if size <= _NUMBERS else TENSOR


def _text(value: Any) -> str:
    """The value if it is short; else a digest of it, with what can be said of its size."""
    if _is_array(value):
        tensor = (
            value if isinstance(value, torch.Tensor) else torch.from_numpy(numpy.array(value, order="C", copy=True))
        )
        if tensor.numel() == 1 and tensor.dtype in _SHOWN:
            return str(tensor.item())
        memory = memory_of(readable(tensor, "a tensor"))
        return f"{tuple(tensor.shape)} {xxhash.xxh3_64_hexdigest(memory)}"
    if isinstance(value, list | tuple) and len(value) > _SHORT:
        return f"{len(value)} values {xxhash.xxh3_64_hexdigest(repr(value).encode())[:8]}"
    text = repr(value)
    return text if len(text) <= VALUE_MAX else f"{text[:VALUE_MAX]}… {xxhash.xxh3_64_hexdigest(text.encode())[:8]}"
