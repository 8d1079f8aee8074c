"""Pairs of sockets as two workers of different hosts have them: TLS with certificates of one run, over loopback."""

from __future__ import annotations

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

from holdfast.core.words import View
from holdfast.membership.codec import decode
from holdfast.net.groups import Connection, Group
from holdfast.net.sockets import prepare
from holdfast.trust.keys import Keys

WAIT_S = 30.0
MEMBERS = ("w0.1@a", "w0.1@b")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    for sock in (left, right):
        prepare(sock)
        sock.settimeout(WAIT_S)
    return left, right


def tls_pair(keys: Keys) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    left, right = tcp_pair()
    client, server = keys.client_context(), keys.server_context()
    assert client is not None and server is not None
    with ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(client.wrap_socket, left)
        accepted = server.wrap_socket(right, server_side=True)
        return dialling.result(WAIT_S), accepted


def group(me: str, peer: str, sock: socket.socket, view: int = 1) -> Group:
    made = Group(View(view, MEMBERS), me, decode)
    made.add(Connection(peer, sock))
    return made


def two_groups(left: socket.socket, right: socket.socket) -> tuple[Group, Group]:
    return group(MEMBERS[0], MEMBERS[1], left), group(MEMBERS[1], MEMBERS[0], right)
