"""Checkpoints without a run: `holdfast.checkpoint.save(uri, state)` and `load(uri)`, for any script.

`state` is what state_dict() returns, nested as you like: dicts, lists, tuples, numbers, strings, None, tensors and
numpy values. It is written whole or not at all, and what is loaded is what was saved, bit for bit, or not at all.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.format.parts import tensor_names
from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid, read_manifest, read_snapshot
from holdfast.checkpoint.saving.retention import Keep, abandoned, delete_checkpoint, superseded
from holdfast.checkpoint.saving.side_by_side import Progress
from holdfast.checkpoint.saving.writing import missing_parts, write_state
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError, IntegrityError, NotStored
from holdfast.state.codec import flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.layout import TensorSpec, spec_of
from holdfast.state.snapshot import Snapshot


def save(
    uri: str,
    state: Any,
    *,
    step: int | None = None,
    run: str = "",
    metrics: Mapping[str, float] | None = None,
    keep: Keep | int | None = None,
) -> int:
    """Writes a checkpoint and returns its step: `step`, or one more than the newest there is, or 0.

    When it returns, the checkpoint is durable. `keep` says which others stay (a number: so many of the newest);
    without it all do.
    """
    chosen = _keep(keep)
    with closing(open_storage(uri)) as storage:
        step = save_to(storage, state, step=step, run=run, metrics=metrics)
        if chosen is not None:
            prune(storage, chosen)
        return step


def load(uri: str, *, step: int | None = None, into: Any = None) -> Any:
    """The state of the newest checkpoint that is whole, or of `step`.

    What cannot be used is named in a warning, and the next older one is tried; a `step` that cannot is an error.
    Dicts come back as dicts, parameters as tensors; tensors are in the memory of this host.

    With `into`, a state like the one that was saved, its tensors are overwritten and returned as part of the result:
    that is faster than memory that must be made first. After an error their content is undefined.
    """
    place = None if into is None else _Into(into).place
    with closing(open_storage(uri)) as storage:
        if step is not None:
            _, snapshot = read_snapshot(storage, _committed(storage, step), place=place)
        else:
            warn: Callable[[str], None] = lambda text: warnings.warn(text, RuntimeWarning, stacklevel=4)  # noqa: E731
            found = newest_valid(storage, warn=warn, place=place)
            if found is None:
                raise ConfigError(f"there is no checkpoint in {storage.uri}", hint="save one first, or look elsewhere")
            _, snapshot = found
        return unflatten(unpack_tree(snapshot.tree), snapshot.tensors)


class _Into:
    """The tensors of a state that another one is read to."""

    def __init__(self, state: Any) -> None:
        tree, self._tensors = flatten(state)
        self._names = tensor_names(pack_tree(tree), len(self._tensors))
        given = set(_addresses(state))
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if tensor.numel() and tensor.data_ptr() not in given:  # flatten has made a copy
                raise ConfigError(
                    f"nothing can be read into {name}: its bytes do not lie in one piece in the memory of this host",
                    hint="load without `into`, and copy",
                )

    def place(self, tree: bytes, specs: Sequence[TensorSpec]) -> Sequence[torch.Tensor]:
        theirs = dict(zip(tensor_names(tree, len(specs)), specs, strict=True))
        mine = {name: spec_of(tensor) for name, tensor in zip(self._names, self._tensors, strict=True)}
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                raise ConfigError(
                    f"the checkpoint has {_described(theirs.get(name))} for {name}, and `into` has "
                    f"{_described(mine.get(name))}",
                    hint="give a state like the one that was saved, or load without `into`",
                )
        tensors = dict(zip(self._names, self._tensors, strict=True))
        return [tensors[name] for name in theirs]


def _addresses(state: Any) -> Iterator[int]:
    if isinstance(state, torch.Tensor):
        yield state.data_ptr()
    elif isinstance(state, np.ndarray):
        yield int(state.ctypes.data)
    elif isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _addresses(value)


def _described(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"


def save_to(
    storage: Storage,
    state: Any,
    *,
    step: int | None = None,
    run: str = "",
    metrics: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> int:
    tree, tensors = flatten(state)
    packed = pack_tree(tree)
    listed = list_checkpoints(storage)
    if step is None:
        step = max((entry.step for entry in listed), default=-1) + 1
    if any(entry.step == step and entry.committed for entry in listed):
        raise ConfigError(f"{storage.uri} already has a checkpoint of step {step}", hint="choose another step")
    snapshot = Snapshot(step, packed, tuple(tensors))
    write_state(storage, snapshot, run=run, metrics=metrics, created_s=time.time(), progress=progress)
    return step


def prune(storage: Storage, keep: Keep, *, dry_run: bool = False) -> list[int]:
    """Deletes what `keep` does not keep, and what was begun and never committed; returns these steps, oldest first.

    A checkpoint whose manifest cannot be read, or whose parts are not all there, does not count as kept and is left
    alone: somebody should look at it.
    """
    listed, there = list_checkpoints(storage), storage.list("checkpoint-")
    committed: list[tuple[int, Mapping[str, float]]] = []
    for entry in listed:
        if entry.committed:
            try:
                manifest = read_manifest(storage, entry.step)
            except (IntegrityError, NotStored):
                continue
            if not missing_parts(there, entry.step, manifest.parts):
                committed.append((entry.step, manifest.metrics))
    steps = superseded(committed, keep) if committed else []
    steps = sorted({*steps, *abandoned(listed)})
    if not dry_run:
        for step in steps:
            delete_checkpoint(storage, step)
    return steps


def _keep(keep: Keep | int | None) -> Keep | None:
    chosen = Keep(last=keep) if isinstance(keep, int) else keep
    if chosen is not None:
        chosen.validate()
    return chosen


def _committed(storage: Storage, step: int) -> int:
    steps = [entry.step for entry in list_checkpoints(storage) if entry.committed]
    if step not in steps:
        newest = f"the newest is that of step {steps[0]}" if steps else "there is none at all"
        raise ConfigError(f"there is no checkpoint of step {step} in {storage.uri}", hint=newest)
    return step
