"""Who does not belong at a server's door, and who does and talks nonsense: updates go on, and nothing is lost."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import PeerError
from holdfast.core.words import KEY_SERVERS, Registration, encode_json
from holdfast.net.sockets import connect
from holdfast.servers.connections import SLICES
from holdfast.servers.frames import encode_frame
from holdfast.servers.links import LOG, dialler
from tests.harness.servers.fleet import Fleet
from tests.servers.test_failover import busy, goes_on

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

WAIT_S = 20.0
LENGTHS = struct.Struct("!IQ")
GROWTH_BYTES_MAX = 64 << 20
AUTHOR = {"worker": "w9", "incarnation": 1, "sequence": 1}
NONSENSE: list[Any] = [
    {},
    {"op": "push"},
    {"op": "no such thing", "slice": "parameters/0", "id": 1},
    {"op": "push", "slice": "parameters/0", "id": 1, "payload": {"kind": "update"}, **AUTHOR},
    {"op": "push", "slice": "parameters/0", "id": -1, "payload": {"kind": "update"}, **AUTHOR},
    {"op": "push", "slice": "parameters/0", "id": 1, "payload": {"kind": "initial", "segments": "x"}, **AUTHOR},
    {"op": "push", "slice": "parameters/0", "id": 1, "payload": {"kind": "update"}, **AUTHOR, "sequence": 1 << 61},
    {"op": "push", "slice": "parameters/0", "id": 1, "payload": {}, **AUTHOR, "memory": [0, 1 << 40]},
    {"op": "read", "slice": "parameters/0", "id": 1, "query": {"kind": "pull", "at_least": -1}},
    {"op": "read", "slice": "parameters/0", "id": 1, "query": {"kind": "pull"}, "wait_s": 1e9},
    {"op": "read", "slice": "../../etc/passwd", "id": 1, "query": {"kind": "pull"}},
    {"op": "read", "slice": "nothing/0", "id": 1, "query": {"kind": "pull"}},
    {"op": "hold", "slice": "parameters/0", "id": 1, "token": "t" * 10_000},
    {"op": "capture", "slice": "parameters/0", "id": 1, "token": "t", "limits": [[1, 2, 3]]},
    {"op": "captured", "slice": "parameters/0", "id": 1, "token": "t"},
    {"op": "retire", "slice": "parameters/0", "id": 1, "worker": "", "incarnation": 1},
    {"op": "log", "slice": "parameters/0", "message": ["append", 1 << 70]},
    {"op": "log", "slice": "parameters/0", "message": None},
]


def frames() -> Iterator[bytes]:
    draw = random.Random(17)
    for words in NONSENSE:
        yield b"".join(encode_frame(words, ()))
        yield b"".join(encode_frame(words, [memoryview(draw.randbytes(200))]))
    head = encode_json(NONSENSE[3])
    for body in (1 << 39, 1 << 50, (1 << 64) - 1):
        yield LENGTHS.pack(len(head), body) + head + b"x" * 1000
    yield LENGTHS.pack((1 << 32) - 1, 0)
    for size in (1, 11, 12, 500, 100_000):
        yield draw.randbytes(size)


def test_strangers_and_members_that_talk_nonsense_cost_a_server_nothing() -> None:
    with Fleet(3, replicas=3) as fleet, busy(fleet) as accounts:
        name = fleet.configurations()["parameters/0"].primary
        before = peak_bytes(fleet, name)
        entry = fleet.ledger.get(KEY_SERVERS + name)
        assert entry is not None
        registration = Registration.decode(entry.value)
        strangers = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00\x01" + b"x" * 400, bytes(100_000), b""]
        for address in (registration.address, registration.local):
            for data in strangers:
                with connect(address, WAIT_S) as sock:
                    send(sock, data)
        for purpose, sender in ((SLICES, "w9.1"), (LOG, "s9.1"), (LOG, name)):
            for data in frames():
                with dialler(registration, "elsewhere", fleet.keys, (purpose, sender))() as sock:
                    send(sock, data)
        goes_on(fleet, accounts, 20)
        assert name in fleet.registered() and peak_bytes(fleet, name) - before < GROWTH_BYTES_MAX
        accounts.stop()
        accounts.check()


def send(sock: socket.socket, data: bytes) -> None:
    """And listen for a moment for what comes of it."""
    with suppress(OSError, PeerError):
        sock.settimeout(0.05)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1000)


def peak_bytes(fleet: Fleet, name: str) -> int:
    status = Path(f"/proc/{fleet.processes[name]}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
