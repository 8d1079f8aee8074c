"""Hosts that hear each other: who is silent, who is only late, what is told around, and when a host is given up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ProtocolError
from holdfast.detection.agent_beat import BEAT_BYTES_MAX, NAMED_MAX, PASSED_ON_MAX, AgentBeat, CrewHealth, Opinion, Told
from holdfast.detection.giving_up import ALL_MAX, HELD_UP_S, REST_S, Case, GivingUp
from holdfast.detection.neighbours import LATE, OK, SILENT, UNHEARD, HostBack, HostSilent, Neighbours
from holdfast.detection.progress import Level
from holdfast.detection.ring import BEAT_S

HOSTS = ("a", "b", "c", "d", "e")


class Land:
    """Agents that beat to each other in lockstep, but for those that are `gone`, and over ways that are not `cut`."""

    def __init__(self, *hosts: str) -> None:
        self.now = 0.0
        self.agents = {host: Neighbours(host) for host in hosts}
        self.crews = {host: CrewHealth() for host in hosts}
        self.gone: set[str] = set()
        self.cut: set[tuple[str, str]] = set()
        self.out: dict[str, set[str]] = {}
        self.silent: list[tuple[str, str]] = []  # who says so, of whom
        self.back: list[tuple[str, str]] = []
        for agent in self.agents.values():
            agent.arrange(hosts)

    def go_on(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            living = [agent for host, agent in self.agents.items() if host not in self.gone]
            said = {
                one.me: one.beat(self.crews[one.me], self.now, out_of_reach=self.out.get(one.me, ())) for one in living
            }
            for agent in living:
                agent.elapse(self.now)
            for agent in living:
                for target in agent.targets:
                    if target not in self.gone and (agent.me, target) not in self.cut:
                        heard = AgentBeat.decode(said[agent.me].encode())
                        self.back += [(target, one.host) for one in self.agents[target].take(heard, self.now)]
            for agent in living:
                self.silent += [(agent.me, found.host) for found in agent.look()]


def test_a_lost_host_is_called_silent_by_both_that_hear_it_and_by_nobody_else() -> None:
    land = Land(*HOSTS)
    land.go_on(5.0)
    assert not land.silent
    land.gone.add("c")
    land.go_on(1.5)
    assert sorted(land.silent) == [("d", "c"), ("e", "c")]
    land.go_on(20.0)
    assert len(land.silent) == 2, "it is said once"
    land.gone.clear()
    land.go_on(BEAT_S)
    assert sorted(land.back) == [("d", "c"), ("e", "c")]


def test_the_second_knows_what_the_first_thinks_and_only_if_that_one_tried() -> None:
    land = Land(*HOSTS)
    land.go_on(5.0)
    land.gone.add("c")
    land.go_on(1.5)
    assert land.agents["e"].confirmed("c", land.now) == ""
    land.out["d"] = {"c"}
    land.go_on(BEAT_S)
    assert land.agents["e"].confirmed("c", land.now) == "d"
    assert land.agents["e"].confirmed("c", land.now + 1.0) == "", "what was said a second ago does not count"
    assert land.agents["d"].confirmed("c", land.now) == ""


def test_a_cut_between_two_is_confirmed_by_nobody() -> None:
    land = Land(*HOSTS)
    land.go_on(5.0)
    land.cut |= {("c", "e"), ("e", "c")}
    land.out = {"e": {"c"}}
    land.go_on(5.0)
    assert land.silent == [("e", "c")]
    assert land.agents["e"].level("c") == SILENT and land.agents["d"].level("c") == OK
    assert land.agents["e"].confirmed("c", land.now) == ""


def test_who_was_never_heard_is_not_silent_and_who_leaves_is_not_either() -> None:
    agent = Neighbours("b")
    agent.arrange(["a", "b", "c"])
    for beat in range(40):
        agent.elapse(beat * BEAT_S)
        agent.take(AgentBeat(host="a", leaving=beat == 39), beat * BEAT_S)
        assert agent.look() == []
    for beat in range(40, 80):
        agent.elapse(beat * BEAT_S)
        assert agent.look() == []
    assert agent.level("a") == OK and agent.level("c") == UNHEARD


def test_our_own_absence_counts_for_nobody() -> None:
    """This agent was not given a processor for an hour; the beats of the others wait in its sockets."""
    agent = Neighbours("b")
    agent.arrange(["a", "b"])
    for beat in range(40):
        agent.elapse(beat * BEAT_S)
        agent.take(AgentBeat(host="a"), beat * BEAT_S)
    agent.elapse(3600.0)
    assert agent.level("a") in (OK, LATE)
    agent.take(AgentBeat(host="a"), 3600.0)
    assert agent.look() == [] and agent.level("a") == OK


def test_patience_is_learnt_and_asked_for() -> None:
    """Of two hosts that fall silent for a second, the one whose beats come every second by its past is not."""
    agent = Neighbours("c", silent_s=0.8)
    agent.arrange(["a", "b", "c"])
    patient = Neighbours("c", silent_s=4.0)  # of a run with a longer lease
    patient.arrange(["a", "b", "c"])
    now = 0.0
    for beat in range(161):
        now += 0.25
        for one in (agent, patient):
            one.elapse(now)
            one.take(AgentBeat(host="a"), now)
            if beat % 4 == 0:
                one.take(AgentBeat(host="b"), now)
            one.look()
    for _ in range(4):
        now += 0.25
        agent.elapse(now)
        patient.elapse(now)
    assert [found.host for found in agent.look()] == ["a"] and agent.level("b") != SILENT
    assert patient.look() == [] and patient.level("a") == LATE


def test_what_is_told_goes_round_the_ring() -> None:
    land = Land(*(f"h{number:02}" for number in range(20)))
    land.crews["h07"] = CrewHealth.of({"w0.1@h07": Level.HUNG, "w1.1@h07": Level.OK}, step=41)
    land.go_on(8.0)
    for agent in land.agents.values():
        rows = {row.host: row for row in agent.rows(land.now)}
        assert agent.me not in rows and len(rows) == 19
        if agent.me != "h07":
            assert rows["h07"].crew.unwell == (("w0.1@h07", Level.HUNG),) and rows["h07"].crew.step == 41
            assert rows["h07"].crew.counts == (1, 0, 0, 1) and rows["h07"].age_s < 6.0
    land.gone.add("h07")
    land.go_on(10.0)
    rows = {host: {row.host: row for row in agent.rows(land.now)} for host, agent in land.agents.items()}
    assert rows["h08"]["h07"].level == SILENT and rows["h08"]["h07"].by == "h08"
    assert rows["h11"]["h07"].level == SILENT and rows["h11"]["h07"].by in ("h09", "h10")
    assert rows["h00"]["h07"].age_s > 8.0, "further away it only gets old"


def test_a_host_that_left_the_ledger_is_forgotten_and_begins_anew() -> None:
    agent = Neighbours("b")
    agent.arrange(["a", "b"])
    for beat in range(20):
        agent.elapse(beat * BEAT_S)
        agent.take(AgentBeat(host="a"), beat * BEAT_S)
    for beat in range(20, 30):
        agent.elapse(beat * BEAT_S)
    assert agent.look() == [HostSilent("a", agent.phi("a"), 2.5)]
    agent.arrange(["b"])
    agent.arrange(["a", "b"])
    assert agent.level("a") == UNHEARD and agent.take(AgentBeat(host="a"), 8.0) == []
    assert isinstance(HostBack("a", 1.0), HostBack)


# ---- on the wire

names = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=20)
crews = st.builds(
    CrewHealth,
    st.tuples(*[st.integers(0, 5000)] * 4),
    st.lists(st.tuples(names, st.sampled_from(Level)), max_size=NAMED_MAX).map(tuple),
    st.integers(0, 1 << 40),
)
beats = st.builds(
    AgentBeat,
    host=names,
    crew=crews,
    opinions=st.lists(
        st.builds(Opinion, names, st.booleans(), st.booleans(), st.floats(0, 1e6), st.floats(0, 1e6)), max_size=2
    ).map(tuple),
    told=st.lists(st.builds(Told, names, st.floats(0, 1e4), crews), max_size=PASSED_ON_MAX).map(tuple),
    leaving=st.booleans(),
)


@settings(max_examples=30)
@given(beats)
def test_a_beat_is_read_as_it_was_written(beat: AgentBeat) -> None:
    assert AgentBeat.decode(beat.encode()) == beat


def test_the_largest_beat_fits() -> None:
    long = "w" * 200
    crew = CrewHealth((1024,) * 4, ((long, Level.HUNG),) * NAMED_MAX, 1 << 40)
    told = tuple(Told(long, 86400.0, crew) for _ in range(PASSED_ON_MAX))
    opinions = (Opinion(long, True, True, 1e6, 1e6),) * 4
    assert len(AgentBeat(host=long, crew=crew, opinions=opinions, told=told).encode()) < BEAT_BYTES_MAX


GOOD = json.loads(
    AgentBeat(host="a", opinions=(Opinion("b", True, False, 1.0, 9.0),), told=(Told("c", 1.0, CrewHealth()),)).encode()
)


@pytest.mark.parametrize(
    "change",
    [
        {"host": ""},
        {"host": "x" * 201},
        {"host": "a\x1b[2J"},
        {"host": 7},
        {"crew": [[0, 0, 0], [], 0]},
        {"crew": [[0, 0, 0, -1], [], 0]},
        {"crew": [[0, 0, 0, 0], [["w", 9]], 0]},
        {"crew": [[0, 0, 0, 0], [["w", 1]] * (NAMED_MAX + 1), 0]},
        {"crew": [[0, 0, 0, 0], [], 1.5]},
        {"opinions": [["b", 1, False, 0.0, 0.0]]},
        {"opinions": [["b", True, False, float("nan"), 0.0]]},
        {"opinions": [["b", True, False]]},
        {"opinions": [["b", True, False, 0.0, 0.0]] * 5},
        {"told": [["c", -1.0, [[0, 0, 0, 0], [], 0]]]},
        {"told": "c"},
        {"leaving": None},
    ],
    ids=str,
)
def test_what_no_agent_would_say(change: dict[str, Any]) -> None:
    AgentBeat.decode(json.dumps(GOOD).encode())
    with pytest.raises(ProtocolError):
        AgentBeat.decode(json.dumps({**GOOD, **change}).encode())


# ---- giving up


def case(**changes: Any) -> Case:
    fields = {"host": "c", "tried": True, "reachable": False, "confirmed_by": "d", "held_up_s": HELD_UP_S}
    return Case(**{**fields, **changes})


@pytest.mark.parametrize(
    "change",
    [{"tried": False}, {"reachable": True}, {"confirmed_by": ""}, {"held_up_s": 0.0}],
    ids=str,
)
def test_a_host_is_given_up_only_with_every_reason_to(change: dict[str, Any]) -> None:
    assert GivingUp().decide(case(), 0.0).give_up
    assert not GivingUp().decide(case(**change), 0.0).give_up


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.sampled_from("abcdefgh")), max_size=60))
def test_nobody_is_given_up_again_and_again(calls: list[tuple[float, str]]) -> None:
    giving_up, now, given_up = GivingUp(), 0.0, list[tuple[float, str]]()
    for later_s, host in calls:
        now += later_s
        if giving_up.decide(case(host=host), now).give_up:
            given_up.append((now, host))
    for when, host in given_up:
        recent = [one for at, one in given_up if when - REST_S < at <= when]
        assert len(recent) <= ALL_MAX and recent.count(host) == 1
