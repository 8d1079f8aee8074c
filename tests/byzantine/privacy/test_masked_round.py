"""Masked sums: exact, with clients that fall silent in every phase, and buckets from a seed that no client chooses."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.byzantine.privacy import dealing
from holdfast.byzantine.privacy.client import MaskedClient
from holdfast.byzantine.privacy.exchange import carried
from holdfast.byzantine.privacy.fixed_point import Encoding
from holdfast.byzantine.privacy.masked_round import MaskedRound
from holdfast.byzantine.privacy.messages import Phase
from holdfast.byzantine.privacy.sharing import recovered, split
from holdfast.byzantine.privacy.terms import Terms
from holdfast.core.errors import ConfigError, ProtocolError
from tests.byzantine.privacy.parties import SECRET, assert_sums, names, run, secrets, terms, values


@pytest.mark.parametrize(("clients", "buckets", "bits"), [(2, 1, 32), (5, 1, 64), (7, 3, 32), (20, 10, 32)])
def test_sums_are_exact_and_every_client_is_in_one(clients: int, buckets: int, bits: int) -> None:
    agreed = terms(clients, buckets, bits=bits)
    found = run(agreed, names(clients))
    assert len(found.sums) == buckets and not found.lost and not found.left_out and found.hostile == 0
    assert sorted(name for one in found.sums for name in one.clients) == names(clients)
    assert_sums(found, agreed)


# -- clients that fall silent, in a bucket of five whose threshold is three


@pytest.mark.parametrize("phase", [Phase.SHARE, Phase.MASK, Phase.UNMASK])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_bucket_bears_two_of_five_that_fall_silent_and_not_three(phase: Phase, count: int) -> None:
    agreed, clients = terms(5), names(5)
    found = run(agreed, clients, silent=dict.fromkeys(clients[:count], phase))
    if count == 3:
        assert found.sums == () and "2 of 5 are left" in found.lost[0].reason and "3 must be" in found.lost[0].reason
        assert found.hostile == 0  # silence proves nothing
        return
    arrived = clients if phase is Phase.UNMASK else clients[count:]  # who falls silent at the end is in the sum
    assert found.sums[0].clients == tuple(arrived)
    assert_sums(found, agreed)


def test_clients_may_be_lost_in_different_phases_and_another_bucket_goes_on() -> None:
    agreed, clients = terms(12, 2), names(12)
    first, second = (set(one.clients) for one in run(agreed, clients).sums)
    some = sorted(first)
    late = {some[0]: Phase.SHARE, some[1]: Phase.MASK, some[2]: Phase.UNMASK}
    found = run(agreed, clients, silent=late)  # six members, four of whom must answer: three do
    assert [set(one.clients) for one in found.sums] == [second] and set(found.lost[0].members) == first
    late.pop(some[2])
    found = run(agreed, clients, silent=late)
    assert {frozenset(one.clients) for one in found.sums} == {frozenset(some[2:]), frozenset(second)}
    assert_sums(found, agreed)


def test_who_does_not_come_at_all_is_not_dealt() -> None:
    agreed, clients = terms(6, 2), names(6)
    found = run(agreed, clients, silent={"c00": Phase.ADVERTISE, "c01": Phase.ADVERTISE})
    assert sorted(name for one in found.sums for name in one.clients) == clients[2:]
    found = run(agreed, clients, silent=dict.fromkeys(clients[:3], Phase.ADVERTISE))
    assert found.sums == () and "3 clients are here, and 2 buckets need 4" in found.lost[0].reason


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(list(Phase)), min_size=7, max_size=7), st.integers(1, 3))
def test_whoever_falls_silent_whenever_sums_are_right_or_lost(phases: list[Phase], buckets: int) -> None:
    agreed, clients = terms(7, buckets), names(7)
    found = run(agreed, clients, silent=dict(zip(clients, phases, strict=True)))
    assert_sums(found, agreed)
    for one in found.sums:
        assert len(one.clients) >= 2  # never a client's numbers alone


class Forgetful:
    """A client each of whose messages is handled by another process."""

    def __init__(self, name: str, agreed: Terms) -> None:
        self.kept = MaskedClient(name, 1, agreed, secrets(name)).kept()

    def hear(self, content: bytes) -> bytes:
        client = MaskedClient.restored(self.kept)
        if client.phase is Phase.MASK:
            client.contribute(values(client.terms, client.name))
        answer = client.hear(content)
        self.kept = client.kept()
        return answer


def test_clients_may_live_as_long_as_one_message() -> None:
    agreed, clients = terms(7, 2), names(7)
    found = carried(MaskedRound(1, clients, agreed, SECRET), {name: Forgetful(name, agreed) for name in clients})
    assert len(found.sums) == 2 and not found.left_out
    assert_sums(found, agreed)


def test_whoever_has_refused_once_refuses_for_good_and_what_is_not_kept_is_not_restored() -> None:
    client = MaskedClient("c00", 1, terms(3), secrets("c00"))
    with pytest.raises(ProtocolError):
        client.hear(b"?")
    again = MaskedClient.restored(client.kept())
    with pytest.raises(ProtocolError, match="bytes that encode nothing"):
        again.hear(MaskedRound(1, names(3), terms(3), SECRET).begin()[0].content)
    for content in (b"", b"?", client.kept()[:-1], client.kept() + b"n"):
        with pytest.raises(ProtocolError):
            MaskedClient.restored(content)


# -- parts


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 100.0), st.integers(1, 50), st.sampled_from([32, 64]), st.integers(0, 2**31))
def test_numbers_keep_their_range_and_sums_do_not_leave_it(limit: float, members: int, bits: int, seed: int) -> None:
    encoding = Encoding.fitting(limit, members, bits)
    assert encoding.is_sound(members) and encoding.limit == pytest.approx(limit, rel=1e-6)
    rows = np.random.default_rng(seed).uniform(-2 * limit, 2 * limit, (members, 9))
    rows[:, 0], rows[:, 1] = limit, -limit
    encoded = [encoding.encode(row) for row in rows]
    clipped = np.clip(rows, -encoding.limit, encoding.limit)
    summed = encoding.decode(np.sum(encoded, axis=0, dtype=encoded[0].dtype))
    unit = 2.0**-encoding.fraction_bits
    assert np.abs(summed - clipped.sum(axis=0)).max() <= members * (unit / 2 + 1e-12 * limit)
    for row, residues in zip(clipped, encoded, strict=True):
        assert np.abs(encoding.decode(residues) - row).max() <= unit / 2 + 1e-12 * limit
        assert (encoding.from_bytes(encoding.to_bytes(residues)) == residues).all()


def test_ranges_that_cannot_be_are_refused() -> None:
    for wrong, said in (
        ((float("nan"), 2, 32), "are no range"),
        ((1e12, 2, 32), "do not fit into 32 bits"),
        ((1.0, 2, 16), "no numbers of 16 bits"),
    ):
        with pytest.raises(ConfigError, match=said):
            Encoding.fitting(*wrong)
    with pytest.raises(ConfigError, match="not finite"):
        Encoding.fitting(1.0, 2).encode(np.array([0.0, np.nan]))


@pytest.mark.parametrize(
    ("clients", "buckets", "colluding", "said"),
    [
        (5, 3, 0, "5 clients cannot be dealt into 3 buckets of at least 2"),
        (9, 3, 2, "9 clients cannot be dealt into 3 buckets of at least 4"),
        (5, 0, 0, "0 buckets"),
    ],
)
def test_terms_that_cannot_be_are_refused(clients: int, buckets: int, colluding: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Terms(buckets, 3, Encoding.fitting(1.0, 9), colluding).checked(clients)
    with pytest.raises(ConfigError, match="can leave the range"):
        Terms(1, 3, Encoding.fitting(1.0, 3)).checked(5)
    with pytest.raises(ConfigError, match="two clients have one name"):
        MaskedRound(1, ["a", "a"], Terms(1, 3, Encoding.fitting(1.0, 2)), SECRET)


def test_the_threshold_is_above_half_of_honest_members_and_twice_the_colluding_ones() -> None:
    for members, colluding in ((2, 0), (3, 0), (3, 1), (8, 0), (9, 2), (10, 4)):
        threshold = Terms(1, 1, Encoding.fitting(1.0, 10), colluding).threshold(members)
        assert 2 * threshold > members + colluding and 2 * (threshold - 1) <= members + colluding
        assert threshold <= members and colluding < threshold


def test_any_threshold_of_shares_opens_a_secret_and_fewer_do_not() -> None:
    secret = bytes(range(16))
    shares = dict(enumerate(split(secret, 3, 5)))
    for some in combinations(shares.items(), 3):
        assert recovered(dict(some), 3, secret.__eq__) == secret
    assert recovered(dict(list(shares.items())[:2]), 3, secret.__eq__) is None
    assert recovered(shares | {1: bytes(16)}, 3, secret.__eq__) == secret  # one is wrong, and others are tried
    assert recovered(shares | dict.fromkeys((0, 1, 2), bytes(16)), 3, secret.__eq__) is None


# -- who is in which bucket


def test_buckets_are_a_matter_of_chance_that_depends_on_every_nonce() -> None:
    clients = names(12)
    nonces = {name: bytes(16) for name in clients}
    together: Counter[frozenset[str]] = Counter()
    for number in range(600):
        deal = dealing.dealt(dealing.seed_of(SECRET, number, nonces), clients, 3)
        assert sorted(name for bucket in deal for name in bucket) == clients
        assert {len(bucket) for bucket in deal} == {4}
        together.update(frozenset(pair) for bucket in deal for pair in combinations(bucket, 2))
    # Each pair is together in 3/11 of the rounds: 164 of 600, and rarely more than 5 standard deviations off.
    assert len(together) == 66 and min(together.values()) > 110 and max(together.values()) < 218
    first = dealing.dealt(dealing.seed_of(SECRET, 0, nonces), clients, 3)
    other = dealing.dealt(dealing.seed_of(SECRET, 0, nonces | {"c11": bytes([1]) * 16}), clients, 3)
    assert first != other


def test_values_of_tests_differ_between_clients() -> None:
    agreed = terms(3)
    assert (values(agreed, "c00") != values(agreed, "c01")).any()
