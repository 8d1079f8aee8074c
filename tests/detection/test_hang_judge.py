"""A host with its workers, seen look by look: whom to end, whom to spare, and what the watcher's own absence costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.detection.beat import Activity, Beat
from holdfast.detection.hang_judge import HangJudge, HangVerdict, Process
from holdfast.detection.phi import IntervalHistory
from holdfast.detection.progress import Level, Limits

LOOK_S = 0.1


@dataclass
class Host:
    """Workers that beat, and a judge that looks at them ten times a second."""

    names: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    elsewhere: tuple[str, ...] = ()
    now: float = 1000.0
    stopped: set[str] = field(default_factory=set)
    still: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)
    verdicts: list[HangVerdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        usual = IntervalHistory(100, 0.02, 0.005, 0.05)
        pace = IntervalHistory(100, 0.1, 0.01, 0.15)
        self.hang_judge = HangJudge(self.limits)
        self.beats = {
            name: Beat(number=1, at=self.now, activity=Activity.SHARD, entered=9, pace=pace, usual=usual)
            for name in self.names
        }
        self.cpu_s = dict.fromkeys(self.names, 1.0)

    def put(self, name: str, activity: Activity) -> None:
        self.beats[name] = replace(self.beats[name], activity=activity, entered=self.beats[name].entered + 1)

    def pass_by(self, seconds: float, *, look_s: float = LOOK_S) -> None:
        for _ in range(round(seconds / look_s)):
            self.now += look_s
            for name, beat in self.beats.items():
                if name in self.busy or (name not in self.stopped and name not in self.still):
                    self.cpu_s[name] += look_s / 2
                if name not in self.stopped:
                    moved_at = beat.moved_at if name in self.still else self.now
                    self.beats[name] = replace(beat, number=beat.number + 1, at=self.now, moved_at=moved_at)
            self.verdicts += self.look()

    def look(self) -> list[HangVerdict]:
        asked = self.hang_judge.observe(self.beats, self.now)
        seen: Mapping[str, Process] = {
            name: Process("T" if name in self.stopped else "S", self.cpu_s[name]) for name in asked
        }
        return self.hang_judge.judge(seen, (*self.names, *self.elsewhere))

    @property
    def ended(self) -> list[str]:
        return [verdict.worker for verdict in self.verdicts if verdict.kill]

    def level(self, name: str) -> Level:
        return self.hang_judge.suspicion(name).level


def test_workers_that_get_on_are_left_alone() -> None:
    host = Host(("w0.1", "w1.1"))
    host.pass_by(300.0)
    assert host.verdicts == [] and host.level("w0.1") == Level.OK


def test_a_stopped_worker_is_ended_within_a_second() -> None:
    host = Host(("w0.1", "w1.1"))
    host.pass_by(1.0)
    host.stopped.add("w1.1")
    host.pass_by(0.6)
    assert host.level("w1.1") == Level.SUSPECT and host.verdicts == []
    host.pass_by(0.5)
    assert host.ended == ["w1.1"]
    host.pass_by(10.0)
    assert host.ended == ["w1.1"], "said once"


def test_a_thread_that_stands_still_is_found_after_five_seconds() -> None:
    host = Host(("w0.1", "w1.1"))
    host.put("w0.1", Activity.WAITING)
    host.still |= {"w0.1", "w1.1"}  # the other waits for it, and does not hang
    host.pass_by(4.8)
    assert host.verdicts == []
    host.pass_by(0.6)
    assert host.ended == ["w1.1"]
    assert "in a shard" in host.verdicts[0].suspicion.reason


def test_loader_processes_that_work_are_waited_for() -> None:
    host = Host(("w0.1", "w1.1"))
    host.put("w1.1", Activity.LOADING)
    host.still.add("w1.1")
    host.busy.add("w1.1")
    host.pass_by(100.0)
    assert host.verdicts == []
    host.pass_by(30.0)
    assert host.ended == ["w1.1"]


def test_the_only_member_is_never_ended() -> None:
    host = Host(("w0.1",))
    host.stopped.add("w0.1")
    host.pass_by(300.0)
    assert host.ended == []
    assert [verdict.spared for verdict in host.verdicts] == ["it is the only member, and has the only state"]


def test_when_all_look_hung_nobody_is_ended_until_one_wakes() -> None:
    host = Host(("w0.1", "w1.1", "w2.1"))
    host.stopped |= {"w0.1", "w1.1", "w2.1"}
    host.pass_by(60.0)
    assert host.ended == [] and len(host.verdicts) == 3
    host.stopped.remove("w0.1")
    host.pass_by(1.0)
    assert sorted(host.ended) == ["w1.1", "w2.1"]


def test_two_that_hang_one_moment_after_the_other_are_both_spared() -> None:
    """When the first has hung for long enough the second is only suspect, and yet nobody is well."""
    host = Host(("w0.1", "w1.1"))
    host.still = {"w0.1"}
    host.pass_by(0.3)
    host.still = {"w0.1", "w1.1"}
    host.pass_by(30.0)
    assert host.ended == [] and {verdict.worker for verdict in host.verdicts} == {"w0.1", "w1.1"}
    host.still = {"w0.1"}
    host.pass_by(1.0)
    assert host.ended == ["w0.1"]


def test_who_has_stood_still_for_a_while_vouches_for_nobody() -> None:
    """When the first has hung for long enough nobody suspects the second yet, which may hang as well."""
    host = Host(("w0.1", "w1.1"))
    host.still = {"w0.1"}
    host.pass_by(3.0)
    host.still = {"w0.1", "w1.1"}
    host.pass_by(2.2)
    assert host.level("w0.1") == Level.HUNG and host.level("w1.1") == Level.OK and host.verdicts == []
    host.pass_by(1.0)
    assert host.ended == [] and "seen to be well" in host.verdicts[0].spared
    host.put("w1.1", Activity.WAITING)
    host.pass_by(0.2)
    assert host.ended == ["w0.1"]


def test_who_wakes_and_hangs_on_vouches_for_nobody() -> None:
    """What it did while it was stopped nobody knows, so its patience begins anew; but it is not seen to get on."""
    host = Host(("w0.1", "w1.1"))
    host.still = {"w0.1", "w1.1"}
    host.stopped = {"w0.1"}
    host.pass_by(8.0)
    host.stopped = set()
    host.pass_by(1.0)
    assert host.level("w0.1") == Level.OK and host.level("w1.1") == Level.HUNG and host.ended == []
    host.still = {"w1.1"}
    host.pass_by(0.2)
    assert host.ended == ["w1.1"]


def test_who_has_the_only_state_is_not_ended_while_the_other_fetches_it() -> None:
    host = Host(("w0.1", "w1.2"))
    host.beats["w1.2"] = replace(host.beats["w1.2"], activity=Activity.WAITING, entered=1)
    host.still.add("w0.1")
    host.pass_by(300.0)
    assert host.ended == [] and "have the state" in host.verdicts[0].spared
    host.put("w1.2", Activity.SCRIPT)
    host.pass_by(1.0)
    assert host.ended == ["w0.1"]


def test_all_of_one_host_are_ended_late_while_others_live_elsewhere() -> None:
    host = Host(("w0.1@a", "w1.1@a"), elsewhere=("w0.1@b",))
    host.still |= set(host.names)
    host.pass_by(110.0)
    assert host.verdicts == []
    host.pass_by(20.0)
    assert sorted(host.ended) == ["w0.1@a", "w1.1@a"]


def test_the_time_in_which_nobody_looked_is_nobodys_silence() -> None:
    """The host was frozen, and with it the agent and all workers."""
    host = Host(("w0.1", "w1.1"))
    host.pass_by(1.0)
    host.now += 3600.0
    host.stopped |= {"w0.1", "w1.1"}  # not scheduled yet
    host.verdicts += host.look()
    assert host.verdicts == [] and host.level("w0.1") < Level.HUNG
    host.stopped.clear()
    host.pass_by(5.0)
    assert host.verdicts == []


def test_a_script_after_its_loop_is_ended_only_if_it_holds_up_others() -> None:
    host = Host(("w0.1", "w1.1"))
    host.put("w0.1", Activity.ENDED)
    host.still.add("w0.1")
    host.pass_by(400.0)
    assert host.verdicts == []
    host.put("w1.1", Activity.WAITING)
    host.pass_by(130.0)
    assert host.ended == ["w0.1"]


def test_one_that_wakes_while_its_stacks_are_collected_is_let_off() -> None:
    host = Host(("w0.1", "w1.1"))
    host.stopped.add("w1.1")
    host.pass_by(1.5)
    (verdict,) = host.verdicts
    assert host.hang_judge.still_hung(verdict, verdict.beat)
    assert not host.hang_judge.still_hung(verdict, replace(verdict.beat, number=verdict.beat.number + 1))
    assert not host.hang_judge.still_hung(verdict, None)
    host.pass_by(0.5)
    assert host.ended == ["w1.1", "w1.1"], "and it may be called hung again"


def test_one_whose_thread_moves_while_its_stacks_are_collected_is_let_off() -> None:
    host = Host(("w0.1", "w1.1"))
    host.still.add("w1.1")
    host.pass_by(6.0)
    (verdict,) = host.verdicts
    later = replace(verdict.beat, number=verdict.beat.number + 5)
    assert host.hang_judge.still_hung(verdict, later)
    assert not host.hang_judge.still_hung(verdict, replace(later, moved_at=host.now))
    assert not host.hang_judge.still_hung(verdict, replace(later, entered=later.entered + 1))


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["w0.1", "w1.1", "w2.1"]), max_size=3), st.floats(0.1, 3.0), st.booleans())
def test_one_of_all_members_is_always_left(hung: list[str], look_s: float, stopped: bool) -> None:
    host = Host(("w0.1", "w1.1", "w2.1"))
    (host.stopped if stopped else host.still).update(hung)
    host.pass_by(15.0, look_s=look_s)
    assert len(set(host.ended)) < len(host.names)
    if len(set(hung)) < 3:
        assert set(host.ended) <= set(hung)


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=60))
def test_however_the_watcher_is_scheduled_workers_that_beat_at_every_look_are_fine(gaps: list[float]) -> None:
    host = Host(("w0.1", "w1.1"))
    for gap_s in gaps:
        host.pass_by(gap_s, look_s=max(gap_s, 1e-6))
    assert host.verdicts == []


def test_those_who_are_gone_are_forgotten() -> None:
    host = Host(("w0.1", "w1.1"))
    host.pass_by(1.0)
    del host.beats["w1.1"]
    host.look()
    assert host.level("w1.1") == Level.OK


def test_who_was_left_behind_is_watched_but_vouches_for_nobody() -> None:
    """It may have given up its state: the only member is not ended because of it."""
    host = Host(("w0.1", "w1.1"), Limits(stopped_s=5.0))
    host.pass_by(1.0)

    def look(stopped: str, seconds: float) -> list[HangVerdict]:
        host.stopped = {stopped}
        found = []
        for _ in range(round(seconds / LOOK_S)):
            host.now += LOOK_S
            other = "w0.1" if stopped == "w1.1" else "w1.1"
            beat = host.beats[other]
            host.beats[other] = replace(beat, number=beat.number + 1, at=host.now, moved_at=host.now)
            asked = host.hang_judge.observe(host.beats, host.now)
            seen = {name: Process("T" if name == stopped else "S", 1.0) for name in asked}
            found += host.hang_judge.judge(seen, ("w0.1",), ("w1.1",))
        return found

    assert look("w1.1", 4.5) == []
    assert [(verdict.worker, verdict.kill) for verdict in look("w1.1", 1.0)] == [("w1.1", True)]
    assert [(verdict.worker, verdict.kill) for verdict in look("w0.1", 6.0)] == [("w0.1", False)]
