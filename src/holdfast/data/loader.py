"""Batches of shards, in the order in which this worker will want them, prefetched by loader processes if asked for.

The caller says what it expects to need (`expect`) and takes what it needs (`get`); being wrong costs time, never
bits: what was not prefetched is fetched by the worker itself, and what is no longer wanted is dropped.

A ShardLoader belongs to one thread, preferably the main one: only there are dead loader processes noticed at once,
and do loader processes die with the worker at once. It owns its loader processes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.alignment import align_batch, pin_batch
from holdfast.data.by_value import Packed
from holdfast.data.fetching import LoaderStart, ShardFetcher
from holdfast.data.shards import ShardPlace, ShardPlan
from holdfast.data.stuck_loaders import PATIENCE_S, LoaderStacks

_RESTARTS_MAX = 3  # in a row, without a batch in between


class BatchLoader(Protocol):
    """What a step engine has of a loader."""

    def expect(self, upcoming: Iterable[ShardPlace]) -> None: ...

    def get(self, step: int, shard: int) -> Any: ...

    def get_here(self, step: int, shard: int, change: Callable[[Any], Any] = ...) -> Any: ...

    def close(self) -> None: ...


class ShardLoader:
    """`get(step, shard)` returns that shard's batch, the same bits however it was fetched.

    The process's generators are left in an undefined state: seed them again before the forward pass.
    """

    def __init__(
        self,
        dataset: Any,
        plan: ShardPlan,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | None = None,
        pinned: bool = False,
    ) -> None:
        """`pinned`: batches are for a device, and are handed out in memory from which it can copy by itself."""
        _check_dataset(dataset, plan)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(
                f"collate_fn is {a_kind(collate_fn)}, not a function", hint="give a function from samples to a batch"
            )
        _check_processes(num_workers, prefetch_factor, worker_init_fn)
        self._plan = plan.validate()
        self._fetcher = ShardFetcher(dataset if plan.arrangement is None else plan.arrangement, plan.seed, collate_fn)
        self._put = pin_batch if pinned else align_batch
        self._workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._worker_init_fn = worker_init_fn
        self._context = multiprocessing_context
        self._queue = _Queue(plan)
        self._loader: DataLoader[Any] | None = None
        self._batches: Any = None  # the DataLoader's iterator, while there are loader processes
        self._restarts = 0
        self._stacks = LoaderStacks() if multiprocessing_context in (None, "fork") and num_workers else None

    def expect(self, upcoming: Iterable[ShardPlace]) -> None:
        """From now on, prefetch in this order: (step, shard) after (step, shard), read lazily, endless or not."""
        self._queue.follow(iter(upcoming))

    def get(self, step: int, shard: int) -> Any:
        """The batch, in the same place of a cache line however it came. A dataset's exception keeps its traceback."""
        if not self._workers:
            return self._put(self._fetcher.fetch(step, shard, self._plan.indices(step, shard)))
        return self._put(self._get((step, shard)))

    def get_here(self, step: int, shard: int, change: Callable[[Any], Any] = lambda batch: batch) -> Any:
        """The batch, fetched by the worker itself. `change` is done to it before it is put in its place."""
        return self._put(change(self._fetch_here((step, shard))))

    def _get(self, place: ShardPlace) -> Any:
        step, queue = place[0], self._queue
        queue.reach(step)
        # Steps that are over: take them out, or the loader processes stay busy with what nobody wants.
        while queue.asked and queue.asked[0][0] < step:
            self._receive()
        if place not in queue.ready:
            self._start()
        while place not in queue.ready and place in queue.asked:
            self._receive()
        queue.taken.add(place)
        if place not in queue.ready:
            return self._fetch_here(place)
        batch: Any = queue.ready.pop(place)
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()  # type: ignore[no-untyped-call]
        return batch.batch() if isinstance(batch, Packed) else batch

    def close(self) -> None:
        """Ends the loader processes. The loader can be used again and starts new ones."""
        batches, self._batches, self._loader = self._batches, None, None
        self._queue.forget()
        if batches is None:
            return
        if all(process.is_alive() for process in batches._workers):
            batches._shutdown_workers()
        else:
            _end_at_once(batches)

    def __enter__(self) -> ShardLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fetch_here(self, place: ShardPlace) -> Any:
        return self._fetcher.fetch(*place, self._plan.indices(*place))

    def _start(self) -> None:
        """Makes sure that loader processes are at work, if there is anything to expect."""
        queue = self._queue
        if queue.asked or not queue.has_next():
            return
        # The DataLoader asks for one new place for each batch that it hands out. At the start, and after a dry
        # spell, it asks for as many as it may have under way: that is what iter() does.
        assert self._loader is None or queue.ran_dry
        queue.ran_dry = False
        if self._loader is None:
            self._loader = self._new_loader()
            self._batches = _without_alarm(iter(self._loader))
            return
        try:
            with _alarm(self._batches):
                iter(self._loader)
        except _LoaderDied as death:
            self._restart(death)

    def _new_loader(self) -> DataLoader[Any]:
        main = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if main and self._context in (None, "fork") else None
        return DataLoader(
            self._fetcher,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._queue,
            num_workers=self._workers,
            prefetch_factor=self._prefetch_factor,  # None: as many as torch thinks best
            persistent_workers=True,
            collate_fn=_as_it_is,
            worker_init_fn=LoaderStart(parent, self._worker_init_fn, self._stacks),
            timeout=PATIENCE_S,
            multiprocessing_context=self._context,
            generator=torch.Generator(),  # its own: starting must not draw from the process's generator
        )

    def _receive(self) -> None:
        """Waits for the batch that was asked for first, and keeps it unless its step is over."""
        queue = self._queue
        try:
            with _alarm(self._batches):
                place, batch = self._next_batch()
        except _LoaderDied as death:
            self._restart(death)
            return
        except BaseException:
            # Ctrl-C, or a signal handler that raises: whether the batch was handed out is anybody's guess.
            self._abandon()
            raise
        first = queue.asked.popleft()
        assert place == first, f"{place} arrived, {first} was next"
        self._restarts = 0
        if place[0] >= queue.step:
            queue.ready[place] = batch

    def _next_batch(self) -> Any:
        """However long that takes. It is said where the loader processes stand meanwhile."""
        while True:
            try:
                return next(self._batches)
            except RuntimeError as error:
                if "timed out" not in str(error) or not all(process.is_alive() for process in self._batches._workers):
                    raise
                if self._stacks is not None:
                    self._stacks.tell([process.pid for process in self._batches._workers])

    def _restart(self, death: _LoaderDied) -> None:
        self._restarts += 1
        if self._restarts > _RESTARTS_MAX:
            self.close()
            raise ConfigError(
                f"loader processes died {self._restarts} times in a row: {death}",
                hint="look for a crash in the dataset or too little memory; num_workers=0 shows where it happens",
            ) from death
        self._abandon()
        self._start()

    def _abandon(self) -> None:
        """Ends the loader processes, whatever state they are in; what they were asked for is still expected."""
        _end_at_once(self._batches)
        self._batches = self._loader = None
        self._queue.ask_again()


class _Queue:
    """The sampler: yields on demand what is expected next, and remembers what became of it."""

    def __init__(self, plan: ShardPlan) -> None:
        self.asked: deque[ShardPlace] = deque()  # the loader processes work on these, and deliver in this order
        self.ready: dict[ShardPlace, Any] = {}  # arrived, not yet taken
        self.taken: set[ShardPlace] = set()  # of this step: `get` has returned them
        self.step = 0  # the step of the last `get`; everything before it is over
        self.ran_dry = False
        self._plan = plan
        self._next: deque[ShardPlace] = deque()  # to be yielded before the rest of what is expected
        self._upcoming: Iterator[ShardPlace] = iter(())

    def follow(self, upcoming: Iterator[ShardPlace]) -> None:
        self._next.clear()
        self._upcoming = upcoming

    def reach(self, step: int) -> None:
        if step != self.step:
            self.step = step
            self.taken.clear()
            self.ready = {place: batch for place, batch in self.ready.items() if place[0] >= step}

    def has_next(self) -> bool:
        """Whether there is something left to ask for. What is over, taken, ready or asked for is passed over."""
        while True:
            if not self._next:
                following = next(self._upcoming, None)
                if following is None:
                    return False
                self._next.append(following)
            place = self._next[0]
            known = place in self.taken or place in self.ready or place in self.asked
            if place[0] >= self.step and not known:
                return True
            self._next.popleft()

    def ask_again(self) -> None:
        """What was asked for will not come: put it in front of the rest."""
        self._next.extendleft(reversed(self.asked))
        self.asked.clear()

    def forget(self) -> None:
        self.asked.clear()
        self.ready.clear()
        self.ran_dry = False

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        return self

    def __next__(self) -> tuple[int, int, list[int]]:
        if not self.has_next():
            self.ran_dry = True
            raise StopIteration
        place = self._next.popleft()
        self.asked.append(place)
        return (*place, self._plan.indices(*place))


class _LoaderDied(Exception):
    """A loader process ended without being told to."""


def _without_alarm(batches: Any) -> Any:
    # torch raises RuntimeError out of SIGCHLD, wherever the main thread is, in the user's backward too. A loader
    # process that dies between two batches is no reason for that: take its number off torch's list.
    if getattr(batches, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    return batches


@contextmanager
def _alarm(batches: Any) -> Iterator[None]:
    """While we wait, torch's alarm is on: it also ends a read that a killed process left halfway."""
    processes = batches._workers
    try:
        torch._C._set_worker_pids(id(batches), tuple(process.pid for process in processes))
        # After the alarm is set, so that no death falls between the two.
        dead = [process.pid for process in processes if not process.is_alive()]
        if dead:
            raise _LoaderDied(f"process {dead[0]} was killed or crashed")
        yield
    except (OSError, EOFError) as error:
        # A tensor's memory is handed over by the process that made it, which is gone.
        raise _LoaderDied(f"a process was killed or crashed while it handed over a batch ({error})") from error
    except RuntimeError as error:
        if all(process.is_alive() for process in processes):
            raise
        raise _LoaderDied(str(error)) from error
    finally:
        with suppress(ValueError):  # the alarm went off before it was set
            torch._C._remove_worker_pids(id(batches))


def _end_at_once(batches: Any) -> None:
    # Not torch's own shutdown: the dead process may have held a lock that it would wait for.
    batches._shutdown = True
    for process in batches._workers:
        process.kill()
    for process in batches._workers:
        process.join()  # it was killed
    for queue in batches._index_queues:
        queue.cancel_join_thread()
        queue.close()


def _as_it_is(batch: Any) -> Any:
    return batch


def _check_processes(num_workers: Any, prefetch_factor: Any, worker_init_fn: Any) -> None:
    if type(num_workers) is not int or num_workers < 0:
        raise ConfigError(
            f"num_workers is {num_workers!r:.40}", hint="how many loader processes each worker has: 0 or more"
        )
    if prefetch_factor is not None and num_workers == 0:
        raise ConfigError(
            f"prefetch_factor is {prefetch_factor!r:.40}, and num_workers is 0: nobody fetches ahead",
            hint="set num_workers to 1 or more, or leave out prefetch_factor",
        )
    if prefetch_factor is not None and (type(prefetch_factor) is not int or prefetch_factor < 1):
        raise ConfigError(
            f"prefetch_factor is {prefetch_factor!r:.40}",
            hint="how many batches each loader process fetches ahead: 1 or more",
        )
    if worker_init_fn is not None and not callable(worker_init_fn):
        raise ConfigError(
            f"worker_init_fn is {a_kind(worker_init_fn)}, not a function",
            hint="give a function of the loader process's number, from 0",
        )


def _check_dataset(dataset: Any, plan: ShardPlan) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{name} is an IterableDataset, which has no sample number n to fetch again elsewhere",
            hint="pass a dataset with __getitem__ and __len__, or holdfast.data.Stream over its files",
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{name} has no {'__len__' if hasattr(dataset, '__getitem__') else '__getitem__'}",
            hint="pass a map-style dataset, with __getitem__(index) and __len__()",
        )
    if plan.sampling is None and len(dataset) != plan.length:
        raise ConfigError(
            f"the dataset has {len(dataset)} samples and the plan is for {plan.length}",
            hint="build the ShardPlan with length=len(dataset)",
        )
