"""The ring of hosts: fair, known to all, and no dearer for many."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.detection.ring import WATCHERS, predecessors, successors
from tests.harness.heartbeats import simulate

hosts = st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=12)


@given(hosts, st.integers(1, 4))
def test_everyone_beats_to_and_hears_as_many(hosts: set[str], count: int) -> None:
    expected = min(count, len(hosts) - 1)
    chosen = {host: successors(hosts, host, count) for host in hosts}
    assert all(len(set(others)) == expected and host not in others for host, others in chosen.items())
    assert all(times == expected for times in Counter(one for others in chosen.values() for one in others).values())
    for host in hosts:
        assert set(predecessors(hosts, host, count)) == {one for one in hosts if host in chosen[one]}


@given(hosts)
def test_the_first_that_hears_a_host_beats_to_the_second(hosts: set[str]) -> None:
    """So the second knows what both think, and need not ask."""
    for host in hosts:
        watchers = successors(hosts, host)
        if len(watchers) == WATCHERS and len(hosts) > WATCHERS:
            assert watchers[1] in successors(hosts, watchers[0])


def test_who_has_no_place_hears_nobody() -> None:
    assert successors(["a", "b"], "c") == predecessors(["a", "b"], "c") == ()


def test_what_it_costs_and_how_soon_a_loss_is_noticed_do_not_depend_on_how_many_there_are() -> None:
    few, many, most = (simulate(workers, seed=1) for workers in (40, 1_000, 10_000))
    assert few.sent_per_s == many.sent_per_s == most.sent_per_s == few.heard_per_s == most.heard_per_s == 8.0
    assert most.false_alarms == many.false_alarms == few.false_alarms == 0
    assert few.unnoticed == many.unnoticed == most.unnoticed == 0
    assert max(few.noticed_s, many.noticed_s, most.noticed_s) < 1.2
    assert abs(most.noticed_s - few.noticed_s) < 0.2 and most.noticed_s_worst < 2.0
