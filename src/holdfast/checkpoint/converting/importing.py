"""Other programs' files as state: safetensors, torch.save, torch.distributed.checkpoint. Nothing in them is run.

safetensors is data. Files of torch.save are read by torch.load(weights_only=True), which builds tensors and plain
values and refuses everything else. The metadata of torch.distributed.checkpoint is a pickle: its instructions are
followed here as a description of records, and no class or function that it names is ever looked up.

Whatever is wrong with a file is a ConfigError with its path.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.converting.exporting import STEP_ENTRY, STEP_KEY, SUFFIXES, TENSORS_KEY, TREE_KEY
from holdfast.checkpoint.format.manifest import STEP_MAX
from holdfast.checkpoint.format.parts import STORED_AS
from holdfast.core.errors import ConfigError, HoldfastError, ProtocolError
from holdfast.state.codec import unflatten, unpack_tree
from holdfast.state.layout import TensorSpec, dtype_name

HEADER_BYTES_MAX = 100_000_000  # of safetensors
METADATA_BYTES_MAX = 256 * 2**20
_DTYPES = {name: dtype for dtype, name in STORED_AS.items()}
_HINT = "possible are .safetensors, .pt written by torch.save, and directories of torch.distributed.checkpoint"


def read_state(path: Path) -> Any:
    """The state in a file or directory of another program."""
    return read_state_and_step(path)[0]


def read_state_and_step(path: Path) -> tuple[Any, int | None]:
    """The state in a file or directory of another program, and its step, where that is said."""
    kind = "dcp" if path.is_dir() else SUFFIXES.get(path.suffix)
    if not path.exists():
        raise ConfigError(f"there is no {path}", hint="name a file or a directory that is there")
    if kind is None:
        raise ConfigError(f"the name of {path} does not say what it is", hint=_HINT)
    reader = {"dcp": _read_dcp, "torch": _read_torch, "safetensors": _read_safetensors}[kind]
    try:
        state = reader(path)
        step = state.pop(STEP_ENTRY, None) if type(state) is dict else None
        if step is None and kind == "safetensors":
            step = _header_of(path)[1].get(STEP_KEY)
        if step is not None and not 0 <= int(step) <= STEP_MAX:
            raise ValueError("no step")
        return state, None if step is None else int(step)
    except ConfigError:
        raise
    except HoldfastError as error:
        raise ConfigError(f"{path} cannot be read: {error.message}", hint=_HINT) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error})", hint=_HINT) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged, or is not what its name says", hint=_HINT) from error


# -- torch.save


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:
        return _load(file, path)


def _load(file: Any, path: Path) -> Any:
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 6):
        raise ConfigError(
            f"torch {torch.__version__} can be made to run what a file says (CVE-2025-32434), so {path} is not read",
            hint="update torch to 2.6 or later, or convert the file to safetensors",
        )
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of many kinds, and none of them documented
        said = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(
            f"{path} is not a file of torch.save with nothing but tensors and plain values: {said}",
            hint="save a state_dict() rather than a whole object",
        ) from error


# -- safetensors


def _read_safetensors(path: Path) -> Any:
    header, about, start = _header_of(path)
    with path.open("rb") as file:
        # Private to this process: what is read may be written to, and the file stays as it is.
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    tensors = {name: _stored_tensor(memory[start:], entry) for name, entry in header.items()}
    if TREE_KEY not in about:
        return tensors
    described = [(entry[0], TensorSpec.from_json(entry[1:])) for entry in json.loads(about[TENSORS_KEY])]
    ordered = [_as_it_was(tensors.pop(name), spec) for name, spec in described]
    return unflatten(unpack_tree(about[TREE_KEY].encode()), ordered)


def _header_of(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """The entries of its tensors, what it says of itself, and where the tensors begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
            raise ValueError("no header")
        header = json.loads(file.read(length))
    about = header.pop("__metadata__", None) or {}
    return header, about, 8 + length


def _stored_tensor(data: torch.Tensor, entry: Any) -> torch.Tensor:
    start, stop = entry["data_offsets"]
    spec = TensorSpec.from_json([dtype_name(_DTYPES[entry["dtype"]]), entry["shape"]])
    if not 0 <= start <= stop <= len(data) or stop - start != spec.nbytes:
        raise ValueError("not a place in the file")
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    memory = data[start:stop]
    if memory.storage_offset() % spec.dtype.itemsize:
        memory = memory.clone()
    return memory.view(spec.dtype).view(spec.shape)


def _as_it_was(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor in its own dtype and memory order, of which the file has a row-major copy."""
    if tensor.dtype != spec.dtype:
        if tensor.dtype != torch.uint8 or tensor.numel() != spec.nbytes:
            raise ValueError("not the tensor that is described")
        tensor = tensor.clone().view(spec.dtype).view(spec.shape)
    if tuple(tensor.shape) != spec.shape:
        raise ValueError("not the tensor that is described")
    if not spec.order:
        return tensor
    inverse = [spec.order.index(d) for d in range(len(spec.order))]
    return tensor.permute(spec.order).contiguous().permute(inverse)


# -- torch.distributed.checkpoint


def _read_dcp(path: Path) -> dict[str, Any]:
    file = path / ".metadata"
    if not file.is_file():
        raise ConfigError(f"{path} is not a directory of torch.distributed.checkpoint", hint=_HINT)
    if file.stat().st_size > METADATA_BYTES_MAX:
        raise ConfigError(f"{file} has more than {METADATA_BYTES_MAX} bytes", hint=_HINT)
    metadata = _follow(file.read_bytes()).fields()
    chunks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for index, info in metadata["storage_data"].items():
        place = index.fields()
        offset = place.get("offset")
        chunks[str(place["fqn"]), () if offset is None else _sizes(offset)] = info.fields()
    paths = metadata.get("planner_data") or {}
    sizes = {stored.name: stored.stat().st_size for stored in path.iterdir() if stored.is_file()}
    room = sum(sizes.values())
    state: dict[Any, Any] = {}
    for name, entry in metadata["state_dict_metadata"].items():
        fields = entry.fields()
        if "chunks" in fields:
            spec = _spec(fields)
            room -= spec.nbytes
            if room < 0:  # before memory is taken for it
                raise ValueError("tensors larger than the files")
            value = _dcp_tensor(path, name, spec, fields["chunks"], chunks)
        else:
            value = _load(io.BytesIO(_slice(path, chunks[name, ()])), path)
        _put(state, paths.get(name) or (name,), value)
    return dict(_with_lists(state))


def _spec(fields: dict[str, Any]) -> TensorSpec:
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, _Record) or not dtype.name.startswith("torch.") or dtype.arguments:
        raise ValueError("not a dtype")
    return TensorSpec.from_json([dtype.name.removeprefix("torch."), list(_sizes(fields["size"]))])


def _dcp_tensor(
    path: Path, name: str, spec: TensorSpec, pieces: list[Any], chunks: dict[tuple[str, tuple[int, ...]], Any]
) -> torch.Tensor:
    whole = None
    covered = 0
    for piece in pieces:
        fields = piece.fields()
        offsets, sizes = _sizes(fields["offsets"]), _sizes(fields["sizes"])
        tensor = _load(io.BytesIO(_slice(path, chunks[name, offsets])), path)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes or tensor.dtype != spec.dtype:
            raise ValueError("not the tensor that is described")
        if sizes == spec.shape and len(pieces) == 1:
            return tensor
        whole = torch.empty(spec.shape, dtype=spec.dtype) if whole is None else whole
        place = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        place.copy_(tensor)
        covered += tensor.numel()
    if whole is None or covered != math.prod(spec.shape):
        raise ValueError("a tensor with holes")
    return whole


def _slice(path: Path, info: dict[str, Any]) -> bytes:
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    if type(name) is not str or name != Path(name).name or name in ("", ".", "..") or info.get("transform_descriptors"):
        raise ConfigError(f"{path} keeps its bytes in a way that is not known here", hint=_HINT)
    with (path / name).open("rb") as file:
        if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length:
            raise ValueError("not a place in the file")
        if offset + length > (path / name).stat().st_size:
            raise ConfigError(f"{path / name} ends early", hint="it was not written to its end, or was cut off later")
        file.seek(offset)
        return file.read(length)


def _sizes(value: Any) -> tuple[int, ...]:
    """A torch.Size, or a tuple that stands for one."""
    sizes = value.arguments[0] if isinstance(value, _Record) else value
    if not isinstance(sizes, (list, tuple)) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("not sizes")
    return tuple(sizes)


def _put(state: dict[Any, Any], path: Any, value: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def _with_lists(state: Any) -> Any:
    """Keys of dicts are strings there; numbers are places in a list."""
    if not isinstance(state, dict):
        return state
    if state and all(type(key) is int for key in state):
        if sorted(state) != list(range(len(state))):
            raise ValueError("a list with holes")
        return [_with_lists(state[index]) for index in range(len(state))]
    return {key: _with_lists(value) for key, value in state.items()}


# -- a pickle as a description: what it would import and call becomes a record


@dataclass(eq=False)
class _Record:
    name: str  # of the class or function, which is not looked up
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def fields(self) -> dict[str, Any]:
        if not isinstance(self.state, dict):
            return {}
        return self.state


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})
_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}


def _follow(data: bytes) -> _Record:
    """The object that a pickle describes, as records, lists, tuples, dicts and plain values."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            _gather(name, items, stack)
        elif name not in _IGNORED:
            _simple(name, argument, stack)
    (result,) = stack
    if not isinstance(result, _Record):
        raise ProtocolError("its metadata is not a record")
    return result


def _gather(name: str, items: list[Any], stack: list[Any]) -> None:
    if name == "TUPLE":
        stack.append(tuple(items))
    elif name == "APPENDS":
        stack[-1].extend(items)
    else:
        stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _simple(name: str, argument: Any, stack: list[Any]) -> None:
    if name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name in _TUPLES:
        items = tuple(stack[-_TUPLES[name] :])
        del stack[-_TUPLES[name] :]
        stack.append(items)
    elif name == "APPEND":
        item = stack.pop()
        stack[-1].append(item)
    elif name == "SETITEM":
        value, key = stack.pop(), stack.pop()
        stack[-1][key] = value
    elif name == "GLOBAL":
        stack.append(_Record(str(argument).replace(" ", ".")))
    elif name == "STACK_GLOBAL":
        attribute, module = stack.pop(), stack.pop()
        stack.append(_Record(f"{module}.{attribute}"))
    elif name in ("REDUCE", "NEWOBJ"):
        arguments, callee = stack.pop(), stack.pop()
        stack.append(_Record(callee.name, tuple(arguments)))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].state = state
    elif type(argument) in (int, float, str, bytes):
        stack.append(argument)
    else:
        raise ProtocolError(f"its metadata has the instruction {name}")
