"""What servers and workers send each other: through TLS, under a small bound, and when it is nonsense."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError, PeerError, ProtocolError
from holdfast.ledger.memory import MemoryLedger
from holdfast.log import messages as m
from holdfast.log.configuration import Configuration, LogEnd
from holdfast.log.rules import Rules
from holdfast.servers.asking import Asking
from holdfast.servers.buffers import BufferPool
from holdfast.servers.connections import limits_in
from holdfast.servers.frames import FrameStream, Outgoing, encode_frame
from holdfast.servers.links import Dialled
from holdfast.servers.log_codec import decode_message, decode_snapshot, encode_message, encode_snapshot
from holdfast.servers.parameter_slice import ParameterSlice, initial_payload, update_head
from holdfast.servers.placing import Target, first_placement, next_wish
from holdfast.servers.port import ParameterServers, Piece, initial_of, layout_of
from holdfast.servers.recipe import GroupRecipe, Recipe, settings_of
from holdfast.servers.replicated import Author, Payload
from holdfast.servers.server import ServerSettings, SliceServer
from holdfast.servers.slicing import Segment
from holdfast.servers.wires import Window, Wire, hinted
from holdfast.servers.worker_memory import Parts, _rounded
from holdfast.trust.keys import Keys, create_keys
from tests.agent.agent_harness import wait_for
from tests.servers.serving import in_threads

UPDATE = m.Update("w0", 1, 2, 7, 3)
SNAPSHOT = m.Snapshot(LogEnd(2, 9), (m.Remembered("w0", 1, False, 2, ((1, 4), (2, 5))),))
MESSAGES: list[m.Message] = [
    m.Append(3, 1, 0.5, LogEnd(2, 4), (m.Entry(3, 5, UPDATE), m.Entry(3, 6, m.Forgotten("w1", 1))), 4),
    m.Append(3, 1, 0.5, LogEnd(2, 4), (m.Entry(3, 5, m.Opened("s0.1")),), 4),
    m.Appended(3, 0.5, 5),
    m.Mismatch(3, 0.5, 4),
    m.Offer(3, 1, 0.5, SNAPSHOT),
    m.Seal(3, True),
    m.Sealed(3, LogEnd(2, 4)),
    m.Fenced(3),
    m.Resigned(3, "the disk is full"),
    m.Configured(Configuration(4, "s0.1", ("s0.1", "s1.1"), "why"), 12),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)


def changed(value: Any, path: Sequence[int], to: Any) -> Any:
    """The same with something else at one place in it."""
    if not path or not isinstance(value, dict | list) or not value:
        return to
    if isinstance(value, dict):
        key = sorted(value)[path[0] % len(value)]
        return {**value, key: changed(value[key], path[1:], to)}
    at = path[0] % len(value)
    return [*value[:at], changed(value[at], path[1:], to), *value[at + 1 :]]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: m.Message) -> None:
    sent = json.loads(json.dumps(encode_message(message, lambda update: {"kind": "update"})))
    assert decode_message(sent, lambda head, nbytes: 7) == message


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MESSAGES), st.lists(st.integers(0, 9), max_size=6), JSON)
def test_a_message_with_something_changed_is_taken_or_refused(message: m.Message, path: list[int], to: Any) -> None:
    sent = changed(encode_message(message, lambda update: {}), path, to)
    decoders: list[Callable[[Any], object]] = [
        lambda value: decode_message(value, lambda head, nbytes: 7),
        decode_snapshot,
        lambda value: limits_in(value if isinstance(value, dict) else {"limits": value}),
    ]
    for decode in decoders:
        with suppress(ProtocolError):
            decode(sent)
    with suppress(ProtocolError):
        decode_snapshot(changed(encode_snapshot(SNAPSHOT), path, to))


def slice_of_four() -> tuple[ParameterSlice, Payload, Payload]:
    recipe = Recipe((GroupRecipe("SGD", settings_of(torch.optim.SGD([torch.zeros(1)], 0.1).param_groups[0])),), (0,))
    initial = initial_payload([Segment(0, 0, 4)], ["float32"], recipe, [Piece(torch.zeros(4), {})])
    state = ParameterSlice()
    first = Payload(initial.head, memoryview(bytearray(b"".join(initial.views))))
    state.apply(Author("w0", 1, 1), first)
    update = Payload(update_head(1, [recipe.groups[0].settings], []), memoryview(bytearray(64)))
    return state, first, update


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans(), st.lists(st.integers(0, 9), max_size=6), JSON)
@example(begins=True, path=[4, 0, 3], to=[])  # a list where the name of a dtype should be
def test_what_is_checked_can_be_applied(begins: bool, path: list[int], to: Any) -> None:
    state, first, update = slice_of_four()
    sent = first if begins else update
    head = changed(json.loads(json.dumps(sent.head)), path, to)
    payload = Payload(head if isinstance(head, dict) else {"kind": head}, sent.body)
    before = state.digest()
    try:
        state.check(Author("w0", 1, 2), payload)
    except ProtocolError:
        assert state.digest() == before
        return
    state.apply(Author("w0", 1, 2), payload)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_frames_end_the_connection_or_are_waited_for(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = FrameStream(ours, lambda head, nbytes: None)
        theirs.sendall(data)
        with suppress(PeerError):
            stream.receive(lambda head, nbytes: None)


def test_a_frame_that_is_read_from_live_memory_is_of_one_version() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        live = bytearray(b"a" * (8 << 20))
        sender, got = FrameStream(ours, lambda head, nbytes: None), bytearray(8 << 20)
        frame = Outgoing(encode_frame({"id": 1}, [memoryview(live)]), is_live=True)
        sender.send(frame)
        assert not sender.flush()
        frame.detach(BufferPool())
        live[:] = b"b" * len(live)
        whole: list[int] = []
        reader = FrameStream(theirs, lambda head, nbytes: [memoryview(got)])
        while not whole:
            sender.flush()
            reader.receive(lambda head, nbytes: whole.append(nbytes))
        assert set(got) == {ord("a")}


def train(servers: ParameterServers, pushes: int) -> None:
    parameters = {str(number): torch.nn.Parameter(torch.zeros(200_000)) for number in range(3)}
    optimizer = torch.optim.SGD(parameters.values(), 1.0)
    values = [one.data for one in parameters.values()]
    servers.open(layout_of(parameters, optimizer), initial_of(values), timeout_s=30)
    groups = [settings_of(group) for group in optimizer.param_groups]
    tickets = [
        servers.push([torch.full_like(one, -1.0) for one in values], groups, clock=clock)
        for clock in range(1, pushes + 1)
    ]
    for ticket in tickets:
        ticket.wait(30)
    servers.pull(values).wait(30)
    assert all(bool((one == pushes).all()) for one in values)


def test_everything_passes_through_tls(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with in_threads(3, keys=create_keys(tmp_path / "keys")) as connect:
        train(connect("w0"), 5)


def test_workers_wait_while_the_log_is_full() -> None:
    """There is room for less than one update of each slice at a time, and all of them come through."""
    with in_threads(3, settings=ServerSettings(log_bytes_max=400_000)) as connect:
        train(connect("w0"), 12)


def test_a_worker_that_shares_memory_is_told_that_there_is_no_room_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.SGD([parameter], 1.0)
    with in_threads(1, servers=1, replicas=1, sockets=tmp_path) as connect:
        worker = connect("w0")
        worker.open(layout_of({"weight": parameter}, optimizer), initial_of([parameter.data]), timeout_s=30)
        worker.join(0)
        with monkeypatch.context() as full:
            full.setattr(SliceServer, "has_room_for", lambda *given: False)
            groups = [settings_of(group) for group in optimizer.param_groups]
            ticket = worker.push([torch.ones(100_000)], groups, clock=1)
            wait_for(lambda: "s0.1 has no room for it" in ticket.waits_for(), "the reason to be told", 30.0)
        ticket.wait(30)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_entry_may_be_dropped_as_soon_as_it_is_applied(replicas: int) -> None:
    shortest = ServerSettings(rules=Rules(snapshot_every=1, kept_behind=0))
    with in_threads(2, servers=replicas, replicas=replicas, settings=shortest) as connect:
        train(connect("w0"), 6)


def test_slices_are_spread_evenly_and_need_as_many_servers_as_replicas() -> None:
    placed = first_placement(dict.fromkeys(("s0.1", "s1.1", "s2.1"), "h"), 6, 2)
    assert [one.primary for one in placed] == ["s0.1", "s1.1", "s2.1"] * 2
    counts = [sum(server in one.replicas for one in placed) for server in ("s0.1", "s1.1", "s2.1")]
    assert counts == [4, 4, 4]
    with pytest.raises(ConfigError, match="3 replicas of each slice need as many servers"):
        first_placement({"s0.1": "h"}, 1, 3)


def test_the_replicas_of_a_slice_are_on_as_many_hosts_as_there_are() -> None:
    hosts = {"s0.1@a": "a", "s1.1@a": "a", "s2.1@a": "a", "s0.1@b": "b", "s0.1@c": "c"}
    for one in first_placement(hosts, 10, 3):
        assert {hosts[server] for server in one.replicas} == {"a", "b", "c"}, "the loss of a host takes one of them"
    assert len({one.primary for one in first_placement(hosts, 10, 3)}) == 5


def test_a_slice_comes_to_its_target_step_by_step() -> None:
    configuration, target = Configuration(1, "a", ("a", "b", "c")), Target(("d", "b", "e"))
    alive = {"a", "b", "c", "d", "e"}
    seen = []
    while (wish := next_wish(configuration, target, alive)) is not None:
        seen.append(type(wish).__name__)
        replicas, primary = configuration.replicas, configuration.primary
        if isinstance(wish, m.AddReplica):
            replicas = (*replicas, wish.server)
        elif isinstance(wish, m.RemoveReplica):
            replicas = tuple(one for one in replicas if one != wish.server)
        else:
            primary = wish.server
        configuration = configuration.next("wished", primary=primary, replicas=replicas)
        assert len(configuration.replicas) >= 3
    assert set(configuration.replicas) == {"b", "d", "e"}
    assert seen.count("AddReplica") == seen.count("RemoveReplica") == 2 and seen.count("HandOver") == 1


def test_memory_that_is_kept_for_the_next_payloads_is_within_the_bound() -> None:
    page = 4096
    pool = BufferPool(held_bytes_max=4 * page)
    first, second, third = pool.get(page), pool.get(page), pool.get(2 * page)
    for buffer in (first, second, third):
        buffer.release()
    assert (pool.used_bytes, pool.idle_bytes) == (0, 4 * page)
    large = pool.get(3 * page)  # another size: what is kept has to go for it
    assert pool.used_bytes + pool.idle_bytes <= 4 * page
    beyond = pool.get(3 * page)  # whoever needs more gets it, and nothing is kept beside it
    assert (pool.used_bytes, pool.idle_bytes) == (6 * page, 0)
    beyond.release()
    large.release()
    assert pool.used_bytes == 0 and 0 < pool.idle_bytes <= 4 * page


def test_who_refuses_is_believed_only_if_it_knows_more_than_the_ledger_has_told() -> None:
    refusal = {"refused": "not the primary", "primary": "s1.1", "epoch": 4}
    assert hinted(refusal, "s0.1", known_epoch=3) == "s1.1"
    assert hinted(refusal, "s0.1", known_epoch=4) == ""  # it lags behind, and names who led before
    assert hinted(refusal, "s1.1", known_epoch=3) == ""
    assert hinted({**refusal, "primary": ""}, "s0.1", known_epoch=3) == ""
    for wrong in ({"primary": 7}, {"epoch": "4"}, {"epoch": None}, {"epoch": True}):
        assert hinted({**refusal, **wrong}, "s0.1", known_epoch=0) == ""


def test_bodies_under_way_are_bounded_and_go_in_order() -> None:
    window = Window(bytes_max=10)
    for number, nbytes in ((1, 6), (2, 4), (3, 4), (4, 30), (5, 1)):
        window.add(number, nbytes)
    assert list(window.ready()) == [1, 2]
    window.remove(2)
    assert list(window.ready()) == [3]
    window.remove(1)
    assert list(window.ready()) == []  # the next is too large to go beside another
    window.remove(3)
    assert list(window.ready()) == [4]  # and goes alone
    window.remove(5)
    window.remove(4)
    assert list(window.ready()) == []


def test_a_part_of_shared_memory_is_used_again_for_what_is_of_about_its_size() -> None:
    parts = Parts(2 * _rounded(8_333_440))
    first, second = parts.take(8_333_376), parts.take(8_333_440)
    assert first is not None and second is not None and first != second
    assert parts.take(64) is None  # there is no room, and the worker sends it through the socket
    parts.give_back(first)
    assert parts.take(8_333_440) == first
    parts.give_back(second)
    assert parts.take(64) == second


def test_a_connection_that_comes_late_is_not_taken_for_another_wires() -> None:
    """Its server shares the memory of the wire that it was dialled for: updates would be read from the wrong one."""
    asking = Asking("w0.1", "h", Keys.from_secret(bytes(32)), MemoryLedger().another)
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            first, second = Wire("s0.1", None), Wire("s0.1", None)
            asking._wires["s0.1"] = second
            asking._dialled(Dialled("s0.1", ours, first))
            assert second.stream is None and ours.fileno() < 0
            asking._dialled(Dialled("s0.1", None, first))
            assert asking._wires["s0.1"] is second  # which is still being dialled
            del asking._wires["s0.1"]
    finally:
        asking.close()
