"""Who is left out too often: honest workers hardly ever, hostile ones soon; and never more than can be spared."""

from __future__ import annotations

import random

import pytest

from holdfast.core.errors import ProtocolError
from holdfast.membership.auditing import Auditing, Said
from holdfast.membership.codec import decode, encode
from holdfast.membership.messages import Ready
from holdfast.membership.trusting import BETS, TrustBook, average

WORKERS = tuple(f"w{number}.1" for number in range(5))
BROUGHT = tuple((worker, (2 * number, 2 * number + 1)) for number, worker in enumerate(WORKERS))
SHARDS = 10


def book(f: int = 3, *, shards: int = SHARDS, whole: bool = True, least: int = 7) -> TrustBook:
    return TrustBook(shards=shards, f=f, least=least, whole=whole)


def played(steps: int, seed: int, *, out: int = 3, always: tuple[int, ...] = ()) -> TrustBook:
    """Every step leaves out so many at random, and `always` these."""
    draws, kept = random.Random(seed), book()
    for _ in range(steps):
        rest = [shard for shard in range(SHARDS) if shard not in always]
        gone = {*always, *draws.sample(rest, out - len(always))}
        kept.count(BROUGHT, {shard: shard not in gone for shard in range(SHARDS)}, alike=True)
    return kept


def test_honest_workers_are_not_distrusted_in_a_long_run() -> None:
    for seed in range(20):
        kept = played(3000, seed)
        assert not kept.distrusts(WORKERS), seed
        assert max(account.suspicion for account in kept.accounts.values()) < 0.8


def test_the_bets_are_fair() -> None:
    """On average worth one, whatever was left out: that is what the bound on false alarms stands on."""
    from math import comb, exp

    for bet in BETS:
        for out in range(SHARDS + 1):
            ways = [comb(out, u) * comb(SHARDS - out, 3 - u) / comb(SHARDS, 3) for u in range(4)]
            worth = sum(way * exp(bet * u - average(SHARDS, out, 3, bet)) for u, way in enumerate(ways))
            assert abs(worth - 1.0) < 1e-12


def test_whoever_is_always_left_out_is_distrusted_soon_and_named_with_reasons() -> None:
    kept = played(8, 1, always=(6, 7))
    (found,) = kept.distrusts(WORKERS)
    assert found.worker == "w3.1" and found.left_out == found.shards == 16
    assert "16 of its 16 shards in 8 steps" in found.reason and "1,000,000" in found.reason


def test_being_left_out_a_little_more_often_takes_longer() -> None:
    draws, kept = random.Random(4), book()
    for step in range(1000):
        gone = {6, *draws.sample([0, 1, 2, 3, 4, 5, 7, 8, 9], 2)} if step % 2 else set(draws.sample(range(SHARDS), 3))
        kept.count(BROUGHT, {shard: shard not in gone for shard in range(SHARDS)}, alike=True)
        if kept.distrusts(WORKERS):
            assert kept.distrusts(WORKERS)[0].worker == "w3.1" and step > 20
            return
    raise AssertionError("never found")


def test_shards_that_are_not_draws_of_one_kind_are_counted_and_prove_nothing() -> None:
    kept = book()
    for _ in range(100):
        kept.count(BROUGHT, {shard: shard not in (6, 7) for shard in range(SHARDS)}, alike=False)
    assert kept.accounts["w3.1"].left_out == 200 and not kept.distrusts(WORKERS)


@pytest.mark.parametrize(
    ("workers", "shards", "f", "spared"),
    [
        (5, 10, 3, True),
        (5, 5, 1, True),  # the one that was to be expected
        (2, 4, 2, False),  # one's word against the other's
        (5, 10, 1, False),  # a worker has more shards than f: nobody is to be believed
        (10, 10, 3, True),
        (4, 8, 4, True),  # two hostile ones of four; then one of three, who has three at most
        (6, 12, 6, True),
    ],
)
def test_nobody_goes_whom_the_others_cannot_spare(workers: int, shards: int, f: int, spared: bool) -> None:
    assert book(f, shards=shards).can_spare_one(workers) is spared


def test_elastic_steps_need_shards_enough_without_it() -> None:
    assert book(3, whole=False, least=7).can_spare_one(5)
    assert not book(3, whole=False, least=9).can_spare_one(5)


def said(worker: str) -> Said:
    return Said(distrusts=(worker, "it was left out"))


def test_more_than_half_must_distrust_the_same_one() -> None:
    auditing = Auditing("w0.1", SHARDS)
    words = {worker: Said() for worker in WORKERS}
    words["w0.1"] = words["w1.1"] = said("w3.1")
    assert auditing.judge(7, WORKERS, words) is None
    words["w3.1"] = said("w0.1")  # the accused cannot turn it round
    assert auditing.judge(7, WORKERS, words) is None
    words["w4.1"] = said("w3.1")
    finding = auditing.judge(7, WORKERS, words)
    assert finding is not None and finding.liars == ("w3.1",) and finding.what == "trust"
    assert "is distrusted by 3 members: it was left out" in finding.reason


def test_whom_a_member_distrusts_is_said_in_its_ready() -> None:
    ready = Ready(3, (1, 2), said=said("w3.1"))
    assert decode(encode(ready, {})[4:])[0] == ready


@pytest.mark.parametrize("wrong", [7, ["w3.1"], ["w3.1", 5], ["w" * 100_000, "why"]])
def test_nonsense_about_whom_it_distrusts_is_refused(wrong: object) -> None:
    import json

    fields = {"t": "ready", "s": 3, "v": [1], "n": {}, "u": wrong}
    with pytest.raises(ProtocolError):
        decode(json.dumps(fields).encode())
