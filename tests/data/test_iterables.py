"""Iterables: where a reader finds its way back to, how batches are cut, and what workers tell each other of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.data import Live
from holdfast.data.iterables.cutting import part_of, samples_in, shares
from holdfast.data.iterables.handed import BATCH_BYTES_MAX, HandedBatches, Packing, parsed
from holdfast.data.iterables.reader import Position, Read, Reader, is_iterable
from holdfast.state.objects import object_bytes, object_from_bytes


class Plain(IterableDataset[int]):
    """Another order in every epoch, drawn from the process's generator."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, 0

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.size))
        random.shuffle(numbers)
        for number in numbers:
            self.read += 1
            yield number


class Counted:
    """With a position, and an order that follows from a count of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.epoch, self.read = size, 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(self.size), self.size)
        while self.at < self.size:
            self.at += 1
            self.read += 1
            yield order[self.at - 1]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Noisy(Counted):
    """It draws for each sample."""

    def __iter__(self) -> Iterator[Any]:
        return (number + random.random() / 2 for number in super().__iter__())


class Sticky(Counted):
    """As Hugging Face's: what was loaded is where every pass begins, and one that is at its end gives nothing."""

    begin = 0

    def __iter__(self) -> Iterator[int]:
        self.at = self.begin
        while self.at < self.size:
            self.at += 1
            self.read += 1
            yield self.at - 1

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


class Told(Counted):
    """As a StreamingDataset of MosaicML's: told how much it has given; what it has begun is old to it."""

    next_epoch = 0
    loaded: dict[str, int] | None = None

    def __iter__(self) -> Iterator[int]:
        loaded = self.loaded
        if loaded is not None and loaded["epoch"] >= self.next_epoch:
            self.epoch, self.at = loaded["epoch"], loaded["sample_in_epoch"]
        else:
            self.epoch, self.at = self.next_epoch, 0
        self.next_epoch = self.epoch + 1
        return super().__iter__()

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:  # type: ignore[override]
        assert from_beginning
        return {"epoch": self.next_epoch - 1, "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def reader_of(iterable: Any, *, batch: int | None = 4, drop_last: bool = False) -> Reader:
    return Reader(iterable, batch_size=batch, shards=2, seed=1, drop_last=drop_last)


def batches_from(reader: Reader, at: Position, count: int) -> list[Read]:
    found = []
    for _ in range(count):
        found.append(reader.read(at))
        at = found[-1].after
    return found


def samples_of(read: Read) -> list[Any]:
    return [sample for part in read.parts for sample in part]


class Ordered(IterableDataset[int]):
    """In the order of the epoch that it is told, as a loader's dataset often is."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(self.size), self.size))


@pytest.mark.filterwarnings("ignore:.*deprecated")  # torchdata 0.11 asks torch for what is
@pytest.mark.parametrize("stateful", [False, True])
def test_the_dataset_of_a_loader_is_told_the_epoch(stateful: bool) -> None:
    """By a second reader, too, which begins in the middle."""
    kind: Any = DataLoader
    if stateful:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def opened() -> Reader:
        return reader_of(kind(Ordered(12), batch_size=4), batch=None)

    whole = batches_from(opened(), Position(), 9)
    orders = [torch.cat([part for read in whole[at : at + 3] for part in read.parts]).tolist() for at in (0, 3, 6)]
    assert orders == [random.Random(epoch).sample(range(12), 12) for epoch in range(3)]
    again = opened().read(whole[3].after)
    assert [part.tolist() for part in again.parts] == [part.tolist() for part in whole[4].parts]


@pytest.mark.parametrize("kind", [Plain, Counted, Noisy, Sticky, Told])
@pytest.mark.parametrize("size", [10, 12])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_successor_reads_on_as_the_first_reader_would_have(kind: Any, size: int, drop_last: bool) -> None:
    whole = batches_from(reader_of(kind(size), drop_last=drop_last), Position(), 9)
    per_epoch = size // 4 if drop_last else -(-size // 4)
    assert [(read.epoch, read.number) for read in whole] == [divmod(number, per_epoch) for number in range(9)]
    for epoch in range(9 // per_epoch):
        samples = [int(one) for read in whole if read.epoch == epoch for one in samples_of(read)]
        assert len(set(samples)) == len(samples) == (size // 4 * 4 if drop_last else size)
        assert drop_last or sorted(samples) == list(range(size))
    for begin in range(1, 9):
        successor = reader_of(kind(size), drop_last=drop_last)
        assert batches_from(successor, whole[begin - 1].after, 9 - begin) == whole[begin:]


def test_a_position_costs_no_reading() -> None:
    for kind in (Counted, Told):
        state = batches_from(reader_of(kind(100)), Position(), 20)[-1].after
        successor = kind(100)
        reader_of(successor).read(state)
        assert successor.read == 4


def test_a_position_that_asks_for_what_nobody_knows_is_none(recwarn: pytest.WarningsRecorder) -> None:
    class Odd(Counted):
        def state_dict(self, secret: int) -> dict[str, int]:  # type: ignore[override]
            raise AssertionError("nobody can call this")

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError("nobody has a state")

    whole = batches_from(reader_of(Odd(10)), Position(), 3)
    assert batches_from(reader_of(Odd(10)), whole[0].after, 2) == whole[1:]


def test_a_reader_goes_back(recwarn: pytest.WarningsRecorder) -> None:
    for kind in (Plain, Counted, Noisy, Sticky, Told):
        reader = reader_of(kind(10))
        whole = batches_from(reader, Position(), 8)
        assert batches_from(reader, whole[4].after, 3) == whole[5:]
        assert batches_from(reader, Position(), 8) == whole


def test_what_a_plain_iterable_costs_is_told() -> None:
    state = reader_of(Plain(10)).read(Position()).after
    told: list[str] = []
    successor = reader_of(Plain(10))
    successor.warn = told.append
    successor.read(state)
    assert len(told) == 1
    assert "its first 1 batches are dropped" in told[0]


def test_a_live_source_is_read_on_and_what_is_lost_is_told() -> None:
    source = iter(range(100))  # what all workers take from
    first, second = reader_of(Live(source)), reader_of(Live(source))
    told: list[str] = []
    second.warn = told.append
    read = batches_from(first, Position(), 3)[-1]
    assert samples_of(second.read(read.after)) == [12, 13, 14, 15]
    assert "is lost: at most one step's batch" in told[0]


def test_a_generator_gives_its_samples_once() -> None:
    reader = reader_of(iter(range(6)))
    reads = batches_from(reader, Position(), 3)
    assert [samples_of(read) for read in reads] == [[0, 1, 2, 3], [4, 5], []]
    assert reads[-1].epoch == 1
    fresh = reader_of(iter(range(6)))
    assert fresh.read(reads[0].after) == reads[1]


@pytest.mark.parametrize("size", [0, 3])
def test_an_iterable_without_a_batch_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="gives nothing" if not size else "gives 3 samples, fewer than a batch"):
        reader_of(Plain(size), drop_last=True).read(Position())


def test_batches_of_any_size_are_cut_along_their_samples() -> None:
    x, y = torch.arange(10.0).view(5, 2), numpy.arange(5)
    batch = {"x": x, "more": [y, {"text": list("abcde")}], "scale": 2.0}
    assert samples_in(batch) == 5
    assert shares(5, 2) == [[0, 1, 2], [3, 4]]
    part = part_of(batch, [3, 4])
    assert torch.equal(part["x"], x[3:]) and part["more"][0].tolist() == [3, 4]
    assert part["more"][1]["text"] == ["d", "e"] and part["scale"] == 2.0
    assert shares(2, 5) == [[0], [1], [0], [1], [0]]
    reads = batches_from(reader_of([torch.ones(size) for size in (3, 1, 4)], batch=None), Position(), 3)
    assert [read.sizes for read in reads] == [(2, 1), (1, 1), (2, 2)]
    with pytest.raises(ConfigError, match="whose parts have 2 and 3 samples"):
        samples_in([torch.ones(2), torch.ones(3)])
    with pytest.raises(ConfigError, match="a float, in which there are no samples"):
        samples_in(2.0)


def handed(iterable: Any) -> HandedBatches:
    return HandedBatches(reader_of(iterable), Packing(object_bytes, object_from_bytes))


def test_whoever_has_heard_reads_on_and_a_state_is_the_same_everywhere() -> None:
    one, other = handed(Counted(10)), handed(Counted(10))
    one.ensure("w0")
    other.load(one.ensure("w0").message)
    epochs = []
    for step in range(9):
        reader = (one, other)[step % 2]
        text = reader.ahead(f"w{step % 2}")
        assert reader.ahead(f"w{step % 2}") == text
        for each in (one, other):
            each.told(text)
        epochs.append((one.step().epoch, one.ends_epoch))
        assert [one.samples(shard) for shard in (0, 1)] == [other.samples(shard) for shard in (0, 1)]
        for each in (one, other):
            each.applied()
        assert one.step().message == other.step().message
    assert epochs == [(step // 3, step % 3 == 2) for step in range(9)]
    assert one.step().epoch_steps == 3


def test_what_makes_no_sense_is_a_peers_error() -> None:
    message = handed(Plain(10)).ensure("w0").message
    for wrong in (b"", message[:-1], message + b"x", b"\xff" * 50):
        with pytest.raises(ProtocolError):
            parsed(wrong)
    with pytest.raises(ProtocolError):
        handed(Plain(3)).told("no base64")


def test_a_batch_that_is_too_large_is_refused() -> None:
    large = [torch.zeros(BATCH_BYTES_MAX // 8) for _ in range(4)]
    with pytest.raises(ConfigError, match="hands at most 24 MiB"):
        handed(iter(large)).ensure("w0")


def test_what_counts_as_an_iterable() -> None:
    assert is_iterable(Plain(3)) and is_iterable(iter([1])) and is_iterable(Live([1]))
    assert is_iterable(DataLoader(Plain(3))) and not is_iterable(DataLoader([1, 2]))
    assert not any(map(is_iterable, ([1, 2], "abc", {"a": 1}, torch.ones(3), object(), Plain)))
