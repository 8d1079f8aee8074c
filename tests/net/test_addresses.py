"""Where workers listen: what is written for --listen, and what is chosen without it."""

from __future__ import annotations

import socket

import pytest

from holdfast.core.errors import ConfigError
from holdfast.net.addresses import address_towards, check_listen, parse_listen


@pytest.mark.parametrize(
    ("listen", "host", "ports"),
    [
        ("127.0.0.1", "127.0.0.1", range(0)),
        ("node7", "node7", range(0)),
        ("node7:29500", "node7", range(29500, 29501)),
        ("10.0.0.5:29500-29599", "10.0.0.5", range(29500, 29600)),
        ("::1", "::1", range(0)),
        ("[::1]", "::1", range(0)),
        ("[fd00::7]:29500-29501", "fd00::7", range(29500, 29502)),
        ("fe80::1%eth0", "fe80::1%eth0", range(0)),
    ],
)
def test_what_can_be_written(listen: str, host: str, ports: range) -> None:
    assert parse_listen(listen) == (host, ports)


@pytest.mark.parametrize(
    "listen", ["host:", "host:x", "host:2-1", "host:0", "host:70000", ":5", "[::1", "[::1]x", "[::1]:", "[host]:5"]
)
def test_what_cannot(listen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_listen(listen)
    assert caught.value.hint


def test_a_port_in_use_is_found_before_a_worker_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match="0 of 1 ports"):
            check_listen(f"127.0.0.1:{port}", 1)
    check_listen("127.0.0.1", 5)


def test_ipv6_ports() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    check_listen("::1", 3)
    server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    with server, pytest.raises(ConfigError, match="0 of 1 ports"):
        check_listen(f"[::1]:{server.getsockname()[1]}", 1)


def test_the_address_towards_the_ledger() -> None:
    assert address_towards("etcd://127.0.0.1:2379") == "127.0.0.1"
    assert address_towards("etcd://no-such-host.invalid:2379,127.0.0.1:2379") == "127.0.0.1"
    assert address_towards("etcd://localhost") in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match="no way"):
        address_towards("etcd://no-such-host.invalid:2379")


def test_the_address_towards_a_ledger_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    assert address_towards("etcd://[::1]:2379") == "::1"
    assert address_towards("etcds://[::1],127.0.0.1") == "::1"
