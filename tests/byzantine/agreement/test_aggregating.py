"""What a round's agreed updates come to: the same bits on every server, with what is drawn by chance drawn anew."""

from __future__ import annotations

import torch

from holdfast.byzantine.agreement.aggregating import Aggregation, decode_state, encode_state

FORM = encode_state({"weight": torch.zeros(50)})
BUCKETS = "bucketing:2+median"


def updates(round: int, count: int = 9) -> list[bytes]:
    generator = torch.Generator().manual_seed(round)
    return [encode_state({"weight": torch.randn(50, generator=generator)}) for _ in range(count)]


def change(rule: str, hostile: int, parent: bytes, given: list[bytes]) -> torch.Tensor:
    model, why = Aggregation(rule, hostile, FORM).combine(parent, given)
    assert not why, why
    return decode_state(model)["weight"] - decode_state(parent)["weight"]


def test_servers_deal_alike_and_anew_in_every_round() -> None:
    """Who is with whom follows from what was agreed on: the same updates upon another model are dealt otherwise."""
    given, later = updates(1), encode_state({"weight": torch.full((50,), 1.0)})
    one, other = (change(BUCKETS, 1, FORM, given) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.allclose(one, change(BUCKETS, 1, later, given), atol=1e-3)
    assert torch.allclose(change("median", 1, FORM, given), change("median", 1, later, given), atol=1e-5)


def test_whoever_sends_last_does_not_know_the_deal_of_what_the_others_sent() -> None:
    """The last update alone decides who is with whom: 12 of them, and hardly two deals alike."""
    first, found = updates(1, 8), set()
    for number in range(12):
        last = encode_state({"weight": torch.full((50,), 1e-9 * number)})
        found.add(tuple(round(one, 4) for one in change(BUCKETS, 1, FORM, [*first, last]).tolist()))
    assert len(found) >= 10


def test_an_update_of_another_form_leaves_f_as_it_is_where_the_others_are_enough() -> None:
    given = updates(1, 5)
    given[0] = encode_state({"weight": torch.full((50,), 1e6)})
    given[4] = encode_state({"other": torch.zeros(3)})
    assert change("trimmed-mean", 1, FORM, given).abs().max() < 10.0
    assert change("trimmed-mean", 1, FORM, [given[1], given[2], given[4]]).abs().max() < 10.0
