"""The agent's decisions, without processes: who is replaced, when, and when starting again will not help."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.agent.policy import REPLACE_AFTER_S, AnnounceStop, AskToLeave, Kill, Policy, RunEnd, Start
from holdfast.core.words import worker_id


class Story:
    """Carries out what the policy says at once, and keeps what it said."""

    def __init__(self, workers: int = 2, spares: int = 0, restarts: int = 100) -> None:
        self.policy = Policy(workers, spares, restarts)
        self.now = 0.0
        self.incarnations: dict[int, int] = {}
        self.end: RunEnd | None = None
        self.said: list[Any] = []
        self.tick()

    def tick(self, after_s: float = 0.0) -> list[Any]:
        self.now += after_s
        actions = self.policy.tick(self.now)
        for action in actions:
            if isinstance(action, Start):
                self.incarnations[action.slot] = self.incarnations.get(action.slot, 0) + 1
                self.policy.started(worker_id(action.slot, self.incarnations[action.slot]))
            if isinstance(action, RunEnd):
                self.end = action
        self.said += actions
        return actions

    def exit(self, worker: str, code: int | None = None, signal: int | None = None) -> list[Any]:
        self.reason = self.policy.exited(worker, code, signal, self.now)
        return self.tick()

    def event(self, who: str, kind: str, **fields: Any) -> None:
        self.policy.observed({"who": who, "kind": kind, **fields}, self.now)

    @property
    def alive(self) -> list[str]:
        return sorted(self.policy.alive)


def test_workers_and_spares_are_started() -> None:
    assert Story(workers=2, spares=1).alive == ["w0.1", "w1.1", "w2.1"]


def test_a_killed_worker_is_replaced_at_once() -> None:
    story = Story()
    story.exit("w1.1", signal=9)
    assert story.reason == "killed"
    assert story.alive == ["w0.1", "w1.2"]


def test_back_off_doubles_to_its_limit_and_membership_resets_it() -> None:
    story = Story(workers=1)
    waits = []
    for incarnation in range(1, 12):
        story.exit(f"w0.{incarnation}", signal=9)
        waits.append(0.0 if story.alive else story.policy.deadline() - story.now)
        if not story.alive:
            assert not story.tick(waits[-1] - 0.001)
            story.tick(0.002)
        assert story.alive == [f"w0.{incarnation + 1}"]
    assert waits == pytest.approx([0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30])
    story.event("w0.12", "joined", step=5)
    story.exit("w0.12", signal=9)
    assert story.alive == ["w0.13"]


def test_an_evicted_worker_is_replaced_without_counting() -> None:
    story = Story(restarts=0)
    story.exit("w0.1", code=75)
    assert story.reason == "evicted"
    assert story.alive == ["w0.2", "w1.1"]
    assert story.policy.restarts == 0


def test_without_restarts_the_others_go_on_and_the_last_failure_is_the_outcome() -> None:
    story = Story(restarts=1)
    story.event("w0.1", "progress", step=3)
    story.exit("w0.1", signal=9)
    assert story.alive == ["w0.2", "w1.1"]
    story.exit("w0.2", signal=9)
    assert story.alive == ["w1.1"]
    assert story.end is None
    story.exit("w1.1", code=7)
    assert story.end == RunEnd("failed", 7, "no worker is left and all 1 restarts are used up", "w1.1")


@pytest.mark.parametrize(("exit", "code"), [({"code": 1}, 1), ({"code": 2}, 2), ({"signal": 11}, 139)])
def test_failing_in_every_worker_before_the_first_step_ends_the_run(exit: dict[str, int], code: int) -> None:
    story = Story(workers=2)
    story.exit("w0.1", **exit)
    assert story.end is None
    story.exit("w1.1", **exit)
    assert story.end is not None
    assert (story.end.outcome, story.end.exit_code, story.end.worker) == ("failed", code, "w1.1")


def test_who_is_refused_before_it_is_a_member_is_told_from_who_fails() -> None:
    story = Story(workers=2)
    assert story.policy.exited("w0.1", 2, None, 1.0) == "refused"
    story.event("w1.1", "joined", step=3)
    assert story.policy.exited("w1.1", 2, None, 1.0) == "failed"


def test_the_step_that_a_dead_worker_was_at_counts_though_no_event_told_of_it() -> None:
    story = Story(workers=1)
    story.policy.got_to(777)
    for incarnation in (1, 2):
        story.exit(f"w0.{incarnation}", 1)
        story.tick(60.0)
    assert story.alive == ["w0.3"]  # it failed after the first step, so it is tried again
    story.exit("w0.3", 1)
    assert story.end is not None and story.end.reason == "the script failed 3 times without getting past step 777"


def test_being_killed_before_the_first_step_is_not_the_scripts_fault() -> None:
    story = Story(workers=2)
    story.exit("w0.1", signal=9)
    story.exit("w1.1", signal=9)
    assert story.end is None
    assert story.alive == ["w0.2", "w1.2"]


def test_failing_at_the_same_step_again_and_again_ends_the_run() -> None:
    story = Story(workers=2)
    for round_ in (1, 2, 3):
        assert story.end is None
        for step in (48, 49, 50):
            story.event(f"w0.{round_}", "progress", step=step)
            story.event(f"w1.{round_}", "progress", step=step)
        story.exit(f"w0.{round_}", code=1)
        story.exit(f"w1.{round_}", code=1)
        story.tick(1.0)
    assert story.end is not None
    assert story.end.reason == "the script failed 3 times without getting past step 50"


def test_failures_between_which_the_run_advances_do_not_end_it() -> None:
    story = Story(workers=2)
    for round_ in range(1, 10):
        story.event(f"w0.{round_}", "progress", step=round_ * 10)
        story.event(f"w1.{round_}", "progress", step=round_ * 10)
        story.exit(f"w0.{round_}", code=1)
        story.exit(f"w1.{round_}", code=1)
        story.tick(1.0)
    assert story.end is None


def test_one_slot_that_always_fails_does_not_end_a_run_whose_others_work() -> None:
    story = Story(workers=2)
    story.event("w1.1", "progress", step=1)  # a step that takes minutes
    for incarnation in range(1, 8):
        story.exit(f"w0.{incarnation}", code=1)
        story.tick(60.0)
    assert story.end is None


def test_a_process_without_registration_is_hung_after_the_grace() -> None:
    story = Story()
    story.policy.unregistered("w0.1", story.now)
    assert story.tick(0.9) == []
    assert story.tick(0.2) == [Kill("w0.1", "hung")]
    assert story.tick(5.0) == []  # once
    story.exit("w0.1", signal=9)
    assert story.reason == "hung"
    assert "w0.2" in story.alive


def test_a_worker_that_registers_again_or_said_goodbye_is_not_hung() -> None:
    story = Story()
    story.policy.unregistered("w0.1", story.now)
    story.policy.registered("w0.1")
    story.event("w1.1", "left", step=3)
    story.policy.unregistered("w1.1", story.now)
    assert story.tick(10.0) == []
    assert story.policy.deadline() > 1e9  # and nothing spins meanwhile


def test_stopping_replaces_nobody_and_ends_with_the_given_code() -> None:
    story = Story()
    story.policy.stop("Ctrl-C", 130, story.now)
    assert story.tick() == [AnnounceStop("Ctrl-C")]
    story.exit("w0.1", signal=9)
    assert story.alive == ["w1.1"]
    story.exit("w1.1", code=0)
    assert story.end == RunEnd("stopped", 130, "Ctrl-C")


def test_who_does_not_stop_in_time_is_killed() -> None:
    story = Story()
    story.policy.stop("Ctrl-C", 130, story.now)
    story.tick()
    assert story.tick(29.9) == []
    assert {action.worker for action in story.tick(0.2)} == {"w0.1", "w1.1"}
    assert story.tick(100.0) == []


def test_stop_at_once_kills_everyone() -> None:
    story = Story()
    story.policy.stop_at_once("twice", 130)
    assert story.tick() == [
        Kill("w0.1", "the run is over"),
        Kill("w1.1", "the run is over"),
        RunEnd("stopped", 130, "twice"),
    ]


def test_after_the_last_step_nobody_is_replaced_spares_are_stopped_and_scripts_may_go_on() -> None:
    story = Story(workers=2, spares=1)
    story.event("w0.1", "finished", step=9)
    story.exit("w1.1", signal=9)
    assert story.alive == ["w0.1", "w2.1"]
    assert story.tick(5.0) == [AnnounceStop("the run is finished")]
    story.exit("w2.1", code=0)
    assert story.tick(10_000.0) == []  # w0.1 still evaluates its model
    story.exit("w0.1", code=0)
    assert story.end == RunEnd("finished", 0, "")


def test_a_straggler_has_a_minute() -> None:
    story = Story(workers=2)
    story.event("w0.1", "finished", step=9)
    story.tick(5.0)
    assert story.tick(54.0) == []
    assert story.tick(1.0) == [Kill("w1.1", "did not finish in time")]


def test_a_straggler_that_the_last_view_was_without_has_a_quarter_of_that() -> None:
    story = Story(workers=2)
    story.policy.viewed(["w0.1"])
    story.event("w0.1", "finished", step=9)
    story.tick(5.0)
    assert story.tick(9.0) == []
    assert story.tick(1.0) == [Kill("w1.1", "did not finish in time")]


def test_the_end_of_an_earlier_loop_excuses_no_straggler() -> None:
    """It was at the end of a loop once, and was stopped in the next one, while the others came to the last."""
    story = Story(workers=2)
    for worker in ("w0.1", "w1.1"):
        story.event(worker, "reached", step=80)
    story.event("w0.1", "recovered", step=82)
    story.event("w0.1", "reached", step=120)
    story.event("w0.1", "finished", step=120)
    story.tick(5.0)
    assert story.tick(55.0) == [Kill("w1.1", "did not finish in time")]


def test_a_script_that_fails_after_its_training_gives_its_own_code() -> None:
    story = Story(workers=1)
    story.event("w0.1", "finished", step=9)
    story.exit("w0.1", code=3)
    assert story.end == RunEnd("finished", 3, "w0.1 failed after the last step", "w0.1")


def test_scaling_up_starts_and_scaling_down_asks_the_highest_to_leave() -> None:
    story = Story(workers=2)
    story.policy.resized(4)
    story.tick()
    assert story.alive == ["w0.1", "w1.1", "w2.1", "w3.1"]
    story.policy.resized(1)
    reason = "the run has 1 workers now"
    assert story.tick() == [AskToLeave(f"w{slot}.1", reason) for slot in (1, 2, 3)]
    assert story.tick(1.0) == []
    for slot in (1, 2, 3):
        story.exit(f"w{slot}.1", code=0)
        assert story.reason == "left"
    assert story.alive == ["w0.1"]
    story.policy.resized(2)
    story.tick()
    assert story.alive == ["w0.1", "w1.2"]


def test_who_was_asked_to_leave_and_is_wanted_again_is_replaced() -> None:
    story = Story(workers=2)
    story.policy.resized(1)
    story.tick()
    story.policy.resized(2)
    story.tick()
    story.exit("w1.1", code=0)
    assert story.alive == ["w0.1", "w1.2"]


def test_an_adopted_workers_exit_is_read_from_its_events() -> None:
    story = Story(workers=3)
    story.event("w0.1", "left", step=3)
    story.event("w1.1", "evicted", view=2)
    story.exit("w0.1")
    assert story.reason == "left"
    story.exit("w1.1")
    assert story.reason == "evicted"
    story.exit("w2.1")
    assert story.reason == "killed"
    assert story.alive == ["w1.2", "w2.2"]


def test_everyone_leaving_ends_the_run_without_an_error() -> None:
    story = Story(workers=2)
    story.exit("w0.1", code=0)
    story.exit("w1.1", code=0)
    assert story.end == RunEnd("left", 0, "every worker left")


def test_a_system_that_starts_no_processes_is_asked_again_with_back_off() -> None:
    policy = Policy(1, 0, 2)
    actions: list[Any] = []
    for minute in range(20):
        for action in policy.tick(minute * 60.0):
            actions.append(action)
            if isinstance(action, Start):
                policy.start_failed(0, minute * 60.0)
    assert [type(action) for action in actions] == [Start, Start, Start, RunEnd]
    assert actions[-1].exit_code == 1


def slow_story(*, spares: int = 1, replace_below: float = 0.3) -> Story:
    story = Story(workers=2, spares=spares)
    story.policy.replace_below = replace_below
    for worker in story.alive:
        story.policy.registered(worker)
    story.policy.viewed(["w0.1", "w1.1"])
    return story


def test_a_slow_worker_makes_way_for_a_spare_and_its_slot_has_the_next_one() -> None:
    story = slow_story()
    story.event("w0.1", "slow", worker="w1.1", times=5.0, since_s=5.0)
    assert story.tick(REPLACE_AFTER_S - 5.1) == []
    assert story.policy.deadline() == pytest.approx(story.now + 0.1)
    (asked,) = story.tick(0.2)
    assert isinstance(asked, AskToLeave) and asked.worker == "w1.1" and "5.0 times" in asked.reason
    story.policy.viewed(["w0.1", "w2.1"])
    story.exit("w1.1", code=0)
    assert story.alive == ["w0.1", "w1.2", "w2.1"]


@pytest.mark.parametrize(
    ("spares", "replace_below", "times", "later"),
    [
        (0, 0.3, 5.0, None),  # nobody waits
        (1, 0.0, 5.0, None),  # switched off
        (1, 0.3, 2.5, None),  # not that slow
        (1, 0.3, 5.0, "no_longer_slow"),
    ],
    ids=["no spare", "off", "not that slow", "over"],
)
def test_a_slow_worker_stays(spares: int, replace_below: float, times: float, later: str | None) -> None:
    story = slow_story(spares=spares, replace_below=replace_below)
    story.event("w0.1", "slow", worker="w1.1", times=times, since_s=5.0)
    if later:
        story.event("w0.1", later, worker="w1.1")
    assert story.tick(10 * REPLACE_AFTER_S) == []


def test_a_spare_that_still_starts_does_not_count() -> None:
    story = slow_story()
    story.policy.unregistered("w2.1", story.now, 1000.0)
    story.event("w0.1", "slow", worker="w1.1", times=5.0, since_s=5.0)
    assert story.tick(2 * REPLACE_AFTER_S) == []
    story.policy.registered("w2.1")
    assert [type(action) for action in story.tick()] == [AskToLeave]


def test_two_slow_workers_are_replaced_one_after_the_other() -> None:
    story = slow_story()
    for worker in ("w0.1", "w1.1"):
        story.event("w0.1", "slow", worker=worker, times=5.0, since_s=5.0)
    assert [action.worker for action in story.tick(REPLACE_AFTER_S)] == ["w0.1"]
    assert story.tick(1.0) == []
    story.policy.viewed(["w1.1", "w2.1"])
    story.exit("w0.1", code=0)
    assert story.tick() == [], "the next spare has not registered yet"
    story.policy.registered("w0.2")
    assert [action.worker for action in story.tick()] == ["w1.1"]


def test_a_worker_whose_heart_says_that_it_hangs_is_killed_once_and_replaced() -> None:
    story = Story()
    story.policy.viewed(["w0.1", "w1.1"])  # a member: its lease alone would not be reason enough
    assert story.policy.hung("w1.1") == [Kill("w1.1", "hung")]
    assert story.policy.hung("w1.1") == [] and story.policy.hung("w9.9") == []
    story.exit("w1.1", signal=9)
    assert story.reason == "hung" and story.alive == ["w0.1", "w1.2"]


def test_one_that_hangs_while_the_others_wait_to_leave_is_killed_and_not_replaced() -> None:
    story = Story()
    story.policy.stop("asked to stop", 0, story.now)
    assert story.policy.hung("w1.1") == [Kill("w1.1", "hung")]
    story.exit("w1.1", signal=9)
    story.exit("w0.1", code=0)
    assert story.end is not None and story.end.outcome == "stopped"


def test_who_has_finished_does_not_hang() -> None:
    story = Story()
    story.event("w1.1", "finished", step=9)
    assert story.policy.hung("w1.1") == [] and story.policy.hung("w0.1") == []


@pytest.mark.parametrize("kind", ["corruption", "distrusted"])
def test_a_slot_whose_workers_are_found_wrong_stays_empty_in_the_end(kind: str) -> None:
    story = Story(workers=3)
    for incarnation in (1, 2, 3):
        wrong = f"w1.{incarnation}"
        assert wrong in story.alive
        told = {"liars": [wrong]} if kind == "corruption" else {"worker": wrong}
        story.event("w0.1", kind, step=7, **told)
        story.event(wrong, kind, step=7, **told)  # counts once
        story.exit(f"w1.{incarnation}", code=75)
        story.tick(60.0)
    assert story.alive == ["w0.1", "w2.1"]
    story.policy.resized(4)
    story.tick()
    assert story.alive == ["w0.1", "w2.1", "w3.1"]


def test_who_accuses_is_replaced_as_ever() -> None:
    story = Story(workers=3)
    for _ in range(4):
        worker = next(name for name in story.alive if name.startswith("w0."))
        story.event(worker, "corruption", step=7, liars=["w9.1"])
        story.exit(worker, code=75)
        story.tick(60.0)
    assert len(story.alive) == 3


def test_who_was_left_behind_has_time_to_come_back() -> None:
    story = Story()
    story.policy.viewed(["w0.1"], late=["w1.1"])
    story.policy.unregistered("w1.1", story.now)
    assert story.tick(5.9) == []
    assert story.policy.deadline() == pytest.approx(story.now + 0.1)
    assert story.tick(0.2) == [Kill("w1.1", "hung")]


def test_who_was_left_behind_is_no_spare() -> None:
    story = slow_story(spares=0)
    story.policy.viewed(["w1.1"], late=["w0.1"])
    story.event("w1.1", "slow", worker="w1.1", times=5.0, since_s=5.0)
    assert story.tick(10 * REPLACE_AFTER_S) == []


def test_who_fails_between_two_loops_is_replaced_when_the_others_go_on() -> None:
    """All are at the end of a loop, which may be the last; a step after it says that it was not."""
    story = Story(workers=3)
    for worker in ("w0.1", "w1.1", "w2.1"):
        story.event(worker, "view", members=["w0.1", "w1.1", "w2.1"], step=0)
        story.event(worker, "reached", step=20)
    story.exit("w1.1", code=1)
    assert story.alive == ["w0.1", "w2.1"] and story.policy.done
    story.event("w0.1", "progress", step=21)
    story.tick(5.0)
    assert story.alive == ["w0.1", "w1.2", "w2.1"]
    for worker in story.alive:
        story.event(worker, "finished", step=60)
        story.exit(worker, code=0)
    assert story.end == RunEnd("finished", 0, "")


def test_a_run_that_waits_for_itself_for_good_stops_with_an_error() -> None:
    story = Story()
    assert story.policy.hung("w1.1", story.now, kill=False, hopeless="the run waits for itself") == []
    story.tick()
    assert AnnounceStop("the run waits for itself") in story.said
    for worker in story.alive:
        story.event(worker, "left", step=3)
        story.exit(worker, code=0)
    assert story.end == RunEnd("stopped", 1, "the run waits for itself")


def test_an_unsaved_end_is_no_success_and_nobody_is_started_for_it() -> None:
    story = Story(workers=2, spares=1)
    for worker in ("w0.1", "w1.1"):
        story.event(worker, "progress", step=9)
        story.event(worker, "unsaved", step=9, reason="the disk is full")
    story.exit("w0.1", code=74)
    assert story.reason == "unsaved" and story.alive == ["w1.1", "w2.1"]
    story.exit("w1.1", code=74)
    assert story.end == RunEnd("unsaved", 74, "the last state is not saved")


def test_an_unsaved_end_of_a_run_that_was_stopped_keeps_the_code_of_the_signal() -> None:
    for code, expected in ((130, 130), (0, 74)):
        story = Story(workers=1)
        story.event("w0.1", "progress", step=9)
        story.policy.stop("asked", code, story.now)
        story.tick()
        story.event("w0.1", "unsaved", step=9, reason="the disk is full")
        story.exit("w0.1", code=74)
        assert story.end is not None and (story.end.outcome, story.end.exit_code) == ("unsaved", expected)


def test_one_that_saved_is_enough() -> None:
    story = Story()
    story.event("w0.1", "finished", step=9)
    story.event("w1.1", "unsaved", step=9, reason="its network is gone")
    story.exit("w1.1", code=74)
    story.exit("w0.1", code=0)
    assert story.end == RunEnd("finished", 0, "")


def test_a_script_that_ends_in_the_middle_is_not_started_again() -> None:
    story = Story()
    for worker in ("w0.1", "w1.1"):
        story.event(worker, "progress", step=5)
        story.event(worker, "cut_short", step=5, steps=9)
        story.exit(worker, code=1)
    assert story.end == RunEnd("cut short", 1, "the script ended in the middle of the training")


def test_who_finishes_before_the_others_has_only_left_its_loop() -> None:
    story = Story()
    story.event("w0.1", "finished", step=8)
    story.exit("w0.1", code=0)
    story.event("w1.1", "progress", step=20)
    assert story.tick(1000.0) == [] and not story.policy.done
    story.event("w1.1", "finished", step=30)
    story.exit("w1.1", code=0)
    assert story.end == RunEnd("finished", 0, "")


def test_a_host_that_only_serves_stays_until_the_run_is_over() -> None:
    for over, outcome in (("finished", "finished"), ("stop", "stopped")):
        policy = Policy(0, 0, 100, serves=True)
        assert policy.tick(0.0) == policy.tick(1e6) == []
        if over == "finished":
            policy.finished(1e6)
        else:
            policy.stop("Ctrl-C", 130, 1e6)
        *_, end = policy.tick(1e6)
        assert isinstance(end, RunEnd)
        assert (end.outcome, end.exit_code) == (outcome, 0 if over == "finished" else 130)


def test_a_host_that_only_serves_may_be_given_workers_and_stays_when_they_have_left() -> None:
    story = Story(workers=0)
    story.policy = Policy(0, 0, 100, serves=True)
    story.policy.resized(1)
    story.tick()
    assert story.alive == ["w0.1"]
    story.exit("w0.1", code=0)
    assert story.policy.tick(1e6) == []
