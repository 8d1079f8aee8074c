"""Durable segments: what a restart finds after a death at any byte, after damage to any, and on a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError, IntegrityError, StorageError, StorageUnavailable
from holdfast.log import frames
from holdfast.log.segments import NEW_NAME, SUFFIX, Segments

ZEROS = bytes(2 * frames.SECTOR_BYTES)
Found = tuple[dict[int, bytes], bytes]


def found(log: Segments) -> Found:
    return dict(log.read(log.first, log.last)), log.note


def reopen(directory: Path, **options: int) -> Found:
    with closing(Segments.open(directory, **options)) as log:
        return found(log)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{SUFFIX}"))


def write_a_log(directory: Path) -> tuple[Found, int]:
    """A log in one segment. Returns what it held before its last commit, and where that begins."""
    with closing(Segments.open(directory)) as log:
        for index in range(1, 5):
            log.append(index, b"entry %d" % index)
        log.keep_note(b"promised 3")
        log.commit()
        log.append(4, b"another entry 4")
        log.commit()
        before, offset = found(log), files(directory)[0].stat().st_size
        log.append(5, b"the last" + ZEROS + b"one")
        log.append(6, b"")
        log.commit()
    return before, offset


def test_a_restart_finds_what_was_committed(tmp_path: Path) -> None:
    before, _ = write_a_log(tmp_path)
    assert before == ({1: b"entry 1", 2: b"entry 2", 3: b"entry 3", 4: b"another entry 4"}, b"promised 3")
    entries, note = reopen(tmp_path)
    assert entries == {**before[0], 5: b"the last" + ZEROS + b"one", 6: b""} and note == b"promised 3"


def test_what_is_not_committed_is_not_there(tmp_path: Path) -> None:
    before, _ = write_a_log(tmp_path)
    expected = reopen(tmp_path)
    with closing(Segments.open(tmp_path)) as log:
        log.append(7, b"seven")
        assert found(log) == expected
    assert reopen(tmp_path) == expected != before


def test_one_sync_serves_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (synced.append(file), real(file)))
    with closing(Segments.open(tmp_path)) as log:
        for index in range(1, 101):
            log.append(index, b"x" * 100)
        log.commit()
        log.commit()
    assert len(synced) == 1


def test_a_tail_torn_at_any_byte_is_cut_off(tmp_path: Path) -> None:
    before, offset = write_a_log(tmp_path)
    path = files(tmp_path)[0]
    whole = path.read_bytes()
    for length in range(offset, len(whole)):
        path.write_bytes(whole[:length])
        assert reopen(tmp_path) == before, length
        assert path.stat().st_size == offset
    path.write_bytes(whole[:-1])
    with closing(Segments.open(tmp_path)) as log:
        log.append(5, b"five")
        log.commit()
    assert reopen(tmp_path) == ({**before[0], 5: b"five"}, before[1])


def test_a_tail_with_sectors_that_were_never_written_is_cut_off(tmp_path: Path) -> None:
    before, offset = write_a_log(tmp_path)
    path = files(tmp_path)[0]
    whole = path.read_bytes()
    first = offset - offset % frames.SECTOR_BYTES + frames.SECTOR_BYTES
    holes = range(first, len(whole), frames.SECTOR_BYTES)
    assert len(holes) >= 2
    for hole in holes:
        missing = min(frames.SECTOR_BYTES, len(whole) - hole)
        path.write_bytes(whole[:hole] + bytes(missing) + whole[hole + missing :])
        assert reopen(tmp_path) == before, hole
    path.write_bytes(whole[:offset] + bytes(100))
    assert reopen(tmp_path) == before


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    write_a_log(tmp_path)
    path = files(tmp_path)[0]
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=str(path)):
            reopen(tmp_path)
        assert path.read_bytes() == damaged, "damage is left for a person to look at"


def test_damage_that_comes_while_the_log_is_open_is_noticed_by_who_reads(tmp_path: Path) -> None:
    with closing(Segments.open(tmp_path)) as log:
        log.append(1, b"entry")
        log.commit()
        path = files(tmp_path)[0]
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
        with pytest.raises(IntegrityError, match="not what was written"):
            list(log.read(1, 1))


def write_many_segments(directory: Path) -> dict[int, bytes]:
    entries = {index: bytes([index % 256]) * 300 for index in range(1, 31)}
    with closing(Segments.open(directory, segment_bytes_max=1000)) as log:
        log.keep_note(b"note")
        for index, payload in entries.items():
            log.append(index, payload)
            log.commit()
    return entries


def test_segments_are_begun_and_removed_from_the_front(tmp_path: Path) -> None:
    entries = write_many_segments(tmp_path)
    count = len(files(tmp_path))
    assert count >= 8
    with closing(Segments.open(tmp_path, segment_bytes_max=1000)) as log:
        assert found(log) == (entries, b"note")
        log.drop_through(20)
        assert found(log)[0] == {index: entries[index] for index in range(21, 31)}
        assert len(files(tmp_path)) < count / 2
    left, note = reopen(tmp_path)
    assert {index: left[index] for index in range(21, 31)} == {index: entries[index] for index in range(21, 31)}
    assert note == b"note" and min(left) > 15, "files go as a whole, so a little more than was asked for may stay"


def test_a_tail_is_replaced_across_segments_and_stays_so(tmp_path: Path) -> None:
    entries = write_many_segments(tmp_path)
    with closing(Segments.open(tmp_path, segment_bytes_max=1000)) as log:
        log.append(12, b"from another primary")
        log.commit()
        log.drop_through(11)
        assert found(log)[0] == {12: b"from another primary"}
    left, _ = reopen(tmp_path)
    assert left[12] == b"from another primary" and max(left) == 12
    assert all(left[index] == entries[index] for index in left if index < 12)


def test_a_log_begins_anew_after_a_snapshot(tmp_path: Path) -> None:
    write_a_log(tmp_path)
    with closing(Segments.open(tmp_path)) as log:
        log.restart_after(100)
        log.append(101, b"after the snapshot")
        log.commit()
        assert (log.first, log.last) == (101, 101)
    assert reopen(tmp_path) == ({101: b"after the snapshot"}, b"promised 3")


@pytest.mark.parametrize("content", [b"\x01", b"\x09" + bytes(12), b"\x01" + bytes(8) + b"\xff\x00\x00\x00"])
def test_a_frame_that_is_whole_and_holds_no_records_is_damage(tmp_path: Path, content: bytes) -> None:
    write_a_log(tmp_path)
    path = files(tmp_path)[0]
    whole = path.read_bytes()
    path.write_bytes(whole + frames.encode(frames.mask(content, len(whole)), len(whole)))
    with pytest.raises(IntegrityError, match=str(path)):
        reopen(tmp_path)


@pytest.mark.parametrize("harm", ["missing", "cut", "swapped", "empty"])
def test_damage_in_the_middle_is_noticed(tmp_path: Path, harm: str) -> None:
    write_many_segments(tmp_path)
    one, other = files(tmp_path)[2:4]
    if harm == "missing":
        one.unlink()
    elif harm == "cut":
        one.write_bytes(one.read_bytes()[:-5])
    elif harm == "empty":
        one.write_bytes(b"")
    else:
        one.rename(tmp_path / "aside")
        other.rename(one)
        (tmp_path / "aside").rename(other)
    with pytest.raises(IntegrityError, match=str(tmp_path)):
        reopen(tmp_path)


def test_a_death_while_a_segment_is_begun_leaves_the_log(tmp_path: Path) -> None:
    entries = write_many_segments(tmp_path)
    (tmp_path / NEW_NAME).write_bytes(b"half of a")
    assert reopen(tmp_path) == (entries, b"note")
    assert not (tmp_path / NEW_NAME).exists()


def test_two_processes_cannot_have_one_directory(tmp_path: Path) -> None:
    with closing(Segments.open(tmp_path)), pytest.raises(ConfigError, match="another process has the log"):
        Segments.open(tmp_path)
    Segments.open(tmp_path).close()


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_commit_that_fails_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write_a_log(tmp_path)
    expected = reopen(tmp_path)
    with closing(Segments.open(tmp_path)) as log:
        log.append(7, b"seven")
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StorageError, match="failed"):
                log.commit()
        assert found(log) == expected == reopen_copy(tmp_path)
        log.append(7, b"seven once more")
        log.commit()
        assert len(files(tmp_path)) == (2 if call == "fdatasync" else 1), "pages of a failed sync cannot be trusted"
    assert reopen(tmp_path) == ({**expected[0], 7: b"seven once more"}, expected[1])


def test_what_a_failed_sync_left_behind_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither syncing nor cutting works: the frame stays in the file, and the next segment says how much counts."""

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write_a_log(tmp_path)
    expected = reopen(tmp_path)
    with closing(Segments.open(tmp_path)) as log:
        log.append(7, b"never acknowledged")
        size = files(tmp_path)[0].stat().st_size
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(StorageError):
                log.commit()
        assert files(tmp_path)[0].stat().st_size > size
        log.append(7, b"seven")
        log.commit()
    assert reopen(tmp_path) == ({**expected[0], 7: b"seven"}, expected[1])


def reopen_copy(directory: Path) -> Found:
    """What another process would find now."""
    with tempfile.TemporaryDirectory() as copy:
        for path in files(directory):
            shutil.copy(path, copy)
        return reopen(Path(copy))


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


def test_a_full_disk_loses_nothing_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    with closing(Segments.open(small_disk / "log", segment_bytes_max=20_000)) as log:
        index = 0
        with pytest.raises(StorageUnavailable, match="is full") as refusal:
            while True:
                log.append(index + 1, b"%d " % (index + 1) * 1000)
                log.commit()
                index += 1
        assert "free some space" in refusal.value.hint
        assert index > 10 and log.last == index
        expected = found(log)
        assert expected == reopen_copy(small_disk / "log")
        log.drop_through(index - 5)
        log.append(index + 1, b"there is room again")
        log.commit()
    left, _ = reopen(small_disk / "log", segment_bytes_max=20_000)
    assert left[index + 1] == b"there is room again"
    assert all(left[one] == expected[0][one] for one in left if one <= index)


payloads = st.binary(max_size=40) | st.integers(0, 1200).map(bytes)
kinds = st.sampled_from(["append", "append", "append", "replace", "note", "drop", "restart", "reopen"])
steps = st.lists(st.tuples(kinds, payloads), max_size=25)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 2**32), st.integers(200, 3000))
def test_a_log_is_what_a_dictionary_would_be(steps: list[tuple[str, bytes]], chance: int, bytes_max: int) -> None:
    """Also after a restart in the middle. What was dropped may still be there."""
    model: dict[int, bytes] = {}
    note, last, dropped = b"", 0, 0
    with tempfile.TemporaryDirectory() as directory:
        log = Segments.open(Path(directory), segment_bytes_max=bytes_max)
        for kind, payload in steps:
            if kind == "append" or (kind == "replace" and last == dropped):
                last += 1
                log.append(last, payload)
                model[last] = payload
            elif kind == "replace":
                last = dropped + 1 + chance % (last - dropped)
                log.append(last, payload)
                model = {index: one for index, one in model.items() if index < last} | {last: payload}
            elif kind == "note":
                log.keep_note(payload)
                note = payload
            elif kind == "drop":
                dropped = max(dropped, last - chance % 3)
                log.drop_through(dropped)
            elif kind == "restart":
                last = dropped = last + chance % 5
                log.restart_after(last)
                model.clear()
            log.commit()
            if kind == "reopen":
                log.close()
                log = Segments.open(Path(directory), segment_bytes_max=bytes_max)
            entries, kept = found(log)
            assert kept == note and log.last == last
            assert {index: one for index, one in entries.items() if index > dropped} == {
                index: one for index, one in model.items() if index > dropped
            }
        log.close()


@given(st.binary(max_size=3000) | st.integers(0, 3000).map(bytes), st.integers(0, 5000))
def test_a_masked_body_has_no_sector_of_zeros(content: bytes, offset: int) -> None:
    body = frames.mask(content, offset)
    assert frames.unmask(body) == content
    start = offset + frames.HEADER.size
    first = frames.SECTOR_BYTES - start % frames.SECTOR_BYTES
    pieces = [
        body[:first],
        *(body[at : at + frames.SECTOR_BYTES] for at in range(first, len(body), frames.SECTOR_BYTES)),
    ]
    assert all(any(piece) for piece in pieces if piece)
