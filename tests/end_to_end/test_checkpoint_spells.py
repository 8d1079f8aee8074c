"""What a worker's saver says of a storage in trouble, and what it does with answers that are lost. No processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from holdfast.checkpoint.format import parts
from holdfast.checkpoint.format.manifest import Manifest, directory_of
from holdfast.checkpoint.format.owner import Owner
from holdfast.checkpoint.restoring.reading import read_manifest, verify
from holdfast.checkpoint.saving.saved import Saved, SaverNews
from holdfast.checkpoint.saving.saver import Saver
from holdfast.checkpoint.saving.share import Share
from holdfast.core.errors import StorageUnavailable
from holdfast.engine.transfer.claiming import Claim
from holdfast.state.codec import flatten, pack_tree
from holdfast.state.snapshot import Snapshot
from tests.harness.memory_storage import MemoryStorage

WAIT_S = 20.0


class One:
    """One worker's saver, and what it has told."""

    def __init__(self, storage: MemoryStorage, rank: int, count: int, run: str = "r") -> None:
        self.rank, self.count = rank, count
        self.saved: list[Saved] = []
        self.said: list[str] = []
        told = SaverNews(
            self._saved,
            lambda reason: self.said.append("down"),
            lambda down_s: self.said.append("up"),
            committing=Claim(Owner(run=run, id=run)).check,  # as in a run
        )
        self.saver = Saver(lambda: storage, told, run=run, config={})

    def _saved(self, saved: Saved, manifest: Manifest) -> None:
        self.saved.append(saved)

    def begin(self, step: int) -> bool:
        return self.saver.begin(Share(state_at(step), self.rank, self.count, {}))


def state_at(step: int) -> Snapshot:
    state = {f"t{number}": torch.full((3000,), float(step + number)) for number in range(4)}
    tree, tensors = flatten(state, sort=True)
    return Snapshot(step, pack_tree(tree), tuple(tensors))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


def test_one_word_for_each_spell_of_a_full_disk() -> None:
    """It can be listed all the while, names change with every step, and some workers have nothing to write first."""
    storage = MemoryStorage()
    workers = [One(storage, rank, 3) for rank in range(3)]  # one part: the second only steps in, the third never writes
    storage.fail_with(StorageUnavailable("the disk is full"), calls={"write", "create"})
    for step in (10, 20, 30):
        for worker in workers:
            until(lambda worker=worker, step=step: worker.begin(step))  # type: ignore[misc]
        for worker in workers[:2]:
            worker.saver.nudge()
        until(lambda: workers[0].said == ["down"])
        until(lambda: workers[1].said == ["down"])
    storage.fail_with(None)
    assert all(worker.saver.settle(WAIT_S) for worker in workers)
    assert [worker.said for worker in workers] == [["down", "up"], ["down", "up"], []]
    assert verify(storage, 30) == []


class Forgetful(MemoryStorage):
    """Creates, and then the answer is lost."""

    losses = 1

    def create(self, name: str, data: bytes) -> bool:
        created = super().create(name, data)
        if created and self.losses:
            self.losses -= 1
            raise StorageUnavailable("no answer")
        return created


@pytest.mark.parametrize("last", [False, True])
def test_who_has_committed_knows_it_though_the_answer_is_lost(last: bool) -> None:
    """Else nobody would record the checkpoint, nor clear away those before it."""
    worker = One(Forgetful(), 0, 1)
    if last:
        assert worker.saver.finish(Share(state_at(5), 0, 1, {}), timeout_s=WAIT_S)
    else:
        worker.begin(5)
        assert worker.saver.settle(WAIT_S)
    assert [saved.mine for saved in worker.saved] == [True]


def test_a_damaged_part_of_the_same_step_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that went on from an older checkpoint is asked to leave at the very step whose checkpoint is damaged."""
    monkeypatch.setattr(parts, "PART_BYTES", 16 * 1024)
    storage = MemoryStorage()
    worker = One(storage, 0, 1)
    worker.begin(7)
    assert worker.saver.settle(WAIT_S)
    name = next(stored.name for stored in storage.list(directory_of(7)) if "part-0001" in stored.name)
    data = bytearray(storage.read(name, 1 << 20))
    data[-1] ^= 1
    storage.write(name, memoryview(data))
    assert "part-0001" in verify(storage, 7)[0]

    again = One(storage, 0, 1)
    again.saver.distrusted = frozenset({7})
    assert again.saver.finish(Share(state_at(7), 0, 1, {}), timeout_s=WAIT_S)
    assert verify(storage, 7) == []


def test_two_runs_in_one_place_do_not_overwrite_each_other() -> None:
    """Each that was started there alone would have been told at its start."""
    storage = MemoryStorage()
    one, other = One(storage, 0, 1, run="one"), One(storage, 0, 1, run="other")
    one.begin(5)
    assert one.saver.settle(WAIT_S)
    before = storage.list()
    other.begin(5)
    until(lambda: other.said == ["down"])
    assert not other.saved
    assert read_manifest(storage, 5).run == "one"
    assert storage.list() == before
