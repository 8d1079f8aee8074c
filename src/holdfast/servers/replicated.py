"""What a replicated log carries: a port. The parameters of a slice are one kind of it, a shard of a table another.

Each replica has one such state and gives it the same updates in the same order. So `apply` must be a function of the
state and the update alone: no clock, no randomness, nothing of this machine. The replica's thread owns the state.

An update is a `Payload`: a small head of plain values, and bytes, which were read from the network into memory of their
own and are not changed. What kind of state a slice has, its name says: `parameters/3`, `table/users/0`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Head: TypeAlias = Mapping[str, Any]  # as JSON has it
HEAD_BYTES_MAX = 4 * 1024 * 1024
INITIAL = "initial"  # the kind of an update that is what a slice begins with


@dataclass(frozen=True)
class Payload:
    head: Head
    body: memoryview  # contiguous, of bytes

    @property
    def nbytes(self) -> int:
        return self.body.nbytes


@dataclass(frozen=True)
class Author:
    """Whose update it is."""

    worker: str
    incarnation: int
    sequence: int


@dataclass(frozen=True)
class Answer:
    """To a query. The views are of the live state: they are valid until the next call of the state."""

    head: Head
    views: Sequence[memoryview] = ()

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)


class ReplicatedState(Protocol):
    @property
    def version(self) -> int:
        """So many updates are applied; those that changed nothing may be left out. It never falls."""

    def check(self, author: Author, payload: Payload) -> None:
        """Asked on the primary before an update enters the log.

        ProtocolError for what does not fit, DivergedError for what is not finite. Nothing is changed.
        """

    def apply(self, author: Author, payload: Payload) -> None:
        """An update that was checked, in log order. Must not fail for what another replica can apply."""

    def forget(self, worker: str, incarnation: int) -> None:
        """This worker is gone: in log order, as updates are."""

    def read(self, query: Head) -> Answer | None:
        """None: not yet; it is asked again after the next update. ProtocolError for a query that makes no sense."""

    def capture(self) -> Answer:
        """Everything, for `restore` on another replica."""

    def restore(self, payload: Payload) -> None:
        """What `capture` gave. ProtocolError if it cannot be."""

    def digest(self) -> str:
        """Two replicas that have applied the same updates have the same."""
