"""Reads an iterable batch after batch, from any position: the one worker of a run that reads does this.

Three kinds of iterable differ in how a position is found again:

    with state_dict and load_state_dict    by its own state
    any other                              by reading the epoch again up to there, and dropping what was read
    holdfast.data.Live                     not at all: what comes next is what comes next

Before a batch is read, the process's generators are seeded from (seed, epoch, number of the batch), and before an epoch
from (seed, epoch), so that an iterable which draws from them gives the same to whoever reads. Owns the iterator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.fetching import LoaderStart
from holdfast.data.iterables.cutting import part_of, samples_in, shares
from holdfast.data.iterables.positions import has_position, is_told_samples, load_position, state_of
from holdfast.data.sampling import tell_epoch
from holdfast.data.seeding import derive_seed, seed_everything

_DEPTH_MAX = 16  # of iterables in iterables that are looked through
_NOTHING: Any = object()


@dataclass(frozen=True)
class Position:
    """Between two batches. `state`: the iterable's own, after the batch before; None: there is none."""

    epoch: int = 0
    batches: int = 0  # of this epoch, that were read
    state: Any = None


@dataclass(frozen=True)
class Read:
    """A batch in the parts of its shards, and the position after it. No parts: the iterable gives nothing any more."""

    epoch: int
    number: int  # of the batch in its epoch
    parts: tuple[Any, ...]
    sizes: tuple[int, ...]  # samples of each part
    after: Position


class Live:
    """Around an iterable whose samples are new whoever reads them, such as a queue: nothing is ever skipped."""

    def __init__(self, iterable: Any) -> None:
        if not hasattr(iterable, "__iter__"):
            raise ConfigError(f"Live was given {a_kind(iterable)}", hint="give something that can be iterated over")
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


class Reader:
    """`batch_size` samples make a batch; None: the iterable gives batches."""

    def __init__(
        self,
        iterable: Any,
        *,
        batch_size: int | None,
        shards: int,
        seed: int,
        drop_last: bool,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.warn = warn
        self._iterable, self._live = (iterable.iterable, True) if isinstance(iterable, Live) else (iterable, False)
        self._batch_size, self._shards, self._seed, self._drop_last = batch_size, shards, seed, drop_last
        self._seeks = has_position(self._iterable) and not self._live and not shuffles_in_a_buffer(self._iterable)
        if batch_size is None and is_told_samples(self._iterable):
            self._seeks = False  # it gives batches, in which nobody has counted samples yet
        self._samples = 0  # of this epoch, that the iterator has given
        self._start: Any = _NOTHING  # its state before anything was read
        self._iterator: Iterator[Any] | None = None
        self._at: Position | None = None  # of the iterator
        self._first: Any = _NOTHING  # an item that was taken to see whether there is one

    def read(self, position: Position) -> Read:
        """The batch there. The process's generators are left in whatever state the iterable left them."""
        at = self._at
        if at is None or (at.epoch, at.batches) != (position.epoch, position.batches):
            self._open(position)
        found = self._next_in(position)
        if isinstance(found, Read):
            return found
        if position.batches:
            following = Position(position.epoch + 1, 0, self._state())
            self._open(following)
            again = self._next_in(following)
            return again if isinstance(again, Read) else Read(following.epoch, 0, (), (), following)
        if position.epoch == 0:
            had = f"{found} samples, fewer than a batch" if found else "nothing"
            raise ConfigError(
                f"the dataset, {a_kind(self._iterable)}, gives {had}", hint="it must give at least one batch"
            )
        return Read(position.epoch, 0, (), (), position)

    def close(self) -> None:
        """Ends loader processes that the iterator has."""
        self._iterator, self._at = None, None

    def _next_in(self, position: Position) -> Read | int:
        """The next batch of this epoch; if there is none, how many samples were left over."""
        items = self._take(position.epoch, position.batches)
        if len(items) == (self._batch_size or 1):
            self._at = after = Position(position.epoch, position.batches + 1, self._state())
            return self._cut(items, position, after)
        self._iterator, self._at = None, None  # the epoch is over: the next one is opened
        if items and not self._drop_last:
            return self._cut(items, position, Position(position.epoch + 1, 0, self._state()))
        return len(items)

    def _cut(self, items: list[Any], place: Position, after: Position) -> Read:
        batch = items if self._batch_size is not None else items[0]
        count = len(items) if self._batch_size is not None else samples_in(batch)
        if not count:
            raise ConfigError("the iterable gives an empty batch", hint="leave out batches without samples")
        chosen = shares(count, self._shards)
        if self._batch_size is not None:
            parts = tuple([batch[number] for number in one] for one in chosen)
        else:
            parts = tuple(part_of(batch, one) for one in chosen)
        return Read(place.epoch, place.batches, parts, tuple(map(len, chosen)), after)

    def _state(self) -> Any:
        return state_of(self._iterable, self._samples) if self._seeks else None

    def _take(self, epoch: int, number: int) -> list[Any]:
        seed_everything(derive_seed(self._seed, "read", epoch, number))
        assert self._iterator is not None
        items = [] if self._first is _NOTHING else [self._first]
        self._first = _NOTHING
        items.extend(islice(self._iterator, (self._batch_size or 1) - len(items)))
        self._samples += len(items)
        return items

    def _open(self, position: Position) -> None:
        """An iterator that stands there."""
        behind = self._at
        self._at, self._iterator, self._first, self._samples = None, None, _NOTHING, 0
        fresh = self._start is _NOTHING
        if fresh:
            self._prepare_loader()
            self._start = self._state()
        if self._seeks:
            self._seek(position, fresh=fresh)
        else:
            self._begin(position.epoch)
            if self._live:
                self._tell_live(position, fresh=fresh)
            elif self._iterator is self._iterable and behind is not None:
                self._go_on(position, behind)  # it gives its samples once, and cannot begin anew
            else:
                self._skip(position, 0)
        self._at = position

    def _seek(self, position: Position, *, fresh: bool) -> None:
        if position.state is not None:
            load_position(self._iterable, position.state)
            iterator = self._begin(position.epoch)
            if position.batches:
                self._samples = position.batches * (self._batch_size or 1)
                return
            self._first = next(iterator, _NOTHING)
            if self._first is not _NOTHING:
                return
        # Of some the state at an epoch's end says that there is nothing more.
        if self._start is not None and position.state is not None:
            self._iterable.load_state_dict(self._start)
        elif self._start is not None and not fresh:
            load_position(self._iterable, self._start)
        self._begin(position.epoch)

    def _begin(self, epoch: int) -> Iterator[Any]:
        for one in _layers(self._iterable):
            tell_epoch(one, epoch)
        seed_everything(derive_seed(self._seed, "open", epoch))
        self._iterator = iter(self._iterable)
        return self._iterator

    def _skip(self, position: Position, done: int) -> None:
        if position.batches > done:
            self.warn(
                f"{a_kind(self._iterable)} has no position that could be gone back to: epoch {position.epoch} is read "
                f"again, and its first {position.batches - done} batches are dropped; each sample is used once if it "
                "gives the same as before"
            )
        for number in range(done, position.batches):
            if not self._take(position.epoch, number):
                self.warn(f"it gave only {number} batches this time, so it does not give the same as before")
                return

    def _tell_live(self, position: Position, *, fresh: bool) -> None:
        if fresh and position != Position():
            self.warn(
                "what the worker that read before has taken out of the iterable and not handed on is lost: at most one "
                "step's batch, and what the iterable itself had fetched ahead"
            )

    def _go_on(self, position: Position, behind: Position) -> None:
        if position.epoch == behind.epoch and position.batches >= behind.batches:
            self._skip(position, behind.batches)
        elif position.epoch == behind.epoch:
            self.warn(
                f"the run went back to batch {position.batches} of epoch {position.epoch}, and {a_kind(self._iterable)}"
                f" cannot: what it gave up to batch {behind.batches} is not used again"
            )

    def _prepare_loader(self) -> None:
        """Loader processes of the iterable's own must not keep this worker's connections open when it dies."""
        loader = self._iterable
        if isinstance(loader, DataLoader) and loader.num_workers and loader.multiprocessing_context is None:
            main = threading.current_thread() is threading.main_thread()
            loader.worker_init_fn = LoaderStart(os.getpid() if main else None, loader.worker_init_fn)


def is_iterable(dataset: Any) -> bool:
    """Whether it gives samples one after the other, and none by its number."""
    if isinstance(dataset, Live):
        return True
    if isinstance(dataset, DataLoader):
        return is_iterable(dataset.dataset)
    by_number = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return (
        hasattr(dataset, "__iter__") and not by_number and not isinstance(dataset, type | str | bytes | set | frozenset)
    )


def _layers(iterable: Any) -> Iterator[Any]:
    """It, and what a loader reads: the order of an epoch may be the dataset's, and its loader knows of none."""
    yield iterable
    for _ in range(_DEPTH_MAX):
        if not isinstance(iterable, DataLoader):
            return
        iterable = iterable.dataset
        yield iterable


def shuffles_in_a_buffer(iterable: Any) -> bool:
    """Whether it is a Hugging Face dataset with a shuffle buffer, whose content its position leaves out."""
    waiting = [iterable]
    for _ in range(_DEPTH_MAX):
        if not waiting:
            return False
        one = waiting.pop()
        if type(one).__name__ == "BufferShuffledExamplesIterable":
            return True
        held = [getattr(one, name, None) for name in ("dataset", "_ex_iterable", "ex_iterable")]
        waiting += [inner for inner in (*held, *(getattr(one, "ex_iterables", None) or ())) if inner is not None]
    return False
