"""Holdfast inside Ray Train: the workers of a TorchTrainer take part in one run.

    def train(config):
        with holdfast.integrations.ray.take_part("mnist"):
            run = holdfast.join(model, optimizer, dataset, batch_size=256, checkpoint="s3://…")
            ...

Ray Train starts all of its workers again when one is lost, so nobody keeps the state: the run goes on from its newest
checkpoint, exactly. Its ledger is in an actor, which outlives the workers, and ends when nobody has needed it for a
while. Who wants survivors to go on uses holdfast.integrations.ray.launch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.words import KEY_WORKERS
from holdfast.integrations.ray.finding import find_ray, node_address
from holdfast.integrations.ray.run_ledger import RunLedger
from holdfast.integrations.ray.worker_actor import ActorPlace, enter
from holdfast.placement.directory import RunDirectory, home_directory
from holdfast.placement.environment import WorkerEnvironment

IDLE_S = 600.0  # without a worker: Ray Train may be waiting for a machine
LOOK_S = 2.0
ANSWER_S = 120.0


@contextmanager
def take_part(run: str, *, dir: str | None = None) -> Iterator[None]:
    """This worker of Ray Train is a worker of `run` within the block, where `holdfast.join` is called."""
    from holdfast.engine.api.process_edge import newest_run

    ray = find_ray()
    context = import_module("ray.train").get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    actor_class = ray.remote(LedgerActor)
    options: dict[str, Any] = {"name": f"holdfast-{run}", "get_if_exists": True, "lifetime": "detached"}
    actor = actor_class.options(num_cpus=0, max_concurrency=1, **options).remote(run, dir)
    host = f"n{ray.get_runtime_context().get_node_id()[:8]}"
    answer = ray.get(actor.take_part.remote(rank, size, host), timeout=ANSWER_S)
    if "refused" in answer:
        raise ConfigError(answer["refused"], hint="see the log of the actor holdfast-" + run)
    before = dict(os.environ)
    variables = {**answer["variables"], "HOLDFAST_LISTEN": node_address()}
    enter(
        ActorPlace(
            run=run, home=dir or "", host=host, worker=answer["worker"], variables=variables, keys=answer["keys"]
        )
    )
    joined = None
    try:
        yield
        joined = newest_run()
        if joined is not None:
            joined.close()
    finally:
        if joined is None and (failed := newest_run()) is not None:
            with suppress(Exception):  # the block's own exception is on its way
                failed.close(failed=True)
        for name in set(os.environ) - set(before):
            if name.startswith("HOLDFAST_"):
                del os.environ[name]


class LedgerActor:
    """Made into an actor by the first worker that comes. Its thread watches whether anybody needs it."""

    def __init__(self, run: str, dir: str | None) -> None:
        self._directory = RunDirectory(home_directory(dir), run)
        self._ledger = RunLedger(self._directory, node_address())
        self._ledger.clear()
        self._workers: dict[int, str] = {}  # by rank
        self._lock = threading.Lock()  # the ledger's client is used by two threads
        self._needed = time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="holdfast-needed").start()

    def take_part(self, rank: int, size: int, host: str) -> dict[str, Any]:
        """A name for the worker of this rank. Whoever had the rank before is no more: Ray Train says so."""
        with self._lock:
            self._needed = time.monotonic()
            try:
                for other in [one for one in self._workers if one == rank or one >= size]:
                    self._ledger.fence(self._workers.pop(other))
                self._ledger.resize(size)
                worker = self._workers[rank] = self._ledger.next_worker(rank, host)
            except HoldfastError as error:
                return {"refused": str(error)}
        environment = WorkerEnvironment(
            run_dir=self._directory.path,
            worker=worker,
            socket_dir=self._directory.path,
            checkpoint=CheckpointSettings().placed(self._directory.path, alone=False).encode(),
            ledger=self._ledger.url,
        )
        return {"worker": worker, "keys": self._ledger.keys, "variables": environment.to_variables()}

    def _watch(self) -> None:
        while time.monotonic() - self._needed < IDLE_S:
            time.sleep(LOOK_S)
            with self._lock, suppress(HoldfastError):
                if self._ledger.ledger.read(KEY_WORKERS).entries:
                    self._needed = time.monotonic()
        self._ledger.close()
        os._exit(0)
