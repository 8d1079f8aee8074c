"""The record of rewinds: asked for by all, made once, bounded; and which states still count after it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.host_memory.gathering import GatheredStorage, MemorySource, whole_steps
from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid
from holdfast.checkpoint.saving.writing import write_state
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.core.errors import ConfigError, DivergedError, Evicted, LedgerUnavailable, ProtocolError, StorageRefused
from holdfast.core.rewinds import RECORDS_MAX, Rewind, Rewinds
from holdfast.core.words import KEY_ORIGIN, KEY_REWINDS, Registration
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.recovery import rewinding
from holdfast.engine.recovery.rewinding import Rewinding
from holdfast.events import EventLog, read_events
from holdfast.ledger.memory import MemoryLedger
from holdfast.net.mailbox import Mailbox
from holdfast.state.snapshot import Holder

steps = st.integers(0, 50)
records = st.builds(
    Rewind,
    back_to=steps,
    passed=st.lists(steps, max_size=4).map(tuple),
    reason=st.text(max_size=20),
    kind=st.sampled_from(["diverged", "audit"]),
    evict=st.lists(st.sampled_from(["w0.1", "w1.3@a"]), max_size=2).map(tuple),
)
histories = st.lists(records, max_size=5).map(lambda found: Rewinds(tuple(found)))


@given(histories)
def test_a_record_is_read_as_it_was_written(history: Rewinds) -> None:
    assert Rewinds.decode(history.encode()) == history


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{}",
        b'{"rewinds":3}',
        b'{"rewinds":[{}]}',
        b'{"rewinds":[{"back_to":-1,"passed":[],"reason":"","kind":"","evict":[]}]}',
        b'{"rewinds":[{"back_to":1,"passed":[-1],"reason":"","kind":"","evict":[]}]}',
        b'{"rewinds":[{"back_to":1,"passed":3,"reason":"","kind":"","evict":[]}]}',
        Rewinds((Rewind(back_to=1, passed=(), reason=""),) * (RECORDS_MAX + 1)).encode(),
    ],
    ids=range(8),
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Rewinds.decode(data)


@given(histories, records, steps, st.integers(0, 5))
def test_what_the_run_went_back_from_is_never_believed_again(
    history: Rewinds, later: Rewind, step: int, known: int
) -> None:
    known = min(known, history.number)
    longer = history.with_(later)
    if not history.believes(step, known):
        assert not longer.believes(step, known)
    assert longer.believes(step, known) == (history.believes(step, known) and step <= later.back_to)
    assert longer.believes(step, longer.number)  # who knew of all of them is of the run as it is now
    assert longer.passed == history.passed | set(later.passed)


# ---- asking


class Member:
    def __init__(self, ledger: Any, directory: Path, name: str, stack: ExitStack) -> None:
        self.mailbox = Mailbox()
        stack.callback(os.close, self.mailbox.fd)
        self.events = EventLog(directory / f"{name}.jsonl", name)
        stack.callback(self.events.close)
        place = Registration(id=name, host="", pid=1, pid_started=1, address="unix:/nowhere", fingerprint="x")
        self.feed = LedgerFeed(ledger, place, self.mailbox, self.events, lease_s=30.0)
        stack.callback(self.feed.close)
        entry = ledger.get(KEY_REWINDS)
        known = Rewinds.decode(entry.value) if entry is not None else Rewinds()
        self.rewinding = Rewinding(known, self.feed, self.events, alone=False)
        self.feed.start()


@contextmanager
def members(ledger: MemoryLedger, directory: Path, *names: str) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        yield [Member(ledger.another(), directory, name, stack) for name in names]


def held(ledger: MemoryLedger) -> Rewinds:
    entry = ledger.get(KEY_REWINDS)
    return Rewinds.decode(entry.value) if entry is not None else Rewinds()


def ask(member: Member, **changes: Any) -> None:
    member.rewinding.ask(**{"back_to": 40, "passed": (57,), "reason": "it is not finite at step 57", **changes})


def test_what_all_ask_for_is_done_once_and_ends_all(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    with members(ledger, tmp_path, "w0.1", "w1.1", "w2.1") as (first, second, third):
        for member in (first, second):
            with pytest.raises(Evicted) as ended:
                ask(member)
            assert ended.value.reason == "the run goes back to step 40 or before: it is not finite at step 57"
        assert held(ledger).number == 1
        with pytest.raises(Evicted):  # it meant another; the first that is there holds
            ask(third, back_to=3, passed=(), reason="an audit", kind="audit")
        assert held(ledger).records == (Rewind(back_to=40, passed=(57,), reason="it is not finite at step 57"),)
        assert third.rewinding.overtaken(held(ledger)).startswith("the run goes back to step 40")
    told = [event for event in read_events(tmp_path) if event["kind"] == "rewound"]
    assert {(event["number"], event["step"], tuple(event["passed"])) for event in told} == {(1, 40, (57,))}
    with members(ledger, tmp_path, "w0.2") as (fresh,):
        assert fresh.rewinding.passed == {57}
        assert fresh.rewinding.overtaken(held(ledger)) == ""


def test_a_run_goes_back_so_many_times_of_each_kind(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    for number in range(3):
        with members(ledger, tmp_path, f"w0.{number}") as (member,), pytest.raises(Evicted):
            ask(member, passed=(number,))
    with members(ledger, tmp_path, "w0.9") as (member,):
        with pytest.raises(DivergedError, match="at step 57, and the run has gone back 3 times already"):
            ask(member)
        with pytest.raises(Evicted):
            ask(member, kind="audit", reason="two digests differ", evict=("w1.1",))
    assert held(ledger).number == 4
    assert held(ledger).evicted == {"w1.1"}


def test_a_run_does_not_go_back_before_its_beginning(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    with members(ledger, tmp_path, "w0.1") as (member,):
        member.rewinding.began(45)
        wait_for(lambda: member.feed.entry(KEY_ORIGIN) is not None)
        member.rewinding.began(50)  # a later search: it began where it began
        with pytest.raises(Evicted):
            ask(member)
    assert held(ledger).records[0].back_to == 45
    with members(ledger, tmp_path, "w0.2") as (member,):
        wait_for(lambda: member.feed.entry(KEY_ORIGIN) is not None)
        with pytest.raises(ConfigError, match="back to step 45 or before, and there is no such checkpoint"):
            member.rewinding.check_start()


def test_a_run_that_began_at_its_start_may_start_over(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    with members(ledger, tmp_path, "w0.1") as (member,):
        member.rewinding.began(0)
        with pytest.raises(Evicted):
            ask(member)
    with members(ledger, tmp_path, "w0.2") as (member,):
        wait_for(lambda: member.feed.entry(KEY_ORIGIN) is not None)
        member.rewinding.check_start()


def test_without_the_ledger_nobody_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewinding, "ASK_FOR_S", 0.2)
    ledger = MemoryLedger()
    with members(ledger, tmp_path, "w0.1") as (member,):
        member.feed.compare_and_set = lambda *arguments: None  # type: ignore[method-assign]
        with pytest.raises(LedgerUnavailable, match="does not say that the run goes back"):
            ask(member)


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come about in 10 s")


# ---- which states count


def save(storage: LocalStorage, step: int, known: int) -> None:
    torch.manual_seed(100 * known + step)
    model = torch.nn.Linear(2, 2)
    snapshot = Holder(model, torch.optim.SGD(model.parameters(), lr=0.1)).capture(step)
    config = Rewinding(Rewinds((Rewind(back_to=99, passed=(), reason=""),) * known), None, None, alone=True)  # type: ignore[arg-type]
    write_state(storage, snapshot, created_s=0.0, config=config.mark({"batch_size": 8}))


def knowing(*back_to: int) -> Rewinding:
    history = Rewinds(tuple(Rewind(back_to=step, passed=(), reason="") for step in back_to))
    return Rewinding(history, None, None, alone=True)  # type: ignore[arg-type]


def committed(storage: Any) -> list[int]:
    return [listed.step for listed in list_checkpoints(storage) if listed.committed]


def test_what_the_run_went_back_from_is_deleted(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for step, known in ((10, 0), (20, 0), (30, 0), (25, 1), (40, 1)):
        save(storage, step, known)
    assert knowing().forget(storage, pytest.fail) == frozenset()
    assert committed(storage) == [40, 30, 25, 20, 10]
    assert knowing(22).forget(storage, pytest.fail) == frozenset()  # of those that knew of none, what is above 22
    assert committed(storage) == [40, 25, 20, 10]
    knowing(22, 24).forget(storage, pytest.fail)
    assert committed(storage) == [20, 10]
    found = newest_valid(storage, warn=pytest.fail)
    assert found is not None and found[0].step == 20


def test_what_cannot_be_deleted_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    for step in (10, 20):
        save(storage, step, 0)

    def refuse(name: str) -> None:
        raise StorageRefused("read-only")

    monkeypatch.setattr(storage, "delete", refuse)
    warnings: list[str] = []
    stays = knowing(15).forget(storage, warnings.append)
    assert stays == {20}
    assert "the checkpoint of step 20, from which the run has gone back, stays: read-only" in warnings
    found = newest_valid(storage, warn=pytest.fail, leave_out=stays)
    assert found is not None and found[0].step == 10


def test_what_other_hosts_have_in_memory_is_passed_over(tmp_path: Path) -> None:
    for host, step, known in (("a", 10, 0), ("b", 20, 0), ("b", 18, 1)):
        save(LocalStorage(tmp_path / host), step, known)
    gathered = GatheredStorage([MemorySource(host, LocalStorage(tmp_path / host)) for host in ("a", "b")])
    assert whole_steps(gathered) == [20, 18, 10]
    knowing(15).forget(gathered, pytest.fail)
    assert whole_steps(gathered) == [18, 10]
    assert gathered.newest_seen() == 18
    assert committed(LocalStorage(tmp_path / "b")) == [20, 18]  # that is for its own workers to delete
    knowing(15).forget_memory(tmp_path / "b")
    assert committed(LocalStorage(tmp_path / "b")) == [18]
    knowing(15).forget_memory(tmp_path / "nowhere")
