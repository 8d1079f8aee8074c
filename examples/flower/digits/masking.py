"""Masked buckets, if the run's configuration has some: the server then learns sums of clients' updates and no more.

Needs the extra `privacy` of Holdfast. `attack` in a node's config may be `shout` or `babble` here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from flwr.app import Context, Message, RecordDict

from holdfast.byzantine.privacy.noise import Noise
from holdfast.integrations.flower import MaskedBuckets, MaskedUpdates
from holdfast.integrations.flower.masked_records import RECORD, record_of


class Shouting(MaskedUpdates):
    """The opposite of its update, as far as the sum of its bucket has room for."""

    def numbers(self, update, terms, members):
        room = replace(terms.encoding, limit_units=terms.encoding.limit_units * members)
        return room.encode(-room.limit * np.sign(update))


class Babbling(MaskedUpdates):
    """Bytes that mean nothing in place of its masked numbers."""

    def __call__(self, message: Message, context: Context, call_next) -> Message:
        is_for_numbers = "arrays" in message.content
        reply = super().__call__(message, context, call_next)
        if not is_for_numbers or reply.has_error():
            return reply
        return Message(RecordDict({RECORD: record_of(b"no such message")}), reply_to=message)


MODS = {"shout": Shouting, "babble": Babbling}


def mod(run, attack: str) -> MaskedUpdates:
    """What a client puts between the server and its training."""
    return MODS.get(attack, MaskedUpdates)(noise=noise(run))


def buckets(run) -> MaskedBuckets:
    """What the server does with the sums."""
    wanted = {"f": int(run["f"]), "buckets": int(run["buckets"]), "limit": float(run["limit"])}
    return MaskedBuckets(str(run["aggregator"]), **wanted, noise=noise(run))


def noise(run) -> Noise | None:
    clip = float(run["clip"])
    return Noise(multiplier=float(run["noise"]), clip=clip) if clip else None
