"""Has shards computed again in other circumstances, and compares what they leave behind. See engine/checker.py.

Every step's shards are computed once as always. The first process of a check then has them handed to the script again,
in one go: fetched by the worker itself into memory that begins elsewhere, in the reverse order, after the state was
captured and restored. Only if something differs are these tried one by one, to say which it was.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import xxhash

from holdfast.core.errors import ConfigError
from holdfast.data.loader import BatchLoader
from holdfast.data.shards import ShardPlace
from holdfast.engine.api.run import Run
from holdfast.modes.capture import Collector
from holdfast.reduce.reduction import Number
from holdfast.script_check.batches import described, misplaced
from holdfast.script_check.joining_in import write_snapshot
from holdfast.script_check.notes import (
    AGAIN,
    BATCH,
    FETCH,
    FIRST,
    MEAN,
    ORDER,
    RESTORE,
    SHARD,
    STATE,
    Found,
    Notes,
    Task,
    Words,
)
from holdfast.script_check.settings import settings_of
from holdfast.script_check.surroundings import Surroundings, changes, generator_states
from holdfast.state.digest import digest_tensors
from holdfast.state.entries import entries_of
from holdfast.state.layout import memory_of, readable
from holdfast.state.local import local
from holdfast.state.snapshot import Snapshot

AGAIN_MAX = 16  # shards of a step that are computed again
PATIENCE_S = 20.0  # when computing again has taken so long, it goes on with two shards a step
INFINITE = "not finite"
ALL = "all"  # another memory, another order, a restored state


class Recomputing:
    """Belongs to the thread of the user's loop. Ends the process when the check's steps are over."""

    def __init__(self, run: Run, task: Task, notes: Notes, surroundings: Surroundings) -> None:
        self._run = run
        self._task = task
        self._notes = notes
        self._surroundings = surroundings
        self._holder = run._worker._transfer.holder
        self._step = -1
        self._attempt = ""  # how the shards are computed now; empty: as always
        self.batch_digest = ""  # of the shard at hand
        self._batches: dict[ShardPlace, list[tuple[str, str]]] = {}
        self._shards: dict[int, Words] = {}
        self._buffers: dict[str, set[str]] = {}  # what the step's shards made of each
        self._drawn: dict[int, str] = {}  # the generators after a shard
        self._differs: tuple[int, list[str], bool] | None = None  # shard, names, whether it drew other random numbers
        self._around: Words = {}
        self._weights: dict[str, str] = {}
        self._again = 0
        self._spent_s = 0.0

    # ---- around a shard

    def batch(self, loader: BatchLoader, place: ShardPlace, *, counts: bool) -> Any:
        if counts:
            current = self._run.engine.current
            self._begin(current.number if current is not None else place[0])
            batch = loader.get(*place)
            self._batches[place] = described(batch)
            self.batch_digest = xxhash.xxh3_64_hexdigest(repr([values for values, _ in self._batches[place]]).encode())
            return batch
        batch = loader.get_here(*place, misplaced) if self._attempt == ALL else loader.get_here(*place)
        self._compare_batches(place, self._batches[place], described(batch))
        return batch

    def collector(
        self, shard: int, inner: Collector, metrics: Mapping[str, Mapping[int, Number]], *, counts: bool
    ) -> Collector:
        return _Tap(self, inner if counts else None, metrics)

    def left_behind(self, shard: int, words: Words, *, counts: bool) -> None:
        drawn = generator_states()
        if counts:
            self._shards[shard], self._drawn[shard] = words, drawn
            for entry in self._run._capture.buffers._entries:
                self._buffers.setdefault(entry.name, set()).add(told(entry.now()))
            return
        self._again += 1
        first = self._shards[shard]
        names = [name for name in {**first, **words} if name != BATCH and first.get(name) != words.get(name)]
        if names and self._differs is None:
            self._differs = (shard, names, drawn != self._drawn[shard])

    def names(self) -> list[str]:
        capture = self._run._capture
        trained = [f"the gradient of {capture._name_of(parameter)}" for parameter in capture._trained]
        return [*trained, *(f"the buffer {name}" for name in capture.buffers.base())]

    # ---- a step

    def _begin(self, step: int) -> None:
        if step == self._step:
            return
        self._step, self._attempt, self._again = step, "", 0
        self._batches, self._shards, self._drawn, self._buffers = {}, {}, {}, {}
        self._around = self._surroundings.look()
        self._notes.write("around", step=step, around=self._around, generators=generator_states())
        self._weights = self._digests()

    def again(self, step: int, shards: tuple[int, ...]) -> Iterator[int]:
        if not shards or self._task.role != FIRST:
            return
        self._check_parameters(step)
        chosen = shards[: AGAIN_MAX if self._spent_s < PATIENCE_S else 2]
        meanwhile = changes(self._around, self._surroundings.look())
        began = time.monotonic()
        self._restore(step)
        yield from self._try(ALL, chosen[::-1])
        self._spent_s += time.monotonic() - began
        if self._differs is None:
            return
        first = self._differs
        for attempt in (AGAIN, ORDER, RESTORE):
            if attempt == RESTORE:
                self._restore(step)
            yield from self._try(attempt, chosen if attempt != ORDER else chosen[::-1])
            if self._differs is not None:
                self._tell(attempt, self._differs, meanwhile)
        self._tell(AGAIN, first, meanwhile)  # not every time

    def _try(self, attempt: str, shards: Sequence[int]) -> Iterator[int]:
        self._attempt, self._differs = attempt, None
        for number, shard in enumerate(shards):
            yield shard
            if attempt == AGAIN and not number and len(shards) > 1:
                self._differs = None  # another shard went before it than at first: see ORDER

    def _tell(self, check: str, differs: tuple[int, list[str], bool], around: Sequence[str]) -> NoReturn:
        shard, names, drew = differs
        clue = "it drew another number of random numbers" if drew else ""
        found = Found(check, names[0], self._step, shard, more=len(names) - 1, around=tuple(around[:5]), clue=clue)
        self._end_with(found)

    def _compare_batches(self, place: ShardPlace, one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
        if [values for values, _ in one] != [values for values, _ in other]:
            self._end_with(Found(FETCH, "the batch", self._step, place[1], clue="values"))
        for (_, form), (_, twin) in zip(one, other, strict=True):
            if form != twin:
                self._end_with(Found(FETCH, "the batch", self._step, place[1], clue=f"{form}, then {twin}"))

    def _check_parameters(self, step: int) -> None:
        for name, digest in self._digests().items():
            if digest != self._weights.get(name, digest):
                self._end_with(Found(SHARD, f"the parameter {name}", step))

    def _restore(self, step: int) -> None:
        """What is captured is put back: what belongs to the state and is not in a snapshot gets lost here."""
        before = self._entries(step)
        taken = self._holder.capture(step)
        copy = Snapshot(step, taken.tree, tuple(tensor.clone() for tensor in taken.tensors))
        try:
            self._holder.restore(copy)
        except ConfigError as error:
            self._end_with(Found(RESTORE, STATE, step, clue=str(error).splitlines()[0]))
        after = {entry[0]: entry[3] for entry in self._entries(step)}
        differs = [entry for entry in before if after.get(entry[0]) != entry[3]]
        if differs:
            name, _, _, value = differs[0]
            clue = f"{value}, then {after.get(name, 'nothing')}"
            self._end_with(Found(RESTORE, name, step, more=len(differs) - 1, clue=clue))

    def _digests(self) -> dict[str, str]:
        capture = self._run._capture
        return {capture._name_of(one): digest_tensors([("", local(one))]) for one in capture.parameters}

    def loaded(self, step: int) -> None:
        """What all shards have made of a buffer is their mean, and numbers have none that is infinite."""
        for entry in self._run._capture.buffers._entries:
            of_shards, now = self._buffers.get(entry.name, set()), told(entry.now())
            whole = not (entry.tensor.dtype.is_floating_point or entry.tensor.dtype.is_complex)
            overflows = now == INFINITE and of_shards and INFINITE not in of_shards
            if overflows or (whole and len(of_shards) == 1 and now not in of_shards):
                self._end_with(Found(MEAN, f"the buffer {entry.name}", step))
        self._check_form(step)

    def _check_form(self, step: int) -> None:
        """The form of .grad must not depend on whether this worker had a shard: who has none makes it anew."""
        capture = self._run._capture
        for parameter in capture._trained:
            grad = parameter.grad
            if grad is not None and grad.stride() != torch.empty_like(parameter).stride():
                clue = f"strides {grad.stride()}, and {torch.empty_like(parameter).stride()} where there was no shard"
                self._end_with(Found(SHARD, f"the gradient of {capture._name_of(parameter)}", step, clue=clue))

    def applied(self, step: int) -> None:
        self._notes.write("shards", step=step, shards=self._shards, again=self._again)
        self._notes.write("state", step=step + 1, entries=self._entries(step + 1))
        if self._task.role == FIRST and step + 1 == self._task.join_at:
            write_snapshot(self._task.snapshot, self._holder.capture(step + 1))
        if step + 1 >= self._task.steps:
            self._notes.write("over")
            self._end()

    def arrived(self, step: int) -> None:
        """The state of the first process is in place, and no line of the script has run since."""
        self._run._capture.buffers.rebase()
        self._notes.write("state", step=step, entries=self._entries(step))

    def _entries(self, step: int) -> list[tuple[str, str, str, str]]:
        entries, _ = entries_of(self._holder.refer(step))
        told = [(entry.name, entry.part, entry.kind, entry.value) for entry in entries]
        return [*told, *settings_of(self._run.model, self._holder._extras)]

    def _end_with(self, found: Found) -> NoReturn:
        self._notes.found(found)
        self._end()

    def _end(self) -> NoReturn:
        """As early as can be: what the script does after its steps is nobody's concern here."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Tap:
    """Takes the digest of everything that a shard leaves behind, and passes it on if it counts."""

    def __init__(
        self, checker: Recomputing, inner: Collector | None, metrics: Mapping[str, Mapping[int, Number]]
    ) -> None:
        self._checker = checker
        self._inner = inner
        self._metrics = metrics

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None:
        present = list(present)
        words = {BATCH: self._checker.batch_digest} if self._inner is not None else {}
        words |= {
            name: _digest(tensor) if tensor is not None else "none"
            for name, tensor in zip(self._checker.names(), tensors, strict=True)
        }
        recorded = {name: values[shard] for name, values in self._metrics.items() if shard in values}
        words |= {f"the metric {name}": float(value).hex() for name, value in recorded.items()}
        self._checker.left_behind(shard, words, counts=self._inner is not None)
        if self._inner is not None:
            self._inner.add(shard, tensors, present)


def told(buffer: torch.Tensor) -> str:
    """A digest, or that it is not finite."""
    if buffer.dtype.is_floating_point and not bool(torch.isfinite(buffer.detach().double()).all()):
        return INFINITE
    return _digest(buffer)


def _digest(tensor: torch.Tensor) -> str:
    dense = readable(local(tensor), "a gradient").contiguous()
    return f"{tuple(dense.shape)} {xxhash.xxh3_64_hexdigest(memory_of(dense))}"
