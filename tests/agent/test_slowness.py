"""Which servers are slow: a pure judgement over what the others measure, in invented time."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.agent.servers.slowness import Finding, SlownessJudge, SlowRules

RULES = SlowRules(after_s=8.0, back_after_s=30.0)
QUICK, LATE = {"s1": 0.002, "s2": 0.3}, {"s1": 0.002, "s2": 0.003}


class Story:
    """Measures every two seconds, as servers tell them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.judge = SlownessJudge(RULES)
        self.found: list[tuple[float, Finding]] = []

    def goes_on(self, seconds: float, **measured: Mapping[str, float]) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 2.0
            for by, lags_s in measured.items():
                self.judge.measured(by, lags_s, self.now)
            self.found += [(self.now, finding) for finding in self.judge.look(self.now)]


def test_a_server_that_takes_much_longer_than_the_others_for_a_while_is_slow() -> None:
    story = Story()
    story.goes_on(6, s0=QUICK)
    assert not story.found, "not at once"
    story.goes_on(6, s0=QUICK)
    [(_, finding)] = story.found
    assert (finding.server, finding.slow) == ("s2", True)
    assert finding.times == 150.0
    assert "150.0 times as long as the others' for 8 s" in finding.reason


def test_a_moment_is_not_enough_and_neither_is_a_little() -> None:
    story = Story()
    for _ in range(10):
        story.goes_on(6, s0=QUICK)
        story.goes_on(2, s0=LATE)
    story.goes_on(60, s0={"s1": 0.0002, "s2": 0.02})  # 100 times as long, and nobody notices
    story.goes_on(60, s0={"s1": 1.0, "s2": 3.0})  # 2 s longer, and large payloads take so long
    assert not story.found


def test_it_is_quick_again_when_it_has_been_for_long_and_for_twice_as_long_the_next_time() -> None:
    story = Story()
    story.goes_on(20, s0=QUICK)
    story.goes_on(200, s0=LATE)
    story.goes_on(20, s0=QUICK)
    story.goes_on(200, s0=LATE)
    times = [(at, finding.slow) for at, finding in story.found]
    assert [slow for _, slow in times] == [True, False, True, False]
    assert times[1][0] - 20 == 32, "30 s, and the look after it"
    assert times[3][0] - 240 == 62


def test_between_quick_and_slow_it_stays_what_it_is() -> None:
    story = Story()
    story.goes_on(20, s0=QUICK)
    assert len(story.found) == 1
    story.goes_on(400, s0={"s1": 0.1, "s2": 0.3})
    assert len(story.found) == 1, "three times as long is neither"


def test_a_slow_server_accuses_nobody_and_two_servers_cannot_tell() -> None:
    story = Story()
    story.goes_on(60, s2={"s0": 0.4, "s1": 0.41})
    story.goes_on(60, s0={"s1": 5.0})
    assert not story.found


def test_most_of_those_who_can_compare_have_to_find_it() -> None:
    story = Story()
    cut = {"s0": 0.002, "s3": 0.5}
    story.goes_on(60, s0={"s1": 0.002, "s3": 0.002}, s1=cut, s2={"s0": 0.002, "s1": 0.002, "s3": 0.003})
    assert not story.found, "between s1 and s3 the network is slow"
    story.goes_on(60, s0={"s1": 0.002, "s3": 0.5}, s1=cut, s2={"s0": 0.002, "s1": 0.002, "s3": 0.5})
    assert [finding.server for _, finding in story.found] == ["s3"]


def test_what_was_measured_long_ago_does_not_count() -> None:
    story = Story()
    story.goes_on(2, s0=QUICK)
    story.goes_on(60)
    story.goes_on(6, s0=QUICK)
    assert not story.found
    story.judge.gone("s2")
    story.goes_on(6, s0=QUICK)
    assert not story.found, "another server has its name now"
