"""Client momentum as a Flower mod: a client sends an average of its updates over rounds instead of each one.

Noise that is averaged away is noise that a hostile client cannot hide in, and attacks that add up over rounds show
(Karimireddy et al. 2021; Farhadkhani et al. 2022). m = beta · m + (1 - beta) · update, beginning with the first one, as
in `byzantine.WorkerMomentum`; m is in `Context.state`, where Flower keeps what belongs to a client, and never leaves
it. Imports no torch: clients may be without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable

from holdfast.core.errors import ConfigError

KEPT = "holdfast.momentum"  # the record in Context.state


class ClientMomentum:
    """`ClientApp(mods=[ClientMomentum(0.9)])`, or `@app.train(mods=[...])`."""

    def __init__(self, beta: float = 0.9) -> None:
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"beta={beta!r} is not at least 0 and below 1", hint="0.9 is usual, 0 is no momentum")
        self.beta = beta

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Errors and replies without a model of the kind that came go through as they are: the server judges them."""
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        came = _only(message)
        sent = None if came is None else {name: array.numpy() for name, array in came[1].items()}
        reply = call_next(message, context)
        made = None if reply.has_error() else _only(reply)
        if sent is None or made is None or {*made[1]} != {*sent}:
            return reply
        name, record = made
        arrays = {key: array.numpy() for key, array in record.items()}
        if any(arrays[key].shape != sent[key].shape or arrays[key].dtype != sent[key].dtype for key in sent):
            return reply
        kept = self._kept(context, sent)
        averaged = {key: self._averaged(key, arrays[key], sent[key], kept) for key in sent if _is_real(sent[key])}
        context.state[KEPT] = ArrayRecord({key: Array(value) for key, value in averaged.items()})
        reply.content[name] = ArrayRecord(
            {key: Array(np.asarray(sent[key] + averaged[key]) if key in averaged else arrays[key]) for key in record}
        )
        return reply

    def _averaged(self, key: str, made: Any, sent: Any, kept: dict[str, Any]) -> Any:
        update = made - sent
        return np.asarray(update if key not in kept else self.beta * kept[key] + (1.0 - self.beta) * update, made.dtype)

    def _kept(self, context: Context, sent: dict[str, Any]) -> dict[str, Any]:
        """The momentum so far; nothing where another model was trained before."""
        record = context.state.array_records.get(KEPT)
        kept = {} if record is None else {key: array.numpy() for key, array in record.items()}
        real = {key: (array.shape, array.dtype) for key, array in sent.items() if _is_real(array)}
        return kept if {key: (array.shape, array.dtype) for key, array in kept.items()} == real else {}


def _only(message: Message) -> tuple[str, ArrayRecord] | None:
    """The one record of arrays that a message has."""
    if not message.has_content() or len(message.content.array_records) != 1:
        return None
    return next(iter(message.content.array_records.items()))


def _is_real(array: Any) -> bool:
    return bool(array.dtype.kind == "f")
