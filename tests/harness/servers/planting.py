"""Faults that are planted in servers, so that it can be seen that the accounts and the check of histories find them."""

from __future__ import annotations

from holdfast.log.machine import ReplicaMachine
from holdfast.log.messages import Effect, ReadAsked, Serve
from holdfast.servers.parameter_slice import ParameterSlice
from holdfast.servers.replicated import Author, Payload

EVERY = 7  # updates


def plant(what: str) -> None:
    """In this process, for good; empty: nothing."""
    if what:
        {"lost update": _lose, "doubled update": _double, "stale read": _serve_stale_reads}[what]()


def _repeat(times: int) -> None:
    """Every seventh update is applied so many times."""
    apply = ParameterSlice.apply

    def wrong(self: ParameterSlice, author: Author, payload: Payload) -> None:
        is_chosen = payload.head["kind"] == "update" and author.sequence % EVERY == 0
        for _ in range(times if is_chosen else 1):
            apply(self, author, payload)

    ParameterSlice.apply = wrong  # type: ignore[method-assign]


def _lose() -> None:
    _repeat(0)


def _double() -> None:
    _repeat(2)


def _serve_stale_reads() -> None:
    """Whoever is asked says that what it has is the newest, lease or no lease."""

    def wrong(self: ReplicaMachine, event: ReadAsked, now: float) -> list[Effect]:
        return [Serve(event.client, self.copy.committed, fresh=True)]

    ReplicaMachine._read = wrong  # type: ignore[method-assign]
