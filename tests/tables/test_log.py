"""The log: restored to the bit whatever was killed when; gaps, repetitions and damage by name; followers of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import tables
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.port import Storage, Stored
from holdfast.core.errors import ConfigError, IntegrityError, StorageRefused, StorageUnavailable
from holdfast.tables import publishing
from holdfast.tables.following import Follower
from holdfast.tables.log_format import entry_name, parts_of, place_of, sequences
from holdfast.tables.publishing import Publisher
from holdfast.tables.stores import LocalStore
from tests.harness.memory_storage import MemoryStorage

PLACE = place_of(0, 1)


def made(shards: int = 1) -> holdfast.EmbeddingTable:
    table = holdfast.EmbeddingTable(
        4, optimizer=tables.Adam(lr=0.1), admit=2, expire=tables.Expire(rows=40, updates=30)
    )
    if shards > 1:
        table.connect("users", LocalStore(table.settings, shards=shards))
    return table


def train(table: holdfast.EmbeddingTable, steps: int = 1) -> None:
    for _ in range(steps):
        draws = torch.Generator().manual_seed(table.store.updates(0))
        table(torch.randint(0, 60, (20,), generator=draws)).square().sum().backward()
        table.step()


def digest(table: holdfast.EmbeddingTable) -> str:
    assert isinstance(table.store, LocalStore)
    return "-".join(state.digest() for state in table.store.states)


def restored(place: Path | Storage, shards: int = 1) -> holdfast.EmbeddingTable:
    table = made(shards)
    assert Publisher(table.store, LocalStorage(place) if isinstance(place, Path) else place).restore()
    return table


class Killed(BaseException):
    """The process is gone; nothing catches this."""


class Cut:
    """A storage whose n-th call does not come back: nothing of it happens, or all of it."""

    def __init__(self, inner: Storage, at: int, *, after: bool, error: Callable[[], BaseException]) -> None:
        self.uri, self.writers, self.block_bytes = inner.uri, 1, inner.block_bytes
        self.left, self.calls = at, 0
        self._inner, self._after, self._error = inner, after, error

    def _call(self, name: str, *given: Any) -> Any:
        self.calls += 1
        self.left -= 1
        if self.left == 0 and not self._after:
            raise self._error()
        found = getattr(self._inner, name)(*given)
        if self.left == 0:
            raise self._error()
        return found

    def write(self, name: str, data: memoryview) -> None:
        self._call("write", name, data)

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._call("create", name, data))

    def read(self, name: str, bytes_max: int) -> bytes:
        return bytes(self._call("read", name, bytes_max))

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        self._call("read_into", name, memory, offset)

    def list(self, prefix: str = "") -> list[Stored]:
        return list(self._call("list", prefix))

    def delete(self, name: str) -> None:
        self._call("delete", name)

    def close(self) -> None:
        pass


def written(storage: Any, digests: list[str], rounds: int = 8) -> Iterator[holdfast.EmbeddingTable]:
    table = made()
    publisher = Publisher(table.store, storage)
    for _ in range(rounds):
        train(table, 2)
        digests.append(digest(table))
        publisher.write()
        yield table


@pytest.mark.parametrize("after", [False, True])
def test_a_process_killed_at_any_call_leaves_a_log_that_restores_what_was_acknowledged(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "DELTAS_MAX", 2)
    at, finished = 0, False
    while not finished:
        at += 1
        inner, acknowledged = MemoryStorage(), 0
        digests: list[str] = []
        storage = Cut(inner, at, after=after, error=Killed)
        try:
            for _ in written(storage, digests):
                acknowledged += 1
            finished = True
        except Killed:
            pass
        table = made()
        publisher = Publisher(table.store, inner)
        if publisher.restore():
            found = digests.index(digest(table)) + 1
            assert acknowledged <= found <= acknowledged + 1, f"call {at}"
        else:
            assert acknowledged == 0
        train(table)
        publisher.write()
        assert digest(restored(inner)) == digest(table), f"call {at}: it goes on from there"
    assert at > 30


@pytest.mark.parametrize("after", [False, True])
def test_a_storage_that_fails_once_costs_nothing(after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "DELTAS_MAX", 2)
    for at in range(1, 40):
        inner = MemoryStorage()
        storage = Cut(inner, at, after=after, error=lambda: StorageUnavailable("no answer"))
        table = made()
        publisher, failed = Publisher(table.store, storage), 0
        for _ in range(8):
            train(table)
            try:
                publisher.write()
            except StorageUnavailable:
                failed += 1
        assert failed <= 1 and digest(restored(inner)) == digest(table), f"call {at}"


def test_an_entry_in_many_parts_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "parts_of", partial(parts_of, part_bytes=70))
    table = log_of(tmp_path, 4)
    assert len(list((tmp_path / PLACE / "data").iterdir())) > 20
    assert digest(restored(tmp_path)) == digest(table)
    follower = Follower(LocalStorage(tmp_path))
    assert follower.refresh() and rows(follower.look_up) == rows(table)


def test_shards_are_restored_one_by_one(tmp_path: Path) -> None:
    table = made(3)
    publisher = tables.publish(table, str(tmp_path))
    for _ in range(5):
        train(table, 3)
        publisher.write()
    assert digest(restored(tmp_path, 3)) == digest(table)
    with pytest.raises(ConfigError, match="this table has 1 shards"):
        tables.publish(made(), str(tmp_path)).write()


def log_of(path: Path, entries: int = 6) -> holdfast.EmbeddingTable:
    table = made()
    publisher = tables.publish(table, str(path))
    for _ in range(entries):
        train(table)
        publisher.write()
    return table


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def data_of(path: Path, sequence: int) -> Path:
    (found,) = (path / PLACE / "data").glob(f"{sequence:012d}-*-0000")
    return found


def test_a_gap_a_repetition_and_damage_are_each_named(tmp_path: Path) -> None:
    log_of(tmp_path / "gap")
    (tmp_path / "gap" / entry_name(PLACE, 3)).unlink()
    with pytest.raises(IntegrityError, match="a gap: entry 4 comes after entry 2"):
        restored(tmp_path / "gap")

    log_of(tmp_path / "repeated")
    entries = [tmp_path / "repeated" / entry_name(PLACE, number) for number in range(6)]
    content = entries[3].read_bytes()
    entries[4].write_bytes(content)
    with pytest.raises(IntegrityError, match="says that it is entry 3"):
        restored(tmp_path / "repeated")

    log_of(tmp_path / "damaged")
    damage(data_of(tmp_path / "damaged", 2))
    with pytest.raises(IntegrityError, match=r"data/000000000002-.* does not match its checksum"):
        restored(tmp_path / "damaged")
    damage(tmp_path / "damaged" / entry_name(PLACE, 4))
    with pytest.raises(IntegrityError, match=r"000000000004\.json is not an entry"):
        restored(tmp_path / "damaged")


def test_updates_that_are_missing_or_twice_in_entries_are_named(tmp_path: Path) -> None:
    """Written by a hand that gets the numbers right and the updates wrong."""
    for off, word in ((-1, "a repetition: updates 2 to 2"), (1, "a gap: updates 3 to 3")):
        path, table = tmp_path / word[2:5], made()
        publisher = tables.publish(table, str(path))
        for _ in range(2):
            train(table)
            publisher.write()
        train(table, 3)
        honest = table.store.changes
        table.store.changes = lambda shard, since, honest=honest, off=off: honest(shard, since + off)  # type: ignore
        last = publisher._logs[0].last
        assert last is not None
        object.__setattr__(last.moment, "updates", last.moment.updates + off)
        publisher.write()
        with pytest.raises(IntegrityError, match=word):
            restored(path)


def test_two_writers_are_told_apart(tmp_path: Path) -> None:
    one, other = made(), made()
    first, second = tables.publish(one, str(tmp_path)), tables.publish(other, str(tmp_path))
    train(one)
    first.write()
    train(other, 5)
    second.write()
    train(one)
    with pytest.raises(StorageRefused, match="another process writes the log"):
        first.write()
    assert digest(restored(tmp_path)) == digest(other)
    first.write()
    assert digest(restored(tmp_path)) == digest(one), "who writes again is the writer"


def test_another_worker_becomes_the_writer(tmp_path: Path) -> None:
    """All workers have restored the table when they began; later the one that wrote is lost."""
    log_of(tmp_path)
    one, other = made(), made()
    first, second = tables.publish(one, str(tmp_path)), tables.publish(other, str(tmp_path))
    assert first.restore() and second.restore()
    for _ in range(3):
        train(one)
        first.write()
        train(other)
    train(other)
    second.write()
    assert digest(restored(tmp_path)) == digest(other)


def test_old_entries_go_and_what_is_left_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "DELTAS_MAX", 3)
    table = log_of(tmp_path, 30)
    kept = sequences(LocalStorage(tmp_path), PLACE)
    assert kept[0] >= 20 and kept == list(range(kept[0], 30))
    assert min(path.name for path in (tmp_path / PLACE / "data").iterdir()) >= f"{kept[0]:012d}"
    assert digest(restored(tmp_path)) == digest(table)


def test_rows_that_came_from_elsewhere_begin_a_new_base(tmp_path: Path) -> None:
    table, other = made(), made()
    publisher = tables.publish(table, str(tmp_path))
    train(table, 3)
    publisher.write()
    train(other, 9)
    table.load_state_dict(other.state_dict())
    train(table)
    publisher.write()
    assert digest(restored(tmp_path)) == digest(table)


# ---- followers


def rows(source: Any, count: int = 80) -> bytes:
    with torch.no_grad():
        found: torch.Tensor = source(torch.arange(count))
    return found.numpy().tobytes()


def test_a_follower_serves_what_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "DELTAS_MAX", 3)
    table = made(2)
    publisher, follower = tables.publish(table, str(tmp_path)), Follower(LocalStorage(tmp_path))
    assert not follower.refresh()
    with pytest.raises(StorageUnavailable, match="nothing is read"):
        follower.look_up(torch.arange(3))
    for _ in range(12):
        train(table, 2)
        published = rows(table)
        publisher.write()
        train(table)
        assert follower.refresh() and rows(follower.look_up) == published and not follower.trouble
    again = Follower(LocalStorage(tmp_path))
    assert again.refresh() and rows(again.look_up) == published, "a restarted one comes to the same"
    behind = Follower(LocalStorage(tmp_path))
    assert behind.refresh()
    for _ in range(15):
        train(table)
        publisher.write()
    assert behind.refresh() and rows(behind.look_up) == rows(table), "what it had is long removed"


def test_a_follower_says_how_old_its_rows_are_and_keeps_to_what_it_was_asked(tmp_path: Path) -> None:
    table, now = made(), [time.time()]
    publisher = tables.publish(table, str(tmp_path))
    follower = Follower(LocalStorage(tmp_path), staleness_s=30.0, clock=lambda: now[0])
    publisher.write()
    assert follower.refresh() and follower.staleness_s < 10.0
    now[0] += 60.0
    with pytest.raises(StorageUnavailable, match="s old, and at most 30 s are asked for"):
        follower.look_up(torch.arange(3))
    assert 50.0 < follower.staleness_s < 80.0
    with pytest.raises(ConfigError, match="times above 0"):
        tables.follow(str(tmp_path), every_s=0.0)


@pytest.mark.parametrize("what", ["entry", "part", "lost part"])
def test_a_follower_outlives_garbage(tmp_path: Path, what: str) -> None:
    """It serves what it had, says what is wrong, and goes on with the next base."""
    table = made()
    publisher, follower = tables.publish(table, str(tmp_path)), Follower(LocalStorage(tmp_path))
    train(table, 4)
    publisher.write()
    assert follower.refresh()
    before = rows(follower.look_up)
    train(table)
    publisher.write()
    wrong = tmp_path / entry_name(PLACE, 1) if what == "entry" else data_of(tmp_path, 1)
    if what == "lost part":
        wrong.unlink()
    else:
        damage(wrong)
    train(table)
    publisher.write()
    for _ in range(2):
        assert follower.refresh() and rows(follower.look_up) == before
        assert wrong.name in follower.trouble
    fresh = Follower(LocalStorage(tmp_path))
    assert fresh.refresh() and fresh.trouble and rows(fresh.look_up) == before, "a new one comes as far"
    tables.publish(table, str(tmp_path)).write()
    for one in (follower, fresh):
        assert one.refresh() and rows(one.look_up) == rows(table) and not one.trouble


TRAINER = """
    import sys, torch
    import holdfast
    from holdfast import tables

    table = holdfast.EmbeddingTable(2, optimizer=tables.SGD(lr=1.0), first=tables.Uniform(0.0))
    log = tables.publish(table, sys.argv[1])
    log.restore()
    ids = torch.arange(50)
    while True:
        (-table(ids)).sum().backward()
        table.step()
        log.write()
        print(table.store.updates(0), flush=True)
"""


@pytest.mark.processes
def test_a_follower_beside_a_training_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """Every row counts the updates: a look-up that mixes two moments, or goes back, would show."""
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER))
    log, acknowledged, seen = tmp_path / "log", 0, 0
    follower: Follower | None = None
    for _ in range(3):
        trainer = subprocess.Popen([sys.executable, str(script), str(log)], stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None
        try:
            for _ in range(8):
                acknowledged = int(trainer.stdout.readline())
            follower = follower or tables.follow(str(log), every_s=0.01)
        finally:
            trainer.send_signal(signal.SIGKILL)
            acknowledged = int((trainer.stdout.read().split("\n")[:-1] or [acknowledged])[-1])
            trainer.wait()
            trainer.stdout.close()
        deadline = time.monotonic() + 30.0
        while seen < acknowledged and time.monotonic() < deadline:
            values = follower.look_up(torch.arange(50)).unique()
            assert len(values) == 1 and int(values[0]) >= seen
            seen = int(values[0])
        assert acknowledged <= seen <= acknowledged + 1
    assert follower is not None
    follower.close()
