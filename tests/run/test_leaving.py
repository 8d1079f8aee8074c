"""What a worker that leaves in order does, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from holdfast.core.errors import Stopped, Unsaved
from holdfast.engine.lines import Lines
from holdfast.engine.recovery.auditing import Audits
from holdfast.engine.recovery.leaving import Leaving
from holdfast.engine.recovery.rewinding import Rewinding
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine


@dataclass
class Diary:
    """Stands for the machine, the ledger's feed, the events and the audits, and writes down what is asked of them."""

    done: list[str] = field(default_factory=list)
    why: str = ""  # the state is not saved
    next: int = 7

    @property
    def feed(self) -> Diary:
        return self

    @property
    def events(self) -> Diary:
        return self

    def write(self, kind: str, **facts: Any) -> None:
        self.done.append(kind)

    def deregister(self) -> None:
        self.done.append("deregister")

    def end(self, end: m.End) -> None: ...

    def save_now(self, step: int, *, save: bool) -> str:
        self.done.append("save")
        return self.why

    def leaving(self) -> Leaving:
        return Leaving(
            cast(Machine, self),
            cast(Lines, self),
            checkpoints=NoCheckpoints(),
            audits=cast(Audits, self),
            rewinding=cast(Rewinding, self),
            save_now=self.save_now,
            settle=lambda: self.done.append("settle"),
        )


def test_what_is_under_way_is_settled_before_the_ledger_says_that_the_worker_is_gone() -> None:
    diary = Diary()
    with pytest.raises(Stopped):
        diary.leaving().leave(m.End("left", "asked to"))
    assert diary.done == ["save", "left", "settle", "deregister"]


def test_that_is_so_too_where_the_state_could_not_be_saved() -> None:
    diary = Diary(why="the disk is full")
    with pytest.raises(Unsaved):
        diary.leaving().leave(m.End("left", "asked to"))
    assert diary.done == ["save", "unsaved", "settle", "deregister"]
