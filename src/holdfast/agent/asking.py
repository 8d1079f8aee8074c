"""What a run can be asked for from outside its agent: to stop, to save now, to let a worker go.

Through the ledger, which agent and workers watch; to a worker also by a signal, on its own host.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.core.words import (
    KEY_DEAD,
    KEY_DEAD_SERVERS,
    KEY_HOSTS,
    KEY_SAVE,
    KEY_SIZE,
    KEY_SLICE,
    KEY_STOP,
    KEY_VIEW,
    KEY_WORKERS,
    View,
    decode_json,
    encode_json,
    host_of,
)
from holdfast.events.telling import count
from holdfast.ledger.port import Ledger
from holdfast.placement.directory import RunDirectory
from holdfast.placement.ledger import SERVED, open_ledger
from holdfast.placement.proc import FoundProcess, find_workers, process_started
from holdfast.servers.log_codec import decode_configuration
from holdfast.trust.keys import load_keys

EVERY_START = 1 << 30  # of a server: all processes that it has had, and will have


@contextmanager
def ledger_of(directory: RunDirectory) -> Iterator[Ledger]:
    described = directory.read()
    socket = directory.recorded_ledger_socket()
    assert socket is not None
    url = str(described.get("ledger") or "")
    keys = load_keys(str(described["keys"])) if url.startswith(SERVED) else None
    ledger = open_ledger(url, directory.name, socket, b"" if url else directory.secret(), keys)
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
    return f"run {name} has no agent: {count(len(living), 'worker')} asked to finish the step and leave"


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


def declare_gone(directory: RunDirectory, hosts: Sequence[str]) -> str:
    """Say that hosts are gone for good: nobody waits any more for workers there that may have the training's state.

    A host that lives after all, cut off from the ledger, loses what it trains meanwhile; it can fork nothing.
    """
    name = directory.name
    if not directory.host:
        raise ConfigError(
            f"run {name} is on one host, whose agent sees its workers die", hint="this is for runs on several hosts"
        )
    with ledger_of(directory) as ledger:
        entries = {entry.key: entry.value for entry in ledger.read("").entries}
        registered = {key[len(KEY_WORKERS) :] for key in entries if key.startswith(KEY_WORKERS)}
        members = View.decode(entries[KEY_VIEW]).members if KEY_VIEW in entries else ()
        servers = _servers_of_slices(entries)
        for host in hosts:
            if KEY_HOSTS + host in entries or host in map(host_of, registered):
                raise ConfigError(
                    f"host {host} takes part in run {name}: its agent or a worker stands in the ledger",
                    hint="stop it there; of a host that has lost power that goes by itself, within seconds",
                )
            if host not in map(host_of, (*members, *servers)):
                known = ", ".join(sorted(set(map(host_of, (*members, *servers))))) or "none"
                raise ConfigError(
                    f"no worker of host {host} is in the last view of run {name}, and no slice is on its servers",
                    hint=f"its hosts are: {known}",
                )
        gone = [member for member in members if host_of(member) in hosts]
        ended = [server for server in servers if host_of(server) in hosts]
        for host in hosts:
            ledger.delete(KEY_SIZE + host)  # or the others would wait for new workers of it
        for worker in gone:
            ledger.put(KEY_DEAD + worker, b"{}")
        for server in ended:
            ledger.put(KEY_DEAD_SERVERS + server, encode_json({"start": EVERY_START}))
    return f"run {name} waits no more for {', '.join((*gone, *ended))}"


def _servers_of_slices(entries: Mapping[str, bytes]) -> tuple[str, ...]:
    """The parameter servers that slices are on, or were."""
    found: set[str] = set()
    for key, value in entries.items():
        if key.startswith(KEY_SLICE):
            with suppress(ProtocolError):
                found |= set(decode_configuration(decode_json(value)).replicas)
    return tuple(sorted(found))
