"""What a launch on Ray decides, without Ray."""

from __future__ import annotations

from holdfast.integrations.ray.supervising import (
    RAISES_MAX,
    ROOM_AGAIN_S,
    ROOM_S,
    STRAGGLE_S,
    AskToLeave,
    End,
    RunEnd,
    Start,
    Supervision,
    TellOfRoom,
)


def begun(workers: int = 3) -> Supervision:
    supervision = Supervision(workers)
    assert supervision.tick(0.0) == [Start(slot) for slot in range(workers)]
    assert supervision.tick(0.0) == []
    for slot in range(workers):
        supervision.placed(slot)
    return supervision


def test_the_lost_are_replaced_at_once_and_then_later_and_later() -> None:
    supervision = begun()
    supervision.died(1, 10.0)
    assert supervision.tick(10.0) == [Start(1)]
    supervision.died(1, 10.0)
    assert supervision.tick(10.0) == [] and supervision.tick(10.5) == [Start(1)]
    supervision.died(1, 11.0)
    assert supervision.tick(11.5) == [] and supervision.tick(12.0) == [Start(1)]
    supervision.got_on(1)
    supervision.died(1, 99.0)
    assert supervision.tick(99.0) == [Start(1)]


def test_who_leaves_or_is_evicted_comes_back_at_once_and_is_not_counted() -> None:
    supervision = begun()
    supervision.node_goes(2)
    assert supervision.tick(1.0) == [AskToLeave(2)] and supervision.tick(1.0) == []
    supervision.left(2, 2.0)
    assert supervision.tick(2.0) == [Start(2)] and supervision.restarts == 0


def test_the_run_is_over_when_all_have_come_to_the_end() -> None:
    supervision = begun()
    supervision.died(0, 1.0)
    supervision.returned(1, 1.0)
    assert supervision.tick(1.0) == []  # nobody is started any more
    supervision.returned(2, 2.0)
    assert supervision.tick(2.0) == [RunEnd("finished")]


def test_who_does_not_get_on_is_not_waited_for_for_ever() -> None:
    supervision = begun()
    supervision.returned(1, 1.0)
    supervision.heard(0, 7, 1.0, through=True)
    supervision.heard(2, 7, 1.0, through=False)
    assert supervision.tick(STRAGGLE_S) == [] and supervision.tick(1.0 + STRAGGLE_S) == [End(2)]
    supervision.died(2, 1.0 + STRAGGLE_S)
    assert supervision.tick(2.0 + STRAGGLE_S) == []
    supervision.returned(0, 9 * STRAGGLE_S)
    assert supervision.tick(9 * STRAGGLE_S) == [RunEnd("finished")]


def test_who_evaluates_or_saves_behind_its_loop_has_as_long_as_it_takes() -> None:
    """It may be the leader, whose value is the launch's."""
    supervision = begun(2)
    supervision.returned(1, 1.0)
    supervision.heard(0, 40, 2.0, through=True)
    for minutes in range(1, 60):
        assert supervision.tick(minutes * 60.0) == []
    supervision.returned(0, 3600.0)
    assert supervision.tick(3600.0) == [RunEnd("finished")]


def test_who_goes_on_training_is_waited_for() -> None:
    supervision = begun(2)
    supervision.returned(1, 0.0)
    for minutes in range(1, 10):
        supervision.heard(0, minutes, minutes * 60.0 - 1.0, through=False)
        assert supervision.tick(minutes * 60.0) == []
    assert supervision.tick(9 * 60.0 - 1.0 + STRAGGLE_S) == [End(0)]


def test_a_stop_bounds_what_comes_behind_a_loop_too() -> None:
    supervision = begun(2)
    supervision.returned(1, 1.0)
    supervision.heard(0, 40, 2.0, through=True)
    supervision.stop("Ctrl-C", 100.0)
    assert supervision.tick(99.0 + STRAGGLE_S) == []
    assert supervision.tick(100.0 + STRAGGLE_S) == [RunEnd("finished")]


def test_who_has_no_place_is_told_of_after_a_while_and_again() -> None:
    supervision = Supervision(3)
    supervision.tick(0.0)
    supervision.placed(1)
    assert supervision.tick(ROOM_S - 1) == []
    assert supervision.tick(ROOM_S) == [TellOfRoom((0, 2))] and supervision.tick(ROOM_S + 1) == []
    supervision.placed(0)
    assert supervision.tick(ROOM_S + ROOM_AGAIN_S) == [TellOfRoom((2,))]


def test_a_function_that_fails_everywhere_ends_it() -> None:
    supervision = begun()
    supervision.raised(0, 1.0)
    supervision.raised(1, 1.0)
    assert RunEnd not in map(type, supervision.tick(1.0))
    supervision.raised(2, 1.0)
    assert supervision.tick(1.0) == [RunEnd("failed", "the function failed", 2)]


def test_a_function_that_fails_again_and_again_in_one_place_ends_it() -> None:
    supervision, now = begun(), 1.0
    for _ in range(RAISES_MAX):
        now += 60.0
        assert RunEnd not in map(type, supervision.tick(now))
        supervision.raised(1, now)
    assert supervision.tick(now) == [RunEnd("failed", "the function failed", 1)]


def test_what_would_be_refused_everywhere_ends_it_at_once() -> None:
    supervision = begun()
    supervision.raised(1, 1.0, hopeless=True)
    assert supervision.tick(1.0) == [RunEnd("failed", "the function failed", 1)]


def test_an_exception_after_the_last_step_of_others_does_not_undo_the_training() -> None:
    supervision = begun(2)
    supervision.returned(0, 1.0)
    supervision.raised(1, 2.0)
    assert supervision.tick(2.0) == [RunEnd("finished")]


def test_restarts_are_bounded() -> None:
    supervision, now = Supervision(1, restarts_max=2), 0.0
    for _ in range(3):
        now += 60.0
        assert supervision.tick(now) == [Start(0)]
        supervision.died(0, now)
    assert supervision.tick(now + 60.0) == [RunEnd("failed", "all 2 restarts are used up", 0)]


def test_a_stopped_run_ends_when_its_workers_have_left() -> None:
    supervision = begun(2)
    supervision.stop("Ctrl-C", 1.0)
    supervision.left(0, 2.0, stopped="Ctrl-C")
    assert supervision.tick(2.0) == []
    supervision.left(1, 2.0, stopped="Ctrl-C")
    assert supervision.tick(2.0) == [RunEnd("stopped", "Ctrl-C")]
