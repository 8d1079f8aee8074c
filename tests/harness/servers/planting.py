"""Faults that are planted in servers, to see that the accounts and histories find them; and ends at a chosen step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.log.machine import ReplicaMachine
from holdfast.log.messages import Effect, ReadAsked, Serve
from holdfast.servers import replica
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


def end_at(order: Path) -> None:
    """`order` names a kind of effect: before this process performs the next one of it, it ends as by kill -9."""
    perform = replica._PERFORM

    def before(kind: str, act: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def wrapped(self: Any, effect: Any) -> None:
            if order.exists() and order.read_text() == kind:
                order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            act(self, effect)

        return wrapped

    for kind, act in list(perform.items()):
        perform[kind] = before(kind.__name__, act)
