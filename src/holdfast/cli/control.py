"""`holdfast scale` and `holdfast stop`: a word to a run's agent, through its ledger."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_SIZE, KEY_STOP, encode_json
from holdfast.launch.directory import RunDirectory, home_directory
from holdfast.launch.proc import find_workers
from holdfast.launch.settings import check_workers
from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.ledger.port import Ledger


def find_run(name: str, home: str | None) -> RunDirectory:
    directory = RunDirectory(home_directory(home), name)
    if not directory.exists():
        raise ConfigError(
            f"there is no run {name} in {directory.home}", hint="list them with `holdfast runs`, or give its --dir"
        )
    return directory


@contextmanager
def ledger_of(directory: RunDirectory) -> Iterator[Ledger]:
    socket = directory.recorded_ledger_socket()
    assert socket is not None
    ledger = EmbeddedLedger(socket, directory.secret())
    try:
        yield ledger
    finally:
        ledger.close()


def scale(name: str, home: str | None, workers: int) -> int:
    check_workers(workers)
    directory = find_run(name, home)
    if directory.agent() is None:
        command = directory.read().get("command", f"holdfast run --run {name}")
        raise ConfigError(
            f"run {name} has no agent, so its size cannot be changed", hint=f"take it over with: {command}"
        )
    with ledger_of(directory) as ledger:
        ledger.put(KEY_SIZE, encode_json({"workers": workers}))
    print(f"run {name} is asked to have {workers} workers")
    return 0


def stop(name: str, home: str | None) -> int:
    """Without an agent there is no ledger to say it through, but a worker leaves in order on SIGTERM as well."""
    directory = find_run(name, home)
    if directory.agent() is not None:
        with ledger_of(directory) as ledger:
            ledger.put(KEY_STOP, encode_json({"reason": "holdfast stop"}))
        print(f"run {name} is asked to stop: workers finish the step and leave")
        return 0
    living = find_workers(directory.path)
    if not living:
        raise ConfigError(f"run {name} does not run", hint=f"see `holdfast status {name}`")
    for found in living:
        try:
            os.kill(found.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
    print(f"run {name} has no agent; its {len(living)} workers are asked to finish the step and leave")
    return 0
