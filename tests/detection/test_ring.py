"""The ring of watchers: fair, across hosts, and no dearer for many."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.words import host_of, worker_id
from holdfast.detection.ring import ring, watch_lists
from holdfast.testing.heartbeats import simulate

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=8)


def land(hosts: list[int]) -> list[str]:
    return [worker_id(slot, 1, f"h{number}") for number, size in enumerate(hosts) for slot in range(size)]


@given(sizes, st.integers(1, 4))
def test_everyone_watches_and_is_watched_as_often_as_everyone(hosts: list[int], watched: int) -> None:
    members = land(hosts)
    lists = watch_lists(members, watched)
    count = min(watched, len(members) - 1)
    assert sorted(ring(members)) == sorted(members) and lists.keys() == set(members)
    assert all(len(set(chosen)) == count and member not in chosen for member, chosen in lists.items())
    times = Counter(one for chosen in lists.values() for one in chosen)
    assert all(times[member] == count for member in members)


@given(st.integers(3, 9), st.integers(1, 6))
def test_neighbours_are_on_different_hosts(hosts: int, size: int) -> None:
    for member, chosen in watch_lists(land([size] * hosts)).items():
        assert len({host_of(member), *map(host_of, chosen)}) == 3


def test_what_it_costs_and_how_soon_a_loss_is_noticed_do_not_depend_on_how_many_there_are() -> None:
    few, many, most = (simulate(workers, seed=1) for workers in (10, 1_000, 10_000))
    assert few.sent_per_s == many.sent_per_s == most.sent_per_s == few.heard_per_s == most.heard_per_s == 8.0
    assert most.false_alarms == many.false_alarms == few.false_alarms == 0
    assert many.unnoticed == most.unnoticed == 0
    assert max(few.noticed_s, many.noticed_s, most.noticed_s) < 1.2
    assert abs(most.noticed_s - few.noticed_s) < 0.2 and most.noticed_s_worst < 2.0
