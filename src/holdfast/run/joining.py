"""holdfast.join: check the arguments, read where this process belongs, and wire everything together."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.config import ELASTIC, NUMERICS, RunConfig
from holdfast.core.errors import ConfigError
from holdfast.data.cursor import Cursor
from holdfast.data.loader import ShardLoader
from holdfast.data.shards import ShardPlan
from holdfast.launch.environment import WorkerEnvironment
from holdfast.launch.proc import process_started
from holdfast.modes.diverging import Losses
from holdfast.modes.exact import Exact
from holdfast.run.auditing import audited
from holdfast.run.guarding import Guard, wake_scalers
from holdfast.run.loop import Loops, Run, check_optimizer
from holdfast.run.memory import keep_freed_memory
from holdfast.run.numerics import fingerprint, fix_arithmetic
from holdfast.run.place import Place, path_of
from holdfast.run.quorum import moded
from holdfast.run.worker import LeaveRequested
from holdfast.state.snapshot import Holder, Stateful

LOOPS = "holdfast.loops"  # our own part of a snapshot's extras

_taken: set[str] = set()  # places of this process: each can be taken once


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    batch: int,
    shards: int = 8,
    seed: int = 0,
    last: str = "drop",
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_workers: int = 0,
    prefetch: int = 2,
    extras: Mapping[str, Stateful] | None = None,
    checkpoint: str | None = None,
    save_every: str | int | None = None,
    keep: int | None = None,
    threads: int | None = None,
    numerics: str = "refuse",
    non_finite: str = "stop",
    spike: float = 0.0,
    mode: str = "exact",
    quorum: int | None = None,
) -> Run:
    """Take part in the run that this process was started for; started by hand, be a run of one.

    A step takes `batch` samples in `shards` equal shards. With the same seed, batch and shards the weights are the
    same bits for any number of workers, whatever fails. `extras` are other things with a state_dict that change
    during training (scheduler, averaged model, gradient scaler): they travel to workers that join.
    With mode="elastic" a step takes what the workers bring that are there; with `quorum`, K of them.
    `checkpoint` is where checkpoints are kept, and found again when no worker is left: a directory, s3://…, hdfs://….
    """
    environment = WorkerEnvironment.from_variables()
    _check_kinds(model, optimizer, numerics)
    exact = Exact(model)
    check_optimizer(optimizer, exact)
    threads = threads or (environment.threads if environment else 1)
    told = environment.checkpoint if environment else ""
    saving = CheckpointSettings.decode(told).overruled(uri=checkpoint, every=save_every, keep=keep).validate()
    config = RunConfig(
        batch=batch,
        shards=shards,
        seed=seed,
        length=_length(dataset),
        last=last,
        shuffle=shuffle,
        threads=threads,
        parameters=sum(parameter.numel() for parameter in exact.parameters),
        path=path_of(environment),
        outage_s=environment.outage_s if environment else 0.0,
        checkpoint="" if saving.own else saving.uri,
        non_finite=non_finite,
        spike=spike,
        **audited(environment, numerics),
        **moded(mode, quorum),
    ).validate()
    plan = ShardPlan(config.length, batch, shards, seed, last, shuffle).validate()  # type: ignore[arg-type]
    loader = ShardLoader(dataset, plan, collate_fn=collate_fn, loader_workers=loader_workers, prefetch=prefetch)
    _prepare(model, extras or {}, threads, environment)
    loops = Loops(Losses(spike), Cursor(shards, plan.steps_per_epoch) if mode == ELASTIC else None)
    holder = Holder(model, optimizer, {**(extras or {}), LOOPS: loops}, buffers=exact.base_buffers)
    place = Place(environment, fingerprint())
    place.agree(config, numerics)
    _taken.update([environment.worker] if environment else [])
    worker, feed = place.build(config, exact, holder, saving)
    run = Run(
        model,
        optimizer,
        plan=plan,
        loader=loader,
        exact=exact,
        worker=worker,
        feed=feed,
        events=place.events,
        loops=loops,
        guard=Guard(config, extras or {}, losses=loops.losses, exact=exact, worker=worker, events=place.events),
        name=environment.run if environment else "",
    )
    _live_and_end_with_process(run, place)
    return run


def _check_kinds(model: Any, optimizer: Any, numerics: str) -> None:
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"join got a {type(model).__name__} and a {type(optimizer).__name__}",
            hint="holdfast.join(model, optimizer, dataset, batch=...)",
        )
    if numerics not in NUMERICS:
        raise ConfigError(f"numerics is {numerics!r}", hint=f"numerics is one of {', '.join(map(repr, NUMERICS))}")


def _prepare(
    model: torch.nn.Module, extras: Mapping[str, Stateful], threads: int, environment: WorkerEnvironment | None
) -> None:
    _check_once(environment)
    fix_arithmetic(threads)
    keep_freed_memory()
    wake_scalers(model, extras)


def _check_once(environment: WorkerEnvironment | None) -> None:
    if environment is not None and environment.worker in _taken:
        raise ConfigError(
            "holdfast.join was called twice in one worker",
            hint="a script is one run: join once, with all that it trains",
        )


def _length(dataset: Any) -> int:
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            "an iterable dataset has no positions, so nobody else could compute a lost worker's shards",
            hint="use a map-style dataset with __len__ and __getitem__",
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"the dataset, a {type(dataset).__name__}, has no length",
            hint="give it __len__ and __getitem__, so that any worker can fetch any sample",
        ) from error


def _live_and_end_with_process(run: Run, place: Place) -> None:
    """Leave the run when the script ends; tell an error from a normal end; SIGTERM asks to leave in order."""
    if place.environment is not None:
        run.beat_in(place.environment.run_dir, process_started(os.getpid()) or 0)
    failed = False
    previous = sys.excepthook
    process = os.getpid()  # a child that the script forks inherits all this, and is not the worker

    def note_failure(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        nonlocal failed
        if os.getpid() != process:
            previous(kind, error, trace)
            return
        failed = True
        place.events.write("failed", reason=f"{kind.__name__}: {error}".partition("\n")[0])
        previous(kind, error, trace)
        if "deterministic implementation" in str(error):
            print(
                "holdfast: this operation gives different bits from run to run, so training cannot be exact\n"
                "  hint: replace it with a deterministic one; the message above names it",
                file=sys.stderr,
            )

    def end() -> None:
        if os.getpid() != process:
            return
        run.close(failed=failed)
        place.close()

    def asked_to_leave(number: int, _frame: object) -> None:
        if os.getpid() == process:
            place.mailbox.put(LeaveRequested())
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    sys.excepthook = note_failure
    atexit.register(end)
    if place.environment is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, asked_to_leave)
