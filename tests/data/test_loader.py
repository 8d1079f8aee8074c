"""The loader: the same bits from wherever, in any order, whatever happens to its processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from holdfast.core.errors import ConfigError
from holdfast.data.loader import ShardLoader
from holdfast.data.shards import ShardPlan

PLAN = ShardPlan(64, 16, 4, seed=11)


class Augmented(Dataset):
    """Uses every generator there is, and says which process it ran in."""

    def __len__(self) -> int:
        return PLAN.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "python": random.random(),
            "numpy": numpy.random.rand(3),
            "torch": torch.randn(4) + index,
            "here": float(get_worker_info() is None),
        }


class Moody(Augmented):
    """Fails as told by files in a folder: sample numbers that raise, and a number of times to die."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, Any]:
        if (self.folder / f"raise-{index}").exists():
            raise KeyError(f"sample {index} is broken")
        for ticket in sorted(self.folder.glob("die-*")):
            if get_worker_info() is not None:
                ticket.unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def places(steps: range, shards: list[int]) -> Iterator[tuple[int, int]]:
    return ((step, shard) for step in steps for shard in shards)


def bits(batch: dict[str, Any]) -> list[bytes]:
    return [bytes(batch[key].numpy().tobytes()) for key in ("index", "python", "numpy", "torch")]


def inline(place: tuple[int, int], dataset: Dataset | None = None) -> list[bytes]:
    return bits(ShardLoader(dataset or Augmented(), PLAN).get(*place))


def loader_pids(loader: ShardLoader) -> list[int]:
    return [process.pid for process in loader._batches._workers]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def eventually(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_give_the_bits_of_the_worker_itself(workers: int) -> None:
    with ShardLoader(Augmented(), PLAN, num_workers=workers) as loader:
        loader.expect(places(range(6), [1, 2]))
        torch.manual_seed(0)
        for place in places(range(6), [1, 2]):
            batch = loader.get(*place)
            assert not batch["here"].any()
            assert bits(batch) == inline(place)
        pids = loader_pids(loader)
    assert eventually(lambda: all(map(is_gone, pids)))


def test_a_change_of_assignment_costs_no_bits() -> None:
    with ShardLoader(Augmented(), PLAN, num_workers=2) as loader:
        loader.expect(places(range(100), [0, 1]))
        asked = [(0, 0), (0, 1), (1, 0)]
        # A member dies: its shards come to me, out of order, and I have three from then on.
        change = [(1, 3), (1, 1), (1, 2)]
        for place in asked + change:
            assert bits(loader.get(*place)) == inline(place)
        loader.expect(places(range(2, 100), [2, 3, 1]))
        here = []
        for place in places(range(2, 9), [2, 3, 1]):
            batch = loader.get(*place)
            assert bits(batch) == inline(place)
            here.append(bool(batch["here"].any()))
        # What was under way for the old assignment is used or dropped, and then prefetching is back.
        assert not any(here[-6:])
        assert len(loader._queue.ready) <= 2
        # A jump ahead, as after a rejoin; then the same place twice, then backwards.
        for place in [(50, 0), (50, 0), (49, 3)]:
            assert bits(loader.get(*place)) == inline(place)


def test_expectations_that_end_can_be_renewed_without_new_processes() -> None:
    with ShardLoader(Augmented(), PLAN, num_workers=2, prefetch_factor=1) as loader:
        pids = None
        for step in range(4):
            loader.expect(places(range(step, step + 1), [0, 1, 2]))
            for shard in (0, 1, 2):
                batch = loader.get(step, shard)
                assert not batch["here"].any() and bits(batch) == inline((step, shard))
            pids = pids or loader_pids(loader)
            assert loader_pids(loader) == pids
        assert bits(loader.get(9, 0)) == inline((9, 0))


def test_a_killed_loader_process_is_replaced() -> None:
    with ShardLoader(Augmented(), PLAN, num_workers=2) as loader:
        loader.expect(places(range(100), [0, 1]))
        loader.get(0, 0)
        for step, victim in ((0, 0), (3, 1)):
            os.kill(loader_pids(loader)[victim], signal.SIGKILL)
            time.sleep(0.05)  # torch's alarm would go off here
            torch.ones(3).sum()
            began = time.monotonic()
            for place in places(range(step + 1, step + 3), [0, 1]):
                batch = loader.get(*place)
                assert bits(batch) == inline(place)
            assert time.monotonic() - began < 4
        assert not batch["here"].any()


def test_a_loader_process_that_dies_over_a_batch_is_replaced_a_few_times(tmp_path: Path) -> None:
    dataset = Moody(tmp_path)
    for number in range(2):
        (tmp_path / f"die-{number}").touch()
    with ShardLoader(dataset, PLAN, num_workers=1, prefetch_factor=1) as loader:
        loader.expect(places(range(100), [0]))
        began = time.monotonic()
        assert bits(loader.get(0, 0)) == inline((0, 0))
        assert time.monotonic() - began < 4
        assert not list(tmp_path.iterdir())
        for number in range(50):
            (tmp_path / f"die-{number}").touch()
        with pytest.raises(ConfigError, match="loader processes died 4 times in a row"):
            for step in range(1, 10):
                loader.get(step, 0)


class Slow(Augmented):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if get_worker_info() is not None:
            time.sleep(0.1)
        return super().__getitem__(index)


def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ShardLoader(Slow(), PLAN, num_workers=1) as loader:
            loader.expect(places(range(100), [0]))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                loader.get(0, 0)
            for step in (0, 1):
                batch = loader.get(step, 0)
                assert bits(batch) == inline((step, 0)) and not batch["here"].any()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_exception_of_the_dataset_is_raised_with_its_traceback(tmp_path: Path) -> None:
    dataset = Moody(tmp_path)
    broken = PLAN.indices(1, 0)[2]
    (tmp_path / f"raise-{broken}").touch()
    with ShardLoader(dataset, PLAN, num_workers=2) as loader:
        loader.expect(places(range(10), [0]))
        loader.get(0, 0)
        with pytest.raises(KeyError, match=f"sample {broken} is broken") as caught:
            loader.get(1, 0)
        assert "__getitem__" in str(caught.value)
        assert bits(loader.get(2, 0)) == inline((2, 0))
    with pytest.raises(KeyError, match=f"sample {broken} is broken"):
        ShardLoader(dataset, PLAN).get(1, 0)


def test_loader_processes_end_with_a_killed_worker() -> None:
    script = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_loader import *\n"
        "loader = ShardLoader(Augmented(), PLAN, num_workers=2)\n"
        "loader.expect(places(range(100), [0, 1])); loader.get(0, 0)\n"
        "print(*loader_pids(loader), flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pids = [int(word) for word in worker.stdout.readline().split()]
        worker.kill()
        assert len(pids) == 2
        assert eventually(lambda: all(map(is_gone, pids)), seconds=2)


def test_loader_processes_hold_no_copies_of_the_workers_connections() -> None:
    mine, peers = socket.socketpair()
    with peers, ShardLoader(Augmented(), PLAN, num_workers=1) as loader:
        loader.expect(places(range(100), [0]))
        loader.get(0, 0)
        mine.close()
        peers.settimeout(2)
        assert peers.recv(1) == b""


class Batched:
    """Has __getitems__, as Hugging Face's datasets do."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * 2 for index in indices]


def test_batched_access_and_collate_functions_are_used() -> None:
    loader = ShardLoader(Batched(), PLAN, collate_fn=tuple)
    assert loader.get(3, 1) == tuple(index * 2 for index in PLAN.indices(3, 1))
    with ShardLoader(Batched(), PLAN, collate_fn=tuple, num_workers=1) as prefetching:
        prefetching.expect(places(range(9), [1]))
        assert prefetching.get(3, 1) == loader.get(3, 1)


def test_fetching_here_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        seen = []
        loader = ShardLoader(Batched(), PLAN, collate_fn=lambda samples: seen.append(torch.get_num_threads()))
        loader.get(0, 0)
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NoLength(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "sentence"),
    [
        (Stream(), {}, "Stream is an IterableDataset"),
        (NoLength(), {}, "NoLength has no __len__"),
        (iter([1]), {}, "has no __getitem__"),
        (TensorDataset(torch.zeros(3)), {}, "the dataset has 3 samples and the plan is for 64"),
        (Batched(), {"num_workers": -1}, "num_workers is -1"),
        (Batched(), {"num_workers": 1.0}, "num_workers is 1.0"),
        (Batched(), {"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
        (Batched(), {"prefetch_factor": 4}, "prefetch_factor is 4, and num_workers is 0: nobody fetches ahead"),
        (Batched(), {"num_workers": 1, "worker_init_fn": 3}, "worker_init_fn is an int, not a function"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(dataset: Any, options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        ShardLoader(dataset, PLAN, **options)
    assert caught.value.hint
