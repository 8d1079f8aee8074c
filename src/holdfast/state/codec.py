"""Nested state to (JSON tree, tensors) and back, exactly. No pickle: what is decoded is data, never code.

How a value looks in the tree:
    None, bool, str, int, finite float   as in JSON (Python writes floats so that they read back bit for bit)
    list                                 a JSON list
    anything else                        an object with one key, the tag:
        {"d": [[key, value], …]}  dict     {"c": [[key, count], …]}  Counter    {"t": […]}        tuple
        {"o": [[key, value], …]}  OrderedDict        {"D.float": [[key, value], …]}  defaultdict(float)
        {"f": "7ff8000000000000"} float    {"i": "0x…"}              large int  {"n": [dtype, hex]}  numpy scalar
        {"T": 3}  tensor number 3          {"a": 4}  the same, as a numpy array     {"b": "aGk="}  bytes
        {"dtype": "bfloat16"}              {"device": "cuda:0"}                 {"size": [2, 3]}

Owns nothing; pure apart from reading tensors. Local misuse is a ConfigError with the value's path; bytes from
elsewhere that no encoder writes are a ProtocolError.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.devices.copies import here
from holdfast.state.layout import dense, dtype_name
from holdfast.state.local import local

Tree: TypeAlias = Any  # what json.loads can return

TREE_BYTES_MAX = 16 * 2**20
DEPTH_MAX = 64
_INT_BITS_PLAIN = 64
_DICT_TAGS = {dict: "d", OrderedDict: "o", Counter: "c"}
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple)}  # of a defaultdict
# Lists of what may be named, so that a name from the wire is only ever looked up, never interpreted.
_TORCH_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# Two C types may share a name; the usual one is numpy's default, and comes last here.
_NUMPY_DTYPES = {dtype.name: dtype for dtype in map(numpy.dtype, "GgqQlLiIhHbB?efdFD")}
_HINT = "a state_dict may hold dicts, lists, tuples, numbers, strings, bytes, None, tensors and numpy values"


def flatten(
    value: Any,
    *,
    sort: bool = False,
    path: str = "state",
    anywhere: bool = False,
    of: Callable[[torch.Tensor], torch.Tensor] = local,
) -> tuple[Tree, list[torch.Tensor]]:
    """The tree of `value` and the tensors it refers to by number; tensors are references wherever possible.

    They are in this process's memory, or `anywhere`: those of a device are still there. `of`: what of each is meant; of
    those that are sharded over a group, this rank's part.

    With `sort`, dicts are written in the order of their keys, so that two workers whose dicts were filled in a
    different order get the same bytes; but for those in an `InOrder`.
    """
    encoder = _Encoder(sort, of)
    tree = encoder.encode(value, path, 0)
    return tree, encoder.tensors if anywhere else here(encoder.tensors)


@dataclass(frozen=True)
class InOrder:
    """Around a value whose dicts keep their order, whatever `sort` says. It leaves no trace in the tree."""

    value: Any


def pairs_of(tree: Tree) -> list[list[Any]] | None:
    """The keys and values of a dict's tree, of whatever kind; None if it is no dict's."""
    if not isinstance(tree, dict) or len(tree) != 1:
        return None
    ((tag, body),) = tree.items()
    return body if (tag in _DICT_TAGS.values() or tag.startswith("D.")) and isinstance(body, list) else None


class _Encoder:
    def __init__(self, sort: bool, of: Callable[[torch.Tensor], torch.Tensor] = local) -> None:
        self.sort = sort
        self._of = of
        self.tensors: list[torch.Tensor] = []

    def encode(self, value: Any, path: str, depth: int) -> Tree:
        if depth > DEPTH_MAX:
            raise ConfigError(f"{path:.200}… is nested more than {DEPTH_MAX} deep", hint=_HINT)
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() <= _INT_BITS_PLAIN else {"i": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"f": struct.pack(">d", value).hex()}
        if isinstance(value, torch.Tensor):
            return {"T": self._add(self._of(value), path)}
        if kind in _DICT_TAGS or kind is defaultdict:
            return self._dict(value, path, depth)
        if kind is InOrder:
            sort, self.sort = self.sort, False
            tree = self.encode(value.value, path, depth)
            self.sort = sort
            return tree
        if kind in (list, tuple):
            items = [self.encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return items if kind is list else {"t": items}
        if kind is bytes:
            return {"b": base64.b64encode(value).decode()}
        if kind is torch.Size:
            return {"size": list(value)}
        if isinstance(value, (numpy.generic, numpy.ndarray)):
            return self._numpy(value, path)
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise ConfigError(f"{path} is a {kind.__name__}, which cannot travel in a snapshot", hint=_HINT)

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        self.tensors.append(dense(tensor, path))
        return len(self.tensors) - 1

    def _numpy(self, value: Any, path: str) -> Tree:
        if _NUMPY_DTYPES.get(value.dtype.name) != value.dtype:
            raise ConfigError(f"{path} is a numpy {value.dtype}, which cannot travel in a snapshot", hint=_HINT)
        if isinstance(value, numpy.generic):
            return {"n": [value.dtype.name, value.tobytes().hex()]}
        if type(value) is not numpy.ndarray:
            name = type(value).__name__
            hint = "keep its data and its mask as two arrays" if name == "MaskedArray" else "keep it as a plain array"
            raise ConfigError(f"{path} is a numpy {name}, which cannot travel in a snapshot", hint=hint)
        try:
            # A copy: torch warns about arrays that are read-only, and refuses negative strides.
            return {"a": self._add(torch.from_numpy(numpy.array(value, order="K", copy=True)), path)}
        except TypeError as error:
            raise ConfigError(f"{path} is a numpy array of {value.dtype}", hint=_HINT) from error

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Tree:
        for key in value:
            if type(key) not in (str, int, bool) or (type(key) is int and key.bit_length() > _INT_BITS_PLAIN):
                raise ConfigError(
                    f"{path} has the key {key!r:.80}, a {type(key).__name__}",
                    hint="keys of a state_dict are strings or integers",
                )
        keys: Iterable[Any] = value
        if self.sort:
            keys = sorted(value, key=lambda key: (type(key).__name__, key))
        pairs = [[key, self.encode(value[key], f"{path}[{key!r}]", depth + 1)] for key in keys]
        if not isinstance(value, defaultdict):
            return {_DICT_TAGS[type(value)]: pairs}
        factory = value.default_factory
        if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            raise ConfigError(
                f"{path} is a defaultdict whose default is {factory!r:.80}, which cannot travel in a snapshot",
                hint=f"let state_dict return dict(...), or give it one of {', '.join(_FACTORIES)}",
            )
        return {f"D.{factory.__name__ if factory is not None else ''}": pairs}


def unflatten(tree: Tree, tensors: Sequence[torch.Tensor]) -> Any:
    """The value whose `flatten` gave this; the tensors in it are the very ones passed in."""
    return _decode(tree, _Numbered(tensors), 0)


class _Numbered:
    """Tensors that are taken out by number, each once: a short tree cannot ask for the same large copy many times."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors: list[torch.Tensor | None] = list(tensors)

    def take(self, number: Any) -> torch.Tensor:
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise ProtocolError(f"there is no tensor {number!r:.40}")
        tensor, self._tensors[number] = self._tensors[number], None
        if tensor is None:
            raise ProtocolError(f"tensor {number} is in a state twice")
        return tensor


def _decode(tree: Tree, tensors: _Numbered, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ProtocolError(f"a state nested more than {DEPTH_MAX} deep")
    if tree is None or isinstance(tree, (bool, str, int, float)):
        return tree
    if isinstance(tree, list):
        return [_decode(item, tensors, depth + 1) for item in tree]
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ProtocolError(f"not a tagged value: {tree!r:.80}")
    ((tag, body),) = tree.items()
    try:
        if pairs_of(tree) is not None:
            return _decode_dict(tag, body, tensors, depth)
        if tag == "t" and isinstance(body, list):
            return tuple(_decode(item, tensors, depth + 1) for item in body)
        if tag == "T":
            return tensors.take(body)
        if tag == "a":
            return numpy.array(tensors.take(body).numpy(), order="K", copy=True)
        return _decode_scalar(tag, body)
    except ProtocolError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, struct.error) as error:
        raise ProtocolError(f"not a value of kind {tag!r:.20}: {body!r:.80}") from error


def _decode_dict(tag: str, body: Any, tensors: _Numbered, depth: int) -> Any:
    result: dict[Any, Any] = {"d": dict, "o": OrderedDict, "c": Counter}.get(tag, dict)()
    if tag.startswith("D."):
        result = defaultdict(_FACTORIES[tag[2:]] if tag != "D." else None)
    for key, item in body:
        if type(key) not in (str, int, bool) or key in result:
            raise ProtocolError(f"a dict with the key {key!r:.80}, or with it twice")
        result[key] = _decode(item, tensors, depth + 1)
    return result


def _decode_scalar(tag: str, body: Any) -> Any:
    if tag == "f":
        (number,) = struct.unpack(">d", bytes.fromhex(body))
        return number
    if tag == "i":
        return int(body, 16)
    if tag == "n":
        name, data = body
        dtype = _NUMPY_DTYPES[name]
        raw = bytes.fromhex(data)
        if len(raw) != dtype.itemsize:
            raise ProtocolError(f"not a numpy scalar: {body!r:.80}")
        return numpy.frombuffer(raw, dtype)[0]
    if tag == "b":
        return base64.b64decode(body, validate=True)
    if tag == "dtype":
        return _TORCH_DTYPES[body]
    if tag == "device":
        return torch.device(str(body))
    if tag == "size":
        return torch.Size(body)
    raise ProtocolError(f"not a value of kind {tag!r:.20}: {body!r:.80}")


def pack_tree(tree: Tree) -> bytes:
    """The bytes of a tree that `flatten` returned."""
    data = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > TREE_BYTES_MAX:
        raise ConfigError(
            f"the state without its tensors has {len(data)} bytes, more than {TREE_BYTES_MAX}",
            hint="keep large data in tensors rather than in Python lists",
        )
    return data


def unpack_tree(data: bytes | memoryview) -> Tree:
    """Reads what `pack_tree` wrote, whoever sent it. Bounded: TREE_BYTES_MAX, and the depth at `unflatten`."""
    if len(data) > TREE_BYTES_MAX:
        raise ProtocolError(f"a state tree of {len(data)} bytes, at most {TREE_BYTES_MAX} are read")
    try:
        return json.loads(bytes(data), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a state tree: {bytes(data[:80])!r}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
