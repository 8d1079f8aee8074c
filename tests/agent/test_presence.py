"""A host's name in a run on several: one agent has it, the next gets it when that one is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.agent.hosts import presence
from holdfast.agent.hosts.presence import HostPresence, check_keys, other_hosts
from holdfast.agent.ledgers import StartPatience
from holdfast.core.errors import ConfigError, LedgerUnavailable
from holdfast.core.words import KEY_HOSTS, KEY_KEYS, decode_json, encode_json
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.port import Entry
from holdfast.placement.proc import process_started


@pytest.fixture
def ledger() -> Iterator[MemoryLedger]:
    ledger = MemoryLedger()
    yield ledger
    ledger.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "LEASE_S", 0.4)
    monkeypatch.setattr(presence, "TAKE_OVER_S", 1.2)


def test_the_name_is_there_while_the_agent_is(ledger: MemoryLedger) -> None:
    agent = HostPresence(ledger.another(), "alpha", workers=2)
    agent.take()
    entry = ledger.get(KEY_HOSTS + "alpha")
    assert entry is not None and entry.lease
    assert decode_json(entry.value)["workers"] == 2
    assert other_hosts({entry.key: entry.value}, "alpha") == []
    assert other_hosts({entry.key: entry.value}, "beta") == ["alpha"]
    agent.close()
    assert ledger.get(KEY_HOSTS + "alpha") is None


def test_two_hosts_of_one_name(ledger: MemoryLedger, impatient: None) -> None:
    first, second = HostPresence(ledger.another(), "alpha"), HostPresence(ledger.another(), "alpha", workers=1)
    first.take()
    with pytest.raises(ConfigError, match="already called alpha"):
        second.take()
    first.close()
    second.take()
    second.close()


def test_the_agent_of_another_machine_vanished(ledger: MemoryLedger, impatient: None) -> None:
    """Only its lease tells, and the next one waits for that."""
    lease = ledger.grant(0.5)
    ledger.put(KEY_HOSTS + "alpha", encode_json({"boot": "elsewhere", "pid": 1, "pid_started": 1}), lease=lease)
    agent = HostPresence(ledger.another(), "alpha")
    agent.take()
    agent.close()


def test_the_agent_of_this_machine_was_killed(ledger: MemoryLedger) -> None:
    """Its process is gone: there is nothing to wait for."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        value = {"boot": presence._boot(), "pid": child.pid, "pid_started": process_started(child.pid)}
        ledger.put(KEY_HOSTS + "alpha", encode_json(value), lease=ledger.grant(3600.0))
        agent = HostPresence(ledger.another(), "alpha")
        assert not agent._claim()
    finally:
        child.kill()
        child.communicate()
    agent.take()
    agent.close()


def test_keys_that_are_not_the_runs(ledger: MemoryLedger) -> None:
    check_keys(ledger, "f1", "r")
    check_keys(ledger, "f1", "r")
    with pytest.raises(ConfigError, match="not the keys of run r"):
        check_keys(ledger, "f2", "r")


class SlowToStart(MemoryLedger):
    """Answers after so many silences."""

    def __init__(self, silences: int) -> None:
        super().__init__()
        self.silences = silences

    def get(self, key: str) -> Entry | None:
        if self.silences:
            self.silences -= 1
            raise LedgerUnavailable("no member answers")
        return super().get(key)


def test_a_ledger_that_answers_later_is_waited_for() -> None:
    said: list[str] = []
    ledger, patience = SlowToStart(silences=3), StartPatience("etcd://a", said.append)
    patience.ask(lambda: check_keys(ledger, "f1", "r"))
    assert said == ["no member answers; waiting up to 30 s for it, Ctrl-C ends the wait"]
    assert ledger.get(KEY_KEYS) is not None


def test_a_ledger_that_does_not_answer() -> None:
    patience = StartPatience("etcd://a", lambda text: None, patience_s=0.3)
    with pytest.raises(ConfigError, match="etcd://a does not answer: no member answers"):
        patience.ask(lambda: check_keys(SlowToStart(silences=1000), "f1", "r"))


def test_nobody_waits_for_a_ledger_of_its_own() -> None:
    with pytest.raises(LedgerUnavailable):
        StartPatience("", lambda text: None).ask(lambda: check_keys(SlowToStart(silences=1), "f1", "r"))
