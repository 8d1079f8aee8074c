"""Every decoder of what others send, given anything: a value or a Holdfast error, in bounded memory and time.

Two sources: bytes of all kinds, and valid messages with something changed, in their bytes or in their JSON.
"""

from __future__ import annotations

import json
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.core.config import RunConfig
from holdfast.core.errors import HoldfastError, PeerError
from holdfast.core.rewinds import Rewind, Rewinds
from holdfast.core.words import (
    KEY_ROLLS,
    KEY_SIZE,
    KEY_STOP,
    KEY_VIEW,
    KEY_WORKERS,
    Registration,
    View,
    decode_json,
    decode_whole,
)
from holdfast.detection.agent_beat import AgentBeat, CrewHealth, Opinion, Told
from holdfast.detection.progress import Level
from holdfast.engine.ledger_feed import LedgerNews, read_news
from holdfast.events import EventReader
from holdfast.ledger import wire as ledger_wire
from holdfast.ledger.channel import Channel
from holdfast.ledger.port import Change, Entry
from holdfast.ledger.wire import Request as LedgerRequest
from holdfast.membership import codec
from holdfast.membership.messages import Done, GivenMean, Ready
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import Report
from holdfast.net.byte_ranges import CHECK_BYTES, Request, Status, decode_reply, encode_reply
from holdfast.net.framing import LENGTH, frame
from holdfast.net.greeting import HELLO_BYTES, Greeting, Hello
from holdfast.net.groups import FRAME_BYTES_MAX, Connection, Gone, Group, Said
from holdfast.reduce.reduction import Brought
from holdfast.state.codec import flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.layout import allocate
from holdfast.state.snapshot import Snapshot
from holdfast.state.transfer import fetch, serve
from holdfast.state.wire import Summary, TransferManifest
from holdfast.trust.handshake import MAC_BYTES, MAGIC, NONCE_BYTES, ServerHandshake
from holdfast.trust.keys import Keys

SECRET = bytes(range(32))
CREW = CrewHealth((1, 0, 0, 1), (("w0.1@a", Level.HUNG),), 7)
BEAT = AgentBeat(host="a", crew=CREW, opinions=(Opinion("b", True, False, 1.0, 9.0),), told=(Told("c", 1.0, CREW),))
BYTES_MAX = 1 << 20
TENSORS = [torch.arange(6.0).view(2, 3), torch.tensor([1, 2], dtype=torch.int16)]
TREE, FLAT = flatten({"w": TENSORS[0], "n": {"k": [1, 2.5, None, "x", (3,)], "b": TENSORS[1], "big": 1 << 90}})
SNAPSHOT = Snapshot(3, pack_tree(TREE), tuple(FLAT))
REWINDS = Rewinds((Rewind(back_to=4, passed=(7, 8), reason="why", evict=("w1.1",)),))
CONFIG = RunConfig(batch_size=8, shards=4, length=64, parameters=10)
READY = Ready(4, (0, 1, 2), True, False, "why")
NOTE = Brought((((0, 2), 0), ((2, 3), 1)), (0, 1), {"loss": {0: 1.5, 2: 0.25}}).encode(bulk=True)
REGISTRATION = Registration(
    id="w0.1@a", host="a", pid=3, pid_started=4, address="tcp:[::1]:9", fingerprint="f", local="unix:/x"
)
REQUEST = Request("tensors", 0, 8)
ENTRY = Entry("worker/w0.1", b"value", 7, 3, 1)


@dataclass(frozen=True)
class Decoder:
    decode: Callable[[bytes], object]
    valid: tuple[bytes, ...]
    frame: Callable[[bytes], bytes] = bytes  # puts a changed body back into what surrounds it
    body: Callable[[bytes], bytes] = bytes  # and takes it out


def ledger_message(data: bytes) -> object:
    message = ledger_wire.take_frame(bytearray(data))
    if message is None:
        return None
    answers: list[object] = []
    for decode in (
        ledger_wire.decode_request,
        ledger_wire.decode_error,
        ledger_wire.decode_changes,
        lambda one: ledger_wire.decode_entries(one.get("entries")),
        lambda one: ledger_wire.decode_entry(one.get("result")),
    ):
        with suppress(HoldfastError):
            answers.append(decode(message))
    return answers


def hello(data: bytes) -> object:
    return Hello.decode(data, ("group", "snapshot"))


def member_frame(data: bytes) -> object:
    message, note = codec.decode(data)
    return message, Brought.decode(note, slots=8, tensors=4)


def manifest(data: bytes) -> object:
    """As far as a joiner goes with what it was told."""
    found = TransferManifest.decode(data, bytes_max=BYTES_MAX)
    return unflatten(unpack_tree(found.tree), allocate(found.specs))


def headed(head: bytes) -> bytes:
    return struct.pack("!I", len(head)) + head + SNAPSHOT.tree


def head_of(data: bytes) -> bytes:
    (length,) = struct.unpack_from("!I", data)
    return data[4 : 4 + length]


def length_first(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def ledger_frames() -> tuple[bytes, ...]:
    requests = [LedgerRequest(id=1, op=op, key="k", prefix="p", value=b"v") for op in ledger_wire.OPERATIONS]
    return (
        *map(ledger_wire.encode_request, requests),
        *ledger_wire.reading_frames(1, [ENTRY], 9),
        *ledger_wire.change_frames([Change("put", "k", b"v", 8)], 9),
        ledger_wire.result_frame(1, ledger_wire.encode_entry(ENTRY)),
        ledger_wire.frame({"id": 1, "error": "LeaseGone", "message": "m", "hint": "h"}),
    )


BODIES = [
    codec.encode(message, note)[4:]
    for message, note in (
        (READY, NOTE),
        (Done(3), None),
        (GivenMean(3), {"bulk": 1}),
        (Report(None, (1, 2), True, "d" * 32), None),
    )
]
DECODERS = {
    "a message between members": Decoder(member_frame, tuple(BODIES)),
    "a greeting": Decoder(hello, (Hello("group", 3, "w0.1").encode(None), b'{"slots": 3, "slot_bytes": 9}')),
    "a message of the ledger": Decoder(ledger_message, ledger_frames(), length_first, lambda data: data[4:]),
    "a request for bytes": Decoder(Request.decode, (REQUEST.encode()[LENGTH.size :],)),
    "a reply with bytes": Decoder(decode_reply, (encode_reply(Status.OK, 77),)),
    "a summary": Decoder(Summary.decode, (Summary.of(SNAPSHOT).encode(),)),
    "a manifest": Decoder(manifest, (TransferManifest.of(SNAPSHOT).encode(),), headed, head_of),
    "a manifest's tree": Decoder(lambda data: unflatten(unpack_tree(data), FLAT), (SNAPSHOT.tree,)),
    "a view": Decoder(View.decode, (View(3, ("w0.1", "w1.1"), "why").encode(),)),
    "a registration": Decoder(Registration.decode, (REGISTRATION.encode(),)),
    "a configuration": Decoder(CONFIG.check_same, (CONFIG.encode(),)),
    "an agent's beat": Decoder(AgentBeat.decode, (BEAT.encode(),)),
    "a roll": Decoder(Roll.decode, (Roll(3, ("w0.1",), ("w1.1",), True).encode(),)),
    "a record of rewinds": Decoder(Rewinds.decode, (REWINDS.encode(),)),
    "a number in the ledger": Decoder(lambda data: decode_whole(data, "workers"), (b'{"workers": 3}',)),
    "an object": Decoder(decode_json, (b'{"workers": 3}',)),
}

numbers = st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1e308, float("inf"), float("nan"), -0.0])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.integers() | st.floats() | st.text(max_size=8) | st.just("x" * 5000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
noise = st.binary(max_size=200) | st.builds(lambda value: json.dumps(value).encode(), values)


def changed_bytes(draw: st.DataObject, data: bytes) -> bytes:
    """One to four small accidents."""
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(data)))
        match draw.draw(st.integers(0, 4)):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + draw.draw(st.binary(max_size=8)) + data[at:]
            case 2:
                data = data[:at] + data[at + draw.draw(st.integers(1, 8)) :]
            case 3:
                data = data[:at] + draw.draw(st.binary(min_size=1, max_size=8)) + data[at + 1 :]
            case _:
                data = data[:at] + data
    return data


def changed_json(draw: st.DataObject, data: bytes) -> bytes:
    """Another value in one place of a valid object, or one place less or more."""
    value = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def collect(inside: Any) -> None:
        for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], (dict, list)):
                collect(inside[key])

    collect(value)
    if not places:
        return json.dumps(draw.draw(values)).encode()
    inside, key = draw.draw(st.sampled_from(places))
    match draw.draw(st.integers(0, 2)):
        case 0:
            del inside[key]
        case 1 if isinstance(inside, list):
            inside.insert(key, draw.draw(values))
        case _:
            inside[key] = draw.draw(values)
    return json.dumps(value).encode()


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_bytes_are_a_value_or_an_error_of_ours(name: str, data: st.DataObject) -> None:
    decoder = DECODERS[name]
    example = data.draw(st.sampled_from(decoder.valid))
    body = decoder.body(example)
    tried = [data.draw(noise), decoder.frame(data.draw(noise)), changed_bytes(data, example)]
    tried.append(decoder.frame(changed_bytes(data, body)))
    if body.lstrip()[:1] == b"{":
        tried.append(decoder.frame(changed_json(data, body)))
    for one in tried:
        with suppress(HoldfastError):
            decoder.decode(one)


@pytest.mark.parametrize("name", DECODERS)
def test_valid_messages_are_read(name: str) -> None:
    """The changes above begin at something that works."""
    DECODERS[name].decode(DECODERS[name].valid[0])


GIANTS = {
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "a long number": b'{"number":' + b"9" * 1_000_000 + b"}",
    "a long exponent": b'{"number": 1e999999999, "step": 1e999999999}',
    "a long text": b'{"reason":"' + b"x" * 500_000 + b'"}',
    "many fields": b"{" + b",".join(b'"%d":0' % number for number in range(30_000)) + b"}",
    "many shards": b'{"t":"ready","s":1,"v":[' + b",".join([b"1"] * 100_000) + b"]}",
    "another encoding": '{"t": "ready"}'.encode("utf-32"),
    "zeros": bytes(500_000),
    "lengths": b"\xff" * 500_000,
}


@pytest.mark.parametrize("giant", GIANTS)
@pytest.mark.parametrize("name", DECODERS)
def test_what_is_large_costs_a_multiple_of_its_size_at_most(name: str, giant: str) -> None:
    decoder, data = DECODERS[name], GIANTS[giant]
    for one in (data, decoder.frame(data)):
        tracemalloc.start()
        began = time.thread_time()
        with suppress(HoldfastError):
            decoder.decode(one)
        spent_s, (_, peak) = time.thread_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 * len(one) + (1 << 20), peak
        assert spent_s < 5, spent_s


def test_a_large_promise_allocates_nothing() -> None:
    """Lengths, shapes and references are checked before memory is taken for them."""
    table = [["float32", [1 << 40]], ["float32", [1 << 62, 1 << 62, 0]], ["float32", [0, 1 << 62]], ["bool", [0] * 64]]
    for rows in ([row] for row in table):
        total = 0 if 0 in rows[0][1] else 4 << 40
        for promised in (0, total, BYTES_MAX):
            head = {"step": 1, "digest": "d" * 32, "bytes": promised, "tensors": rows}
            with suppress(HoldfastError):
                manifest(headed(json.dumps(head).encode()))
    tracemalloc.start()
    with pytest.raises(HoldfastError):
        unflatten(unpack_tree(b'[{"a":0}' + b',{"a":0}' * 20_000 + b"]"), [torch.zeros(1 << 16)])
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


@settings(max_examples=150)
@given(data=st.data())
def test_a_ledger_with_anything_in_it_is_news_or_an_error_of_ours(data: st.DataObject) -> None:
    valid = {
        KEY_VIEW: DECODERS["a view"].valid[0],
        KEY_WORKERS + "w0.1": REGISTRATION.encode(),
        KEY_ROLLS + "w0.1": DECODERS["a roll"].valid[0],
        KEY_SIZE + "a": b'{"workers": 3}',
        KEY_STOP: b'{"reason": "enough"}',
    }
    assert isinstance(read_news({key: Entry(key, value, 1, 1, 0) for key, value in valid.items()}), LedgerNews)
    key = data.draw(st.sampled_from(sorted(valid)))
    for value in (data.draw(noise), changed_bytes(data, valid[key]), changed_json(data, valid[key])):
        entries = {name: Entry(name, value if name == key else one, 1, 1, 0) for name, one in valid.items()}
        with suppress(HoldfastError):
            read_news(entries)


# -- those that read from a socket


def sent(data: bytes) -> tuple[socket.socket, socket.socket]:
    """A socket that has this to read and then an end, and the other end of it."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    theirs.settimeout(5)
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    return ours, theirs


@settings(max_examples=100)
@given(data=st.data())
def test_a_group_says_what_it_heard_or_that_the_peer_is_gone(data: st.DataObject) -> None:
    valid = b"".join(frame(body) for body in BODIES)
    ours, theirs = sent(data.draw(noise) if data.draw(st.booleans()) else changed_bytes(data, valid))
    group = Group(View(1, ("a", "b")), "a", codec.decode)
    group.add(Connection("b", ours))
    news: list[Said | Gone] = []
    with theirs, closing(group):
        for _ in range(100):
            if group.connections["b"].lost:
                break
            news += group.poll(1.0)
            while group.connections["b"].paused and not group.connections["b"].lost:
                news += group.resume("b")
        assert isinstance(news[-1], Gone)
        assert len(group.connections["b"].inbox) <= FRAME_BYTES_MAX + (1 << 17)


@settings(max_examples=100)
@given(data=st.data())
def test_a_greeting_ends_with_a_hello_or_an_error(data: st.DataObject) -> None:
    """Both from a stranger, and from somebody who knows the secret and then says anything."""
    keys = Keys.from_secret(SECRET)
    valid = Hello("group", 3, "w0.1").encode(None)
    said = data.draw(noise) if data.draw(st.booleans()) else changed_bytes(data, valid)
    proven = data.draw(st.booleans())
    ours, theirs = sent(said.ljust(HELLO_BYTES) if proven else said)
    with theirs, closing(Greeting(ours, keys, time.monotonic() + 2, purposes=("group",))) as greeting:
        if proven:
            greeting._handshake.need = 0
        with suppress(PeerError, OSError, ValueError):
            assert not greeting.advance() or isinstance(greeting.hello, Hello)


@settings(max_examples=100)
@given(first=st.binary(min_size=40, max_size=40), second=st.binary(min_size=MAC_BYTES, max_size=MAC_BYTES))
def test_a_handshake_lets_nobody_in_by_chance(first: bytes, second: bytes) -> None:
    for opening in (first, MAGIC + first[:NONCE_BYTES]):
        handshake = ServerHandshake(SECRET, b"worker")
        with pytest.raises(PeerError):
            handshake.feed(opening)
            handshake.feed(second)
        assert handshake.need


@settings(max_examples=100)
@given(data=st.data())
def test_a_ledger_channel_gives_a_message_or_an_error(data: st.DataObject) -> None:
    valid = b"".join(ledger_frames())
    ours, theirs = sent(data.draw(noise) if data.draw(st.booleans()) else changed_bytes(data, valid))
    with theirs, closing(Channel(ours)) as channel, suppress(HoldfastError, OSError):
        for _ in range(100):
            message = channel.receive(time.monotonic() + 1)
            assert isinstance(message, dict)


@settings(max_examples=60)
@given(data=st.data())
def test_both_ends_of_a_transfer_survive_anything(data: st.DataObject) -> None:
    summary, table = Summary.of(SNAPSHOT).encode(), TransferManifest.of(SNAPSHOT).encode()
    answers = [encode_reply(Status.OK, len(part)) + part + xxhash.xxh3_128_digest(part) for part in (summary, table)]
    answers.append(encode_reply(Status.OK, SNAPSHOT.nbytes) + bytes(SNAPSHOT.nbytes + CHECK_BYTES))
    for talk, valid in (
        (lambda sock: serve(sock, SNAPSHOT, stall_s=1, total_s=2), REQUEST.encode() * 3),
        (lambda sock: fetch([sock], bytes_max=BYTES_MAX, stall_s=1, total_s=2), b"".join(answers)),
    ):
        ours, theirs = sent(data.draw(noise) if data.draw(st.booleans()) else changed_bytes(data, valid))
        with ours, theirs, suppress(HoldfastError):
            talk(ours)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_logs_with_anything_in_them_are_read(tmp_path: Path, data: st.DataObject) -> None:
    """Others read what workers wrote, on disks that fill up and until they are killed."""
    event = {"t": 1.5, "who": "w0.1", "kind": "progress", "step": 3}
    lines = [json.dumps(event).encode(), changed_json(data, json.dumps(event).encode()), data.draw(noise), b"[" * 9999]
    (tmp_path / "w.jsonl").write_bytes(b"\n".join([*lines, json.dumps(event | {"t": 2}).encode()]) + b"\n")
    events = EventReader(tmp_path).poll()
    assert events.count(event) >= 1 and events.count(event | {"t": 2}) >= 1
