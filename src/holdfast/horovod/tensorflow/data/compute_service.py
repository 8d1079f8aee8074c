"""Horovod's face of TensorFlow's data service: a training whose batches are made by the workers of another run.

    holdfast run --horovod --workers 2 -m horovod.tensorflow.data.compute_worker FILE
    holdfast run --horovod --workers 2 train.py FILE

The first run's workers start TensorFlow's own servers, and write into FILE how to find them; the training sends its
pipeline there. What goes between TensorFlow's servers and clients is TensorFlow's, without proof of who they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import tensorflow as tf

import holdfast.horovod.tensorflow as hvd
from holdfast.core.errors import ConfigError
from holdfast.horovod.meeting_place import ComputeClient, MeetingPlace

SIDES = ("compute", "training")
FILE_S = 600.0  # as long as a training waits for the file
LOOK_S = 0.1


@dataclass(frozen=True)
class TfDataServiceConfig:
    """How many serve, on which side the dispatchers are, and where both runs meet."""

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    place: MeetingPlace
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ConfigError(f"the dispatcher side is {self.dispatcher_side!r:.40}", hint=f"one of {', '.join(SIDES)}")
        if self.dispatchers < 1 or self.workers_per_dispatcher < 1:
            raise ConfigError(
                f"{self.dispatchers} dispatchers with {self.workers_per_dispatcher} workers each serve nobody",
                hint="give at least one of each",
            )

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        return ComputeClient(self.place)

    def to_dict(self) -> dict[str, Any]:
        names = ("dispatchers", "workers_per_dispatcher", "dispatcher_side", "timeout")
        return {**{name: getattr(self, name) for name in names}, "place": self.place.to_dict()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        place = MeetingPlace.from_dict(config.get("place"))
        numbers = {name: int(config[name]) for name in ("dispatchers", "workers_per_dispatcher", "timeout")}
        return TfDataServiceConfig(dispatcher_side=str(config["dispatcher_side"]), place=place, **numbers)

    def write(self, filename: str) -> None:
        """All of it at once, for this user only."""
        path = Path(filename)
        with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(json.dumps(self.to_dict()))
        os.replace(file.name, path)  # noqa: PTH105

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        path, until = Path(filename), time.monotonic() + FILE_S
        while wait_for_file_creation and not path.exists() and time.monotonic() < until:
            time.sleep(LOOK_S)
        try:
            return TfDataServiceConfig.from_dict(json.loads(path.read_text()))
        except (OSError, KeyError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{filename} is not the file of a data service: {type(error).__name__}: {error}",
                hint="give the file that horovod.tensorflow.data.compute_worker has written",
            ) from error


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of this rank's dispatcher, which is started here if that is the training's side."""
    client, several = compute_config.compute_client(), compute_config.dispatchers > 1
    number = rank if several else 0
    mine = compute_config.dispatcher_side == "training" and (several or rank == 0)
    with _dispatcher(client, number) if mine else _nothing():
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        count = compute_config.workers_per_dispatcher
        client.wait_for_dispatcher_worker_registration(number, compute_config.timeout, count)
        yield address


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """The dataset, whose batches come from the service. Also a method of tf.data.Dataset, once this is imported."""
    if compute_config.dispatcher_side == "training":
        raise ConfigError(
            "send_to_data_service is for dispatchers on the compute side, and these are the training's",
            hint="with tf_data_service(compute_config, hvd.rank()) as address: ...",
        )
    in_turns = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if in_turns else None,
                num_consumers=size if in_turns else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """One rank of the run that serves: a worker, and of some ranks a dispatcher too, until the service is over."""
    hvd.init()
    number, each = hvd.rank(), compute_config.workers_per_dispatcher
    dispatcher = number // each
    client = compute_config.compute_client()
    mine = compute_config.dispatcher_side == "compute" and number % each == 0
    with _dispatcher(client, dispatcher) if mine else _nothing():
        address = client.wait_for_dispatcher_registration(dispatcher, compute_config.timeout)
        service = tf.data.experimental.service
        server = service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=address.split("://")[1],
                heartbeat_interval_ms=1000,
                dispatcher_timeout_ms=compute_config.timeout * 1000,
            ),
            start=False,
        )
        server.start()
        try:
            client.register_worker_for_dispatcher(dispatcher, number)
            client.wait_for_shutdown()
        finally:
            _stop(server)


@contextmanager
def _dispatcher(client: ComputeClient, number: int) -> Iterator[None]:
    server = tf.data.experimental.service.DispatchServer()
    try:
        client.register_dispatcher(number, server.target)
        yield
    finally:
        _stop(server)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _stop(server: Any) -> None:
    server._stop()  # TensorFlow has no other way
    server.join()
