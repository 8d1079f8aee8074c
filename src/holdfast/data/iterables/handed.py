"""The batches of an iterable as all workers of a run have them: the step's, and the next one when it has its mean.

One worker reads. What it has read for the next step goes to all with the current step's mean: whoever has the one has
the other. A batch is a message of bytes: its samples in the parts of the shards, and the position after it, which is
all that a successor needs to read on. It is the same on every worker, and it is what belongs into a snapshot.

Invariants: `current` is the batch of the step that is under way or comes next; nothing but `applied` and `load` changes
it, but for the first of a run. Samples are packed and unpacked by whoever made this.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.data.iterables.reader import Position, Read, Reader

BATCH_BYTES_MAX = 24 * 2**20  # they go to every worker in one message
_HEAD = struct.Struct("<I")


@dataclass(frozen=True)
class Batch:
    """One step's samples. `message` says all of it."""

    epoch: int
    number: int  # in its epoch
    sizes: tuple[int, ...]  # samples of each shard; empty: the iterable gives nothing any more
    reader: str
    parts: tuple[memoryview, ...]
    epoch_steps: int  # of the last epoch that is over; 0: not known
    at: Position  # after it; its state is packed
    message: bytes

    def digest(self) -> str:
        """Of the samples, whoever has read them."""
        hasher = xxhash.xxh3_64()
        for part in self.parts:
            hasher.update(part)
        return hasher.hexdigest()

    def weight(self, shard: int) -> float:
        """What a shard's mean counts for in the mean over shards, so that this is the mean over samples."""
        return self.sizes[shard] * len(self.sizes) / sum(self.sizes)


@dataclass(frozen=True)
class Packing:
    """Samples and states as bytes, and back."""

    pack: Callable[..., bytes]
    unpack: Callable[[memoryview], Any]


class HandedBatches:
    def __init__(self, reader: Reader, packing: Packing) -> None:
        self.current: Batch | None = None  # None: nothing was read yet
        self._next: Batch | None = None
        self._reader = reader
        self._packing = packing
        self._read_ahead: tuple[bytes, bytes] | None = None  # after which message which one was read here

    def ensure(self, me: str) -> Batch:
        """The batch of the next step. The first one is read by whoever asks first."""
        if self.current is None:
            self.current = parsed(self._message(self._reader.read(Position()), me, 0))
        return self.current

    def step(self) -> Batch:
        """The batch of the step that is under way. ConfigError if there are no more."""
        assert self.current is not None
        if not self.current.sizes:
            raise ConfigError(
                f"the iterable gives nothing in epoch {self.current.epoch}, and the loop wants more steps",
                hint=f"ask for {self.current.epoch} epochs; or give an object whose __iter__ begins anew, in place of "
                "a generator",
            )
        return self.current

    def ahead(self, me: str) -> str:
        """For the others: the batch after the current one, read once, however often it is asked for."""
        current = self.ensure(me)
        if self._read_ahead is None or self._read_ahead[0] != current.message:
            state = None if current.at.state is None else self._packing.unpack(current.at.state)
            found = self._reader.read(Position(current.at.epoch, current.at.batches, state))
            steps = current.number + 1 if found.epoch > current.epoch else current.epoch_steps
            self._read_ahead = (current.message, self._message(found, me, steps))
        return base64.b64encode(self._read_ahead[1]).decode()

    def told(self, text: str) -> None:
        """What came with the step's mean. ProtocolError if it makes no sense."""
        try:
            self._next = parsed(base64.b64decode(text, validate=True))
        except (ValueError, binascii.Error) as error:
            raise ProtocolError("a peer's next batch makes no sense") from error

    @property
    def ends_epoch(self) -> bool:
        return self.current is not None and self._next is not None and self._next.epoch > self.current.epoch

    def applied(self) -> None:
        assert self._next is not None
        self.current, self._next = self._next, None

    def load(self, message: bytes | None) -> None:
        self.current, self._next = None if message is None else parsed(message), None

    def samples(self, shard: int) -> Any:
        return self._packing.unpack(self.step().parts[shard])

    def warns(self, warn: Callable[[str], None]) -> None:
        """Where it is told what a reading costs samples, or may."""
        self._reader.warn = warn

    def close(self) -> None:
        self._reader.close()

    def _message(self, read: Read, me: str, epoch_steps: int) -> bytes:
        state = b"" if read.after.state is None else self._packing.pack(read.after.state, path="the iterable's state")
        parts = [self._packing.pack(part, path="a sample of the iterable") for part in read.parts]
        about = {
            "epoch": read.epoch,
            "number": read.number,
            "sizes": read.sizes,
            "reader": me,
            "epoch_steps": epoch_steps,
            "after": [read.after.epoch, read.after.batches],
            "state": len(state),
            "parts": [len(part) for part in parts],
        }
        head = json.dumps(about, separators=(",", ":")).encode()
        message = b"".join([_HEAD.pack(len(head)), head, state, *parts])
        if len(message) > BATCH_BYTES_MAX:
            raise ConfigError(
                f"a batch of the iterable has {len(message) >> 20} MiB with its position, and one worker hands at most "
                f"{BATCH_BYTES_MAX >> 20} MiB to all others in a step",
                hint="let the iterable give what is small (compressed images, token numbers) and decode in collate_fn; "
                "or use a smaller batch, or holdfast.data.Stream over the files",
            )
        return message


def parsed(message: bytes) -> Batch:
    """ProtocolError if no worker has written that."""
    try:
        (length,) = _HEAD.unpack_from(message)
        about = json.loads(message[_HEAD.size : _HEAD.size + length])
        epoch, batches = map(int, about["after"])
        sizes = tuple(map(int, about["sizes"]))
        lengths = [int(about["state"]), *map(int, about["parts"])]
        pieces = _pieces(memoryview(message)[_HEAD.size + length :], lengths)
        if len(pieces) != len(sizes) + 1 or min((*sizes, 1)) < 1:
            raise ValueError(f"{len(pieces) - 1} parts of {len(sizes)}")
        at = Position(epoch, batches, pieces[0] if lengths[0] else None)
        steps = int(about["epoch_steps"])
        place = int(about["epoch"]), int(about["number"])
        return Batch(*place, sizes, str(about["reader"]), tuple(pieces[1:]), steps, at, message)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ProtocolError("a batch that a peer has read makes no sense") from error


def _pieces(data: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    if min(lengths) < 0 or sum(lengths) != len(data):
        raise ValueError("lengths that do not fit")
    found, start = [], 0
    for length in lengths:
        found.append(data[start : start + length])
        start += length
    return found
