"""Updates and models as bytes, and what a round's updates come to. Every server computes the same bits.

An update is the change of each of the model's tensors. The rules (byzantine/rules) give the same bits for the same
updates in the same order, which the agreed set fixes. Updates that do not have the model's form, or that no rule
can use, must not stop the round: the model then stays as it is, on every server alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from holdfast.byzantine.agreement.canonical import pack, unpack
from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import ConfigError, ProtocolError, TooFewUpdates

State = Mapping[str, torch.Tensor]
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def encode_state(state: State) -> bytes:
    """ConfigError for what is no floating-point tensor."""
    for name, tensor in state.items():
        if str(tensor.dtype) not in _DTYPES:
            raise ConfigError(
                f"{name!r} is {tensor.dtype}, and updates are floating-point numbers",
                hint="leave counters and the like out; every client has them itself",
            )
    return pack(
        tuple((name, str(state[name].dtype), tuple(state[name].shape), _raw(state[name])) for name in sorted(state))
    )


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def decode_state(content: bytes) -> dict[str, torch.Tensor]:
    """ProtocolError for anything but what `encode_state` makes."""
    entries = unpack(content)
    if not isinstance(entries, tuple) or not all(isinstance(one, tuple) and len(one) == 4 for one in entries):
        raise ProtocolError("bytes that are not tensors")
    state: dict[str, torch.Tensor] = {}
    for name, word, shape, raw in entries:
        dtype = _DTYPES.get(word) if isinstance(word, str) else None
        whole = isinstance(shape, tuple) and all(type(one) is int for one in shape)
        if dtype is None or not whole or not isinstance(name, str) or not isinstance(raw, bytes):
            raise ProtocolError("bytes that are not tensors")
        count = 1
        for one in shape:
            count *= one
        if len(raw) != count * dtype.itemsize:
            raise ProtocolError(f"{name!r:.40} has {len(raw)} bytes, which are not {count} numbers")
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        state[name] = flat.reshape(shape)
    if list(state) != sorted(state) or len(state) != len(entries):
        raise ProtocolError("tensors that are not in order")
    return state


def _drawn(parent: bytes, updates: Sequence[bytes]) -> int:
    """What a rule draws by chance in a round follows from what was agreed on: nobody knows it who has yet to send."""
    drawn = hashlib.sha256(hashlib.sha256(parent).digest())
    for one in updates:
        drawn.update(hashlib.sha256(one).digest())
    return int.from_bytes(drawn.digest()[:8], "big")


class Aggregation:
    """`form` is any model of the federation: all have the same names, shapes and dtypes."""

    def __init__(self, rule: str, hostile: int, form: bytes) -> None:
        self._rule = parse(rule)
        self._hostile = hostile
        self._form = {name: (one.dtype, tuple(one.shape)) for name, one in decode_state(form).items()}

    def fits(self, content: bytes) -> str:
        """Why these bytes are no update of this model; nothing if they are."""
        try:
            state = decode_state(content)
        except ProtocolError as error:
            return f"the update is not one of tensors: {error}"
        odd = sorted(set(state) ^ set(self._form))
        if odd:
            return f"the update is of another model than the federation's: {odd[0]!r:.60} is in one of them only"
        for name, one in state.items():
            if (one.dtype, tuple(one.shape)) != self._form[name]:
                dtype, shape = self._form[name]
                return (
                    f"the update is of another model than the federation's: {name!r:.60} is {one.dtype} of "
                    f"{tuple(one.shape)}, and there it is {dtype} of {shape}"
                )
        return ""

    def combine(self, parent: bytes, updates: Sequence[bytes]) -> tuple[bytes, str]:
        """The next model, and why it is the one before if it is."""
        fitting = [decode_state(one) for one in updates if not self.fits(one)]
        hostile = self._rule.bearing(len(fitting), self._hostile, len(updates) - len(fitting))
        try:
            if not fitting:
                raise TooFewUpdates("no update has the model's form")
            change = self._rule.in_round(_drawn(parent, updates)).aggregate(fitting, hostile).value
        except (TooFewUpdates, ConfigError) as error:
            return parent, error.message
        assert isinstance(change, dict)
        model = decode_state(parent)
        return encode_state({name: model[name] + change[name] for name in model}), ""
