"""A model as Flower sends it (an ArrayRecord of serialized arrays) and as the rules take it (tensors by name).

What a client sent is read here, and nothing of it is believed: an array is taken only if its header, its bytes and what
the record says of it are those of the model, and no memory is made before that is known. Owns nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from holdfast.core.errors import ConfigError
from holdfast.state.digest import digest_tensors

State: TypeAlias = "dict[str, torch.Tensor]"
NUMPY = "numpy.ndarray"  # how Flower calls its way to serialize
HEADER_BYTES_MAX = 1024  # of an array of numbers; Flower's own takes 128
NAMES_MAX = 100_000
_KINDS = {"f": (2, 4, 8), "i": (1, 2, 4, 8), "u": (1, 2, 4)}  # of dtypes that rules can combine, by size


class Unfit(Exception):
    """What a client sent is not what was asked for; `reason` says what is wrong with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Model:
    """The model of a round, and what an update of it looks like."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.specs = {name: Spec(tuple(one.shape), one.numpy().dtype) for name, one in state.items()}

    @classmethod
    def of(cls, record: ArrayRecord) -> Model:
        """That of the server's own app; ConfigError for what rules cannot combine."""
        if not 1 <= len(record) <= NAMES_MAX:
            raise ConfigError(f"a model of {len(record)} arrays cannot be trained", hint="give the model's state_dict")
        state = {}
        for name, array in record.items():
            found = array.numpy()
            if found.dtype.itemsize not in _KINDS.get(found.dtype.kind, ()) or not found.dtype.isnative:
                raise ConfigError(
                    f"{name!r} of the model is of {found.dtype}, which no rule can combine",
                    hint="send floating-point and whole numbers; leave masks and the like with the clients",
                )
            if found.dtype.kind == "f" and not np.isfinite(found).all():
                raise ConfigError(f"{name!r} of the model is not finite", hint="look at how the model is initialised")
            state[name] = torch.from_numpy(np.array(found))
        return cls(state)

    def record(self) -> ArrayRecord:
        return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in self.state.items()})

    def digest(self) -> str:
        return digest_tensors(self.state.items())

    def difference(self, record: ArrayRecord) -> State:
        """How far a client's model is from this one: an update. Unfit if it is not a model like this one."""
        for name in record:
            if name not in self.specs:
                raise Unfit(f"it has an array {name!r:.80} that the model does not have")
        found = {}
        for name, spec in self.specs.items():
            if name not in record:
                raise Unfit(f"it has no array {name!r:.80}")
            theirs = torch.from_numpy(read_array(record[name], spec, name))
            found[name] = theirs.to(_working(theirs.dtype)) - self.state[name].to(_working(theirs.dtype))
        return found

    def moved(self, update: Mapping[str, torch.Tensor], factor: float = 1.0) -> Model:
        """This model and so much of an update. Whole numbers stay within what their dtype holds."""
        state = {}
        for name, tensor in self.state.items():
            step = update[name] if factor == 1.0 else update[name] * factor
            if tensor.dtype.is_floating_point:
                moved = tensor.to(step.dtype) + step
            else:
                bounds = torch.iinfo(tensor.dtype)
                moved = (tensor.to(torch.int64) + step.round().to(torch.int64)).clamp(bounds.min, bounds.max)
            state[name] = moved.to(tensor.dtype).contiguous()
        return Model(state)


def _working(dtype: torch.dtype) -> torch.dtype:
    """In what differences are taken: half precision and small whole numbers would overflow."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def read_array(array: Array, spec: Spec, name: str) -> np.ndarray[Any, Any]:
    """A client's array, if it is just like `spec` and finite; Unfit otherwise."""
    if array.stype != NUMPY:
        raise Unfit(f"its {name!r:.80} is serialized as {array.stype!r:.40}")
    if array.dtype != str(spec.dtype) or tuple(array.shape) != spec.shape:
        claimed = f"{array.dtype!s:.20} {list(array.shape)!s:.60}"
        raise Unfit(f"its {name!r:.80} is {claimed} instead of {spec}")
    if not spec.nbytes < len(array.data) <= spec.nbytes + HEADER_BYTES_MAX:
        raise Unfit(f"its {name!r:.80} has {len(array.data)} bytes, and {spec} takes {spec.nbytes}")
    start, by_columns = _header(array.data, spec, name)
    flat = np.frombuffer(array.data, dtype=spec.dtype, offset=start)
    found = flat.reshape(spec.shape[::-1]).T if by_columns else flat.reshape(spec.shape)
    if spec.dtype.kind == "f" and not np.isfinite(flat).all():
        raise Unfit(f"its {name!r:.80} is not finite")
    return np.array(found, order="C")  # the reply's bytes are read-only, and may be let go


def _header(data: bytes, spec: Spec, name: str) -> tuple[int, bool]:
    """Where an npy file's numbers begin, and whether they are stored by columns."""
    stream = io.BytesIO(data[:HEADER_BYTES_MAX])
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, by_columns, dtype = read(stream, max_header_size=HEADER_BYTES_MAX)
    except Exception as error:  # whatever bytes of a stranger's do to that parser is the stranger's fault
        raise Unfit(f"the bytes of its {name!r:.80} are no array: {error!s:.80}") from error
    start = stream.tell()
    if shape != spec.shape or dtype != spec.dtype or len(data) - start != spec.nbytes:
        raise Unfit(f"the bytes of its {name!r:.80} are {dtype!s:.20} {list(shape)!s:.60} instead of {spec}")
    return start, bool(by_columns)
