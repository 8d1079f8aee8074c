"""The exactness training with checkpoints of many small parts, which says where each save and each restore is.

    holdfast run --checkpoint URI ... staged_training.py SOCKET --steps 100 ...

Every stage is announced to a datagram socket as it begins, and lingers for a moment: whoever wants to kill a worker
between two parts, or between the last part and the manifest, hears in time that it is there. Nothing else is changed;
what reaches storage is what the training's own calls bring there.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format import parts
from holdfast.checkpoint.format.manifest import MANIFEST, step_of
from holdfast.checkpoint.saving import saver, share
from holdfast.checkpoint.storage import opening
from holdfast.checkpoint.storage.port import Storage, Stored
from holdfast.engine.transfer import checkpointing, clearing
from holdfast.placement.environment import WORKER

PART_BYTES = 1 << 19
LINGER_S = 0.003
BEGUN, COPYING, WRITING, PARTS_WRITTEN = "just begun", "copying", "writing a part", "parts written, no manifest"
COMMITTED, DELETING, RESTORING = "just committed", "deleting an old one", "restoring"
SAVING = (BEGUN, COPYING, WRITING, PARTS_WRITTEN, COMMITTED, DELETING)


def cut_small() -> None:
    """Parts of half a MiB: whoever reads what such a training wrote must lay it out in the same way."""
    parts.PART_BYTES = parts.PIECE_BYTES_MAX = PART_BYTES


@dataclass(frozen=True)
class Announced:
    worker: str
    stage: str
    step: int

    @classmethod
    def decode(cls, data: bytes) -> Announced:
        worker, stage, step = data.decode().split("\t")
        return cls(worker, stage, int(step))


class Announcer:
    """Used by the training's thread and by those of its saver. Nobody listening is no error."""

    def __init__(self, address: str, worker: str) -> None:
        self._address = address
        self._worker = worker
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def say(self, stage: str, step: int | None) -> None:
        try:
            self._socket.sendto(f"{self._worker}\t{stage}\t{-1 if step is None else step}".encode(), self._address)
        except OSError:
            return
        time.sleep(LINGER_S)


class AnnouncingStorage:
    def __init__(self, inner: Storage, announcer: Announcer) -> None:
        self._inner = inner
        self._announcer = announcer
        self.uri = inner.uri
        self.writers = inner.writers
        self.block_bytes = inner.block_bytes

    def write(self, name: str, data: memoryview) -> None:
        self._announcer.say(WRITING, step_of(name))
        self._inner.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._announcer.say(PARTS_WRITTEN, step_of(name))
        created = self._inner.create(name, data)
        if created and name.endswith(MANIFEST):
            self._announcer.say(COMMITTED, step_of(name))
        return created

    def read(self, name: str, bytes_max: int) -> bytes:
        return self._inner.read(name, bytes_max)

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        self._announcer.say(RESTORING, step_of(name))
        self._inner.read_into(name, memory, offset)

    def list(self, prefix: str = "") -> list[Stored]:
        return self._inner.list(prefix)

    def delete(self, name: str) -> None:
        self._announcer.say(DELETING, step_of(name))
        self._inner.delete(name)

    def close(self) -> None:
        self._inner.close()


def announce_stages(announcer: Announcer) -> None:
    """Put the announcements in place, for the rest of this process's life."""
    fill, begin = parts.fill, saver.Saver.begin

    def announced_fill(part: parts.Part, image: Any, tensors: Any) -> None:
        announcer.say(COPYING, part.step)
        fill(part, image, tensors)

    def announced_begin(self: saver.Saver, save: share.Share) -> bool:
        begun = begin(self, save)
        if begun:
            announcer.say(BEGUN, save.step)
        return begun

    def open_announcing(uri: str) -> Storage:
        return AnnouncingStorage(opening.open_storage(uri), announcer)

    share.fill = announced_fill  # type: ignore[attr-defined]
    saver.Saver.begin = announced_begin  # type: ignore[method-assign]
    checkpointing.open_storage = open_announcing  # type: ignore[attr-defined]
    clearing.open_storage = open_announcing  # type: ignore[attr-defined]


def main() -> None:
    cut_small()
    announce_stages(Announcer(sys.argv.pop(1), os.environ.get(WORKER, "")))
    from tests.trainings import exactness_training

    exactness_training.main()


if __name__ == "__main__":
    main()
