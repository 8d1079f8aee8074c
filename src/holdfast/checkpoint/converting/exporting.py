"""Checkpoints as other programs' files: one safetensors file, torch.save, torch.distributed.checkpoint.

Every byte is checked before it is written. The output appears under its name when it is whole, and replaces nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.parts import PIECE_ALIGNMENT, STORED_AS, flat_bytes, view_of
from holdfast.checkpoint.restoring.reading import read_selected
from holdfast.checkpoint.saving.side_by_side import Progress
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError
from holdfast.state.codec import unflatten, unpack_tree
from holdfast.state.layout import TensorSpec

SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch"}
FORMATS = ("safetensors", "torch", "dcp")
TREE_KEY = "holdfast.tree"  # in the metadata of a safetensors file that holds a whole state
TENSORS_KEY = "holdfast.tensors"
STEP_KEY = "holdfast.step"
STEP_ENTRY = "holdfast_step"  # beside the state, in formats that have no metadata
_WEIGHTS = ("model", "state_dict", "module")  # where scripts keep them


def export(
    storage: Storage,
    manifest: Manifest,
    target: Path,
    *,
    kind: str,
    only_parameters: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes `target` in one of FORMATS: the whole state, or only its weights under the names of the model."""
    chosen = weights_of(manifest) if only_parameters else None
    with _finished(target) as path:
        numbers = range(len(manifest.specs)) if chosen is None else chosen.values()
        tensors = read_selected(storage, manifest, numbers, progress=progress)
        if kind == "safetensors":
            _write_safetensors(path, manifest, tensors, chosen)
            return
        if chosen is None:
            state = _plain(unflatten(unpack_tree(manifest.tree), [tensors[n] for n in range(len(tensors))]))
            if type(state) is dict and all(isinstance(key, str) for key in state):
                state = {**state, STEP_ENTRY: manifest.step}
        else:
            state = {name: tensors[number] for name, number in chosen.items()}
        if kind == "torch":
            with path.open("wb") as file:
                torch.save(state, file)
        else:
            _write_dcp(path, state)


def kind_of(target: Path, named: str | None) -> str:
    """The format of a file or directory, from what the user said or from its name."""
    if named:
        return named
    if target.suffix in SUFFIXES:
        return SUFFIXES[target.suffix]
    raise ConfigError(
        f"the name {target.name} does not say in which format to write",
        hint="name a .safetensors or a .pt file, or add --as dcp for a directory",
    )


def weights_of(manifest: Manifest) -> dict[str, int]:
    """The names of a model's state_dict and the numbers of their tensors.

    In a run's checkpoint these are its parameters and buffers; elsewhere what lies under `model`, or the whole state
    if it has nothing but tensors.
    """
    state = _entries(unpack_tree(manifest.tree))
    if "parameters" in state and "buffers" in state:
        return _tensors_in({**_entries(state["parameters"]), **_entries(state["buffers"])})
    for candidate in (*(_entries(state.get(name)) for name in _WEIGHTS), state):
        found = _tensors_in(candidate)
        if found and len(found) == len(candidate):
            return found
    raise ConfigError(
        f"the checkpoint of step {manifest.step} does not say which of its tensors are a model's weights",
        hint="save the model's state_dict() under the key `model`, or export everything",
    )


def _entries(tree: Any) -> dict[Any, Any]:
    """What a dict in a packed tree holds; nothing if it is no dict."""
    return dict(tree["d"]) if isinstance(tree, dict) and "d" in tree else {}


def _tensors_in(entries: Mapping[Any, Any]) -> dict[str, int]:
    return {str(name): tree["T"] for name, tree in entries.items() if isinstance(tree, dict) and "T" in tree}


def _plain(state: Any) -> Any:
    """Without numpy: torch.load(weights_only=True), which others read it with, knows only torch's own."""
    if isinstance(state, Counter):
        return state
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_plain(value) for value in state)
    if isinstance(state, numpy.ndarray):
        return torch.from_numpy(state)
    return state.item() if isinstance(state, numpy.generic) else state


def _write_safetensors(
    path: Path, manifest: Manifest, tensors: Mapping[int, torch.Tensor], chosen: Mapping[str, int] | None
) -> None:
    """Row-major, so that everybody reads the same shapes. A whole state has its tree in the metadata."""
    about = {"format": "pt", STEP_KEY: str(manifest.step)}
    named = dict(zip(manifest.names, range(len(manifest.names)), strict=True)) if chosen is None else chosen
    if chosen is None:  # of weights alone, the same ones give the same file, from any run
        about["holdfast.run"] = manifest.run
        about[TREE_KEY] = manifest.tree.decode()
        specs = zip(manifest.names, manifest.specs, strict=True)
        about[TENSORS_KEY] = json.dumps([[name, *spec.to_json()] for name, spec in specs])
    header: dict[str, Any] = {"__metadata__": about, **dict.fromkeys(named)}
    # The largest elements first: then all are aligned without holes, which the format does not allow.
    order = sorted(named.items(), key=lambda item: -manifest.specs[item[1]].dtype.itemsize)
    end = 0
    for name, number in order:
        spec = manifest.specs[number]
        dtype = STORED_AS.get(spec.dtype)
        if dtype is None and chosen is not None:
            raise ConfigError(
                f"safetensors has no name for the dtype of {name}, {spec.to_json()[0]}", hint="export to a .pt file"
            )
        shape = list(spec.shape) if dtype else [spec.nbytes]
        header[name] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    data = data.ljust(-(-(8 + len(data)) // PIECE_ALIGNMENT) * PIECE_ALIGNMENT - 8)
    with path.open("wb") as file:
        file.write(len(data).to_bytes(8, "little"))
        file.write(data)
        for _, number in order:
            row_major = tensors[number].contiguous()
            file.write(view_of(flat_bytes(row_major, TensorSpec(row_major.dtype, tuple(row_major.shape)))))


def _write_dcp(path: Path, state: Any) -> None:
    if not isinstance(state, dict):
        raise ConfigError(
            f"torch.distributed.checkpoint keeps dicts, and this state is a {type(state).__name__}",
            hint="export to a .pt or a .safetensors file",
        )
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked
        save(state, checkpoint_id=str(path), no_dist=True)


@contextmanager
def _finished(target: Path) -> Iterator[Path]:
    """A temporary name beside the target, which becomes the target's when all is on the disk."""
    if target.exists():
        raise ConfigError(f"{target} is already there", hint="choose another name, or delete it first")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no directory {target.parent}", hint="make it first, or choose another place")
    own = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        yield own
        for path in sorted(own.rglob("*")) if own.is_dir() else [own]:
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        own.rename(target)
    except OSError as error:
        raise ConfigError(
            f"cannot write {target} ({error.strerror or error})", hint="choose another place with --to"
        ) from error
    finally:
        if own.is_dir():
            shutil.rmtree(own, ignore_errors=True)
        else:
            own.unlink(missing_ok=True)
