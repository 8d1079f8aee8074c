"""A run's claim to its place for checkpoints: that it can write there, and that nobody else does.

At the start, one worker speaks for all of them: the run's id is in the ledger, so a restart is the same run, with any
workers. Later, whoever commits a checkpoint looks whether the place is still the run's.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.format.owner import Owner, create_owner, newest_owner, probe
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError, StorageError, StorageRefused, StorageUnavailable
from holdfast.placement.proc import find_workers, process_started

PROBE_S = 10.0  # a place that can be listed and not written to, at the start: it may be busy for a moment
CREATES_MAX = 100  # somebody else was faster each time


def lives(owner: Owner) -> bool:
    """Whether it is known to: on this host, by its processes."""
    if owner.pid == os.getpid() and not owner.directory:
        return False  # a notebook's cell that joins again goes on with its own
    if owner.host != socket.gethostname():
        return False
    if owner.directory:
        return bool(find_workers(Path(owner.directory)))
    return bool(owner.pid) and process_started(owner.pid) == owner.pid_started


@dataclass(frozen=True)
class ClaimOutcome:
    """What the start of a run has found in its place."""

    owned: bool  # by this run, or by nobody any more: what is there may be gone on from
    trouble: StorageError | None  # it cannot be written to now


class Claim:
    def __init__(self, me: Owner, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._me = me
        self._clock = clock
        self._tried_since: float | None = None

    def look(self, storage: Storage) -> ClaimOutcome:
        """Before anything is read. ConfigError if the place is another's, StorageRefused if it takes no writes."""
        _, owner = newest_owner(storage)
        if owner is not None:
            self._refuse_anothers(owner, storage.uri)
        trouble = None
        try:
            probe(storage)
            self._tried_since = None
        except StorageUnavailable as error:
            trouble = error
        return ClaimOutcome(owner is not None and (owner.id == self._me.id or owner.released), trouble)

    def begin_without_writing(self, trouble: StorageError) -> None:
        """There is no checkpoint, and none can be written now. Raises `trouble`; after a while, as a refusal."""
        now = self._clock()
        self._tried_since = now if self._tried_since is None else self._tried_since
        if now - self._tried_since >= PROBE_S:
            raise StorageRefused(trouble.message, hint=trouble.hint)
        raise trouble

    def take(self, storage: Storage) -> None:
        """The place is this run's from now on; ConfigError if another was faster."""
        for _ in range(CREATES_MAX):
            number, owner = newest_owner(storage)
            if owner is not None:
                if owner.id == self._me.id and not owner.released:
                    return
                self._refuse_anothers(owner, storage.uri)
            if create_owner(storage, number + 1, self._me):
                return
        raise StorageUnavailable(f"{storage.uri} is wanted by several runs at once")

    def check(self, storage: Storage) -> None:
        """Before a commit. StorageRefused if another run has taken the place meanwhile."""
        _, owner = newest_owner(storage)
        if owner is None:
            self.take(storage)
        elif owner.id != self._me.id:
            hint = "give each run a place of its own"
            raise StorageRefused(f"{storage.uri} now belongs to {owner.words}, which has taken it over", hint=hint)

    def _refuse_anothers(self, owner: Owner, uri: str) -> None:
        if owner.id == self._me.id or owner.released:
            return
        mine, release = self._me.run, f"`holdfast checkpoint release {uri}` gives it free"
        if owner.run and owner.run != mine:
            raise ConfigError(
                f"{uri} belongs to {owner.words}, and this is {mine or 'a run without a name'}",
                hint=f"give this run a place of its own, or go on with that one: --run {owner.run}; {release}",
            )
        if lives(owner):
            raise ConfigError(
                f"{uri} belongs to {owner.words}, which is training now",
                hint="give this run a place of its own, or end that one first",
            )
