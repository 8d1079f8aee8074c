"""What a run can be asked for from outside its agent: to stop, to save now, to let a worker go.

Through the ledger, which agent and workers watch; to a worker also by a signal, on its own host.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_SAVE, KEY_STOP, encode_json, host_of
from holdfast.launch.directory import RunDirectory
from holdfast.launch.ledgers import open_ledger
from holdfast.launch.proc import FoundProcess, find_workers, process_started
from holdfast.ledger.port import Ledger


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


def ask_to_stop(directory: RunDirectory, who: str) -> str:
    """Without an agent there is no ledger to say it through, but a worker leaves in order on SIGTERM as well."""
    name = directory.name
    if directory.agent() is not None:
        with ledger_of(directory) as ledger:
            ledger.put(KEY_STOP, encode_json({"reason": who}))
        return f"run {name} is asked to stop: workers finish the step and leave"
    living = find_workers(directory.path)
    if not living:
        raise ConfigError(f"run {name} does not run", hint=f"see `holdfast status {name}`")
    for found in living:
        _terminate(found)
    return f"run {name} has no agent; its {len(living)} workers are asked to finish the step and leave"


def ask_to_save(directory: RunDirectory, who: str) -> str:
    """The first member sees the key at its next step, and all save together after it."""
    name = directory.name
    if directory.agent() is None:
        raise ConfigError(f"run {name} has no agent to ask for a checkpoint", hint=f"see `holdfast status {name}`")
    if (directory.read().get("checkpoint") or {}).get("uri") == "none":
        raise ConfigError(f"run {name} keeps no checkpoints", hint="it was started with --checkpoint none")
    with ledger_of(directory) as ledger:
        ledger.put(KEY_SAVE, encode_json({"reason": who, "at": round(time.time(), 3)}))
    return f"run {name} is asked to save after its next step"


def drain(directory: RunDirectory, worker: str) -> str:
    """It finishes its step and leaves; its slot stays empty, unless a spare waits."""
    for found in find_workers(directory.path):
        if found.worker == worker:
            _terminate(found)
            return f"{worker} is asked to finish its step and leave"
    elsewhere = host_of(worker) and host_of(worker) != directory.host
    hint = f"ask on host {host_of(worker)}" if elsewhere else f"see `holdfast status {directory.name}`"
    raise ConfigError(f"there is no worker {worker[:80]} here", hint=hint)


def _terminate(found: FoundProcess) -> None:
    """SIGTERM to this very process: not to another one that got its number meanwhile."""
    try:
        handle = os.pidfd_open(found.pid)
    except ProcessLookupError:
        return
    try:
        if process_started(found.pid) == found.started:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
