"""Shards of one host's workers lie side by side, so that their sums combine into few nodes of the tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.words import host_of, worker_id
from holdfast.membership.view_rules import assign


def test_each_host_has_one_range_whatever_the_ranks() -> None:
    members = ["w0.1@beta", "w0.1@alpha", "w1.1@beta", "w1.3@alpha"]
    assert assign(8, members) == {
        "w0.1@beta": (0, 1),
        "w1.1@beta": (2, 3),
        "w0.1@alpha": (4, 5),
        "w1.3@alpha": (6, 7),
    }


def test_without_hosts_the_ranks_decide() -> None:
    assert assign(6, ["w2.1", "w0.1", "w1.1"]) == {"w2.1": (0, 1), "w0.1": (2, 3), "w1.1": (4, 5)}


@given(st.integers(1, 64), st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_a_hosts_shards_are_contiguous_even_and_all_there(shards: int, hosts: list[str]) -> None:
    members = [worker_id(slot, 1, host) for slot, host in enumerate(hosts)]
    result = assign(shards, members)
    assert sorted(shard for mine in result.values() for shard in mine) == list(range(shards))
    sizes = [len(mine) for mine in result.values()]
    assert max(sizes) - min(sizes) <= 1
    for host in set(hosts):
        mine = sorted(shard for member in members if host_of(member) == host for shard in result[member])
        assert mine == list(range(mine[0], mine[0] + len(mine))) if mine else True
