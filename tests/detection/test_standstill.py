"""A run that stands still is told from every other wait, and who is in the way is the right one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.waits import Wait, WaitKind
from holdfast.detection.agent_beat import AgentBeat, CrewHealth
from holdfast.detection.beat import Activity, Beat
from holdfast.detection.standstill import ENDED_MAX, PAST_S, STILL_S, TELL_S, Idle, Standstill, StandstillJudge

MEMBERS = ("w0.1", "w1.1", "w2.1")


def waits_for(*whom: str, since: float = 1.0, place: int = 0, kind: WaitKind = WaitKind.PEERS) -> Wait:
    return Wait(kind, f"for {', '.join(whom)} to be ready", whom, since, place)


NOTHING = Wait(WaitKind.NOTHING, "for nothing that it knows of", since=1.0)


class Host:
    """The workers of one host, and the judge that looks at them ten times a second."""

    def __init__(self, waits: dict[str, Wait | None], *, members: tuple[str, ...] = MEMBERS, name: str = "") -> None:
        self.judge = StandstillJudge(name)
        self.waits = waits
        self.members = members
        self.activity = dict.fromkeys(waits, Activity.WAITING)
        self.elsewhere: dict[str, tuple[float, Idle | None]] = {}
        self.now = 100.0
        self.number = 0
        self.silent: set[str] = set()
        self.numbers: dict[str, int] = {}

    @property
    def beats(self) -> dict[str, Beat]:
        for worker in self.waits:
            if worker not in self.silent:
                self.numbers[worker] = self.number
        return {
            worker: Beat(
                number=self.numbers[worker],
                at=self.now,
                step=20,
                entered=5,
                activity=self.activity[worker],
                wait=wait if self.activity[worker] is Activity.WAITING else None,
            )
            for worker, wait in self.waits.items()
        }

    def look(self, seconds: float = 0.1) -> Standstill | None:
        self.now += seconds
        self.number += 1
        beats = self.beats
        self.judge.observe(beats, self.now)
        return self.judge.judge(beats, self.members, self.elsewhere, self.now)

    def look_for(self, seconds: float) -> list[Standstill]:
        looks = [self.look() for _ in range(round(seconds / 0.1))]
        return [found for found in looks if found is not None]


def test_two_that_wait_for_each_other_are_found_in_seconds_and_said_once() -> None:
    host = Host({"w0.1": waits_for("w1.1", "w2.1"), "w1.1": waits_for("w2.1"), "w2.1": waits_for("w1.1")})
    assert host.look_for(STILL_S - 0.2) == []
    (found,) = host.look_for(5.0)
    assert found.blamed == found.ended == "w2.1" and not found.hopeless and found.step == 20
    assert "w1.1 is waiting for w2.1 to be ready" in found.reason


def test_a_view_that_is_new_and_a_ledger_that_is_back_move_everybody_first() -> None:
    """What a heart said last may be of the view before: one that is left alone does not wait for those who are gone."""
    host = Host({"w0.1@a": waits_for("w0.1@b")}, members=("w0.1@b", "w0.1@a"), name="a")
    host.elsewhere = {"b": (0.1, None)}
    assert host.look_for(2 * STILL_S) == []  # the other one does something
    host.members = ("w0.1@a",)
    assert host.look_for(STILL_S - 0.2) == []
    assert host.look_for(1.0)[0].hopeless  # it still waits, in a view of its own
    host = Host({"w0.1": waits_for("w1.1", "w2.1"), "w1.1": waits_for("w2.1"), "w2.1": waits_for("w1.1")})
    assert host.look_for(STILL_S - 0.2) == []
    host.judge.ledger_is_away()
    assert host.look_for(STILL_S - 0.2) == []
    assert len(host.look_for(1.0)) == 1


@pytest.mark.parametrize(
    ("waits", "blamed"),
    [
        ({"w0.1": waits_for("w1.1"), "w1.1": NOTHING, "w2.1": waits_for("w1.1")}, "w1.1"),
        ({"w0.1": NOTHING, "w1.1": waits_for("w2.1"), "w2.1": waits_for("w1.1")}, "w0.1"),
        ({"w0.1": waits_for("w1.1"), "w1.1": waits_for("w0.1", "w2.1"), "w2.1": waits_for("w1.1")}, "w1.1"),
        ({"w0.1": waits_for("w1.1", place=9), "w1.1": waits_for("w0.1"), "w2.1": waits_for()}, "w0.1"),
    ],
    ids=["it waits for nothing", "nobody waits for it, but it is stuck", "two wait for it", "its word was lost"],
)
def test_who_is_in_the_way(waits: dict[str, Wait | None], blamed: str) -> None:
    (found,) = Host(waits).look_for(STILL_S + 1.0)
    assert found.blamed == found.ended == blamed


ALL_WAIT = {"w0.1": waits_for("w2.1"), "w1.1": waits_for("w2.1"), "w2.1": waits_for("w0.1")}


@pytest.mark.parametrize("kind", [WaitKind.VIEW, WaitKind.LEDGER, WaitKind.STORAGE, WaitKind.STATE])
def test_one_that_waits_for_what_moves_is_enough(kind: WaitKind) -> None:
    assert Host({**ALL_WAIT, "w2.1": waits_for(kind=kind)}).look_for(60.0) == []


@pytest.mark.parametrize("activity", [one for one in Activity if one is not Activity.WAITING])
def test_one_that_does_anything_is_enough(activity: Activity) -> None:
    """It computes, loads a batch, evaluates between two loops, ends."""
    host = Host(dict(ALL_WAIT))
    host.activity["w2.1"] = activity
    assert host.look_for(60.0) == []


def test_one_that_does_not_say_what_it_waits_for_is_enough() -> None:
    assert Host({**ALL_WAIT, "w2.1": None}).look_for(60.0) == []


def test_a_silent_heart_is_judged_by_others() -> None:
    host = Host(dict(ALL_WAIT))
    host.look()
    host.silent.add("w2.1")
    assert host.look_for(60.0) == []


def test_a_word_that_comes_begins_the_wait_anew() -> None:
    host = Host(dict(ALL_WAIT))
    for number in range(20):
        host.waits["w0.1"] = waits_for("w2.1", since=float(number))
        assert host.look_for(STILL_S - 1.0) == []


def test_a_moment_in_which_something_came_that_ends_no_wait_does_not() -> None:
    host = Host(dict(ALL_WAIT))
    assert host.look_for(3.0) == []
    host.waits["w0.1"] = None
    host.look()
    host.waits["w0.1"] = ALL_WAIT["w0.1"]
    assert len(host.look_for(STILL_S - 2.0)) == 1


def test_time_in_which_nobody_looked_does_not_count() -> None:
    host = Host(dict(ALL_WAIT))
    for _ in range(4):
        assert host.look(60.0) is None


def test_a_member_whose_process_has_ended_holds_up_no_judgement() -> None:
    host = Host({"w0.1": waits_for("w1.1"), "w1.1": waits_for("w0.1", "w2.1")})
    assert host.look_for(20.0) == []
    host.judge.ended("w2.1")
    (found,) = host.look_for(3.0)
    assert found.ended in ("w0.1", "w1.1")


def test_who_was_in_the_way_before_and_lives_is_ended_the_second_time() -> None:
    host = Host({"w0.1": waits_for("w2.1"), "w2.1": waits_for("w0.1")}, members=("w0.1", "w2.1"))
    (found,) = host.look_for(STILL_S + 1.0)
    assert found.ended == "w2.1"
    host.members = ("w0.1", "w2.2")
    host.waits = {"w0.1": waits_for("w2.2", since=200.0), "w2.2": waits_for("w0.1", since=200.0)}
    host.activity = dict.fromkeys(host.waits, Activity.WAITING)
    (found,) = host.look_for(STILL_S + 1.0)
    assert found.ended == "w0.1"


def test_a_run_that_does_not_get_on_however_many_are_ended_ends() -> None:
    host = Host(dict(ALL_WAIT))
    ended = 0
    while not (found := host.look()) or not found.hopeless:
        ended += found is not None
        if found:
            host.now += 10.0
            host.waits = {one: replace(wait, since=host.now) for one, wait in host.waits.items() if wait}
        assert host.now < 100.0 + 2 * PAST_S
    assert ended == ENDED_MAX and "in vain" in found.hopeless


def test_the_only_state_is_not_ended_but_the_run_is() -> None:
    (found,) = Host({"w0.1": NOTHING}, members=("w0.1",)).look_for(STILL_S + 1.0)
    assert not found.ended and "no other member than w0.1 has the state" in found.hopeless


def test_where_nobody_is_to_be_ended_it_is_only_told() -> None:
    host = Host(dict(ALL_WAIT))
    host.judge.may_end = False
    (found,) = host.look_for(STILL_S + 1.0)
    assert found.blamed == "w2.1" and not found.ended and not found.hopeless


def test_who_was_left_behind_and_waits_for_nothing_is_ended_once() -> None:
    host = Host({"w0.1": waits_for("w1.1"), "w2.1": NOTHING}, members=("w0.1",))
    found: list[Standstill] = []
    for _ in range(100):
        host.look()
        found += host.judge.strays(host.beats, ["w2.1"])
    assert [one.ended for one in found] == ["w2.1"] and found[0].reason.startswith("the others went on")


# ---- several hosts

ACROSS = ("w0.1@a", "w0.1@b", "w1.1@b")
HERE: dict[str, Wait | None] = {"w0.1@a": waits_for("w1.1@b")}
SAID = Idle(9.0, 2, 2, (("w0.1@a", 20),))


@pytest.mark.parametrize(
    "said",
    [
        (0.5, None),
        (5.0, SAID),
        (0.5, replace(SAID, seconds=1.0)),
        (0.5, replace(SAID, members=1)),
    ],
    ids=["one of them does something", "it was not heard of", "not for long", "of another view"],
)
def test_other_hosts_must_say_the_same(said: tuple[float, Idle | None]) -> None:
    host = Host(dict(HERE), members=ACROSS, name="a")
    assert host.look_for(20.0) == []
    host.elsewhere = {"b": said}
    assert host.look_for(20.0) == []


def test_all_hosts_blame_the_same_and_its_own_agent_ends_it() -> None:
    host = Host(dict(HERE), members=ACROSS, name="a")
    host.elsewhere = {"b": (0.5, SAID)}
    assert host.look_for(STILL_S + 0.5) == []  # the others tell first: the end of w0.1@a will move their workers
    (found,) = host.look_for(TELL_S)
    assert found.blamed == found.ended == "w0.1@a" and list(found.waits) == ["w0.1@a"]
    there = Host({"w0.1@b": waits_for("w0.1@a"), "w1.1@b": waits_for("w0.1@a")}, members=ACROSS, name="b")
    there.look_for(2.0)
    said = there.judge.idle(there.beats, ACROSS)
    assert said is not None and dict(said.votes) == {"w0.1@a": 20}
    there.elsewhere = {"a": (0.5, host.judge.idle(host.beats, ACROSS))}
    (found,) = there.look_for(STILL_S)
    assert found.blamed == "w0.1@a" and not found.ended


@pytest.mark.parametrize("idle", [None, SAID])
def test_what_a_host_says_of_it_survives_the_wire(idle: Idle | None) -> None:
    beat = AgentBeat(host="b", crew=CrewHealth(step=3, idle=idle))
    assert AgentBeat.decode(beat.encode()) == beat


@pytest.mark.parametrize(
    "wait",
    [None, NOTHING, waits_for(*(f"w{number}.1@a-host-with-a-long-name" for number in range(40))), waits_for("\n,é\0")],
)
def test_a_beat_says_what_is_waited_for_as_far_as_there_is_room(wait: Any) -> None:
    found = Beat.decode(Beat(number=1, at=2.0, wait=wait).encode())
    assert found is not None
    if wait is None:
        assert found.wait is None
    else:
        assert found.wait is not None and (found.wait.kind, found.wait.since) == (wait.kind, wait.since)
        assert set(found.wait.whom) <= set(wait.whom) and wait.why[:3] == found.wait.why[:3]
