"""The way back from hosts' memory: whom to ask what their hosts keep, and when what they have is enough.

Belongs to the thread of the user's loop, which has nothing else to do when no worker has the training's state.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.checkpoint.host_memory.gathering import GatheredStorage, MemorySource, whole_steps
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.core.words import Registration, host_of
from holdfast.engine.transfer.memory_desk import MEMORY, RemoteMemory
from holdfast.net.greeting import NO_NUMBER, Hello
from holdfast.net.wires import Wires

PATIENCE_S = 15.0  # for workers of hosts whose agents live: as long as a script takes to start


class Recaller:
    """`who` says who is registered, and on which hosts agents live."""

    def __init__(
        self,
        root: Path,
        *,
        me: str,
        wires: Wires,
        who: Callable[[], tuple[Mapping[str, Registration], frozenset[str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._me = me
        self._wires = wires
        self._who = who
        self._clock = clock
        self._until: float | None = None

    def gather(self) -> GatheredStorage:
        """What all hosts keep that have a worker now, this one's first. The caller closes it."""
        others: dict[str, Registration] = {}
        for worker, registration in sorted(self._who()[0].items()):
            if host_of(worker) != host_of(self._me):
                others.setdefault(host_of(worker), registration)
        mine = MemorySource(host_of(self._me) or "this host", LocalStorage(self._root))
        remote = [MemorySource(host, RemoteMemory(host, self._dialler(other))) for host, other in others.items()]
        if remote:
            with ThreadPoolExecutor(len(remote), thread_name_prefix="holdfast-recall") as pool:
                # One that hangs costs the others nothing: the connection is there, or it is not, in CONNECT_S.
                remote = [source for source, there in zip(remote, pool.map(_answers, remote), strict=True) if there]
        return GatheredStorage([mine, *remote])

    def _dialler(self, registration: Registration) -> Callable[[], socket.socket]:
        return lambda: self._wires.ask(registration, Hello(MEMORY, NO_NUMBER, self._me))

    def missing(self, storage: GatheredStorage, *, at_least: int) -> list[str]:
        """Hosts worth waiting for: their agents live, their workers are not here, and without them it is too little.

        Empty when what there is will do, when nobody is missing, or when all of them were waited for long enough.
        """
        steps = whole_steps(storage)
        if steps and steps[0] >= max(at_least, storage.newest_seen()):
            self._until = None
            return []
        registrations, hosts = self._who()
        absent = sorted(hosts - {host_of(worker) for worker in registrations})
        if not absent:
            return []
        now = self._clock()
        if self._until is None:
            self._until = now + PATIENCE_S
        return absent if now < self._until else []


def _answers(source: MemorySource) -> bool:
    assert isinstance(source.storage, RemoteMemory)
    return source.storage.is_there()
