"""elastic.run tries again after a loss, and not for ever where trying again does not help; nor does init."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.words import View
from holdfast.horovod.common.exceptions import HorovodInternalError
from holdfast.horovod.elastic import IN_VAIN_MAX, ObjectState, run_fn
from holdfast.horovod.world import runtime as runtime_module
from holdfast.horovod.world.runtime import Runtime, runtime
from holdfast.membership.view_rules import LedgerState
from tests.horovod.test_world_rules import state


def test_what_fails_again_and_again_is_raised_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    runtime().init()
    state, calls = ObjectState(bcast_object=lambda value: value), []

    @run_fn
    def train(state: ObjectState, commits: int) -> None:
        calls.append(1)
        if len(calls) <= commits:
            state.commit()  # it gets on: that does not count
        raise HorovodInternalError("a broken cable")

    try:
        with pytest.raises(HorovodInternalError, match="a broken cable"):
            train(state, 30)
    finally:
        runtime().shutdown()
    assert len(calls) == 30 + IN_VAIN_MAX
    assert "10 times by now: a broken cable" in capsys.readouterr().err


class LinesOfABadDay:
    """A worker whose ledger has a new view for it again and again, none of whose members can be reached."""

    me = "w0.1"
    news = object()

    def __init__(self) -> None:
        self.opened = 0

    @property
    def state(self) -> LedgerState:
        return state("w0.1", "w1.1", view=View(self.opened + 1, ("w0.1", "w1.1")), size=2)

    @property
    def unreached(self) -> list[Any]:
        return [SimpleNamespace(view=self.opened, peer="w1.1", reason="a broken cable")]

    def open_world(self, view: View) -> Any:
        self.opened = view.number
        return SimpleNamespace(complete=False, close=lambda: None)

    def enters(self, waits: bool, step: int) -> None: ...

    def sort_mail(self) -> None: ...

    def wait_for_mail(self, at_most_s: float) -> None: ...


def test_worlds_that_are_entered_in_vain_do_not_make_the_wait_for_one_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "MEET_S", 0.2)
    mine, lines = Runtime(), LinesOfABadDay()
    mine._lines = lines  # type: ignore[assignment]
    began = time.monotonic()
    with pytest.raises(HorovodInternalError, match="no world came about"):
        mine._meet()
    assert lines.opened > 1 and time.monotonic() - began < 10.0
