"""The rule across buckets: what f means there, what is refused, and what lost buckets cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.byzantine.privacy import across
from holdfast.byzantine.privacy.fixed_point import Encoding, Residues
from holdfast.byzantine.privacy.masked_round import MaskedRound
from holdfast.byzantine.privacy.messages import FromClient, Phase, Shares, Unmask
from holdfast.byzantine.privacy.terms import Terms
from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import ConfigError, TooFewUpdates
from tests.byzantine.privacy.parties import SECRET, names, parties, terms

RULE = parse("trimmed-mean")


@pytest.mark.parametrize(
    ("rule", "clients", "f", "buckets", "said"),
    [
        (
            "trimmed-mean",
            20,
            4,
            8,
            "4 hostile clients spoil up to 4 buckets, and trimmed-mean with f=4 needs 9 buckets",
        ),
        ("bulyan", 20, 2, 10, "bulyan with f=2 needs 11 buckets: there are 10"),
        ("mean", 20, 0, 11, "cannot be dealt into 11 buckets of at least 2"),
        ("mean", 20, -1, 5, "is not a number of updates"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(rule: str, clients: int, f: int, buckets: int, said: str) -> None:
    agreed = Terms(buckets, 1, Encoding.fitting(1.0, clients))
    with pytest.raises(ConfigError, match=said) as refused:
        across.check(parse(rule), clients, f, agreed)
    assert "\n" not in refused.value.message and refused.value.hint
    across.check(RULE, 20, 4, Terms(9, 1, Encoding.fitting(1.0, 20)))


def honest_and_hostile(agreed: Terms, clients: list[str], hostile: list[str]) -> dict[str, Residues]:
    """Honest clients send ones, hostile ones the largest number that the sum has room for."""
    encoding = agreed.encoding
    room = replace(encoding, limit_units=encoding.limit_units * -(-len(clients) // agreed.buckets))
    ones, huge = encoding.encode(np.ones(agreed.numbers)), room.encode(np.full(agreed.numbers, -1e9))
    return {name: huge if name in hostile else ones for name in clients}


def test_f_hostile_clients_spoil_f_buckets_and_the_rule_bears_them() -> None:
    agreed, clients = terms(14, 7), names(14)
    hostile = ["c00", "c05", "c09"]
    updates = honest_and_hostile(agreed, clients, hostile)
    server = MaskedRound(1, clients, agreed, SECRET)
    found = carried_round(server, parties(agreed, clients, updates=updates))
    spoiled = [row for row in across.means(found, agreed.encoding) if bool((row - 1.0).abs().max() > 0.1)]
    assert 1 <= len(spoiled) <= 3
    combined = across.combine(found, agreed.encoding, RULE, 3)
    assert torch.equal(combined.value, torch.ones(agreed.numbers))
    assert not any(combined.trusted[name] for name in hostile)
    mean = across.combine(found, agreed.encoding, parse("mean"), 3)
    assert float(mean.value.max()) < 0.0  # where the mean falls


def carried_round(server: MaskedRound, made):  # type: ignore[no-untyped-def]
    from holdfast.byzantine.privacy.exchange import carried

    return carried(server, made)


def test_a_bucket_lost_in_silence_leaves_f_as_it_was_and_one_lost_by_a_lie_does_not() -> None:
    agreed, clients = terms(12, 6), names(12)
    rule, f = RULE, 2  # needs five buckets; four for one fewer would do
    updates = honest_and_hostile(agreed, clients, [])

    def run(**more):  # type: ignore[no-untyped-def]
        return carried_round(MaskedRound(1, clients, agreed, SECRET), parties(agreed, clients, updates=updates, **more))

    silent = run(silent={"c00": Phase.MASK})
    assert len(silent.sums) == 5 and silent.hostile == 0
    across.combine(silent, agreed.encoding, rule, f)
    other = next(name for name in clients if name not in silent.lost[0].members)
    twice = run(silent={"c00": Phase.MASK, other: Phase.MASK})
    with pytest.raises(TooFewUpdates, match="trimmed-mean with f=2 needs 5 buckets, and 4 are left: bucket"):
        across.combine(twice, agreed.encoding, rule, f)

    def lies(phase: Phase, said: FromClient) -> FromClient:
        return Shares(b"", said.parcels) if isinstance(said, Shares) else said

    lied = run(silent={"c00": Phase.MASK}, tampering={other: lies})
    assert len(lied.sums) == 4 and lied.hostile == 1  # one of the two has shown itself: three buckets are enough
    found = across.combine(lied, agreed.encoding, rule, f)
    assert torch.equal(found.value, torch.ones(agreed.numbers)) and other not in found.trusted


def test_one_that_sends_poison_and_shows_itself_then_is_borne_as_before() -> None:
    """Its numbers are in a sum, which nobody can take apart: if it were counted as gone, the mean would be left."""
    agreed, clients = terms(9, 3), names(9)
    updates = honest_and_hostile(agreed, clients, ["c00"])

    def babbles(phase: Phase, said: FromClient) -> FromClient | bytes:
        return b"?" if isinstance(said, Unmask) else said

    found = carried_round(
        MaskedRound(1, clients, agreed, SECRET),
        parties(agreed, clients, updates=updates, tampering={"c00": babbles}),
    )
    assert "c00" in found.left_out and any("c00" in one.clients for one in found.sums)
    assert found.hostile == 0 and len(found.sums) == 3
    assert torch.equal(across.combine(found, agreed.encoding, RULE, 1).value, torch.ones(agreed.numbers))


def test_one_that_shows_itself_in_time_is_in_no_sum_and_leaves_one_fewer_where_buckets_are_few() -> None:
    agreed, clients = terms(6, 3), names(6)
    updates = honest_and_hostile(agreed, clients, [])

    def babbles(phase: Phase, said: FromClient) -> FromClient | bytes:
        return b"?" if phase is Phase.MASK else said

    found = carried_round(
        MaskedRound(1, clients, agreed, SECRET),
        parties(agreed, clients, updates=updates, tampering={"c00": babbles}),
    )
    assert len(found.sums) == 2 and found.hostile == 1
    assert torch.equal(across.combine(found, agreed.encoding, RULE, 1).value, torch.ones(agreed.numbers))
