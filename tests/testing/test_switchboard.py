"""Does the switchboard cut what it says, and nothing else? Real packets between namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.testing.switchboard import Switchboard, why_not

HOSTS = ("a", "b", "c")
ECHO = """
import socket
sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
sock.bind(("::", 7777))
print("up", flush=True)
while True:
    data, sender = sock.recvfrom(100)
    sock.sendto(data, sender)
"""
ASK = """
import socket, sys
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(0.15)
for _ in range(int(sys.argv[2])):
    sock.sendto(b"?", (sys.argv[1], 7777))
    try:
        sock.recv(100)
        print("y", end="")
    except OSError:
        print("n", end="")
"""


@pytest.fixture(scope="module")
def board() -> Iterator[Switchboard]:
    if reason := why_not():
        pytest.skip(reason)
    with Switchboard(HOSTS) as board:
        servers = []
        try:
            for host in HOSTS:
                command = [*board.command(host), sys.executable, "-S", "-c", ECHO]
                servers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
                assert servers[-1].stdout is not None
                assert servers[-1].stdout.readline() == b"up\n"
            yield board
        finally:
            for server in servers:
                server.kill()
                server.communicate()


@pytest.fixture(autouse=True)
def healed(board: Switchboard) -> Iterator[None]:
    yield
    board.heal()
    board.lose(0)


def answers(board: Switchboard, asker: str, asked: str, *, tries: int = 1, six: bool = False) -> str:
    address = board.address6(asked) if six else board.address(asked)
    command = [*board.command(asker), sys.executable, "-S", "-c", ASK, address, str(tries)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def reaches(board: Switchboard, asker: str, asked: str, *, six: bool = False) -> bool:
    """Asks for some seconds: a kernel that looked for a host in vain asks again where it is only once a second."""
    return any(answers(board, asker, asked, six=six) == "y" for _ in range(40))


def test_hosts_reach_each_other_by_both_protocols(board: Switchboard) -> None:
    assert reaches(board, "a", "b")
    assert reaches(board, "c", "a", six=True)


def test_a_cut_is_between_its_sides_only(board: Switchboard) -> None:
    board.cut("a", ["b", "c"])
    assert answers(board, "a", "b") == "n"
    assert answers(board, "c", "a", six=True) == "n"
    assert reaches(board, "b", "c")
    board.heal()
    assert reaches(board, "a", "b")


def test_an_isolated_and_an_unplugged_host(board: Switchboard) -> None:
    board.isolate("b")
    assert answers(board, "a", "b") + answers(board, "c", "b") == "nn"
    board.heal()
    board.unplug("b")
    assert answers(board, "a", "b") == "n"
    board.plug("b")
    assert reaches(board, "a", "b")


def test_one_way(board: Switchboard) -> None:
    """What b sends still arrives at a, so the kernel of a answers: only the way back is closed."""
    _introduce(board, "a", "b")  # b could not ask any more where a is
    board.cut_one_way("a", "b")
    assert answers(board, "a", "b") == "n"
    assert answers(board, "b", "a") == "n"
    assert reaches(board, "a", "c")
    seen = _packets_received(board, "a")
    answers(board, "b", "a")
    assert _packets_received(board, "a") > seen


def test_loss(board: Switchboard) -> None:
    board.lose(40)
    got = answers(board, "a", "b", tries=40)
    assert {"y", "n"} == set(got), got


def test_a_slow_link(board: Switchboard) -> None:
    board.slow("b", "8mbit")
    assert reaches(board, "a", "b")
    board.slow("b", "")
    assert reaches(board, "a", "b")


def _introduce(board: Switchboard, host: str, to: str) -> None:
    """Tell the kernel of `to` for good which interface `host` has."""
    shown = subprocess.run([*board.command(host), "ip", "-o", "link", "show", "eth0"], capture_output=True, check=True)
    interface = shown.stdout.decode().split("link/ether ")[1].split()[0]
    neighbour = [board.address(host), "lladdr", interface, "dev", "eth0", "nud", "permanent"]
    subprocess.run([*board.command(to), "ip", "neigh", "replace", *neighbour], check=True)


def _packets_received(board: Switchboard, host: str) -> int:
    command = [*board.command(host), "cat", "/proc/net/snmp"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names, values = (line.split() for line in lines if line.startswith("Udp:"))
    return int(values[names.index("InDatagrams")])
