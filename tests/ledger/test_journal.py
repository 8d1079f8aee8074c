"""The log: what a restart finds after a death at any byte, and after damage to any."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError, IntegrityError, LedgerRefused
from holdfast.ledger.journal import LOG_NAME, NEW_LOG_NAME, SECTOR_BYTES, Journal
from holdfast.ledger.machine import Image, LedgerMachine, Record


def commit(journal: Journal, machine: LedgerMachine, record: Record | None) -> None:
    assert record is not None
    journal.append(record, machine)
    machine.commit(record, 0.0)


def write_a_log(directory: Path, last_value: bytes = b"last") -> tuple[Image, int]:
    """A log with every kind of record. Returns the state before the last one, and the offset of that."""
    journal, machine = Journal.open(directory, now=0.0)
    with closing(journal):
        commit(journal, machine, machine.grant(1.5))
        commit(journal, machine, machine.grant(2.5))
        commit(journal, machine, machine.put("w/é", b"\x00\xff", lease=1))
        commit(journal, machine, machine.put("view", b"1"))
        commit(journal, machine, machine.put("view", b"2", lease=2))
        commit(journal, machine, machine.put("gone", b""))
        commit(journal, machine, machine.delete("gone"))
        commit(journal, machine, machine.revoke(1))
        image = machine.export()
        offset = (directory / LOG_NAME).stat().st_size
        commit(journal, machine, machine.put("last", last_value))
    return image, offset


def reopen(directory: Path) -> Image:
    journal, machine = Journal.open(directory, now=0.0)
    journal.close()
    return machine.export()


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    write_a_log(tmp_path)
    journal, machine = Journal.open(tmp_path, now=50.0)
    journal.close()
    assert [(entry.key, entry.value, entry.lease) for entry in machine.read("").entries] == [
        ("last", b"last", 0),
        ("view", b"2", 2),
    ]
    assert machine.next_deadline == 52.5, "a lease has its full time again"
    assert machine.grant(1.0).lease == 3, "a lease's number is never used again"
    assert len(machine.changes_after(0, "")) == machine.revision == 7, "the history is kept too"


def test_a_tail_torn_at_any_byte_is_cut_off(tmp_path: Path) -> None:
    before, offset = write_a_log(tmp_path)
    log = tmp_path / LOG_NAME
    whole = log.read_bytes()
    for length in range(offset, len(whole)):
        log.write_bytes(whole[:length])
        assert reopen(tmp_path) == before, length
        assert log.stat().st_size == offset
    log.write_bytes(whole[:-1])
    journal, machine = Journal.open(tmp_path, now=0.0)
    with closing(journal):
        commit(journal, machine, machine.put("after", b""))
        expected = machine.export()
    assert reopen(tmp_path) == expected


def test_a_tail_whose_data_never_arrived_is_cut_off(tmp_path: Path) -> None:
    before, offset = write_a_log(tmp_path, last_value=b"v" * 3000)
    log = tmp_path / LOG_NAME
    whole = log.read_bytes()
    log.write_bytes(whole[:offset] + bytes(100))
    assert reopen(tmp_path) == before
    hole = offset - offset % SECTOR_BYTES + 2 * SECTOR_BYTES
    log.write_bytes(whole[:hole] + bytes(SECTOR_BYTES) + whole[hole + SECTOR_BYTES :])
    assert reopen(tmp_path) == before


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    write_a_log(tmp_path)
    log = tmp_path / LOG_NAME
    whole = log.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        log.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=str(log)):
            reopen(tmp_path)
        assert log.read_bytes() == damaged, "damage is left for a person to look at"


def test_a_missing_or_repeated_record_is_noticed(tmp_path: Path) -> None:
    _, offset = write_a_log(tmp_path)
    log = tmp_path / LOG_NAME
    whole = log.read_bytes()
    for damaged in (whole + whole[offset:], whole[offset:], b"", whole[:10]):
        log.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=str(log)):
            reopen(tmp_path)


def test_garbage_is_compacted_away(tmp_path: Path) -> None:
    journal, machine = Journal.open(tmp_path, now=0.0, garbage_bytes_max=10_000)
    log = tmp_path / LOG_NAME
    with closing(journal):
        commit(journal, machine, machine.grant(1.5))
        largest = 0
        for index in range(300):
            commit(journal, machine, machine.put(f"key {index % 7}", bytes([index % 256]) * 100, lease=1))
            journal.compact_if_due(machine)
            largest = max(largest, log.stat().st_size)
        expected = machine.export()
    assert largest < 20_000
    assert not (tmp_path / NEW_LOG_NAME).exists()
    assert reopen(tmp_path) == expected


def test_a_death_while_compacting_leaves_the_old_log(tmp_path: Path) -> None:
    write_a_log(tmp_path)
    expected = reopen(tmp_path)
    (tmp_path / NEW_LOG_NAME).write_bytes(b"half of a new")
    assert reopen(tmp_path) == expected
    assert not (tmp_path / NEW_LOG_NAME).exists()


def test_two_servers_cannot_have_one_directory(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, now=0.0)
    with closing(journal), pytest.raises(ConfigError, match="another ledger server"):
        Journal.open(tmp_path, now=0.0)
    Journal.open(tmp_path, now=0.0)[0].close()


def test_after_a_failed_sync_the_log_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, machine = Journal.open(tmp_path, now=0.0)
    log = tmp_path / LOG_NAME

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(journal):
        commit(journal, machine, machine.put("a", b"1"))
        before, inode = log.read_bytes(), log.stat().st_ino
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(LedgerRefused, match="disk failed"):
                journal.append(machine.put("a", b"2"), machine)
        assert log.read_bytes() == before
        commit(journal, machine, machine.put("a", b"3"))
        assert log.stat().st_ino != inode, "pages of a failed sync cannot be trusted"
        expected = machine.export()
    assert reopen(tmp_path) == expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", os.fspath(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small disk here: {error}")
    yield disk
    subprocess.run(["umount", os.fspath(disk)], check=True, timeout=10)


def test_a_full_disk_refuses_writes_until_there_is_room(small_disk: Path) -> None:
    directory = small_disk / "ledger"
    journal, machine = Journal.open(directory, now=0.0, garbage_bytes_max=20_000)
    filler = small_disk / "filler"
    log = directory / LOG_NAME
    with closing(journal):
        commit(journal, machine, machine.put("a", b"before"))
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        size = log.stat().st_size
        with pytest.raises(LedgerRefused, match="disk is full") as refusal:
            journal.append(machine.put("a", b"v" * 10_000), machine)
        assert "free some space" in refusal.value.hint
        assert log.stat().st_size == size
        journal.compact_if_due(machine)
        filler.unlink()
        for index in range(20):
            commit(journal, machine, machine.put("a", bytes([index]) * 5000))
            journal.compact_if_due(machine)
        expected = machine.export()
    assert reopen(directory) == expected
