"""A stream's files: which are the same data, what is kept of them in memory, and what is said of bad ones."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest

from holdfast.core.errors import ConfigError
from holdfast.data import Lines, Parquet, Stream, Tar, Tokens
from holdfast.data.streams import parquet as parquet_source
from holdfast.data.streams.block_order import BlockOrder


def digest(sources: Any) -> str:
    return Stream(sources, shuffle_buffer=8).arranged(0, shuffle=True).digest


def shards_of_one_size(directory: Path, *, changed: int = -1) -> list[Path]:
    """Token files that differ in nothing but their tokens. `changed`: one of them has another last token."""
    directory.mkdir()
    for number in range(3):
        tokens = numpy.arange(5000 * number, 5000 * number + 5000, dtype=numpy.uint16)
        tokens[-1] += number == changed
        tokens.tofile(directory / f"{number}.bin")
    return sorted(directory.iterdir())


def test_files_of_one_size_are_told_apart_by_name_content_and_order(tmp_path: Path) -> None:
    """A host that lists its directory in another order must not be let in: it would read other samples."""
    here = [Tokens(path, length=10) for path in shards_of_one_size(tmp_path / "here")]
    there = [Tokens(path, length=10) for path in shards_of_one_size(tmp_path / "there")]
    assert digest(here) == digest(there)
    assert digest(here) != digest([here[1], here[0], here[2]])
    other = [Tokens(path, length=10) for path in shards_of_one_size(tmp_path / "other", changed=1)]
    assert digest(here) != digest(other)
    (tmp_path / "there" / "1.bin").rename(tmp_path / "there" / "1b.bin")
    renamed = [Tokens(path, length=10) for path in sorted((tmp_path / "there").iterdir())]
    assert digest(here) != digest(renamed)


@pytest.mark.parametrize("suffix", ["txt", "tar"])
def test_lines_and_tars_of_one_size_are_told_apart_too(suffix: str, tmp_path: Path) -> None:
    for home, letters in (("here", "ab"), ("there", "ab"), ("other", "ac")):
        (tmp_path / home).mkdir()
        for number, letter in enumerate(letters):
            path = tmp_path / home / f"{number}.{suffix}"
            if suffix == "tar":
                write_members(path, [("0.txt", letter.encode() * 20)])
            else:
                path.write_text(f"{letter * 20}\n" * 3)
    assert digest(tmp_path / "here" / f"*.{suffix}") == digest(tmp_path / "there" / f"*.{suffix}")
    assert digest(tmp_path / "here" / f"*.{suffix}") != digest(tmp_path / "other" / f"*.{suffix}")
    paths = sorted((tmp_path / "here").glob(f"*.{suffix}"))
    assert digest(paths) != digest(paths[::-1])


def test_a_file_that_was_replaced_is_read_anew_and_not_by_who_had_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old 0\nold 1\n")
    old, never_read = Lines(path), Lines(path)
    copy = pickle.dumps(old)
    assert old.read(0) == b"old 0"
    (tmp_path / "y.txt").write_text("new 0\nnew 1\n")
    os.utime(tmp_path / "y.txt", ns=(1, 1))
    (tmp_path / "y.txt").replace(path)
    assert Lines(path).read(1) == b"new 1"
    assert old.read(1) == b"old 1"  # it has the old file open, and goes on with it
    with pytest.raises(ConfigError, match="has changed since the stream was opened"):
        pickle.loads(copy)
    path.write_text("and now another, longer one\n")
    with pytest.raises(ConfigError, match="has changed since the stream was opened"):
        _after_forgetting(never_read)


def _after_forgetting(source: Lines) -> None:
    from holdfast.data.streams.sources import OpenFiles

    OpenFiles().read(source.file, 0, 5)


def test_a_file_that_was_only_touched_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a\nb\n")
    source = Lines(path)
    os.utime(path, ns=(1, 1))
    assert source.read(1) == b"b" and pickle.loads(pickle.dumps(source)).read(0) == b"a"


def write_members(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))


def test_a_part_that_is_twice_in_a_sample_of_a_tar_is_refused(tmp_path: Path) -> None:
    """Of two samples with one key next to each other, one would be lost without a word."""
    path = tmp_path / "x.tar"
    write_members(path, [("0.x", b"1"), ("0.y", b"2"), ("0.x", b"3"), ("0.y", b"4")])
    with pytest.raises(ConfigError, match=r"x\.tar has 0\.x twice") as caught:
        Tar(path)
    assert "a key of its own" in (caught.value.hint or "")
    write_members(path, [("0.x", b"1"), ("1.x", b"2"), ("0.x", b"3")])
    source = Tar(path)
    assert [source.read(number)["x"] for number in range(3)] == [b"1", b"2", b"3"]


def write_rows(path: Path, first: int, rows: int, group: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    numbers = list(range(first, first + rows))
    table = pyarrow.table({"n": numbers, "text": [f"row {n}" for n in numbers]})
    parquet.write_table(table, path, row_group_size=group)


def test_sources_of_one_parquet_file_have_the_columns_that_each_asked_for(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", 0, 20, 5)
    whole, numbers = Parquet(tmp_path / "a.parquet"), Parquet(tmp_path / "a.parquet", columns=["n"])
    stream = Stream([whole, numbers, Parquet(tmp_path / "a.parquet", columns=["text"])])
    assert whole.read(7) == {"n": 7, "text": "row 7"} and numbers.read(7) == {"n": 7}
    assert [stream[place] for place in (7, 27, 47)] == [{"n": 7, "text": "row 7"}, {"n": 7}, {"text": "row 7"}]


@pytest.mark.parametrize(("rows", "group", "window"), [(9000, 9000, 1500), (6000, 4000, 1500), (7000, 13, 640)])
def test_a_stream_of_parquet_keeps_two_windows_and_decodes_every_row_once(
    rows: int, group: int, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With row groups that are larger than a window, and with small ones that no block's length divides."""
    for number in range(2):
        write_rows(tmp_path / f"{number}.parquet", number * rows, rows, group)
    stream = Stream(tmp_path / "*.parquet", shuffle_buffer=window)
    arrangement = stream.arranged(3, shuffle=True)
    kept = stream._sources[0]._kept  # type: ignore[attr-defined]
    decoded = []
    decode = parquet_source.KeptRows._decoded

    def counted(self: Any, *words: Any, **options: Any) -> Any:
        found = decode(self, *words, **options)
        decoded.append(len(found))
        return found

    monkeypatch.setattr(parquet_source.KeptRows, "_decoded", counted)
    found, most = [], 0
    for number in arrangement.numbers(0, 0, 2 * rows):
        found.append(arrangement[number]["n"])
        most = max(most, kept.rows)
    assert sorted(found) == list(range(2 * rows)) and found != sorted(found)
    assert most <= 2 * max(1024, window)
    assert sum(decoded) <= 2 * rows * 1.01, "a row group was decoded more than once"
    middle = rows + 17
    assert [arrangement[n] for n in arrangement.numbers(0, middle, middle + 3)] == [
        {"n": n, "text": f"row {n}"} for n in found[middle : middle + 3]
    ]


@pytest.mark.parametrize(("sizes", "block"), [([1000], 400), ([1000, 30, 999], 400), ([7, 7, 7, 500], 9), ([50], 50)])
def test_no_window_is_larger_than_it_was_asked_for(sizes: list[int], block: int) -> None:
    order = BlockOrder(sizes, block=block, window=64, seed=2)
    ends = [0, *order.epoch_blocks(1).window_ends.tolist()]
    assert ends[-1] == sum(sizes)
    assert max(stop - start for start, stop in pairwise(ends)) <= 64
    assert sorted(order.numbers(1, 0, sum(sizes)).tolist()) == list(range(sum(sizes)))
