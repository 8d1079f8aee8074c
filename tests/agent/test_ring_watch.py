"""Agents that beat to each other over real sockets: who hears whom, who is silent, and who has no business there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.hosts.host_table import HostTable, host_line, read_table
from holdfast.agent.hosts.ring_links import answers, dial, frame
from holdfast.agent.hosts.ring_watch import RingNews, RingWatch
from holdfast.agent.ledger_watch import LedgerChange, LedgerContents
from holdfast.agent.workers.heartbeat_watch import Glance
from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_HOSTS, KEY_VIEW, KEY_WORKERS, Registration, View, encode_json
from holdfast.detection.agent_beat import AgentBeat
from holdfast.detection.progress import Level
from holdfast.ledger.port import Change
from holdfast.net.addresses import split_tcp
from holdfast.net.sockets import open_tcp
from holdfast.trust.keys import Keys, create_keys

WAIT_S = 20.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return create_keys(Path(tmp_path_factory.mktemp("ring")) / "keys")


class Hosts:
    """Agents of several hosts in this process, and a ledger that is a dictionary."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.values: dict[str, bytes] = {}
        self.rings: dict[str, RingWatch] = {}
        self.servers: dict[str, socket.socket] = {}
        self.news: dict[str, list[RingNews]] = {}
        self.glances: dict[str, dict[str, Glance]] = {}

    def start(self, *hosts: str, **options: Any) -> None:
        for host in hosts:
            server, address = open_tcp("127.0.0.1")
            self.servers[host] = server
            news = self.news.setdefault(host, [])
            self.glances[host] = {}
            self.rings[host] = RingWatch(
                host,
                server,
                self.keys,
                glances=lambda host=host: self.glances[host],  # type: ignore[misc]
                report=news.append,
                lease_s=2.0,
                **options,
            )
            self.values[KEY_HOSTS + host] = encode_json({"ring": address})
        self.tell()

    def tell(self) -> None:
        for ring in self.rings.values():
            ring.listening(lambda news: None)(LedgerContents(dict(self.values)))

    def stop(self, host: str) -> None:
        self.rings.pop(host).close()

    def row(self, by: str, of: str) -> Any:
        return next((row for row in self.rings[by].rows if row.host == of), None)

    def levels(self) -> set[str]:
        return {row.level for ring in self.rings.values() for row in ring.rows}

    def kinds(self, host: str) -> list[str]:
        return [news.kind for news in self.news[host]]


@pytest.fixture
def hosts(keys: Keys) -> Iterator[Hosts]:
    made = Hosts(keys)
    yield made
    for host in tuple(made.rings):
        made.stop(host)


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def go_silent(ring: RingWatch) -> None:
    """Its host loses its network: nothing is sent any more, and nobody says good-bye."""
    ring._send = lambda beat: None  # type: ignore[method-assign]


def test_three_agents_hear_each_other_and_tell_how_their_workers_look(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start("a", "b", "c")
    hosts.glances["b"] = {"w0.1@b": Glance(Level.HUNG, 7, 0.0), "w1.1@b": Glance(Level.OK, 8, 0.0)}
    wait(lambda: hosts.levels() == {"ok"} and all(len(ring.rows) == 2 for ring in hosts.rings.values()), "all to be ok")
    wait(lambda: hosts.row("a", "b").crew.unwell, "b's workers")
    assert hosts.row("a", "b").crew.step == 8
    HostTable(tmp_path).look(hosts.rings["a"].rows, time.monotonic())
    age_s, rows = read_table(tmp_path)
    assert 0 <= age_s < WAIT_S and [row["host"] for row in rows] == ["b", "c"]
    assert rows[0]["unwell"] == {"w0.1@b": "hung"} and rows[0]["workers"] == {"ok": 1, "hung": 1}
    assert host_line(rows[0]).startswith("b        ok: 1 ok, 1 hung (w0.1@b hung), at step 8, ")
    assert host_line({**rows[0], "level": "silent", "phi": 9.0}).startswith("b        silent by a (phi 9.0): 1 ok")
    (tmp_path / "hosts.json").write_text('{"t": 1, "hosts": [{"host": "b"}]}')
    assert read_table(tmp_path) == (0.0, [])
    hosts.stop("b")  # in order: its silence means nothing
    hosts.values.pop(KEY_HOSTS + "b")
    for ring in hosts.rings.values():
        ring.listening(lambda news: None)(LedgerChange(Change("delete", KEY_HOSTS + "b", b"", 9)))
    wait(lambda: all(len(ring.rows) == 1 for ring in hosts.rings.values()), "b to be gone")
    assert hosts.kinds("a") == hosts.kinds("c") == []


def test_one_falls_silent_and_is_not_given_up_since_its_port_answers(hosts: Hosts) -> None:
    """As an agent that hangs on a host that is well. When it beats again, that is said too."""
    hosts.start("a", "b", "c")
    wait(lambda: hosts.levels() == {"ok"}, "all to be ok")
    beats = hosts.rings["b"]._send
    hold_up(hosts, "b")
    go_silent(hosts.rings["b"])
    wait(lambda: "host_silent" in hosts.kinds("a") and "host_silent" in hosts.kinds("c"), "b to be called silent")
    said = next(news for news in hosts.news["a"] if news.kind == "host_silent").fields
    assert said["host"] == "b" and said["noticed_by"] == "a" and said["phi"] >= 8 and said["seconds"] >= 0.8
    wait(lambda: hosts.rings["a"]._tried.get("b") is True, "b to be tried")
    hosts.rings["b"]._send = beats  # type: ignore[method-assign]
    wait(lambda: "host_back" in hosts.kinds("a") and "host_back" in hosts.kinds("c"), "b to be back")
    assert "host_given_up" not in hosts.kinds("a") + hosts.kinds("c")


def hold_up(hosts: Hosts, victim: str) -> None:
    """Every host has a worker of the view, and all but the victim's wait."""
    members = tuple(f"w0.1@{host}" for host in hosts.rings)
    for member in members:
        registration = Registration(
            id=member, host="h", pid=1, pid_started=1, address="tcp:127.0.0.1:1", fingerprint="f"
        )
        hosts.values[KEY_WORKERS + member] = registration.encode()
    hosts.values[KEY_VIEW] = View(3, members).encode()
    for host in hosts.rings:
        hosts.glances[host] = {f"w0.1@{host}": Glance(Level.OK, 5, 0.0 if host == victim else 9.0)}
    hosts.tell()


def test_nothing_there_answers_and_both_say_so_so_it_is_given_up_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.start("a", "b", "c")
    wait(lambda: hosts.levels() == {"ok"}, "all to be ok")
    monkeypatch.setattr("holdfast.agent.hosts.ring_watch.answers", lambda addresses: False)
    hold_up(hosts, "b")
    go_silent(hosts.rings["b"])
    wait(lambda: "host_given_up" in hosts.kinds("a") or "host_given_up" in hosts.kinds("c"), "b to be given up")
    given_up = [news for host in ("a", "c") for news in hosts.news[host] if news.kind == "host_given_up"]
    assert all(news.given_up == ("w0.1@b",) and news.fields["host"] == "b" for news in given_up)
    tried = time.monotonic() + 1.0
    wait(lambda: time.monotonic() > tried, "some more looks")
    assert all(hosts.kinds(host).count("host_given_up") <= 1 for host in ("a", "c"))


def test_of_two_hosts_none_gives_up_the_other(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds the other silent, and both may be well: no third can say."""
    hosts.start("a", "b")
    wait(lambda: hosts.levels() == {"ok"}, "both to be ok")
    monkeypatch.setattr("holdfast.agent.hosts.ring_watch.answers", lambda addresses: False)
    hold_up(hosts, "b")
    go_silent(hosts.rings["b"])
    wait(lambda: "host_silent" in hosts.kinds("a"), "b to be called silent")
    wait(lambda: hosts.rings["a"]._tried.get("b") is False, "b to be tried")
    later = time.monotonic() + 0.5
    wait(lambda: time.monotonic() > later, "some more looks")
    assert hosts.kinds("a") == ["host_silent"]


def test_strangers_and_nonsense_are_hung_up_on(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start("a", "b")
    wait(lambda: hosts.levels() == {"ok"}, "both to be ok")
    address = f"tcp:127.0.0.1:{hosts.servers['a'].getsockname()[1]}"
    with pytest.raises(Exception, match=r"certificate|broke|closed|EOF|alert|reset"):
        dial(address, create_keys(tmp_path / "other"))
    with socket.create_connection(split_tcp(address)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(WAIT_S)
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    for nonsense in (frame(b"{}"), b"\xff\xff\xff\xff", frame(AgentBeat(host="x").encode())[:-1] + b"\x00"):
        sock = dial(address, hosts.keys)
        sock.settimeout(WAIT_S)
        sock.sendall(nonsense)
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b"", nonsense
        sock.close()
    wait(lambda: len(hosts.rings["a"]._incoming) == 1, "only b to be left")
    assert hosts.row("a", "b").level == "ok"


def test_strangers_who_wait_keep_no_host_out(hosts: Hosts) -> None:
    """More of them than there is room for: they crowd out each other."""
    hosts.start("a", "b")
    address = ("127.0.0.1", hosts.servers["a"].getsockname()[1])
    strangers = [socket.create_connection(address, timeout=WAIT_S) for _ in range(200)]
    hosts.start("c")
    wait(lambda: hosts.levels() == {"ok"} and len(hosts.rings["a"].rows) == 2, "c to be heard")
    assert len(hosts.rings["a"]._incoming) == 2
    for stranger in strangers:
        stranger.close()


def test_whether_something_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        assert answers([taken])
    assert answers([taken]), "a refusal is an answer"
    assert not answers([]) and not answers(["tcp:nonsense"])


def test_where_the_agent_listens() -> None:
    server, address = open_tcp("127.0.0.1", "elsewhere", last=True)
    port = server.getsockname()[1]
    assert address == f"tcp:elsewhere:{port}"
    with pytest.raises(ConfigError, match="no free port"):
        open_tcp(f"127.0.0.1:{port}", last=True)
    server.close()
    server, address = open_tcp("::1", last=True) if socket.has_ipv6 else open_tcp("127.0.0.1", last=True)
    assert split_tcp(address)[1] == server.getsockname()[1]
    server.close()
