"""Bytes that are signed: one encoding for a value, one value for an encoding, and nothing else is let in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.byzantine.agreement.canonical import decode, encode, pack, unpack
from holdfast.byzantine.agreement.messages import KINDS, Accepted, Ask, Ballot, Heard, Refused, Submit
from holdfast.byzantine.agreement.statements import Attest, Claim, Prepared, Proposal, Value, ViewChange, Vote
from holdfast.core.errors import ProtocolError

PLAIN = st.recursive(
    st.none() | st.integers(0, 2**63 - 1) | st.binary(max_size=40) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5).map(tuple),
    max_leaves=20,
)
CLAIM = Claim("c1", 3, b"d" * 32, b"s" * 64)
VALUE = Value(3, b"p" * 32, (Attest("s0", 3, (CLAIM,), b"t" * 64), Attest("s1", 3, (), b"")))
VOTE = Vote("prepare", "s1", 3, 0, VALUE.digest, b"u" * 64)
CHANGE = ViewChange("s1", 3, 1, Prepared(0, VALUE, (VOTE,)), b"v" * 64)


@given(PLAIN)
def test_a_value_comes_back(value: Any) -> None:
    assert unpack(pack(value)) == value


@given(PLAIN, PLAIN)
def test_two_values_have_two_encodings(one: Any, two: Any) -> None:
    assert (pack(one) == pack(two)) == (one == two)


@given(st.binary(max_size=80))
def test_whatever_is_accepted_has_no_other_encoding(data: bytes) -> None:
    try:
        value = unpack(data)
    except ProtocolError:
        return
    assert pack(value) == data


@pytest.mark.parametrize(
    "message",
    [
        Proposal("s0", 3, 1, VALUE, (CHANGE,), b"w" * 64),
        CHANGE,
        ViewChange("s1", 3, 1, None, b""),
        Submit(CLAIM, b"content"),
        Ask(4),
        Accepted(3, b"d" * 32),
        Refused(3, "why", 1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_comes_back(message: Any) -> None:
    assert decode(encode(message), KINDS) == message


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, KINDS)


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_changed_byte_is_another_message_or_none(place: int, flip: int) -> None:
    data = bytearray(encode(CHANGE))
    data[place % len(data)] ^= flip
    try:
        assert decode(bytes(data), KINDS) != CHANGE
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "value",
    [
        ("Ask",),
        ("Ask", "4"),
        ("Ask", 4, 5),
        ("Ask", None),
        ("Heard", "s0", None),
        ("Submit", ("Ask", 1), b""),
        (),
        "Ask",
        4,
    ],
    ids=repr,
)
def test_what_has_other_fields_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(pack(value), KINDS)


def test_depth_is_bounded() -> None:
    value: Any = ()
    for _ in range(100):
        value = (value,)
    with pytest.raises(ProtocolError):
        unpack(pack(value))


def test_a_ballot_comes_back() -> None:
    ballot = Ballot(3, 2, b"a" * 32, b"", Prepared(1, VALUE, (VOTE,)))
    assert decode(encode(ballot), {"Ballot": Ballot}) == ballot
    assert Heard.__name__ not in KINDS
