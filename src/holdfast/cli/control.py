"""`holdfast scale` and `holdfast stop`: a word to a run's agent, through its ledger."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_SIZE, KEY_STOP, encode_json
from holdfast.launch.directory import RunDirectory, home_directory, runs_in
from holdfast.launch.ledgers import open_ledger
from holdfast.launch.proc import find_workers
from holdfast.launch.settings import check_name, check_workers, host_name
from holdfast.ledger.port import Ledger


def find_run(name: str, home: str | None) -> RunDirectory:
    """`NAME`, or `NAME@HOST` for one host's part of a run on several; here there is usually only one."""
    place = home_directory(home)
    name, _, host = name.partition("@")
    check_name(name)
    found = [run for run in runs_in(place) if run.name == name and (not host or run.host == host)]
    if len(found) > 1:
        found = [run for run in found if run.host in ("", host_name())] or found
    if not found:
        raise ConfigError(
            f"there is no run {name} in {place}", hint="list them with `holdfast runs`, or give its --dir"
        )
    if len(found) > 1:
        parts = ", ".join(f"{run.name}@{run.host}" for run in found)
        raise ConfigError(f"several hosts of run {name} keep their part here: {parts}", hint="name one of them")
    return found[0]


@contextmanager
def ledger_of(directory: RunDirectory) -> Iterator[Ledger]:
    described = directory.read()
    socket = directory.recorded_ledger_socket()
    assert socket is not None
    url = str(described.get("ledger") or "")
    ledger = open_ledger(url, directory.name, socket, b"" if url else directory.secret())
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
        ledger.put(KEY_SIZE + directory.host, encode_json({"workers": workers}))
    at = f" on host {directory.host}" if directory.host else ""
    print(f"run {name} is asked to have {workers} workers{at}")
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
