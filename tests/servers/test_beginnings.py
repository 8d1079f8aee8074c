"""With which servers a run begins, and what is said where it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from holdfast.core.errors import ConfigError, PeerError
from holdfast.core.words import KEY_HOSTS, KEY_LEAVING, KEY_SERVERS, Registration, encode_json
from holdfast.ledger.memory import MemoryLedger
from holdfast.servers import connections
from holdfast.servers.client import RemoteServers
from holdfast.servers.gathering import Gathered, Wanted, gather
from holdfast.servers.port import initial_of, layout_of
from tests.servers.serving import in_threads


def registered(server: str) -> bytes:
    host = server.partition("@")[2]
    return Registration(id=server, host=host, pid=1, pid_started=1, address="tcp:x:1", fingerprint="").encode()


def test_on_several_hosts_all_servers_that_hosts_announce_are_waited_for() -> None:
    ledger, wanted = MemoryLedger(), Wanted(servers=0, replicas=0)
    assert not wanted.are_enough(gather(ledger)), "one at least"
    ledger.put(KEY_SERVERS + "s0.1@a", registered("s0.1@a"))
    assert wanted.are_enough(gather(ledger)), "hosts that come later take their part then"
    for host, servers in (("a", 1), ("b", 2), ("c", 0)):
        ledger.put(KEY_HOSTS + host, encode_json({"workers": 1, "servers": servers}))
    assert not wanted.are_enough(gather(ledger))
    for server in ("s0.1@b", "s1.1@b", "s9.1@d"):
        ledger.put(KEY_SERVERS + server, registered(server))
    ledger.put(KEY_LEAVING + "s9.1@d", b"{}")
    found = gather(ledger)
    assert found == Gathered(hosts={"s0.1@a": "a", "s0.1@b": "b", "s1.1@b": "b"}, announced=3)
    assert wanted.are_enough(found) and wanted.replicas_of(found) == 3


def test_what_is_missing_is_said() -> None:
    found = Gathered(hosts={"s0.1@a": "a", "s0.1@b": "b"}, announced=2)
    assert not Wanted(servers=0, replicas=3).are_enough(found)
    error = Wanted(servers=0, replicas=3).too_few(found, 60.0)
    assert isinstance(error, ConfigError)
    assert error.message == "3 replicas of each slice need as many servers, and after 60 s the run has 2"
    assert "--replicas 2" in error.hint
    nobody = Wanted(servers=0, replicas=0).too_few(Gathered(hosts={}, announced=0), 60.0)
    assert nobody.message == "1 parameter server is needed to begin, and after 60 s 0 are registered"
    assert isinstance(Wanted(servers=1, replicas=1).too_few(None, 60.0), PeerError), "nobody's mistake"


@pytest.mark.parametrize("share_memory", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_a_slice_that_is_larger_than_memory_is_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share_memory: bool, asked: bool
) -> None:
    """When they are asked whether they have room, and by whoever is to lead where that was not asked."""
    if not asked:
        monkeypatch.setattr(RemoteServers, "_check_room", lambda *given: None)
    monkeypatch.setattr(connections, "free_bytes", lambda: 7_000_000)
    parameter = torch.nn.Parameter(torch.zeros(1_000_000))
    layout = layout_of({"weight": parameter}, torch.optim.SGD([parameter], 0.1))
    with in_threads(1, servers=1, replicas=1, sockets=tmp_path if share_memory else None) as connect:
        client = connect("w0")
        with pytest.raises(ConfigError, match=r"s0\.1 has 0\.01 GB of memory left, and parameters/0 needs 0\.01 GB"):
            client.open(layout, initial_of([parameter.data]), timeout_s=20.0)


def begun_with(
    optimizer: type[torch.optim.Optimizer], free: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "free_bytes", free)
    parameters = [torch.nn.Parameter(torch.zeros(1_000_000)) for _ in range(2)]
    layout = layout_of({"first": parameters[0], "second": parameters[1]}, optimizer(parameters, lr=0.1))
    with in_threads(2, servers=3, replicas=3) as connect:
        connect("w0").open(layout, initial_of([one.data for one in parameters]), timeout_s=20.0)


@pytest.mark.parametrize(
    ("free", "refused"),
    [
        (25_000_000, ""),
        (23_000_000, r"and parameters/1 needs 0\.02 GB"),  # the first slice's optimizer has not taken its 8 MB yet
        (15_000_000, r"has 0\.01 GB of memory left, and parameters/0 needs 0\.02 GB"),
    ],
)
def test_the_state_that_the_optimizer_makes_with_its_first_step_counts(
    monkeypatch: pytest.MonkeyPatch, free: int, refused: str
) -> None:
    begun_with(torch.optim.SGD, lambda: 9_000_000, monkeypatch)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        begun_with(torch.optim.Adam, lambda: free, monkeypatch)


def test_every_server_that_is_to_have_a_slice_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def free() -> int:
        return 1_000_000 if threading.current_thread().name == "server-s2.1" else 1 << 40

    with pytest.raises(ConfigError, match=r"s2\.1 has 0\.00 GB of memory left, and parameters/0 needs 0\.01 GB"):
        begun_with(torch.optim.SGD, free, monkeypatch)
