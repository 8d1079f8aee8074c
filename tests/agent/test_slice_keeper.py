"""What an agent does for slices, over a ledger in memory: when they are lost, and how all begin anew."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.agent.servers.slice_keeper import LOST_S, SliceKeeper
from holdfast.agent.servers.slowness import Finding
from holdfast.core.words import (
    EVERY_START,
    KEY_DEAD_SERVERS,
    KEY_LEAVING,
    KEY_SERVERS,
    KEY_SLICE,
    KEY_SLICES,
    KEY_SLOW_SERVERS,
    KEY_STARTED_OVER,
    KEY_TARGETS,
    Registration,
    decode_json,
    encode_json,
)
from holdfast.ledger.memory import MemoryLedger
from holdfast.log.configuration import Configuration
from holdfast.servers.log_codec import encode_configuration
from holdfast.servers.placing import Target

SILENT_S = 300.0


class Agent:
    """A keeper that hears everything, as the agent's watch has it."""

    def __init__(self, ledger: MemoryLedger, host: str = "a", *, keeps: bool = False) -> None:
        self.ledger = ledger
        self.told: list[tuple[str, dict[str, Any]]] = []
        tell = lambda kind, **fields: self.told.append((kind, fields))  # noqa: E731
        self.keeper = SliceKeeper(ledger.another(), tell, pytest.fail, 0, host, SILENT_S, keeps=keeps)
        self._known: dict[str, bytes] = {}

    def hear(self, now: float = 0.0) -> SliceKeeper:
        values = {entry.key: entry.value for entry in self.ledger.read("").entries}
        for key in self._known.keys() - values.keys():
            self.keeper.heard(key, None, now)
        for key, value in values.items():
            if self._known.get(key) != value:
                self.keeper.heard(key, value, now)
        self._known = values
        return self.keeper


def serve(ledger: MemoryLedger, *servers: str) -> None:
    for server in servers:
        host = server.partition("@")[2]
        one = Registration(id=server, host=host, pid=1, pid_started=1, address="tcp:x:1", fingerprint="")
        ledger.put(KEY_SERVERS + server, one.encode())


def place(ledger: MemoryLedger, name: str, *replicas: str, epoch: int = 1) -> None:
    ledger.put(KEY_SLICE + name, encode_json(encode_configuration(Configuration(epoch, replicas[0], replicas))))


def end(ledger: MemoryLedger, server: str, *, seen: bool) -> None:
    ledger.delete(KEY_SERVERS + server)
    if seen:
        ledger.put(KEY_DEAD_SERVERS + server, encode_json({"start": 1}))


@pytest.mark.parametrize(("seen", "patience_s"), [(True, LOST_S), (False, SILENT_S)])
def test_a_slice_is_lost_with_a_majority_of_its_replicas(seen: bool, patience_s: float) -> None:
    """Those whose end an agent has seen do not come back. Others may be cut off, and train on."""
    ledger = MemoryLedger()
    agent, servers = Agent(ledger), ("s0.1@a", "s0.1@b", "s0.1@c")
    serve(ledger, *servers)
    place(ledger, "parameters/0", *servers)
    end(ledger, servers[0], seen=seen)
    assert agent.hear().lost(0.0) == agent.hear().lost(1e6) == [], "two of three go on"
    end(ledger, servers[1], seen=seen)
    assert agent.hear().lost(0.0) == []
    assert agent.hear().lost(patience_s - 1) == []
    assert agent.hear().lost(patience_s + 1) == ["parameters/0"]
    serve(ledger, servers[1])
    assert agent.hear().lost(patience_s + 2) == [], "it was cut off, and is back"


def test_all_agents_begin_anew_once_and_what_is_created_then_stays() -> None:
    ledger = MemoryLedger()
    first, second = Agent(ledger), Agent(ledger, "b")
    place(ledger, "parameters/0", "s0.1@a", epoch=7)
    ledger.put(KEY_TARGETS + "parameters/0", Target(("s0.1@a",)).encode())
    ledger.put(KEY_SLICES, encode_json({"slices": 1}))
    for agent in (first, second):
        agent.hear()
    first.keeper.start_over(40)
    assert not ledger.read(KEY_SLICE).entries and not ledger.read(KEY_TARGETS).entries
    assert ledger.get(KEY_SLICES) is None
    place(ledger, "parameters/0", "s0.2@a")
    ledger.put(KEY_SLICES, encode_json({"slices": 1}))
    second.keeper.start_over(40)
    entry = ledger.get(KEY_STARTED_OVER)
    assert entry is not None and decode_json(entry.value) == {"number": 1, "step": 40}
    assert ledger.get(KEY_SLICES) is not None and ledger.read(KEY_SLICE).entries, (
        "it came too late, and changed nothing"
    )
    assert second.hear().started_over == 1


def test_what_changes_while_slices_are_forgotten_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that stood still in the middle of it must not take away what others have created since."""
    ledger = MemoryLedger()
    agent = Agent(ledger)
    place(ledger, "parameters/0", "s0.1@a", epoch=7)
    real = agent.keeper._doom

    def late(entry: Any, lease: int) -> None:
        ledger.delete(entry.key)
        place(ledger, "parameters/0", "s0.2@a")
        real(entry, lease)

    monkeypatch.setattr(agent.keeper, "_doom", late)
    agent.keeper.forget_slices()
    [entry] = ledger.read(KEY_SLICE).entries
    assert decode_json(entry.value)["replicas"] == ["s0.2@a"]


def test_it_tells_of_placements_failovers_and_slow_servers_and_writes_targets_once() -> None:
    ledger = MemoryLedger()
    servers = ("s0.1@a", "s0.1@b", "s0.1@c")
    serve(ledger, *servers)
    place(ledger, "parameters/0", *servers)
    first, second = Agent(ledger), Agent(ledger, "b")
    first.hear()
    place(ledger, "parameters/0", *reversed(servers), epoch=2)
    first.hear()
    assert [kind for kind, _ in first.told] == ["placed", "failover"]
    first.keeper.found(Finding(server="s0.1@c", slow=True, times=9.0, reason="late"))
    second.hear(10.0)
    second.keeper.found(Finding(server="s0.1@c", slow=True, times=5.0, reason="late"))
    for agent in (first, second):
        agent.hear(10.0).look(20.0)
    target = ledger.get(KEY_TARGETS + "parameters/0")
    assert target is not None and Target.decode(target.value).primary == "s0.1@a"
    moves = [fields for kind, fields in first.told if kind == "slice_moves"]
    assert moves[0]["reason"] == "s0.1@c is slow; s0.1@a leads instead"
    second.keeper.found(Finding(server="s0.1@c", slow=False, times=1.0, reason="quick"))
    assert ledger.get(KEY_SLOW_SERVERS + "s0.1@c") is not None, "who found it slow says when it is not"
    first.keeper.found(Finding(server="s0.1@c", slow=False, times=1.0, reason="quick"))
    first.hear(30.0)
    assert first.told[-1] == ("server_no_longer_slow", {"server": "s0.1@c"})


def test_a_server_that_leaves_has_slices_until_another_has_them_or_nobody_could() -> None:
    ledger = MemoryLedger()
    agent = Agent(ledger)
    serve(ledger, "s0.1@a")
    place(ledger, "parameters/0", "s0.1@a")
    assert not agent.hear().has_slices_on(["s0.1@a"]), "there is no other"
    serve(ledger, "s0.1@b")
    ledger.put(KEY_LEAVING + "s0.1@a", b"{}")
    assert agent.hear().has_slices_on(["s0.1@a"])
    agent.keeper.look(20.0)
    target = ledger.get(KEY_TARGETS + "parameters/0")
    assert target is not None and Target.decode(target.value) == Target(("s0.1@b",))
    place(ledger, "parameters/0", "s0.1@b", epoch=2)
    assert not agent.hear().has_slices_on(["s0.1@a"])


def test_on_disks_only_those_count_as_lost_that_come_back_without() -> None:
    ledger = MemoryLedger()
    agent = Agent(ledger, keeps=True)
    serve(ledger, "s0@a", "s0@b", "s0@c")
    place(ledger, "parameters/0", "s0@a", "s0@b", "s0@c")
    for server in ("s0@a", "s0@b", "s0@c"):
        end(ledger, server, seen=True)
    agent.hear(0.0).lost(0.0)
    assert not agent.hear(1e6).lost(1e6), "they may be switched on again"
    serve(ledger, "s0.2@a", "s1@b")
    agent.hear(1e6).lost(1e6)
    assert not agent.keeper.lost(2e6), "b has another server besides"
    serve(ledger, "s0.4@b", "s0@c")
    assert not agent.hear(2e6).lost(2e6), "not at once"
    assert agent.keeper.lost(2e6 + LOST_S + 1) == ["parameters/0"], "two disks of three are gone"


def test_a_host_with_disks_that_is_given_up_is_waited_for_no_more() -> None:
    ledger = MemoryLedger()
    agent = Agent(ledger, keeps=True)
    serve(ledger, "s0@a")
    place(ledger, "parameters/0", "s0@a", "s0@b", "s0@c")
    agent.hear(0.0).lost(0.0)
    assert not agent.hear(1e6).lost(1e6)
    for server in ("s0@b", "s0@c"):
        ledger.put(KEY_DEAD_SERVERS + server, encode_json({"start": EVERY_START}))
    agent.hear(1e6).lost(1e6)
    assert agent.keeper.lost(1e6 + LOST_S + 1) == ["parameters/0"]
