"""A shard against a dict, its replicas against each other, compiled against plain; changes that restore it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.native import compiling
from holdfast.native.choosing import VARIABLE
from holdfast.tables import cold as cold_rows
from holdfast.tables.cold import ColdRows
from holdfast.tables.rows import native
from holdfast.tables.rows.choosing import kernels
from holdfast.tables.rows.plain import PlainKernels
from holdfast.tables.settings import SGD, Adagrad, Adam, AdamW, Expire, Normal, RowwiseAdagrad, TableSettings, Uniform
from holdfast.tables.shard import TableShard
from tests.tables.reference import DictTable

needs_compiler = pytest.mark.skipif(not native.available(), reason="no C compiler")
OPTIMIZERS = (
    SGD(weight_decay=0.1),
    Adagrad(lr=0.1),
    RowwiseAdagrad(),
    Adam(weight_decay=0.01),
    AdamW(betas=(0.5, 0.9)),
)
TORCH: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
IDS = (*range(6), 2**63, 2**64 - 1, 2**64 - 2, 0x5DEECE66D)

tables = st.builds(
    TableSettings,
    dim=st.sampled_from([1, 3, 16, 19]),
    optimizer=st.sampled_from(OPTIMIZERS),
    first=st.sampled_from([Uniform(0.1), Normal(0.1), Uniform(0.0)]),
    admit=st.integers(1, 3),
    expire=st.builds(Expire, updates=st.sampled_from([None, 1, 5, 40]), rows=st.sampled_from([None, 1, 4, 8])),
    seed=st.integers(0, 3),
    candidates_max=st.sampled_from([2, 5, 100]),
)
histories = st.lists(st.lists(st.sampled_from(IDS), max_size=8), min_size=1, max_size=12)


@dataclass
class History:
    """Updates from a seed: ids, gradients and learning rates."""

    batches: list[list[int]]
    dim: int

    def __iter__(self) -> Any:
        draws = np.random.default_rng(len(self.batches))
        for number, ids in enumerate(self.batches):
            gradients = draws.standard_normal((len(ids), self.dim)).astype(np.float32)
            yield ids, gradients, 0.1 / (1 + number), 700 * number


def play(shard: TableShard, history: History) -> TableShard:
    for ids, gradients, lr, time in history:
        shard.update(np.array(ids, dtype=np.uint64), gradients, lr=lr, time=time)
    return shard


@settings(max_examples=60)
@given(table=tables, batches=histories)
def test_a_shard_is_what_a_dict_of_rows_is(table: TableSettings, batches: list[list[int]]) -> None:
    history, shard, reference = History(batches, table.dim), TableShard(table), DictTable(table)
    for ids, gradients, lr, time in history:
        shard.update(np.array(ids, dtype=np.uint64), gradients, lr=lr, time=time)
        reference.update(ids, gradients, lr)
        assert len(shard) == len(reference.rows) and shard.candidates == len(reference.seen)
        expected = np.array([reference.look_up(one) for one in IDS], dtype=np.float32)
        assert shard.look_up(np.array(IDS, dtype=np.uint64)).tobytes() == expected.tobytes()


@needs_compiler
@settings(max_examples=60)
@given(table=tables, batches=histories, seconds=st.sampled_from([None, 1.0, 3.0]))
def test_compiled_and_plain_rows_and_rows_on_disk_agree_to_the_bit(
    table: TableSettings, batches: list[list[int]], seconds: float | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    table = replace(table, expire=replace(table.expire, seconds=seconds))
    history = History(batches, table.dim)
    compiled, with_disk = TableShard(table), TableShard(table)
    plain = TableShard(table)
    plain.kernels = PlainKernels()
    plain._rows = plain.kernels.rows(table)
    with patch.object(cold_rows, "MOVED_PART", 1):  # so few in memory that most are on the disk
        with_disk.cold = ColdRows(tmp_path_factory.mktemp("cold"), 2)
        digests = {play(shard, history).digest() for shard in (compiled, with_disk, plain)}
    assert len(digests) == 1
    looked_up = {shard.look_up(np.array(IDS * 2, dtype=np.uint64)).tobytes() for shard in (compiled, with_disk, plain)}
    assert len(looked_up) == 1
    with_disk.cold.close()


@settings(max_examples=60)
@given(table=tables, batches=histories, data=st.data(), seconds=st.sampled_from([None, 2.0]))
def test_changes_bring_a_shard_from_anywhere_to_the_same_bits(
    table: TableSettings, batches: list[list[int]], data: st.DataObject, seconds: float | None
) -> None:
    """Whatever was cut out when: each piece begins at or before the end of the last one, and may come twice."""
    table = replace(table, expire=replace(table.expire, seconds=seconds))
    shard, follower = TableShard(table), TableShard(table)
    for ids, gradients, lr, time in History(batches, table.dim):
        shard.update(np.array(ids, dtype=np.uint64), gradients, lr=lr, time=time)
        if data.draw(st.booleans()):
            changes = shard.changes(data.draw(st.integers(0, follower.updates)))
            follower.apply_changes(changes)
            assert follower.digest() == shard.digest()
            follower.apply_changes(changes)
            assert follower.digest() == shard.digest()
    again = TableShard(table)
    whole = shard.changes()
    again.apply_changes(whole)
    assert again.digest() == shard.digest()
    found, expected = ([one.records, *one.candidates] for one in (again.changes(), whole))
    same = [one.tobytes() == other.tobytes() for one, other in zip(found, expected, strict=True)]
    assert all(same), "what is captured after a restore is what was restored"


@needs_compiler
def test_plain_rows_grow_as_compiled_ones_do() -> None:
    table = TableSettings(dim=3, optimizer=Adam(), admit=2, expire=Expire(rows=150))
    draws = np.random.default_rng(1)
    history = History([draws.integers(0, 400, 100).tolist() for _ in range(12)], 3)
    shards = [TableShard(table) for _ in range(4)]
    for shard in shards[2:]:
        shard.kernels = PlainKernels()
        shard._rows = shard.kernels.rows(table)
    for shard in shards[::2]:
        play(shard, history)
    for shard, source in ((shards[1], shards[2]), (shards[3], shards[0])):
        shard.apply_changes(source.changes())
    assert len({shard.digest() for shard in shards}) == 1 and len(shards[0]) > 100


def test_changes_that_do_not_follow_are_named() -> None:
    table = TableSettings(dim=2)
    shard = play(TableShard(table), History([[1], [2], [3]], 2))
    with pytest.raises(ProtocolError, match="from update 2 to 3, and the shard is at 0"):
        TableShard(table).apply_changes(shard.changes(2))
    with pytest.raises(ProtocolError, match="rows of another size"):
        TableShard(TableSettings(dim=3)).apply_changes(shard.changes())


@pytest.mark.parametrize("optimizer", [one for one in OPTIMIZERS if one.kind in TORCH], ids=lambda one: one.kind)
def test_a_row_is_trained_as_torch_trains_a_parameter(optimizer: Any) -> None:
    """Each row as a parameter of its own, which steps when it has a gradient."""
    table = TableSettings(dim=8, optimizer=optimizer, first=Normal(1.0), seed=5)
    shard, draws = TableShard(table), np.random.default_rng(0)
    ids = np.arange(5, dtype=np.uint64)
    parameters = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in shard.look_up(ids)]
    steppers = [TORCH[optimizer.kind]([one], **vars(optimizer)) for one in parameters]
    for _ in range(20):
        some = draws.choice(5, size=2, replace=False)
        gradients = draws.standard_normal((2, 8)).astype(np.float32)
        shard.update(some.astype(np.uint64), gradients, lr=optimizer.lr)
        for row, gradient in zip(some, gradients, strict=True):
            parameters[row].grad = torch.from_numpy(gradient)
            steppers[row].step()
    expected = torch.stack([one.detach() for one in parameters])
    assert torch.allclose(torch.from_numpy(shard.look_up(ids)), expected, rtol=1e-5, atol=1e-6)


def test_first_values_are_spread_as_they_say() -> None:
    ids = np.arange(4000, dtype=np.uint64)
    uniform = TableShard(TableSettings(dim=16, first=Uniform(0.5), seed=1)).look_up(ids)
    assert abs(uniform.mean()) < 0.01 and abs(uniform.std() - 0.5 / 3**0.5) < 0.01 and np.abs(uniform).max() <= 0.5
    normal = TableShard(TableSettings(dim=16, first=Normal(2.0), seed=1)).look_up(ids)
    assert abs(normal.mean()) < 0.05 and abs(normal.std() - 2.0) < 0.05
    assert len({row.tobytes() for row in normal}) == len(ids)
    other = TableShard(TableSettings(dim=16, first=Normal(2.0), seed=2)).look_up(ids)
    assert not (other == normal).any(axis=1).any()


def test_many_rows_grow_and_go_and_take_the_memory_that_is_stated() -> None:
    table = TableSettings(dim=4, optimizer=SGD(lr=1.0), first=Uniform(0.0), expire=Expire(rows=40_000))
    shard, draws = TableShard(table), np.random.default_rng(3)
    newest: dict[int, int] = {}
    for update in range(1, 31):
        ids = draws.integers(0, 2**64, 5_000, dtype=np.uint64)
        shard.update(ids, np.full((len(ids), 4), -float(update), dtype=np.float32), lr=1.0)
        newest |= dict.fromkeys(ids.tolist(), update)
    assert 37_500 <= len(shard) <= 40_000
    kept = shard.changes().records[:, 0:2].copy().view(np.uint64).reshape(-1)
    values = shard.look_up(kept)
    assert all(values[at, 0] == newest[one] for at, one in enumerate(kept.tolist()))
    oldest = min(newest[one] for one in kept.tolist())
    assert oldest > 20, "the oldest went first"
    if native.available():
        assert shard.memory_bytes <= len(shard) * (16 + 4 * 4 + 20) + (1 << 20)


def test_a_cold_row_is_read_where_it_lies_and_comes_back_when_it_is_updated(tmp_path: Path) -> None:
    table = TableSettings(dim=4, optimizer=Adagrad(lr=0.5))
    shard, other = TableShard(table, ColdRows(tmp_path, 64)), TableShard(table)
    history = History([list(range(start, start + 40)) for start in range(0, 400, 20)], 4)
    assert play(shard, history).digest() == play(other, history).digest()
    assert shard.cold is not None
    was = len(shard.cold)
    assert was > 300 and len(shard) == len(other)
    everything = np.arange(500, dtype=np.uint64)
    assert shard.look_up(everything).tobytes() == other.look_up(everything).tobytes()
    assert len(shard.cold) == was, "a look-up moves nothing"
    assert shard.changes(5).records.shape == other.changes(5).records.shape
    shard.cold.close()
    assert not list(tmp_path.iterdir()), "the file goes with its shard"


def test_a_disk_without_room_is_left_alone_and_rows_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableSettings(dim=4)
    shard, free = TableShard(table, ColdRows(tmp_path, 64)), [0]
    monkeypatch.setattr(cold_rows.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    play(shard, History([list(range(start, start + 40)) for start in range(0, 400, 20)], 4))
    assert shard.cold is not None and len(shard) == 420 and not len(shard.cold)
    free[0] = 1 << 30
    play(shard, History([[1]], 4))
    assert len(shard.cold) >= 420 - 64, "there is room again"


def test_an_update_moves_few_rows_however_many_have_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shard has begun, and each has half the room: nobody waits for thousands of rows to go to the disk."""
    monkeypatch.setattr(cold_rows, "MOVED_ROWS_MAX", 50)
    monkeypatch.setattr(cold_rows, "LOOKED_AT_MAX", 300)
    shards, moved = [1], list[int]()
    tier = ColdRows(tmp_path, 8_000, shared_by=lambda: shards[0])
    write = tier._write
    monkeypatch.setattr(tier, "_write", lambda records: (moved.append(len(records)), write(records)))
    shard = TableShard(TableSettings(dim=4), tier)
    batches = [list(range(start, start + 10)) for start in range(0, 7_000, 10)]
    play(shard, History(batches, 4))
    assert not moved
    shards[0] = 2
    for start in range(7_000, 9_000, 10):
        before = sum(moved)
        play(shard, History([list(range(start, start + 10))], 4))
        assert sum(moved) - before <= 50
    assert len(shard) - len(tier) <= 4_000, "it comes to what it may have"
    on_disk = tier.marks.all()[0]
    assert on_disk.max() < 7_000, "those that were used longest ago"
    tier.close()


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = ColdRows(tmp_path, 8)
    tier._rows.execute("PRAGMA max_page_count=3")
    shard = TableShard(TableSettings(dim=64), tier)
    with pytest.raises(cold_rows.StorageUnavailable, match="rows that are used least, failed"):
        play(shard, History([list(range(200))], 64))
    tier.close()
    with pytest.raises(ConfigError, match="cannot hold the rows"):
        ColdRows(Path("/proc/nothing"), 8)


def test_without_a_compiler_numpy_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, setting in ((VARIABLE, "torch"), ("CC", "no-such-compiler")):
        with monkeypatch.context() as changed:
            changed.setenv(name, setting)
            compiling.library.cache_clear()
            native.functions.cache_clear()
            assert isinstance(kernels(), PlainKernels)
    for cached in (compiling.library, native.functions):
        cached.cache_clear()
    monkeypatch.setenv(VARIABLE, "quick")
    with pytest.raises(ConfigError, match="neither native nor torch"):
        kernels()


@pytest.mark.parametrize(
    "wrong",
    [
        {"dim": 0},
        {"dim": 2, "admit": 0},
        {"dim": 2, "optimizer": torch.optim.SGD},
        {"dim": 2, "optimizer": SGD(lr=float("nan"))},
        {"dim": 2, "optimizer": Adam(betas=(0.9, 1.0))},
        {"dim": 2, "expire": Expire(updates=0)},
        {"dim": 2, "expire": Expire(rows=1.5)},  # type: ignore[arg-type]
        {"dim": 2, "expire": "never"},
        {"dim": 2, "first": Uniform(-1.0)},
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_told_with_what_can(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        TableSettings(**wrong).validate()
    assert caught.value.hint


@given(table=tables)
def test_settings_travel_as_plain_values(table: TableSettings) -> None:
    assert TableSettings.decode(table.encode()) == table
    for name in table.encode():
        with pytest.raises(ProtocolError):
            TableSettings.decode({**table.encode(), name: "garbage"})
