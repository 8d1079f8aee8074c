"""Messages between members survive the wire; anything else is a typed error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ProtocolError
from holdfast.membership.codec import SHARDS_MAX, decode, encode
from holdfast.membership.messages import Done, Fetched, GivenMean, Message, Ready
from holdfast.membership.view_rules import Report
from holdfast.net.framing import LENGTH
from holdfast.reduce.reduction import Brought

steps = st.integers(0, (1 << 40) - 1)
shard_lists = st.lists(st.integers(0, SHARDS_MAX - 1), max_size=20).map(tuple)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Done, steps),
    st.builds(GivenMean, steps),
    st.builds(Fetched, steps),
    st.builds(Ready, steps, shard_lists, st.booleans(), st.booleans(), st.text(max_size=20)),
    st.builds(
        Report,
        st.none() | steps,
        shard_lists,
        st.booleans(),
        st.text(max_size=40),
        st.lists(st.text(max_size=20), max_size=5).map(tuple),
        doubt=st.booleans(),
        given=st.integers(-1, (1 << 40) - 1),
    ),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("tsvcnlxkdfpmyg"), inner, max_size=5),
    max_leaves=10,
)


@given(messages)
def test_round_trip(message: Message) -> None:
    data = encode(message)
    (length,) = LENGTH.unpack_from(data)
    assert length == len(data) - LENGTH.size
    assert decode(data[LENGTH.size :])[0] == message


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(json_values)
def test_random_json(value: object) -> None:
    import json

    try:
        message, _ = decode(json.dumps(value).encode())
    except ProtocolError:
        return
    assert isinstance(message, Done | Ready | GivenMean | Report | Fetched)


@given(json_values)
def test_random_notes(note: object) -> None:
    try:
        brought = Brought.decode(note, slots=8, tensors=3)
    except ProtocolError:
        return
    assert all(0 <= slot < 8 for _, slot in brought.nodes)


def test_notes_round_trip() -> None:
    brought = Brought((((0, 2), 1), ((3, 4), 0)), (0, 2), {"loss": {0: 0.5, 3: float("inf")}})
    import json

    assert Brought.decode(json.loads(json.dumps(brought.encode(bulk=False))), slots=4, tensors=3) == brought
