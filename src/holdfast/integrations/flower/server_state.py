"""The server's state in Holdfast's checkpoints: a round is whole in storage, or it is not there.

A checkpoint of round N has the model after it, the clients' reputations, the combiner's state and every metric so far.
Parts come first, and the manifest, which is created only where there is none, is the commit; the newest that verifies
is taken. Of two server apps on one place the later one has it: the owner's record has a number, the newcomer's is
higher, and the other one finds that before its next commit and stops. Owned by the server app's only thread.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.supercore import log

from holdfast.checkpoint.format.owner import Owner, create_owner, newest_owner, probe
from holdfast.checkpoint.library import prune
from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid
from holdfast.checkpoint.saving.retention import Keep, delete_checkpoint
from holdfast.checkpoint.saving.writing import write_state
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError, ProtocolError, StorageRefused, StorageUnavailable
from holdfast.state.codec import flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.snapshot import Snapshot

KIND = "flower server"
TRIES = 10  # to become the owner, where others want that too
Metrics = dict[int, dict[str, float]]


@dataclass
class ServerState:
    """After round `number`; `left_out` are the rounds that came to nothing."""

    number: int
    model: dict[str, torch.Tensor]
    combiner: str
    reputation: dict[str, Any] = field(default_factory=dict)
    combining: dict[str, Any] = field(default_factory=dict)
    train: Metrics = field(default_factory=dict)
    evaluate: Metrics = field(default_factory=dict)
    server: Metrics = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)

    def tree(self) -> dict[str, Any]:
        return {"kind": KIND, **vars(self)}

    @classmethod
    def of(cls, tree: Any, uri: str) -> ServerState:
        if not isinstance(tree, dict) or tree.get("kind") != KIND or set(tree) != {"kind", *cls.__dataclass_fields__}:
            raise ConfigError(
                f"the checkpoints in {uri} are not those of a Flower server",
                hint="choose an empty place, or that of the run",
            )
        state = cls(**{name: tree[name] for name in cls.__dataclass_fields__})
        if not isinstance(state.number, int) or state.number < 0 or not isinstance(state.model, dict):
            raise ProtocolError(f"not the state of a server: round {state.number!r:.40}")
        return state


class StateKeeper:
    """Where one run of the server app keeps its state."""

    def __init__(self, storage: Storage, *, run: str, keep: Keep, now_s: Callable[[], float] = time.time) -> None:
        self._storage, self._run, self._keep, self._now_s = storage, run, keep, now_s
        self._number = 0
        self._id = secrets.token_hex(16)
        self._unsaved = 0  # rounds that storage did not take

    def claim(self) -> None:
        """From now on the place is this process's. ConfigError if another run has it."""
        probe(self._storage)
        for _ in range(TRIES):
            number, owner = newest_owner(self._storage)
            if owner is not None and owner.run != self._run and not owner.released:
                raise ConfigError(
                    f"{self._storage.uri} is the place of {owner.words}, and this run is {self._run!r}",
                    hint="choose another place for checkpoints, or give that run's name",
                )
            mine = Owner(run=self._run, id=self._id, host=socket.gethostname(), created_s=self._now_s())
            if create_owner(self._storage, number + 1, mine):
                self._number = number + 1
                return
        raise StorageUnavailable(f"others take {self._storage.uri} over and over", hint="start one server app of a run")

    def newest(self) -> ServerState | None:
        found = newest_valid(self._storage, warn=lambda sentence: log(WARNING, sentence))
        if found is None:
            return None
        _, snapshot = found
        for entry in list_checkpoints(self._storage):
            if entry.step > snapshot.step:  # of no use, and in the way of that round's next one
                log(WARNING, "what is left of the checkpoint of round %d is deleted", entry.step)
                delete_checkpoint(self._storage, entry.step)
        return ServerState.of(unflatten(unpack_tree(snapshot.tree), snapshot.tensors), self._storage.uri)

    def save(self, state: ServerState, *, must: bool = False) -> bool:
        """Whole and durable when this returns True. Storage that is away is told of, unless it `must` be there now."""
        try:
            self._check_owner()
            tree, tensors = flatten(state.tree())
            snapshot = Snapshot(state.number, pack_tree(tree), tuple(tensors))
            measured = state.server.get(state.number, {})
            write_state(self._storage, snapshot, run=self._run, metrics=measured, created_s=self._now_s())
        except StorageUnavailable as error:
            if must:
                raise
            self._unsaved += 1
            said = "round %d is not in storage, and is lost if this server ends before one is: %s"
            log(WARNING, said, state.number, error.message)
            return False
        if self._unsaved:
            log(INFO, "storage works again: round %d is saved, %d before it were not", state.number, self._unsaved)
            self._unsaved = 0
        try:
            prune(self._storage, self._keep)
        except StorageUnavailable as error:
            log(WARNING, "old checkpoints stay for now: %s", error.message)
        return True

    def _check_owner(self) -> None:
        number, owner = newest_owner(self._storage)
        if number != self._number or owner is None or owner.id != self._id:
            raise StorageRefused(
                f"another server app has taken over {self._storage.uri}",
                hint="this one is superseded and ends; the run goes on there",
            )

    def close(self) -> None:
        self._storage.close()
