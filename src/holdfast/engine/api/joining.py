"""holdfast.join: check the arguments, read where this process belongs, and wire everything together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from holdfast.byzantine.rules.port import Rule
from holdfast.checkpoint.settings import Checkpoints, CheckpointSettings
from holdfast.core.config import RunConfig
from holdfast.data.loader import BatchLoader
from holdfast.data.sampling import Given
from holdfast.data.seeding import know_devices
from holdfast.data.shards import ShardPlan
from holdfast.engine.api.alone import answers_mistakes_in_a_sentence
from holdfast.engine.api.hash_order import say_where_order_is_chance
from holdfast.engine.api.inputs import (
    check_dataset,
    check_extras,
    check_generator,
    check_model,
    check_optimizers,
    doubts_about,
)
from holdfast.engine.api.old_names import tells_new_names
from holdfast.engine.api.planning import loader_of, planned, samples_of_step
from holdfast.engine.api.process_edge import ProcessEdge, check_free
from holdfast.engine.api.run import Run
from holdfast.engine.building import Building
from holdfast.engine.first_look import FirstLook
from holdfast.engine.freed_memory import keep_freed_memory
from holdfast.engine.loops import Loops
from holdfast.engine.misuse import Misuse
from holdfast.engine.numerics import fingerprint, fix_arithmetic
from holdfast.engine.optimizer_calls import OptimizerCalls
from holdfast.engine.place import WorkerPlace, path_of
from holdfast.engine.ranks.group import found_by_any, has_say, open_leaf, take_sums
from holdfast.engine.ranks.limits import check_sharded
from holdfast.engine.recovery.auditing import audited
from holdfast.engine.recovery.guarding import Guard, wake_scalers
from holdfast.engine.recovery.trusting import alike_shards
from holdfast.engine.servers import check_servers
from holdfast.engine.steps import StepEngine
from holdfast.engine.tables import connect_tables, tables_of, trains_tables, without_recomputing
from holdfast.modes import mode_or_default
from holdfast.modes.bundles import Bundles
from holdfast.modes.capture import GradientCapture
from holdfast.modes.diverging import Losses
from holdfast.modes.port import Mode, TrainingParts
from holdfast.modes.robust import with_rule
from holdfast.placement.environment import WorkerEnvironment
from holdfast.placement.launched import environment_of_process
from holdfast.placement.proc import started_here
from holdfast.state.extras import Stateful, try_extras
from holdfast.state.optimizer import Optimizers
from holdfast.state.snapshot import Holder

LOOPS = "holdfast.loops"  # our own part of a snapshot's extras


@answers_mistakes_in_a_sentence
@tells_new_names
def join(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    dataset: Any,
    *,
    batch_size: int | None = None,
    shards: int = 8,
    seed: int = 0,
    drop_last: bool = False,
    shuffle: bool = True,
    sampler: Given | None = None,
    batch_sampler: Given | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    generator: torch.Generator | None = None,
    extras: Mapping[str, Stateful] | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    threads: int = 1,
    non_finite: str = "stop",
    spike: float = 0.0,
    mode: Mode | None = None,
    aggregate: Rule | None = None,
) -> Run:
    """Take part in the run that this process was started for; started by hand, be a run of one.

    Several optimizers are given by name, {"g": opt_g, "d": opt_d}; so may be several models.
    A step takes `batch_size` samples in `shards` equal shards. With the same seed, batch_size and shards the weights
    are the same bits for any number of workers, whatever fails. `extras` are other things with a state_dict that change
    during training (scheduler, averaged model, gradient scaler): they travel to workers that join.
    What has a name of torch's DataLoader means what it means there; num_workers are processes of each worker.
    `mode` is how a step is made of what the workers bring, and exact if nothing is said (docs/reference/python.md).
    `aggregate` is a rule of holdfast.byzantine that combines the shards' gradients where workers may be hostile, in
    place of the mean; its f counts shards.
    `checkpoint` is where checkpoints are kept, and found again when no worker is left: a directory, s3://…, hdfs://…,
    or holdfast.Checkpoints(uri, every=…, keep=…). What `holdfast run` says of them holds.
    """
    environment = environment_of_process()
    sharded = take_sums(check_model(model))
    capture = (mode := with_rule(mode_or_default(mode), aggregate)).capture(model := check_model(model))
    optimizer = check_optimizers(optimizer, capture.parameters)
    extras = check_extras(extras, model, optimizer)
    told, said = _told(environment), Checkpoints.of(checkpoint)
    saving = told.with_script(said).validate()
    config = RunConfig(
        batch_size=samples_of_step(batch_size, batch_sampler, dataset, shards),
        shards=shards,
        seed=seed,
        length=check_dataset(dataset, shards=shards),
        drop_last=drop_last,
        shuffle=shuffle,
        order_seed=check_generator(generator),
        threads=threads,
        parameters=sum(parameter.numel() for parameter in capture.parameters),
        **_placed(environment),
        checkpoint="" if saving.own else saving.uri,
        non_finite=non_finite,
        spike=spike,
        **without_recomputing(audited(environment), model),
        mode=mode.words(),
    ).validate()
    config, plan = planned(config, dataset, batch_size, sampler, batch_sampler)
    mode.check(config, plan)
    check_sharded(sharded, mode, config, plan, saving, extras)
    ahead: dict[str, Any] = {
        "num_workers": num_workers,
        "prefetch_factor": prefetch_factor,
        "worker_init_fn": worker_init_fn,
    }
    loader = loader_of(dataset, plan, collate_fn, pinned=capture.device is not None, **ahead)
    mode.check_device(capture.device)
    _prepare(model, extras, config.threads, environment)
    check_servers(environment, mode, tables=bool(tables_of(model)))
    place = WorkerPlace(environment, fingerprint(capture.device), mode)
    connect_tables(model, environment, place.me, place.host, place.keys)
    training = Training(model, optimizer, extras, capture=capture, plan=plan, loader=loader, saving=saving)
    run = take_part(place, training, config)
    _live_and_end_with_process(run, place, told.against_script(said))
    return run


@dataclass(frozen=True)
class Training:
    """What a script has given to join, checked."""

    model: torch.nn.Module
    optimizer: Optimizers
    extras: Mapping[str, Stateful]
    _: KW_ONLY
    capture: GradientCapture
    plan: ShardPlan
    loader: BatchLoader
    saving: CheckpointSettings


def take_part(place: WorkerPlace, training: Training, config: RunConfig) -> Run:
    """Wire a worker together in its place. The process is prepared."""
    model, optimizer, extras, capture = training.model, training.optimizer, training.extras, training.capture
    plan, loader, saving = training.plan, training.loader, training.saving
    data = place.mode.data(plan)
    bundles = Bundles(data, place.ranks.rank, config.ranks) if config.ranks > 1 else None
    loops = Loops(Losses(config.spike), bundles or data)
    travels = {**extras, LOOPS: loops}
    holder = Holder(model, optimizer, travels, buffers=capture.buffers)
    capture.agree = found_by_any if capture.sharded else capture.agree
    if bundles is not None:
        capture.open_leaf, capture.has_say = open_leaf, has_say
    place.agree(config)
    if plan.handed is not None:
        plan.handed.warns(lambda text: place.events.write("warning", text=text))
    parts = TrainingParts(
        me=place.me,
        model=model,
        optimizers=optimizer,
        extras=travels,
        data=loops.data,
        events=place.events,
        servers=place.reach_servers,
    )
    attendance = place.mode.attendance(parts)
    building = Building(place, config, capture, holder, attendance)
    worker = building.worker(saving, OptimizerCalls(capture.parameters))
    if bundles is not None:
        worker.gradients.leaf_of = bundles.leaf_of
    guard = Guard(config, extras, losses=loops.losses, capture=capture, worker=worker)
    misuse = Misuse(capture.parameters, place.events, worker.machine, alone=place.environment is None)
    worker.audits.trusting.alike = alike_shards(config, plan, whole=worker.machine.step_rules.whole)
    engine = StepEngine(worker, plan=plan, loader=loader, capture=capture, loops=loops, guard=guard, misuse=misuse)
    name, validated = place.environment.run if place.environment else "", _validated(model, extras, saving)
    return Run(model, optimizer, engine, worker=worker, capture=capture, loops=loops, name=name, **validated)


def _live_and_end_with_process(run: Run, place: WorkerPlace, overruled: str) -> None:
    _tell_doubts(run, place, overruled)
    machine = run._worker.machine
    if machine.audits.rules.every and machine.step_rules.whole and not trains_tables(run.model):
        run.engine.checker = FirstLook(machine, place.events)
    if place.environment is not None and not place.ranks.rank:
        run.beat_in(place.environment.run_dir, started_here())
    ProcessEdge(run, place)


def _tell_doubts(run: Run, place: WorkerPlace, overruled: str) -> None:
    """One worker tells them; in a run of one there is no event log, and Python's warnings say it."""
    if place.environment is not None and not place.me.startswith("w0."):
        return
    for doubt in (*doubts_about(run.model, run.optimizer), *([overruled] if overruled else [])):
        place.events.write("warning", text=doubt)
        if place.environment is None:
            warnings.warn(doubt, stacklevel=5)


def _placed(environment: WorkerEnvironment | None) -> dict[str, Any]:
    told = {"outage_s": environment.outage_s, "rebalance": environment.rebalance} if environment else {}
    told |= {"ranks": environment.ranks} if environment else {}
    return {"path": path_of(environment), **told}


def _validated(model: torch.nn.Module, extras: Mapping[str, Stateful], saving: CheckpointSettings) -> dict[str, Any]:
    """What an evaluation puts into eval mode beside the model, and by what the best checkpoint is chosen."""
    modules = [extra for extra in extras.values() if isinstance(extra, torch.nn.Module)]
    return {"modules": (model, *modules), "criterion": saving.keep_best}


def _told(environment: WorkerEnvironment | None) -> CheckpointSettings:
    """What the agent says about checkpoints."""
    return CheckpointSettings.decode(environment.checkpoint if environment else "")


def _prepare(
    model: torch.nn.Module,
    extras: Mapping[str, Stateful],
    threads: int,
    environment: WorkerEnvironment | None,
) -> None:
    if environment is not None:
        check_free(environment.worker)
    fix_arithmetic(threads)
    know_devices()
    keep_freed_memory()
    wake_scalers(model, extras)
    try_extras(extras)
    if environment is None or environment.launcher:
        say_where_order_is_chance(environment.launcher if environment is not None else "")
