"""A client's side of masked buckets as a Flower mod: its update leaves it under masks, and in no other way.

The server asks four times in a round (`privacy/messages.py`). Three times the mod answers by itself; the third time, it
has the app train, takes the update out of its reply, clips it and adds noise if that was asked for, masks it, and sends
that in place of the reply: no metrics, no number of examples. Whoever asks for an update in the open is refused. Owns
the client's journal. Imports no torch: clients may be without.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode

from holdfast.byzantine.privacy.ciphers import Secrets
from holdfast.byzantine.privacy.client import MaskedClient
from holdfast.byzantine.privacy.fixed_point import Residues
from holdfast.byzantine.privacy.messages import Announce, Parcels, Phase, from_server
from holdfast.byzantine.privacy.noise import Noise
from holdfast.byzantine.privacy.terms import CLIENTS_MAX, NUMBERS_MAX, Terms
from holdfast.core.errors import ConfigError, HoldfastError, ProtocolError
from holdfast.integrations.flower.masked_journal import Journal, default_directory, forget_old, opened
from holdfast.integrations.flower.masked_records import RECORD, flat, in_order, record_of, said_in, words_bytes_max

REASON_CHARACTERS_MAX = 400


class _AppFailed(Exception):
    """The app's own reply is an error."""

    def __init__(self, reply: Message) -> None:
        self.reply = reply


class MaskedUpdates:
    """`ClientApp(mods=[MaskedUpdates()])`; mods that change updates, such as ClientMomentum, come after it.

    `colluding`: so many members of its bucket may act together with the server; it takes no part in a round that
    counts on fewer. `noise`: what this client adds. `directory`: where it keeps what it must not forget within a round.
    """

    def __init__(
        self, *, colluding: int = 0, noise: Noise | None = None, directory: str | os.PathLike[str] | None = None
    ) -> None:
        if isinstance(colluding, bool) or not isinstance(colluding, int) or colluding < 0:
            raise ConfigError(f"colluding={colluding!r} is no number of clients", hint="0, 1, 2, …")
        self._colluding = colluding
        self._noise = noise.validate() if noise is not None else None
        self._directory = Path(directory) if directory is not None else default_directory()

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        try:
            said = said_in(message.content, words_bytes_max(CLIENTS_MAX))
            if isinstance(said, str):
                raise ProtocolError(
                    f"the server asks for an update in the open, and this client sends masked ones only: {said}"
                )
            with opened(self._directory, f"{context.run_id}-{context.node_id}") as journal:
                answer = self._answer(said, journal, message, context, call_next)
        except _AppFailed as failed:
            return failed.reply
        except HoldfastError as error:
            reason = error.message[:REASON_CHARACTERS_MAX]
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)
        return Message(RecordDict({RECORD: record_of(answer)}), reply_to=message)

    def numbers(self, update: Any, terms: Terms, members: int) -> Residues:
        """What is masked and sent, of a flat update in float64. Drills send something else."""
        if self._noise is not None:
            update = self._noise.added(update, self._noise.share(terms, members))
        return terms.encoding.encode(update)

    def _answer(
        self, said: bytes, journal: Journal, message: Message, context: Context, call_next: ClientAppCallable
    ) -> bytes:
        heard = from_server(said)
        if isinstance(heard, Announce):
            client = self._begun(heard, journal, str(context.node_id))
        elif journal.kept:
            client = MaskedClient.restored(journal.kept)
        else:
            raise ProtocolError("the server goes on with a masked round of which nothing is known here")
        try:
            if client.phase is Phase.MASK and isinstance(heard, Parcels):
                update = _trained(message, context, call_next)
                client.contribute(self.numbers(update, client.terms, len(client.members)))
            answer = client.hear(said)
        except ProtocolError:
            journal.write(client.round, client.kept())  # it takes no further part
            raise
        journal.write(client.round, b"" if client.phase is Phase.OVER else client.kept())
        return answer

    def _begun(self, announced: Announce, journal: Journal, name: str) -> MaskedClient:
        terms = announced.terms
        if announced.round <= journal.round:
            raise ProtocolError(
                f"the server announced round {announced.round}, and round {journal.round} was announced already"
            )
        if terms.colluding < self._colluding:
            raise ProtocolError(
                f"the server's masks bear {terms.colluding} members that collude with it, and this client asks for "
                f"{self._colluding}"
            )
        if not (1 <= terms.numbers <= NUMBERS_MAX and terms.buckets >= 1 and terms.encoding.is_sound(terms.smallest)):
            raise ProtocolError("the server announced terms on which no sum is right")
        forget_old(self._directory)
        return MaskedClient(name, announced.round, terms, Secrets.draw())


def _trained(message: Message, context: Context, call_next: ClientAppCallable) -> Any:
    """How far the app has moved the model that came, as one flat array."""
    del message.content[RECORD]
    sent = _arrays(message)
    reply = call_next(message, context)
    if reply.has_error():
        raise _AppFailed(reply)
    made = _arrays(reply)
    forms = [{name: (one.shape, one.dtype) for name, one in arrays.items()} for arrays in (sent, made)]
    if forms[0] != forms[1]:
        raise ConfigError("the app's reply is not a model like the one that came", hint="reply with the trained model")
    return flat({name: made[name].astype("f8") - sent[name].astype("f8") for name in in_order(sent)})


def _arrays(message: Message) -> dict[str, Any]:
    """Of the one record of arrays that a message must have."""
    records = list(message.content.array_records.values()) if message.has_content() else []
    if len(records) != 1:
        raise ConfigError(f"there are {len(records)} records of arrays instead of one", hint="one model, and no other")
    return {name: array.numpy() for name, array in records[0].items()}
