"""Whose a place for checkpoints is: one run's, also when several want it at once, until it is given free."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from holdfast.checkpoint.format.owner import Owner, newest_owner, probe, release
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import ConfigError, StorageRefused, StorageUnavailable
from holdfast.engine.transfer.claiming import Claim
from holdfast.placement.proc import process_started
from tests.harness.memory_storage import MemoryStorage

ELSEWHERE = "another-host"


def claim(run: str, id: str, **about: object) -> Claim:
    return Claim(Owner(run=run, id=id, **{"host": ELSEWHERE, **about}))  # type: ignore[arg-type]


def test_a_place_is_the_run_s_that_came_first_and_its_restarts_keep_it() -> None:
    storage = MemoryStorage("s3://bucket/place")
    first = claim("a", "1")
    assert not first.look(storage).owned
    first.take(storage)
    assert claim("a", "1").look(storage).owned
    claim("a", "1").take(storage)
    assert newest_owner(storage)[0] == 1
    for other in (claim("b", "2"), claim("", "3")):
        with pytest.raises(ConfigError, match="s3://bucket/place belongs to the run a on another-host") as refused:
            other.look(storage)
        assert "--run a" in refused.value.hint and "holdfast checkpoint release" in refused.value.hint
    assert [entry.name for entry in storage.list()] == ["owner-000001.json"], "nobody else has left anything"


def test_of_several_at_once_one_gets_it() -> None:
    storage, won, lost = MemoryStorage(), [], []
    start = threading.Barrier(8)

    def want(name: str) -> None:
        mine = claim(name, name)
        mine.look(storage)
        start.wait()
        try:
            mine.take(storage)
            won.append(name)
        except ConfigError:
            lost.append(name)

    threads = [threading.Thread(target=want, args=(f"r{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owner = newest_owner(storage)[1]
    assert owner is not None and won == [owner.run] and len(lost) == 7


def test_a_run_of_the_same_name_elsewhere_takes_over_and_the_first_notices_before_it_commits() -> None:
    storage = MemoryStorage()
    first, second = claim("a", "1"), claim("a", "2")
    first.take(storage)
    first.check(storage)
    second.look(storage)
    second.take(storage)
    second.check(storage)
    with pytest.raises(StorageRefused, match="now belongs to the run a on another-host, which has taken it over"):
        first.check(storage)


def test_who_is_known_to_live_is_not_taken_over() -> None:
    storage = MemoryStorage()
    pid = os.getppid()
    alive = {"host": socket.gethostname(), "pid": pid, "pid_started": process_started(pid)}
    claim("", "1", **alive).take(storage)
    with pytest.raises(ConfigError, match=r"a run without a name on .* which is training now"):
        claim("", "2").look(storage)
    storage = MemoryStorage()
    claim("", "1", **{**alive, "pid_started": 1}).take(storage)  # another process has that number now
    claim("", "2").take(storage)


def test_a_place_that_is_given_free_is_anybody_s_with_what_is_there() -> None:
    storage = MemoryStorage()
    assert release(storage) is None
    claim("a", "1").take(storage)
    owner = release(storage)
    assert owner is not None and owner.run == "a"
    other = claim("b", "2")
    assert other.look(storage).owned
    other.take(storage)
    assert newest_owner(storage)[0] == 3
    with pytest.raises(ConfigError):
        claim("a", "1").look(storage)


@pytest.mark.parametrize("record", [b"", b"{}", b"[]", b'{"run": 1, "id": 2}', b"\xff"])
def test_a_record_that_says_nothing_is_a_refusal(record: bytes) -> None:
    storage = MemoryStorage()
    storage.create("owner-000004.json", record)
    with pytest.raises(StorageRefused, match=r"owner-000004.json does not say whose the place is"):
        claim("a", "1").look(storage)


def test_a_place_that_lists_and_takes_no_writes_is_noticed_at_once_or_after_a_moment() -> None:
    storage, now = MemoryStorage(), 0.0
    storage.fail_with(StorageRefused("no"), calls={"write", "create"})
    with pytest.raises(StorageRefused):
        claim("a", "1").look(storage)
    storage.fail_with(StorageUnavailable("full", hint="free some"), calls={"write", "create"})
    mine = Claim(Owner(run="a", id="1"), clock=lambda: now)
    trouble = mine.look(storage).trouble
    assert trouble is not None
    with pytest.raises(StorageUnavailable):
        mine.begin_without_writing(trouble)
    now = 11.0
    with pytest.raises(StorageRefused, match="full"):
        mine.begin_without_writing(trouble)
    storage.fail_with(None)
    probe(storage)
    assert storage.list() == [], "a probe leaves nothing"


class Forgetful(MemoryStorage):
    """Says yes to every write, and lists nothing: an object store with a bucket whose name it does not take."""

    def list(self, prefix: str = "") -> list[Stored]:
        return []


def test_a_place_that_takes_writes_and_does_not_list_them_is_noticed_at_once() -> None:
    with pytest.raises(StorageRefused, match="took a file and does not list it"):
        claim("a", "1").look(Forgetful())
