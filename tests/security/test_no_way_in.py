"""Strangers at the doors of a run that trains: none gets in, none costs it anything, and it ends with the exact digest.

The tests of a layout share one run, and the last one lets it finish.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from siege import WAIT_S, Besieged, Crowd, Port, hung_up

from holdfast.core.errors import LedgerRefused, PeerError
from holdfast.core.words import KEY_STOP, KEY_VIEW, Registration
from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.membership.codec import encode
from holdfast.membership.messages import Done, Ready
from holdfast.net.byte_ranges import Request
from holdfast.net.dialling import dial, dial_service
from holdfast.net.greeting import Hello
from holdfast.trust.handshake import MAC_BYTES, MAGIC, NONCE_BYTES
from holdfast.trust.keys import Keys, create_keys

pytestmark = [pytest.mark.xdist_group("security"), pytest.mark.processes, pytest.mark.timeout(150)]

GIGABYTE = 1 << 30
TAKEN_BYTES_MAX = 16 << 20  # by kernels, of what nobody reads
IDLE = 1000
HTTP = b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n"
TLS_START = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03"  # a client's first message, of the largest size


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Of another run."""
    return create_keys(tmp_path_factory.mktemp("other") / "keys")


def try_all_doors(run: Besieged, keys: Keys, sentence: str = "secret|hung up|closed|broke") -> None:
    """As a worker that would join or fetch the state, and as a client of the ledger that would stop the run."""
    for port in run.ports():
        if port.owner == "ledger":
            if keys.secret != run.keys.secret:
                with (
                    closing(EmbeddedLedger(Path(port.address[5:]), keys.secret)) as ledger,
                    pytest.raises(LedgerRefused, match="secret"),
                ):
                    ledger.put(KEY_STOP, b'{"reason":"a stranger said so"}')
            continue
        registration = run.registrations[port.owner]
        stranger = Registration(**{**vars(registration), "address": port.address, "local": ""})
        with pytest.raises(PeerError, match=sentence):
            dial(stranger, "", keys, Hello("group", run.view, "w7.1")).close()
        with pytest.raises(PeerError, match=sentence):
            dial_service(stranger, "", keys, Hello("snapshot", run.view, "w7.1")).close()


def test_a_stranger_who_has_the_address_only(run: Besieged) -> None:
    """It is hung up on in time, and hears no more than a challenge."""
    with run.unharmed():
        began = time.monotonic()
        ports = run.ports()
        assert len(ports) >= 3
        socks = []
        for port in ports:
            for said in (b"", HTTP, MAGIC + bytes(NONCE_BYTES) + bytes(MAC_BYTES), TLS_START, bytes(100_000)):
                socks.append((port, port.connect()))
                with suppress(OSError):  # some are quick to hang up
                    socks[-1][1].sendall(said)
        for port, sock in socks:
            with sock:
                heard = hung_up(sock)
                assert heard is not None, f"{port} did not hang up"
                assert len(heard) <= NONCE_BYTES + MAC_BYTES, f"{port} said {heard!r}"
        assert time.monotonic() - began < 5


def test_a_stranger_with_a_secret_of_its_own(run: Besieged) -> None:
    with run.unharmed():
        try_all_doors(run, Keys.from_secret(os.urandom(32)))


def test_a_certificate_of_another_run(run: Besieged, other_keys: Keys) -> None:
    """Even with the right secret, and even if the stranger does not ask who it talks to."""
    with run.unharmed():
        if run.given is None:
            try_all_doors(run, other_keys)
            return
        stolen = Keys(run.keys.secret, other_keys.fingerprint, other_keys.certificates)
        near = [port for port in run.ports() if not port.tls]
        assert near, "workers of one host meet on unix sockets"
        careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        for port in [port for port in run.ports() if port.tls]:
            stranger = Registration(**{**vars(run.registrations[port.owner]), "local": ""})
            with pytest.raises(PeerError, match="certificate is not of this run"):
                dial(stranger, "", stolen, Hello("group", run.view, "w7.1"))
            assert other_keys.certificates is not None
            other_keys.certificates.client.verify_mode = ssl.CERT_NONE
            try:
                for context in (careless, other_keys.certificates.client):
                    with suppress(OSError), context.wrap_socket(port.connect()) as sock:
                        sock.sendall(MAGIC + bytes(NONCE_BYTES))
                        assert hung_up(sock) == b"", "it heard the challenge"
            finally:
                other_keys.certificates.client.verify_mode = ssl.CERT_REQUIRED


def test_the_right_certificate_and_another_secret(run: Besieged) -> None:
    with run.unharmed():
        secret = bytes(reversed(run.keys.secret))
        try_all_doors(run, Keys(secret, "", run.keys.certificates), "secret")


class Recorder:
    """Stands between a client and a port, and writes down what the client says."""

    def __init__(self, port: Port, path: Path) -> None:
        self._port = port
        self.said = bytearray()
        if port.address.startswith("unix:"):
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(str(path))
            self._server.listen()
            self.address = f"unix:{path}"
        else:
            self._server = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        ours, _ = self._server.accept()
        theirs = self._port.connect()
        back = threading.Thread(target=self._pass_on, args=(theirs, ours, bytearray()), daemon=True)
        back.start()
        self._pass_on(ours, theirs, self.said)
        back.join(WAIT_S)
        ours.close()
        theirs.close()

    @staticmethod
    def _pass_on(source: socket.socket, to: socket.socket, copy: bytearray) -> None:
        with suppress(OSError):
            source.settimeout(WAIT_S)
            while data := source.recv(65536):
                copy += data
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._threads[0].join(WAIT_S)
        self._server.close()


def test_a_recording_played_back(run: Besieged, tmp_path: Path) -> None:
    """Of a whole conversation: the handshake, the greeting, messages; of the ledger's, one that writes."""
    with run.unharmed():
        for number, port in enumerate(run.ports()):
            with closing(Recorder(port, tmp_path / str(number))) as recorder:
                if port.owner == "ledger":
                    with closing(EmbeddedLedger(Path(recorder.address[5:]), run.keys.secret)) as ledger:
                        ledger.put("played", b"once")
                        assert ledger.delete("played")
                else:
                    registration = run.registrations[port.owner]
                    through = Registration(**{**vars(registration), "address": recorder.address, "local": ""})
                    hello = Hello("group", run.view - 1, "w7.1")
                    connection = dial(through, "", run.keys, hello)
                    assert connection.peer == port.owner
                    connection.sock.sendall(encode(Ready(run.applied(), (0,))))
                    connection.close()
            assert len(recorder.said) > len(MAGIC) + NONCE_BYTES + MAC_BYTES
            with port.connect() as sock:
                with suppress(OSError):
                    sock.sendall(recorder.said)
                heard = hung_up(sock)
                assert heard is not None
                assert port.tls or len(heard) == NONCE_BYTES + MAC_BYTES, "it hears a new challenge and no welcome"
            if port.owner == "ledger":
                with closing(EmbeddedLedger(Path(port.address[5:]), run.keys.secret)) as ledger:
                    assert ledger.get("played") is None


def pour(port: Port, first: bytes, limit: int = GIGABYTE) -> int:
    """How much of so many random bytes leaves before somebody hangs up."""
    noise, sent = os.urandom(1 << 20), 0
    with port.connect() as sock, suppress(OSError):
        sock.sendall(first)
        while sent < limit:
            sent += sock.send(noise)
    return sent


def test_a_gigabyte_of_noise_on_each_port(run: Besieged) -> None:
    with run.unharmed():
        for port in run.ports():
            for first in (b"", MAGIC + bytes(NONCE_BYTES), TLS_START):
                assert pour(port, first) < TAKEN_BYTES_MAX, port
            for _ in range(30):  # and again and again, at full speed
                pour(port, b"")


def test_those_who_speak_slowly_or_stop_in_the_middle(run: Besieged) -> None:
    with run.unharmed(), ExitStack() as stack:
        ports = run.ports()
        began = time.monotonic()
        drips = {stack.enter_context(port.connect()): iter(MAGIC + bytes(1000)) for port in ports for _ in range(5)}
        halves = [stack.enter_context(port.connect()) for port in ports]
        for sock in halves:
            with suppress(OSError):  # one that expects TLS has hung up already
                sock.sendall(MAGIC)
                sock.shutdown(socket.SHUT_WR)
        for sock in halves:
            heard = hung_up(sock)
            assert heard is not None and len(heard) < NONCE_BYTES
        while drips and time.monotonic() - began < 6:
            for sock in list(drips):
                try:
                    sock.send(bytes([next(drips[sock])]))
                except OSError:
                    del drips[sock]
            time.sleep(0.2)  # slower than any worker, faster than any patience
        assert not drips, "whoever says a byte now and then is listened to forever"


def test_a_thousand_idle_connections_while_a_worker_is_killed_and_replaced(run: Besieged) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    run.look()
    run.held()
    before, view = run.held(), run.view
    ports = run.ports()
    crowd = Crowd(lambda: ports, IDLE)
    try:
        crowd.tend()
        assert len(crowd) == IDLE
        victim = run.members[-1]
        os.kill(run.pids[victim], signal.SIGKILL)
        tended = time.monotonic()

        def replaced() -> bool:
            nonlocal tended, ports
            if time.monotonic() - tended > 0.25:
                with suppress(PeerError):
                    ports = run.ports()  # the crowd finds the new worker too
                crowd.tend()
                tended = time.monotonic()
            return run.view > view and victim not in run.members and len(run.living_members()) == 2

        run.wait(replaced, "a worker in the place of the one that was killed", 60.0)
        at = run.applied() + 2
        run.wait(lambda: replaced() and run.applied() >= at, "two more steps with it", 60.0)
        assert crowd.turned_away > IDLE, "nobody was turned away"
    finally:
        crowd.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # A worker that came later has a few more connections to the ledger than one that was there at the start.
    run.holds_no_more({name: one for name, one in before.items() if name != victim}, spare=4)


def test_messages_of_an_old_view(run: Besieged) -> None:
    """From somebody who has the keys and was a member once, as a worker has that slept through a view."""
    run.look()
    if run.view == 1:  # nobody was killed yet
        victim = run.members[-1]
        os.kill(run.pids[victim], signal.SIGKILL)
        run.wait(lambda: victim not in run.members and len(run.living_members()) == 2, "another view", 60.0)
        run.wait_more(1)
    run.ports()
    with run.unharmed():
        for old in (1, run.view - 1):
            for worker, registration in run.registrations.items():
                if worker not in run.members:
                    continue
                sleeper = next(member for member in run.members if member != worker)
                far = Registration(**{**vars(registration), "local": ""})
                connection = dial(far, "", run.keys, Hello("group", old, sleeper))
                with suppress(OSError):
                    for message in (Ready(run.applied() + 1, tuple(range(8))), Done(run.applied() + 1)):
                        connection.sock.sendall(encode(message))
                assert hung_up(connection.sock) == b"", "it was listened to"
                connection.close()
                with suppress(OSError), dial_service(far, "", run.keys, Hello("snapshot", old, sleeper)) as sock:
                    sock.sendall(Request("summary").encode())
                    assert hung_up(sock) == b"", "it was given the state"


def test_the_secret_is_in_no_log_command_line_or_environment(run: Besieged) -> None:
    secrets = [run.keys.secret, run.keys.secret.hex().encode()]
    if run.given is not None:
        secrets += (run.home / "keys" / "key.pem").read_bytes().splitlines()[1:-1]
    kept = {path for path in run.home.rglob("*") if path.name in ("secret", "key.pem")}
    assert kept and all(path.stat().st_mode & 0o077 == 0 for path in kept)
    places = [path for path in run.home.rglob("*") if path.is_file() and path not in kept]
    places += [Path(f"/proc/{pid}/{name}") for pid in run.processes().values() for name in ("cmdline", "environ")]
    assert len(places) > 6
    for place in places:
        content = place.read_bytes()
        assert not any(secret in content for secret in secrets), f"{place} has a secret in it"


def test_the_training_ends_with_the_exact_digest(run: Besieged) -> None:
    with closing(run.ledger()) as ledger:
        assert ledger.get(KEY_STOP) is None
        assert ledger.get(KEY_VIEW) is not None
    run.ends_exact()
