"""elastic.run tries again after a loss, and not for ever where trying again does not help."""

from __future__ import annotations

import pytest

from holdfast.horovod.common.exceptions import HorovodInternalError
from holdfast.horovod.elastic import IN_VAIN_MAX, ObjectState, run_fn
from holdfast.horovod.world.runtime import runtime


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
