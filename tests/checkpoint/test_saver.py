"""Savers of several workers with one storage: shares, losses, outages, and a state that changes behind their backs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.format import parts
from holdfast.checkpoint.format.manifest import Manifest, directory_of, manifest_name
from holdfast.checkpoint.restoring.reading import newest_valid, read_snapshot, verify
from holdfast.checkpoint.saving import share
from holdfast.checkpoint.saving.saved import Saved, SaverNews
from holdfast.checkpoint.saving.saver import Doing, Saver
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import ConfigError, StorageUnavailable
from holdfast.state.codec import flatten, pack_tree
from holdfast.state.layout import spec_of
from holdfast.state.snapshot import Snapshot

WAIT_S = 20.0


class Gated:
    """A storage whose writes can be held, or made to fail."""

    def __init__(self, path: Path) -> None:
        self._real = LocalStorage(path)
        self.uri = self._real.uri
        self.writers = 1
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.down = ""
        self.read, self.read_into, self.delete = self._real.read, self._real.read_into, self._real.delete
        self.close = self._real.close

    def _pass(self) -> None:
        self.entered.set()
        assert self.open.wait(WAIT_S)
        if self.down:
            raise StorageUnavailable(self.down)

    def write(self, name: str, data: memoryview) -> None:
        self._pass()
        self._real.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._pass()
        return self._real.create(name, data)

    def list(self, prefix: str = "") -> list[Stored]:
        self._pass()
        return self._real.list(prefix)


class Worker:
    """A saver with its own copy of the state, as a worker has one, and what it was told."""

    def __init__(self, rank: int, count: int, path: Path, mark: int, run_dir: Path | None = None) -> None:
        self.rank, self.count, self.mark = rank, count, mark
        self.before = f"w{(rank - 1) % count}" if run_dir is not None and count > 1 else ""
        self.storage = Gated(path)
        self.saved: list[Saved] = []
        self.troubles: list[str] = []
        self.recoveries: list[float] = []
        self.warnings: list[str] = []
        heard = self.troubles.append, self.recoveries.append, self.warnings.append
        told = SaverNews(lambda saved, manifest: self.saved.append(saved), *heard)
        self.saver = Saver(
            lambda: self.storage, told, run="r", config={"batch_size": 4}, me=f"w{rank}", run_dir=run_dir
        )
        self.state = make_state(0)

    def begin(self, step: int) -> bool:
        snapshot, mark = snapshot_of(self.state, step), self.mark * step
        one = share.Share(snapshot, self.rank, self.count, {"loss": 0.5}, mark=mark, before=self.before)
        return self.saver.begin(one)


def make_state(step: int) -> dict[str, torch.Tensor]:
    return {f"tensor{number}": torch.full((5000,), float(step * 100 + number)) for number in range(9)}


def snapshot_of(state: dict[str, torch.Tensor], step: int) -> Snapshot:
    tree, tensors = flatten(state, sort=True)
    return Snapshot(step, pack_tree(tree), tuple(tensors))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 32 * 1024)  # one tensor in each
    monkeypatch.setattr("holdfast.checkpoint.format.manifest.PART_BYTES", 32 * 1024)


@pytest.fixture(params=["marked", "unmarked", "leaning"])
def crew(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[int], list[Worker]]]:
    made: list[Worker] = []

    def make(count: int) -> list[Worker]:
        mark = len(made) + 1 if request.param != "unmarked" else 0
        run_dir = tmp_path_factory.mktemp("run") if request.param == "leaning" else None
        workers = [Worker(rank, count, tmp_path, mark, run_dir) for rank in range(count)]
        made.extend(workers)
        for worker in workers if run_dir is not None else ():
            worker.saver.prepare(1 << 20, count, leans=True)
            until(lambda worker=worker: worker.saver._buffer.size > 0)  # type: ignore[misc]
        return workers

    yield make
    for worker in made:
        worker.storage.open.set()
        worker.saver.close()


def until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not come to pass")


def whole(path: Path, step: int) -> Snapshot:
    storage = LocalStorage(path)
    assert verify(storage, step) == []
    return read_snapshot(storage, step)[1]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_writes_its_share_and_one_commits(count: int, crew: Callable[[int], list[Worker]], tmp_path: Path) -> None:
    workers = crew(count)
    for step in (10, 20):
        for worker in workers:
            worker.state = make_state(step)
            assert worker.begin(step)
        for worker in workers:
            worker.saver.wait_copied()
            for tensor in worker.state.values():
                tensor.fill_(-1.0)  # the optimizer's next step
        assert all(worker.saver.settle(WAIT_S) for worker in workers)
        assert sum(saved.mine for worker in workers for saved in worker.saved if saved.step == step) == 1
        found = whole(tmp_path, step)
        assert all(torch.equal(a, b) for a, b in zip(found.tensors, make_state(step).values(), strict=True))
    assert all(worker.troubles == [] for worker in workers)


def test_two_hold_each_part_and_no_more(crew: Callable[[int], list[Worker]]) -> None:
    held: dict[int, int] = {}
    for rank in range(4):
        one = share.Share(snapshot_of(make_state(1), 1), rank, 4, {}, 0.0)
        for number in range(9):
            held[number] = held.get(number, 0) + (rank in one.holders(number))
    assert set(held.values()) == {share.COPIES}


def test_a_lost_workers_share_is_written_by_another(crew: Callable[[int], list[Worker]], tmp_path: Path) -> None:
    workers = crew(3)
    for worker in workers[:2]:  # the third dies before it writes anything
        worker.state = make_state(10)
        worker.begin(10)
    for worker in workers[:2]:
        until(lambda worker=worker: worker.saver.doing is Doing.LOOKING)  # type: ignore[misc]
    assert not (tmp_path / manifest_name(10)).exists()
    for worker in workers[:2]:
        worker.saver.nudge()
    until(lambda: (tmp_path / manifest_name(10)).exists())
    whole(tmp_path, 10)


def test_a_place_that_takes_nothing_is_not_called_the_wrong_place(crew: Callable[[int], list[Worker]]) -> None:
    """A part that has not come is missing for the reason that storage gives, and no other is guessed."""
    worker, _ = crew(2)  # the other one cannot write either
    worker.begin(10)
    until(lambda: worker.saver.doing is Doing.LOOKING)
    worker.storage.down = "the disk is full"
    worker.saver._clock = lambda: time.monotonic() + 3600
    worker.saver.nudge()
    until(lambda: bool(worker.troubles))
    until(lambda: worker.begin(20))  # takes the place of the first, which is given up
    until(lambda: worker.saver._save is not None and worker.saver._save.step == 20)
    assert worker.warnings == [] and worker.troubles == ["the disk is full"]


@pytest.fixture
def neighbours(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Two workers of one host, each with room for its own half only."""
    run_dir = tmp_path_factory.mktemp("run")
    workers = [Worker(rank, 2, tmp_path, 7, run_dir) for rank in range(2)]
    for worker in workers:
        worker.saver.prepare(1000, 2, leans=True)
        until(lambda worker=worker: worker.saver._buffer.size > 0)  # type: ignore[misc]
    yield workers
    for worker in workers:
        worker.storage.open.set()
        worker.saver.close()


def test_of_two_on_one_host_each_copies_half_and_can_write_all(neighbours: list[Worker], tmp_path: Path) -> None:
    first, second = neighbours
    second.storage.open.clear()  # it copies, and then never writes
    for worker in neighbours:
        worker.state = make_state(10)
        worker.begin(10)
    for worker in neighbours:
        worker.saver.wait_copied()
        for tensor in worker.state.values():
            tensor.fill_(-1.0)
    save = second.saver._save
    assert save is not None and sorted(save.images) == [part.number for part in save.mine] == [1, 3, 5, 7]
    until(lambda: first.saver.doing is Doing.LOOKING)
    first.saver.nudge()
    until(lambda: (tmp_path / manifest_name(10)).exists())
    found = whole(tmp_path, 10)
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, make_state(10).values(), strict=True))


def test_a_neighbour_that_does_not_copy_is_not_waited_for_twice(neighbours: list[Worker], tmp_path: Path) -> None:
    """It hangs, or has died in the middle: then this worker copies that one's parts before its state may change."""
    first, _ = neighbours
    for step in (10, 20):
        first.state = make_state(step)
        first.begin(step)
        waited_s = first.saver.wait_copied()
        for tensor in first.state.values():
            tensor.fill_(-1.0)
        assert waited_s < share.LEAN_S if step == 20 else waited_s > share.LEAN_S / 2
        until(lambda: first.saver.doing is Doing.LOOKING)
        first.saver.nudge()
        until(lambda step=step: (tmp_path / manifest_name(step)).exists())  # type: ignore[misc]
        found = whole(tmp_path, step)
        assert all(torch.equal(a, b) for a, b in zip(found.tensors, make_state(step).values(), strict=True))


def test_the_state_may_be_read_until_it_is_copied_and_not_after(
    crew: Callable[[int], list[Worker]], tmp_path: Path
) -> None:
    (worker,) = crew(1)
    worker.storage.open.clear()  # storage takes its time
    worker.state = make_state(10)
    worker.begin(10)
    worker.saver.wait_copied()
    for tensor in worker.state.values():
        tensor.zero_()
    assert worker.saver.is_busy and not worker.begin(11), "a newer snapshot took the place of one under way"
    worker.storage.open.set()
    assert worker.saver.settle(WAIT_S)
    assert float(whole(tmp_path, 10).tensors[3][0]) == 1003.0


def test_an_outage_is_told_once_and_the_newest_snapshot_waits(
    crew: Callable[[int], list[Worker]], tmp_path: Path
) -> None:
    (worker,) = crew(1)
    worker.storage.down = "no route to storage"
    worker.state = make_state(10)
    worker.begin(10)
    until(lambda: worker.saver.doing is Doing.STUCK)
    assert not worker.saver.is_busy
    worker.state = make_state(20)
    until(lambda: worker.begin(20))
    until(lambda: worker.saver.doing is Doing.STUCK)
    worker.storage.down = ""
    assert worker.saver.settle(WAIT_S)
    assert worker.troubles == ["no route to storage"] and len(worker.recoveries) == 1
    assert [saved.step for saved in worker.saved] == [20]
    assert not (tmp_path / directory_of(10)).exists() or not (tmp_path / manifest_name(10)).exists()
    whole(tmp_path, 20)


def test_parts_of_another_state_of_the_same_step_are_not_taken_for_ours(
    crew: Callable[[int], list[Worker]], tmp_path: Path
) -> None:
    """A save that a run with another script broke off left parts of the same numbers and sizes, with other digests."""
    (stranger,) = crew(1)
    stranger.state = make_state(99)
    stranger.begin(10)
    assert stranger.saver.settle(WAIT_S)
    (tmp_path / manifest_name(10)).unlink()
    workers = crew(3)
    for worker in workers[:2]:
        worker.state = make_state(10)
        worker.begin(10)
    for worker in workers[:2]:
        until(lambda worker=worker: worker.saver.doing is Doing.LOOKING)  # type: ignore[misc]
    assert not (tmp_path / manifest_name(10)).exists(), "parts of two states were committed as one"
    workers[2].state = make_state(10)
    workers[2].begin(10)
    assert workers[2].saver.settle(WAIT_S)
    assert float(whole(tmp_path, 10).tensors[0][0]) == 1000.0


def test_a_worker_hashes_what_it_writes_and_knows_the_rest_by_the_saves_mark(
    crew: Callable[[int], list[Worker]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed: list[int] = []

    def seal_and_count(part: parts.Part, image: torch.Tensor, mark: int = 0) -> str:
        sealed.append(part.number)
        return parts.seal(part, image, mark)

    monkeypatch.setattr(share, "seal", seal_and_count)
    workers = crew(2)
    for worker in workers:
        worker.state = make_state(10)
        worker.begin(10)
    assert all(worker.saver.settle(WAIT_S) for worker in workers)
    whole(tmp_path, 10)
    assert len(sealed) == (9 if workers[0].mark else 18)


def test_a_part_that_two_call_differently_is_not_there() -> None:
    """Both have the save's mark, so the memory of one of them lies; with one file of a name it is taken on trust."""
    snapshot = snapshot_of(make_state(10), 10)
    one = share.Share(snapshot, 0, 9, {}, 0.0, mark=5)
    specs = tuple(spec_of(tensor) for tensor in snapshot.tensors)
    one.layout = parts.lay_out(parts.tensor_names(snapshot.tree, len(specs)), specs, 10)
    listed = [
        Stored(f"{directory_of(10)}/{parts.file_name(part.number, said, mark)}", part.size - short)
        for part in one.layout
        for said, mark, short in {
            1: [(b"mine", 5, 0), (b"yours", 5, 0)],
            2: [(b"of another save", 6, 0)],
            3: [(b"too short", 5, 1)],
            4: [(b"without a mark", 0, 0)],
            5: [(b"of another save", 6, 0), (b"mine", 5, 0)],
        }.get(part.number, [(b"mine", 5, 0)])
    ]
    assert [part.number for part in one.missing(listed)] == [1, 2, 3, 4]
    assert one.others.keys() == {0, 5, 6, 7, 8}


@pytest.mark.parametrize("there", ["damaged", "of another state"])
def test_a_manifest_that_is_no_good_is_replaced(
    there: str, crew: Callable[[int], list[Worker]], tmp_path: Path
) -> None:
    stranger, worker = crew(1)[0], crew(1)[0]
    stranger.state = make_state(99)
    stranger.begin(10)
    assert stranger.saver.settle(WAIT_S)
    if there == "damaged":
        data = bytearray((tmp_path / manifest_name(10)).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / manifest_name(10)).write_bytes(data)
    worker.state = make_state(10)
    worker.begin(10)
    assert worker.saver.settle(WAIT_S)
    assert float(whole(tmp_path, 10).tensors[0][0]) == 1000.0


@pytest.mark.parametrize("present", [1, 2, 3])
def test_the_last_state_is_written_by_whoever_is_there(
    present: int, crew: Callable[[int], list[Worker]], tmp_path: Path
) -> None:
    workers = crew(3)[:present]
    results: list[bool] = []
    threads = []
    for worker in workers:
        worker.state = make_state(30)
        snapshot = snapshot_of(worker.state, 30)

        def finish(worker: Worker = worker, snapshot: Snapshot = snapshot) -> None:
            results.append(worker.saver.finish(share.Share(snapshot, worker.rank, 3, {}), timeout_s=WAIT_S))

        threads.append(threading.Thread(target=finish))
        threads[-1].start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == [True] * present
    whole(tmp_path, 30)


def test_the_last_state_takes_the_place_of_what_is_under_way(
    crew: Callable[[int], list[Worker]], tmp_path: Path
) -> None:
    (worker,) = crew(1)
    worker.storage.open.clear()
    worker.state = make_state(10)
    worker.begin(10)
    worker.saver.wait_copied()
    assert worker.storage.entered.wait(WAIT_S)
    threading.Timer(0.05, worker.storage.open.set).start()
    worker.state = make_state(11)
    snapshot = snapshot_of(worker.state, 11)
    assert worker.saver.finish(share.Share(snapshot, 0, 1, {}), timeout_s=WAIT_S)
    found = newest_valid(LocalStorage(tmp_path), warn=print)
    assert found is not None and found[0].step == 11


def test_a_notice_that_is_too_short_is_a_no(crew: Callable[[int], list[Worker]]) -> None:
    (worker,) = crew(1)
    worker.storage.down = "no route to storage"
    assert not worker.saver.finish(share.Share(snapshot_of(make_state(1), 1), 0, 1, {}), timeout_s=0.2)


def test_the_manifest_says_whose_it_is(crew: Callable[[int], list[Worker]], tmp_path: Path) -> None:
    (worker,) = crew(1)
    worker.begin(5)
    assert worker.saver.settle(WAIT_S)
    manifest: Manifest = read_snapshot(LocalStorage(tmp_path), 5)[0]
    assert (manifest.run, manifest.config, manifest.metrics) == ("r", {"batch_size": 4}, {"loss": 0.5})


def test_room_is_made_before_it_is_needed(crew: Callable[[int], list[Worker]]) -> None:
    (worker,) = crew(1)
    worker.saver.prepare(1 << 20, 1)
    until(lambda: worker.saver._buffer.size >= 1 << 20)
    held = worker.saver._buffer
    worker.begin(5)
    assert worker.saver.settle(WAIT_S) and worker.saver._buffer is held


def test_a_state_that_changes_while_it_is_copied_is_not_saved(
    crew: Callable[[int], list[Worker]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = crew(1)
    real = share.fill

    def fill(part: parts.Part, image: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        real(part, image, tensors)
        worker.state["tensor3"].add_(1.0)  # the script's own doing, before it asks for shards

    monkeypatch.setattr(share, "fill", fill)
    worker.begin(10)
    until(lambda: bool(worker.warnings))
    assert "changed while it was copied" in worker.warnings[0] and worker.troubles == []
    assert not (tmp_path / manifest_name(10)).exists()


def test_what_fails_while_it_gets_ready_is_told_by_the_save_and_holds_nobody_up() -> None:
    """Storage that cannot be opened for a reason of its own, and a state larger than any memory."""
    tried, warnings = threading.Event(), []

    def broken() -> LocalStorage:
        tried.set()
        raise ConfigError("there is no such client")

    def warn(text: str) -> None:
        warnings.append(text)

    saver = Saver(broken, SaverNews(lambda saved, manifest: None, warn, lambda down_s: None, warn), run="r", config={})
    try:
        saver.prepare(1000, 1)
        assert tried.wait(WAIT_S)
        saver.prepare(1 << 60, 1)
        assert saver.begin(share.Share(snapshot_of(make_state(0), 3), 0, 1, {}))
        saver.wait_copied()
        saver.wait_written(WAIT_S)
        assert warnings == ["there is no such client"]
    finally:
        saver.close()
