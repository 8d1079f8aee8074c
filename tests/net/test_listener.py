"""Where workers listen and who is let in: two sockets, TLS, and strangers who cost nothing but their own connection."""

from __future__ import annotations

import gc
import os
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError, PeerError, ProtocolError
from holdfast.core.words import Registration, View
from holdfast.membership.codec import decode
from holdfast.net.acceptor import AcceptLimits
from holdfast.net.addresses import tcp_address
from holdfast.net.dialling import address_from, dial, dial_service
from holdfast.net.greeting import HELLO_BYTES, WORKER, Hello
from holdfast.net.groups import Connection
from holdfast.net.listener import SERVED_MAX, HandedOver, Listener, Served
from holdfast.net.mailbox import Mailbox
from holdfast.net.meeting import Connected, Meeting, Unreachable
from holdfast.net.proving import client_handshake
from holdfast.net.sockets import connect, listens_everywhere, open_tcp, open_unix
from holdfast.net.wires import SocketWires
from holdfast.reduce.arena import Arena
from holdfast.trust.keys import Keys, create_keys

WAIT_S = 20.0
SECRET_ALONE = Keys.from_secret(bytes(range(32)))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return create_keys(tmp_path_factory.mktemp("run") / "keys")


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return create_keys(tmp_path_factory.mktemp("other") / "keys")


@dataclass
class Door:
    """A listener as a worker of host `a` has it, and what came in."""

    listener: Listener
    registration: Registration
    arena: Arena
    groups: list[tuple[int, Connection]] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)
    hold: threading.Event = field(default_factory=threading.Event)

    def wait(self, groups: int = 0, snapshots: int = 0) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.groups) >= groups and len(self.snapshots) >= snapshots, WAIT_S)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.registration.address.removeprefix("tcp:").rpartition(":")
        return host.strip("[]"), int(port)

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=WAIT_S)


def open_door(directory: Path, keys: Keys, listen: str = "127.0.0.1", limits: AcceptLimits | None = None) -> Door:
    near, local = open_unix(directory / "w.sock")
    far, address = open_tcp(listen)
    registration = Registration(
        id="w0.1@a", host="a", pid=1, pid_started=1, address=address, fingerprint="", local=local
    )
    arena = Arena.create(2, 4096)
    door: Door

    def on_group(view: int, connection: Connection) -> None:
        with door.came:
            door.groups.append((view, connection))
            door.came.notify_all()

    def on_snapshot(view: int, sock: socket.socket) -> None:
        with door.came:
            door.snapshots.append(view)
            door.came.notify_all()
        door.hold.wait(WAIT_S)

    purposes = {"group": HandedOver(on_group), "snapshot": Served(on_snapshot)}
    listener = Listener([near, far], keys, "w0.1@a", purposes, memory=arena, limits=limits)
    door = Door(listener, registration, arena)
    return door


def shut(door: Door) -> None:
    door.hold.set()
    door.listener.close()
    for _, connection in door.groups:
        connection.close()
    door.arena.close()


@pytest.fixture
def door(tmp_path: Path, keys: Keys) -> Iterator[Door]:
    opened = open_door(tmp_path, keys)
    yield opened
    shut(opened)


def hung_up(sock: socket.socket, within_s: float = WAIT_S) -> bool:
    """Whether the other side has closed the connection, in whichever way."""
    deadline = time.monotonic() + within_s
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([sock], [], [], left_s)[0]:
            return False
        try:
            if not sock.recv(65536):
                return True
        except OSError:
            return True
    return False


def open_descriptors() -> int:
    gc.collect()  # a mapped memory file keeps a descriptor for as long as something refers to it
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def call(door: Door, keys: Keys, host: str = "b", view: int = 5, arena: Arena | None = None) -> Connection:
    return dial(door.registration, host, keys, Hello("group", view, "w1.1@b"), memory=arena)


# -- two sockets


def test_workers_of_one_host_meet_on_the_unix_socket_and_pass_memory(door: Door, keys: Keys) -> None:
    mine = Arena.create(3, 8192)
    mine.set_stamp(7, 9)
    connection = call(door, keys, host="a", arena=mine)
    door.wait(groups=1)
    view, theirs = door.groups[0]
    assert (view, theirs.peer, connection.peer) == (5, "w1.1@b", "w0.1@a")
    assert connection.sock.family == theirs.sock.family == socket.AF_UNIX
    assert theirs.memory is not None and theirs.memory.stamp == (7, 9) and theirs.memory.slots == 3
    assert connection.memory is not None and connection.memory.slots == 2
    connection.close()
    mine.close()


def test_workers_of_other_hosts_come_over_tls_and_bring_no_memory(door: Door, keys: Keys) -> None:
    mine = Arena.create(3, 8192)
    connection = call(door, keys, host="b", arena=mine)
    door.wait(groups=1)
    theirs = door.groups[0][1]
    for end in (connection, theirs):
        assert isinstance(end.sock, ssl.SSLSocket) and end.sock.version() == "TLSv1.3"
        assert end.memory is None
        assert end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert end.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
    connection.sock.sendall(b"and now in secret")
    theirs.sock.settimeout(WAIT_S)
    assert theirs.sock.recv(100) == b"and now in secret"
    connection.close()
    mine.close()


def test_without_certificates_tcp_proves_itself_all_the_same(tmp_path: Path) -> None:
    opened = open_door(tmp_path, SECRET_ALONE)
    connection = call(opened, SECRET_ALONE)
    assert not isinstance(connection.sock, ssl.SSLSocket)
    with pytest.raises(ProtocolError, match="secret"):
        call(opened, Keys.from_secret(bytes(32)))
    connection.close()
    shut(opened)


@pytest.mark.parametrize("listen", ["::1", "[::1]", "[::1]:29150-29199"])
def test_ipv6(tmp_path: Path, keys: Keys, listen: str) -> None:
    opened = open_door(tmp_path, keys, listen)
    assert opened.registration.address.startswith("tcp:[::1]:")
    connection = call(opened, keys)
    assert connection.sock.family == socket.AF_INET6
    connection.close()
    shut(opened)


def test_which_address_is_dialled() -> None:
    both = Registration(id="w0.1@a", host="a", pid=1, pid_started=1, address="tcp:h:1", fingerprint="", local="unix:/x")
    assert address_from("a", both) == "unix:/x"
    assert address_from("b", both) == "tcp:h:1"
    one = Registration(id="w0.1", host="a", pid=1, pid_started=1, address="tcp:h:1", fingerprint="")
    assert address_from("a", one) == "tcp:h:1"


@pytest.mark.parametrize(
    ("listen", "advertise", "host"),
    [
        ("127.0.0.1", "", "tcp:127.0.0.1:"),
        ("127.0.0.1", "10.1.2.3", "tcp:10.1.2.3:"),
        ("127.0.0.1", "fd00::7", "tcp:[fd00::7]:"),
        ("127.0.0.1", "[fd00::7]", "tcp:[fd00::7]:"),
        ("localhost", "", "tcp:localhost:"),
        ("0.0.0.0", "", "tcp:127.0.0.1:"),
        ("::", "node7", "tcp:node7:"),
    ],
)
def test_the_address_that_others_are_told(listen: str, advertise: str, host: str) -> None:
    server, address = open_tcp(listen, advertise)
    with server:
        assert address == f"{host}{server.getsockname()[1]}"


def test_addresses_that_nobody_could_dial() -> None:
    assert listens_everywhere("0.0.0.0") and listens_everywhere("[::]:29500-29599") and listens_everywhere("::")
    assert not listens_everywhere("127.0.0.1") and not listens_everywhere("localhost") and not listens_everywhere("")
    assert tcp_address("::1", 5) == "tcp:[::1]:5"
    for nonsense in ("none:", "tcp:", "tcp:host", "tcp:host:x", "tcp:host:65536", "tcp::1", "ftp:host:1", ""):
        with pytest.raises(PeerError, match="not the address of a worker"):
            connect(nonsense, 1.0)


def test_the_first_free_port_of_a_range_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="no free port") as error:
            open_tcp(f"127.0.0.1:{port}")
        assert error.value.hint
        try:
            server, address = open_tcp(f"127.0.0.1:{port}-{min(port + 20, 65535)}")
        except ConfigError:
            pytest.skip("twenty ports in a row are taken")
        with server:
            assert int(address.rpartition(":")[2]) > port


def test_the_unix_socket_is_for_this_user_alone(tmp_path: Path) -> None:
    server, address = open_unix(tmp_path / "s")
    with server:
        assert address == f"unix:{tmp_path / 's'}"
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="cannot listen"):
        open_unix(tmp_path / ("x" * 120))


# -- strangers


def test_a_wrong_certificate_is_refused_by_both_sides(door: Door, keys: Keys, other_keys: Keys) -> None:
    with pytest.raises(ProtocolError, match="certificate is not of this run"):
        call(door, other_keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # one that takes any server, and shows what it has
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(door.stranger()) as anonymous:
        with suppress(OSError):  # it may be closed already
            anonymous.sendall(b"hldfast1" + bytes(32))
        assert hung_up(anonymous)
    call(door, keys).close()
    door.wait(groups=1)


def test_the_right_certificate_with_a_wrong_secret_is_refused(door: Door, keys: Keys) -> None:
    half = Keys(bytes(32), keys.fingerprint, keys.certificates)
    with pytest.raises(ProtocolError, match="secret"):
        call(door, half)
    assert not door.groups


def test_who_speaks_no_tls_is_refused(door: Door, keys: Keys) -> None:
    with pytest.raises(PeerError):
        call(door, Keys.from_secret(keys.secret))
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"hldfast1" + bytes(32), bytes(5000), os.urandom(300)):
        with door.stranger() as stranger:
            stranger.sendall(first)
            assert hung_up(stranger, 1.0), first[:20]
    assert not door.groups


@pytest.mark.parametrize(
    "hello",
    [
        bytes(HELLO_BYTES),
        b"[]".ljust(HELLO_BYTES),
        Hello("break in", 1, "w1.1").encode(None),
        Hello("group", -1, "w1.1").encode(None),
        Hello("group", 1, "").encode(None),
        Hello("group", 1, "w" * 1000).encode(None),
        b'{"purpose":"group","number":1e400,"from":"w"}'.ljust(HELLO_BYTES),
        b'{"purpose":"group","number":1,"from":"w","slots":1}'.ljust(HELLO_BYTES),
    ],
    ids=range(8),
)
def test_a_member_that_talks_nonsense_is_hung_up_on(door: Door, keys: Keys, hello: bytes) -> None:
    with proven(door, keys) as sock:
        sock.sendall(hello)
        assert hung_up(sock, 1.0)
    assert not door.groups


def proven(door: Door, keys: Keys) -> socket.socket:
    """A connection that has said everything but its Hello."""
    context = keys.client_context()
    assert context is not None
    sock = context.wrap_socket(door.stranger())
    client_handshake(sock, keys.secret, time.monotonic() + WAIT_S, kind=WORKER)
    return sock


def test_silence_and_drips_have_one_deadline_for_everything(tmp_path: Path, keys: Keys) -> None:
    door = open_door(tmp_path, keys, limits=AcceptLimits(greeting_s=0.5))
    began = time.monotonic()
    silent, late = door.stranger(), proven(door, keys)
    dripping = proven(door, keys)
    ended: dict[str, float] = {}
    hello = Hello("group", 1, "w1.1").encode(None)
    for byte in hello:
        try:
            dripping.send(bytes([byte]))
        except OSError:
            break
        if hung_up(dripping, 0.02):
            break
    ended["dripping"] = time.monotonic() - began
    for name, sock in (("silent", silent), ("late", late)):
        assert hung_up(sock), name
        ended[name] = time.monotonic() - began
    assert all(0.4 < at_s < 2.0 for at_s in ended.values()), ended
    for sock in (silent, late, dripping):
        sock.close()
    shut(door)


def test_a_thousand_idle_strangers_keep_no_one_out_and_leave_nothing_behind(tmp_path: Path, keys: Keys) -> None:
    limits = AcceptLimits(greeting_s=60.0)  # so that only the bound can make room
    door = open_door(tmp_path, keys, limits=limits)
    before = open_descriptors()
    strangers = [door.stranger() for _ in range(1000)]
    began = time.monotonic()
    for number in range(1, 6):
        call(door, keys, view=number).close()
    assert time.monotonic() - began < 5.0
    door.wait(groups=5)
    kept = sum(not hung_up(stranger, 0.0) for stranger in strangers)
    # Both ends of a stranger's connection are in this process.
    theirs = open_descriptors() - before - len(strangers)
    assert theirs <= limits.unproven_max + 2 * 5, theirs
    still = [stranger for stranger in strangers if not closed_by_now(stranger)]
    assert len(still) <= limits.unproven_max, (len(still), kept)
    for stranger in strangers:
        stranger.close()
    deadline = time.monotonic() + WAIT_S
    while open_descriptors() > before + 5 and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    assert open_descriptors() <= before + 5  # the five connections that were handed over
    shut(door)


def closed_by_now(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return bool(poll.poll(0))


def test_who_has_proved_more_is_dropped_later(tmp_path: Path, keys: Keys) -> None:
    door = open_door(tmp_path, keys, limits=AcceptLimits(unproven_max=4, greeting_s=60.0))
    honest = proven(door, keys)
    strangers = [door.stranger() for _ in range(8)]
    assert all(hung_up(stranger) for stranger in strangers[:4])
    assert not closed_by_now(honest), "the oldest of all, but it has proved itself"
    honest.sendall(Hello("group", 1, "w1.1").encode(None))
    door.wait(groups=1)
    for sock in (honest, *strangers):
        sock.close()
    shut(door)


def test_descriptors_that_strangers_pass_are_closed(tmp_path: Path, door: Door, keys: Keys) -> None:
    before = open_descriptors()
    memory = [os.memfd_create("many") for _ in range(8)]
    for count, hello in ((2, Hello("group", 1, "w1.1").encode(None)), (1, b"nonsense".ljust(HELLO_BYTES))):
        sock = connect(door.registration.local, WAIT_S)
        client_handshake(sock, keys.secret, time.monotonic() + WAIT_S, kind=WORKER)
        socket.send_fds(sock, [hello], memory[:count])
        assert hung_up(sock)
        sock.close()
    # An arena that is smaller than its owner says, and one that comes with a request for a snapshot.
    lie = b'{"purpose":"group","number":1,"from":"w","slots":9,"slot_bytes":4096}'.ljust(HELLO_BYTES)
    sock = connect(door.registration.local, WAIT_S)
    client_handshake(sock, keys.secret, time.monotonic() + WAIT_S, kind=WORKER)
    socket.send_fds(sock, [lie], memory[:1])
    assert hung_up(sock)
    sock.close()
    for fd in memory:
        os.close(fd)
    assert open_descriptors() == before
    assert not door.groups


def test_snapshots_are_served_beside_each_other_up_to_a_bound(door: Door, keys: Keys) -> None:
    def dial_snapshot(view: int, me: str) -> socket.socket:
        return dial_service(door.registration, "b", keys, Hello("snapshot", view, me))

    joiners = [dial_snapshot(3, "w1.1@b") for _ in range(SERVED_MAX)]
    door.wait(snapshots=SERVED_MAX)
    with dial_snapshot(3, "w2.1@b") as one_too_many:
        assert hung_up(one_too_many)
    door.hold.set()
    assert all(hung_up(joiner) for joiner in joiners), "served and closed"
    dial_snapshot(4, "w1.1@b").close()
    door.wait(snapshots=SERVED_MAX + 1)
    for joiner in joiners:
        joiner.close()


def test_closing_hangs_up_on_all_who_still_prove_themselves(tmp_path: Path, keys: Keys) -> None:
    before = open_descriptors()
    opened = open_door(tmp_path, keys)
    strangers = [opened.stranger() for _ in range(3)]
    honest = call(opened, keys)
    opened.wait(groups=1)
    opened.listener.close()
    opened.listener.close()
    assert all(hung_up(stranger) for stranger in strangers)
    with pytest.raises(PeerError, match="cannot connect"):
        call(opened, keys)
    assert not closed_by_now(honest.sock), "what was handed over is its owner's"
    for sock in strangers:
        sock.close()
    honest.close()
    shut(opened)
    del opened
    assert open_descriptors() == before


OUT_OF_DESCRIPTORS = """
import resource, sys, threading
from holdfast.net.listener import HandedOver, Listener
from holdfast.net.sockets import open_tcp
from holdfast.trust.keys import Keys
server, address = open_tcp("127.0.0.1")
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
Listener([server], Keys.from_secret(bytes(range(32))), "w0.1",
         {"group": HandedOver(lambda view, connection: connection.close())})
print(address, flush=True)
sys.stdin.read()
"""


def test_strangers_do_not_use_up_the_descriptors_of_the_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        address = process.stdout.readline().strip()
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        strangers = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(200)]
        registration = Registration(id="w0.1", host="a", pid=1, pid_started=1, address=address, fingerprint="")
        began = time.monotonic()
        connection = dial(registration, "b", SECRET_ALONE, Hello("group", 1, "w1.1"))
        assert time.monotonic() - began < 4.0
        connection.close()
        for stranger in strangers:
            stranger.close()
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


# -- meeting


def accepted(peer: str, *, near: bool, arena: Arena | None = None) -> tuple[Connection, socket.socket]:
    """A connection as the listener hands it over, and its other end."""
    if near:
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
    return Connection(peer, ours, arena), theirs


def registration_of(worker: str, host: str) -> Registration:
    return Registration(
        id=worker, host=host, pid=1, pid_started=1, address="tcp:127.0.0.1:1", fingerprint="", local="unix:/none"
    )


def test_memory_is_needed_from_workers_of_this_host_only(keys: Keys) -> None:
    arena = Arena.create(1, 4096)
    mailbox = Mailbox()
    meeting = Meeting("w0.1@a", SocketWires("a", keys), mailbox, decode, arena)
    view = View(3, ("w0.1@a", "w1.1@a", "w0.1@b"))
    group = meeting.open(view, {name: registration_of(name, name[-1]) for name in view.members})
    far, far_end = accepted("w0.1@b", near=False)
    near, near_end = accepted("w1.1@a", near=True)
    meeting.connected(Connected(3, far))
    meeting.connected(Connected(3, near))
    assert set(group.connections) == {"w0.1@b"}
    assert mailbox.take_all() == [Unreachable(3, "w1.1@a", "it did not share its memory")]
    assert hung_up(near_end)
    # And it cannot get around that by coming from outside.
    outside, outside_end = accepted("w1.1@a", near=False)
    meeting.connected(Connected(3, outside))
    assert hung_up(outside_end) and "w1.1@a" not in group.connections
    whole, whole_end = accepted("w1.1@a", near=True, arena=Arena.create(1, 4096))
    meeting.connected(Connected(3, whole))
    assert group.complete
    group.close()
    for end in (far_end, near_end, outside_end, whole_end):
        end.close()
    arena.close()
    os.close(mailbox.fd)


def test_connections_of_old_views_are_closed_and_of_new_ones_parked(keys: Keys) -> None:
    mailbox = Mailbox()
    meeting = Meeting("w0.1", SocketWires("a", keys), mailbox, decode, None)
    group = meeting.open(View(5, ("w0.1", "w1.1")), {})
    ends = []
    for number in (0, 3, 4):  # a recording, a worker that slept, a knock
        old, end = accepted("w1.1", near=False)
        meeting.connected(Connected(number, old))
        assert hung_up(end)
        ends.append(end)
    early, early_end = accepted("w1.1", near=False)
    meeting.connected(Connected(6, early))
    again, again_end = accepted("w1.1", near=False)
    meeting.connected(Connected(6, again))
    assert hung_up(early_end), "it dialled again"
    assert not closed_by_now(again_end)
    far, far_end = accepted("w1.1", near=False)
    meeting.connected(Connected(9, far))
    group.close()
    group = meeting.open(View(6, ("w0.1", "w1.1")), {})
    assert group.connections["w1.1"] is again
    twice, twice_end = accepted("w1.1", near=False)
    meeting.connected(Connected(6, twice))
    unknown, unknown_end = accepted("w7.1", near=False)
    meeting.connected(Connected(6, unknown))
    assert hung_up(twice_end) and hung_up(unknown_end)
    group.close()
    meeting.open(View(10, ("w0.1", "w1.1")), {}).close()
    assert hung_up(far_end), "its view was passed over"
    for end in (*ends, early_end, again_end, far_end, twice_end, unknown_end):
        end.close()
    os.close(mailbox.fd)


def test_parked_views_are_bounded(keys: Keys) -> None:
    mailbox = Mailbox()
    meeting = Meeting("w0.1", SocketWires("a", keys), mailbox, decode, None)
    ends = []
    for number in range(1, 30):
        early, end = accepted("w1.1", near=False)
        meeting.connected(Connected(number, early))
        ends.append(end)
    assert sum(not closed_by_now(end) for end in ends) == 8
    meeting.open(View(40, ("w0.1", "w1.1")), {}).close()
    assert all(hung_up(end) for end in ends)
    for end in ends:
        end.close()
    os.close(mailbox.fd)
