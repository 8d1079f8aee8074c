"""Streams: each sample of an epoch once, the same from anywhere, whatever the files, blocks, batches and weights."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError
from holdfast.data import Lines, Mixture, Parquet, Stream, Tar, Tokens
from holdfast.data.loader import ShardLoader
from holdfast.data.shards import ShardPlan
from holdfast.data.streams.block_order import BlockOrder
from holdfast.data.streams.packing import DocumentLengths, Packing
from holdfast.data.streams.stream import order_alone


class Counted:
    """A source whose sample n is the number first + n."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.identity = ("Counted", first, size)

    def __len__(self) -> int:
        return self.size

    def read(self, number: int) -> int:
        assert 0 <= number < self.size
        return self.first + number


def counted(sizes: list[int], **options: Any) -> Stream:
    firsts = [sum(sizes[:place]) for place in range(len(sizes))]
    return Stream([Counted(first, size) for first, size in zip(firsts, sizes, strict=True)], **options)


def plan_of(dataset: Any, *, shuffle: bool = True, **options: Any) -> ShardPlan:
    arrangement = dataset.arranged(options.get("seed", 0), shuffle=shuffle)
    return ShardPlan(length=len(dataset), arrangement=arrangement, **{"seed": 0, **options}).validate()


shapes = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(sum),
        "block": st.integers(1, 20),
        "window": st.integers(0, 70),
    }
)


@settings(max_examples=150, deadline=None)
@given(shape=shapes, shards=st.integers(1, 4), per_shard=st.integers(1, 5), seed=st.integers(0, 9), last=st.booleans())
def test_every_sample_of_an_epoch_once(
    shape: dict[str, Any], shards: int, per_shard: int, seed: int, last: bool
) -> None:
    """Over all shards of all steps, in every epoch; the last batch is filled up from the epoch's beginning."""
    stream = counted(shape["sizes"], shuffle_buffer=shape["window"], block=shape["block"])
    size, total = shards * per_shard, sum(shape["sizes"])
    if last and total < size:
        return
    plan = plan_of(stream, batch_size=size, shards=shards, seed=seed, drop_last=last)
    for epoch in range(3):
        steps = range(plan.first_step(epoch), plan.first_step(epoch + 1))
        found = [number for step in steps for shard in range(shards) for number in plan.indices(step, shard)]
        if last:
            assert len(set(found)) == len(found) == total // size * size
        else:
            assert sorted(found[:total]) == list(range(total))
            assert found[total:] == [found[place % total] for place in range(total, len(found))]


@settings(max_examples=100, deadline=None)
@given(shape=shapes, seed=st.integers(0, 9), rng=st.randoms(use_true_random=False))
def test_a_seek_finds_what_reading_on_finds(shape: dict[str, Any], seed: int, rng: random.Random) -> None:
    order = BlockOrder(shape["sizes"], block=shape["block"], window=shape["window"], seed=seed)
    whole = order.numbers(1, 0, order.length).tolist()
    for _ in range(5):
        start = rng.randint(0, order.length)
        stop = rng.randint(start, order.length)
        fresh = BlockOrder(shape["sizes"], block=shape["block"], window=shape["window"], seed=seed)
        assert fresh.numbers(1, start, stop).tolist() == whole[start:stop]
    words = counted(shape["sizes"], shuffle_buffer=shape["window"], block=shape["block"])
    if shape["window"] > 1:
        arrangement = words.arranged(seed, shuffle=True)
        alone = order_alone(json.loads(json.dumps(arrangement.words())), seed)
        assert alone.numbers(1, 0, order.length) == arrangement.numbers(1, 0, order.length) == whole


def test_epochs_and_seeds_have_other_orders_and_a_window_is_from_many_places() -> None:
    order = BlockOrder([6000, 4000], block=10, window=640, seed=1)
    epochs = [order.numbers(epoch, 0, 10000).tolist() for epoch in range(3)]
    other = BlockOrder([6000, 4000], block=10, window=640, seed=2).numbers(0, 0, 10000).tolist()
    assert len({tuple(one) for one in (*epochs, other)}) == 4
    assert len({number // 10 for number in epochs[0][:640]}) == 64
    for place, number in enumerate(epochs[0][:-1]):
        assert not (number + 1 == epochs[0][place + 1] == epochs[0][(place + 2) % 10000] - 1)
    assert BlockOrder([30], block=4, window=8, seed=0, shuffle=False).numbers(7, 3, 9).tolist() == [3, 4, 5, 6, 7, 8]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 12), max_size=20), min_size=1, max_size=4).filter(
        lambda all_of: sum(map(sum, all_of)) > 0
    ),
    length=st.integers(1, 30),
    block=st.integers(1, 6),
    window=st.integers(0, 20),
)
def test_packing_has_every_token_of_an_epoch_once(
    lengths: list[list[int]], length: int, block: int, window: int
) -> None:
    known = DocumentLengths([numpy.array(one, dtype=numpy.int64) for one in lengths])
    order = BlockOrder([len(one) for one in lengths], block=block, window=window, seed=5)
    flat = [one for source in lengths for one in source]
    in_order = [(doc, token) for doc in order.numbers(2, 0, len(flat)).tolist() for token in range(flat[doc])]
    count = -(-known.total // length)
    found = []
    for sequence in random.Random(1).sample(range(count), count):
        pieces = list(Packing(known, length, order).pieces(2, sequence))
        tokens = [(doc, token) for doc, start, stop in pieces for token in range(start, stop)]
        assert len(tokens) == length
        found.append((sequence, tokens))
    packed = [token for _, tokens in sorted(found) for token in tokens]
    assert packed == [in_order[place % known.total] for place in range(count * length)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    samples=st.integers(1, 50),
    shuffle=st.booleans(),
)
def test_a_mixture_keeps_its_weights_and_each_stream_its_epochs(
    sizes: list[int], weights: list[int], samples: int, shuffle: bool
) -> None:
    streams = [counted([size], shuffle_buffer=8, block=2) for size in sizes]
    mixture = Mixture(list(zip(streams, weights, strict=False)), samples=samples)
    arranged = mixture.arranged(3, shuffle=shuffle)
    cycle = sum(weights[: len(sizes)])
    epochs = -(-cycle * 3 // samples)
    whole = [number for epoch in range(epochs) for number in arranged.numbers(epoch, 0, samples)]
    of_streams = [[number // len(sizes) for number in whole if number % len(sizes) == one] for one in range(len(sizes))]
    for first in range(0, len(whole) - cycle + 1, cycle):
        seen = Counter(number % len(sizes) for number in whole[first : first + cycle])
        assert [seen[one] for one in range(len(sizes))] == weights[: len(sizes)]
    for size, numbers in zip(sizes, of_streams, strict=True):
        for first in range(0, len(numbers), size):
            epoch = numbers[first : first + size]
            assert len(set(epoch)) == len(epoch)
    seek = mixture.arranged(3, shuffle=shuffle)
    middle = samples // 2
    assert seek.numbers(epochs - 1, middle, samples) == whole[(epochs - 1) * samples + middle :]


def test_weights_that_are_no_integers_are_thousandths() -> None:
    stream = counted([10])
    assert Mixture([(stream, 0.7), (stream, 0.3)]).counts == [700, 300]
    assert sum(Mixture([(stream, 1 / 3)] * 3).counts) == 1000
    with pytest.raises(ConfigError, match="less than a thousandth"):
        Mixture([(stream, 1.0), (stream, 0.0001)])


def write_tar(path: Path, names: list[str], **options: Any) -> dict[str, bytes]:
    written = {}
    with tarfile.open(path, "w", **options) as tar:
        for name in names:
            data = written[name] = f"the bytes of {name}".encode() * (len(name) % 90)
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return written


@pytest.mark.parametrize("dialect", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_gives_what_tarfile_gives(dialect: int, tmp_path: Path) -> None:
    deep = "d" * 60 + "/" + "e" * 60 + "/" if dialect == tarfile.USTAR_FORMAT else "long/" * 40 + "ünder/"
    names = ["README", "a/0.jpg", "a/0.cls", "a/1.seg.png", "a/1.cls", "a/2.cls", deep + "3.txt", deep + "3.cls"]
    written = write_tar(tmp_path / "x.tar", names, format=dialect)
    for _ in range(2):  # the second time, from the index beside it
        source = Tar(tmp_path / "x.tar")
        assert [source.read(number) for number in range(len(source))] == [
            {"__key__": "a/0", "jpg": written["a/0.jpg"], "cls": written["a/0.cls"]},
            {"__key__": "a/1", "seg.png": written["a/1.seg.png"], "cls": written["a/1.cls"]},
            {"__key__": "a/2", "cls": written["a/2.cls"]},
            {"__key__": deep + "3", "txt": written[deep + "3.txt"], "cls": written[deep + "3.cls"]},
        ]


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab\r\n", max_size=60), at_once=st.integers(1, 9))
def test_lines_are_those_that_are_not_empty(text: str, at_once: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor have carriage returns only; wherever the pieces begin in which the file is read."""
    path = tmp_path_factory.mktemp("lines") / "x.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.data.streams.sources._AT_ONCE", at_once)
        source = Lines(path)
    expected = [line.rstrip("\r").encode() for line in text.split("\n") if line.strip("\r")]
    assert [source.read(number) for number in range(len(source))] == expected


def test_lines_are_found_across_pieces_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.data.streams.sources._AT_ONCE", 7)
    lines = [b"x" * (number * 7 % 23) for number in range(100)]
    (tmp_path / "x.txt").write_bytes(b"\r\n".join(one for one in lines if one))
    source = Lines(tmp_path / "x.txt")
    assert [source.read(number) for number in range(len(source))] == [one for one in lines if one]


def test_an_index_is_kept_and_made_again_when_the_data_has_changed(tmp_path: Path) -> None:
    path, apart = tmp_path / "x.txt", tmp_path / "indices"
    path.write_text("a\nb\n")
    assert len(Lines(path)) == 2 == len(Lines(path, index=apart))
    kept = tmp_path / "x.txt.holdfast-lines"
    assert kept.exists() and len(list(apart.iterdir())) == 1
    made = kept.stat().st_ino
    assert Lines(path).read(1) == b"b" and kept.stat().st_ino == made
    kept.write_bytes(kept.read_bytes()[:-8])  # cut short
    assert Lines(path).read(1) == b"b" and kept.stat().st_ino != made
    path.write_text("a\nb\nccc\n")
    assert Lines(path).read(2) == b"ccc"
    assert len(Stream(str(tmp_path / "x.txt*"))) == 3  # the index is no source


def test_where_nothing_can_be_written_the_index_has_no_name(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a\nb\n")
    (tmp_path / "file").touch()
    assert Lines(path, index=tmp_path / "file").read(1) == b"b"
    assert not (tmp_path / "x.txt.holdfast-lines").exists()


def test_a_file_that_becomes_shorter_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("first\nsecond\n")
    source = Lines(path)
    os.truncate(path, 8)
    with pytest.raises(ConfigError, match="ends at byte 8, and its index knows samples up to byte 13"):
        source.read(1)


def test_tokens_are_windows_that_may_overlap(tmp_path: Path) -> None:
    numpy.arange(23, dtype=numpy.uint16).tofile(tmp_path / "x.bin")
    numpy.save(tmp_path / "x.npy", numpy.arange(23, dtype=numpy.int32))
    for source in (Tokens(tmp_path / "x.bin", length=5, overlap=1), Tokens(tmp_path / "x.npy", length=5, overlap=1)):
        assert len(source) == 4
        assert source.read(1).tolist() == [5, 6, 7, 8, 9, 10] and source.read(1).dtype == torch.int64
    assert len(Tokens(tmp_path / "x.bin", length=24)) == 0


def test_a_stream_is_packed_and_its_lengths_are_kept(tmp_path: Path) -> None:
    documents = [[number] * (1 + number % 4) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, documents[:25])))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, documents[25:])))
    decoded: list[Any] = []

    def decode(line: bytes) -> list[int]:
        decoded.append(line)
        found: list[int] = json.loads(line)
        return found

    stream = Stream(tmp_path / "*.jsonl", decode=decode, pack=8, shuffle_buffer=12, block=3)
    assert len(decoded) == 40 and len(stream) == 100 // 8 + 1
    flat = [token for document in documents for token in document]
    assert torch.cat([stream[number] for number in range(len(stream))]).tolist() == flat + flat[:4]
    decoded.clear()
    again = Stream(tmp_path / "*.jsonl", decode=decode, pack=8, shuffle_buffer=12, block=3)
    assert not decoded
    arranged = again.arranged(4, shuffle=True)
    epochs = [torch.cat([arranged[n] for n in arranged.numbers(epoch, 0, len(again))]).tolist() for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    assert all(sorted(epoch[:100]) == sorted(flat) for epoch in epochs)
    with pytest.raises(ConfigError, match=r"decode makes tokens of shape \(9,\) of document 0, which had 1 when"):
        Stream(tmp_path / "*.jsonl", decode=lambda line: [1] * 9, pack=8)[0]


def test_loader_processes_read_the_same_bits(tmp_path: Path) -> None:
    for name in "abc":
        write_tar(tmp_path / f"{name}.tar", [f"{name}{n}.{part}" for n in range(20) for part in ("x", "y")])
    stream = Stream(tmp_path / "*.tar", decode=lambda sample: sample["__key__"], shuffle_buffer=16, block=2)
    plan = plan_of(stream, batch_size=8, shards=2)
    places = [(step, shard) for step in range(8) for shard in range(2)]
    with ShardLoader(stream, plan) as alone, ShardLoader(stream, plan, num_workers=2) as ahead:
        ahead.expect(places)
        found = [alone.get(*place) for place in places]
        assert [ahead.get(*place) for place in places] == found
    assert len({key for batch in found for key in batch}) == 60


def test_a_stream_goes_to_processes_that_are_spawned(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, [[1, 2], [3], [4, 5]])))
    numpy.arange(9, dtype=numpy.uint16).tofile(tmp_path / "x.bin")
    sources = [tmp_path / "x.jsonl", Tokens(tmp_path / "x.bin", length=3)]
    arranged = Stream(sources, decode=len, shuffle_buffer=4).arranged(1, shuffle=True)
    copy = pickle.loads(pickle.dumps(arranged))
    numbers = arranged.numbers(0, 0, 6)
    assert copy.numbers(0, 0, 6) == numbers
    assert [copy[number] for number in numbers] == [arranged[number] for number in numbers]


def test_other_data_or_another_order_has_another_digest(tmp_path: Path) -> None:
    def digest(sizes: list[int], **options: Any) -> str:
        return counted(sizes, **options).arranged(0, shuffle=True).digest

    assert digest([4, 5]) == digest([4, 5])
    assert len({digest([4, 5]), digest([5, 4]), digest([4, 5], block=3), digest([4, 5], shuffle_buffer=9)}) == 4


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        (lambda home: home / "*.none", {}, "no file is named"),
        (lambda home: home / "none.txt", {}, "cannot be read"),
        (lambda home: home / "x.bin", {}, "is not a file of lines or a tar file"),
        (lambda home: home / "x.jsonl.gz", {}, "is not a file of lines or a tar file"),
        (lambda home: home / "bad.tar", {}, "is no tar file that can be read by position"),
        (lambda home: 7, {}, "a stream's source is an int"),
        (lambda home: [], {"shuffle_buffer": -1}, "shuffle_buffer is -1"),
        (lambda home: [], {"block": 0}, "block is 0"),
        (lambda home: [], {"pack": "8"}, "pack is '8'"),
        (lambda home: [], {"decode": 7}, "decode is an int"),
        (lambda home: home / "empty.txt", {"pack": 8}, "the stream's documents have no tokens"),
    ],
)
def test_mistakes_are_told_in_a_sentence(given: Any, options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"\x1f\x8b" * 600)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=sentence):
        Stream(given(tmp_path), **options)


def test_rows_of_parquet_files_come_once_and_row_groups_stay_together(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, first, size in (("a", 0, 50), ("b", 50, 23)):
        table = pyarrow.table({"n": list(range(first, first + size)), "text": [f"row {n}" for n in range(size)]})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=8)
    stream = Stream(tmp_path / "*.parquet", shuffle_buffer=24)
    assert len(stream) == 73
    assert stream[51] == {"n": 51, "text": "row 1"}
    arrangement = stream.arranged(3, shuffle=True)
    numbers = arrangement.numbers(0, 0, 73)
    assert sorted(arrangement[number]["n"] for number in numbers) == list(range(73))
    groups = [
        {number // 8 if number < 50 else 100 + (number - 50) // 8 for number in numbers[at : at + 16]} for at in (0, 48)
    ]
    assert all(1 < len(one) <= 6 for one in groups)
    one = Parquet(tmp_path / "a.parquet", columns=["n"])
    assert pickle.loads(pickle.dumps(one)).read(49) == {"n": 49}
    assert one.identity != Parquet(tmp_path / "a.parquet").identity
    with pytest.raises(ConfigError, match="has no column 'x'"):
        Parquet(tmp_path / "a.parquet", columns=["x"])
    (tmp_path / "c.parquet").write_bytes(b"no Parquet")
    with pytest.raises(ConfigError, match="cannot be read as a Parquet file"):
        Parquet(tmp_path / "c.parquet")


def test_without_pyarrow_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs the package pyarrow") as caught:
        Parquet(tmp_path / "a.parquet")
    assert caught.value.hint == "pip install 'holdfast[parquet]'"
