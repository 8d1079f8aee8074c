"""Fetching one shard's samples, the same in the worker and in its loader processes, and the latter's first breath.

Invariant: what `ShardFetcher.fetch` returns is a function of (seed, step, shard, dataset): the generators are seeded
before it, and it runs on one compute thread, as torch makes it in loader processes anyway.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from holdfast.data.by_value import SMALL_BYTES, packed
from holdfast.data.seeding import derive_seed, seed_everything
from holdfast.data.shards import ShardPlace
from holdfast.data.stuck_loaders import LoaderStacks

_Failure: Any = ExceptionWrapper  # torch's, which keeps the traceback as text; not typed there
_PR_SET_PDEATHSIG = 1
_WHOLE_TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLAIN_TYPES = frozenset((*_WHOLE_TYPES, torch.float16, torch.bfloat16, torch.float32, torch.float64))


@dataclass(frozen=True)
class ShardFetcher:
    """Stands in for the dataset in a DataLoader whose sampler yields (step, shard, indices)."""

    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None

    def fetch(self, step: int, shard: int, indices: list[int]) -> Any:
        """The batch of one shard. Leaves the process's generators in whatever state the dataset left them."""
        threads = torch.get_num_threads()
        if threads != 1:
            torch.set_num_threads(1)
        try:
            seed_everything(derive_seed(self.seed, step, shard, "fetch"))
            if self.collate_fn is None and (batch := rows_at_once(self.dataset, indices)) is not None:
                return batch
            if getattr(self.dataset, "__getitems__", None):
                samples = self.dataset.__getitems__(indices)
            else:
                samples = [self.dataset[index] for index in indices]
            return (self.collate_fn or _default_batch)(samples)
        finally:
            if threads != 1:
                torch.set_num_threads(threads)

    def __getitem__(self, item: tuple[int, int, list[int]]) -> tuple[ShardPlace, Any]:
        step, shard, indices = item
        try:
            return (step, shard), packed(self.fetch(step, shard, indices))
        except Exception:
            # As a value: what the loader itself raises is then always about its processes.
            info = get_worker_info()
            return (step, shard), _Failure(where=f"in loader process {info.id if info else 0}")

    def __len__(self) -> int:
        return len(self.dataset)


def _default_batch(samples: list[Any]) -> Any:
    """What default_collate makes. In a loader process it makes shared memory for each tensor, for which a small one,
    that is handed over by value, has no use: four fifths of the time."""
    if get_worker_info() is None or default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return default_collate(samples)
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: _stacked})


def _stacked(tensors: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    first = tensors[0]
    if type(first) is torch.Tensor and _is_plain(first):
        size = first.nelement() * first.element_size() * len(tensors)
        if size <= SMALL_BYTES and not any(tensor.requires_grad for tensor in tensors):
            return torch.stack(tensors, 0)
    found: torch.Tensor = collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
    return found


def rows_at_once(dataset: Any, indices: list[int]) -> list[torch.Tensor] | None:
    """What torch's default_collate makes of a TensorDataset's samples, without making them first: a third of the time.

    None where it is not certain to be the same: another dataset, unusual tensors or indices; and in a loader process,
    where default_collate writes into shared memory at once.
    """
    if type(dataset) is not TensorDataset or not indices or get_worker_info() is not None:
        return None
    tensors = dataset.tensors
    if not all(_is_plain(tensor) for tensor in tensors) or not {type(index) for index in indices} <= {int}:
        return None
    if min(indices) < 0 or max(indices) >= len(dataset):
        return None  # counted from the end, or an error that the dataset words itself
    rows = torch.tensor(indices)
    return [tensor.index_select(0, rows) for tensor in tensors]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.is_contiguous()
    )


@dataclass(frozen=True)
class LoaderStart:
    """The first thing that a loader process does. `parent` is set if the process may die with its parent's thread."""

    parent: int | None
    worker_init_fn: Callable[[int], None] | None
    stacks: LoaderStacks | None = None  # if the process is forked: it says there where it stands, when asked

    def __call__(self, number: int) -> None:
        if self.stacks is not None:
            self.stacks.listen()
        # Ctrl-C reaches the whole terminal; the worker finishes its step first and still needs its samples.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_go_of_sockets()
        if self.parent is not None:
            die_with_parent(self.parent)
        show_dataset()
        if self.worker_init_fn is not None:
            self.worker_init_fn(number)


def show_dataset() -> None:
    """Lets torch's get_worker_info say the script's own dataset, which worker_init_fn and the dataset may ask for."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, ShardFetcher):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the info is frozen


def let_go_of_sockets() -> None:
    """Releases the sockets that a fork copied.

    A connection ends for the peer only when every copy is closed: with a copy in here, peers would see a dead or
    departing worker seconds late. The numbers stay taken (by /dev/null), so that a Python object which still
    believes in its socket closes nothing else.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for entry in Path("/proc/self/fd").iterdir():
            number = int(entry.name)
            try:
                if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.dup2(nothing, number, inheritable=False)
            except OSError:
                pass  # the directory's own descriptor, closed again
    except FileNotFoundError:
        pass  # no /proc: not Linux
    finally:
        os.close(nothing)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that forked it ends; torch's own watch takes seconds."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):
        return  # not Linux: torch's own watch it is
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel knew
