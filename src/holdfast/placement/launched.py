"""Where a worker belongs that Holdfast's agent did not start: its run's directory, its ledger, its id.

    torchrun train.py, srun python train.py, mpirun python train.py
    HOLDFAST_LEDGER=… HOLDFAST_KEYS=… HOLDFAST_RUN=… python train.py      one worker more, of a run on several hosts

All processes of one launch find the same run, since each finds the same name. What an agent would do once, the first of
them that comes does under a lock: make the directory, its secret and its record, and see that a ledger is served. On
one host that is a process of its own (agent/ledger_process.py), which whoever misses it starts again; on several it is
the etcd that HOLDFAST_LEDGER names. Owns nothing once the place is known.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.errors import ConfigError, LedgerUnavailable
from holdfast.core.words import KEY_INCARNATIONS, KEY_SIZE, decode_whole, encode_json, worker_id
from holdfast.ledger.port import Ledger
from holdfast.net.addresses import address_towards
from holdfast.placement.directory import RunDirectory, home_directory
from holdfast.placement.environment import RUN_DIR, WorkerEnvironment, variable
from holdfast.placement.launchers import NOBODY, RANK_VARIABLES, Launch, read_launch, run_name
from holdfast.placement.ledger import open_ledger
from holdfast.placement.ledger_served import locked_for_launch, see_that_it_is_served
from holdfast.placement.naming import NAME, check_name, host_name
from holdfast.placement.proc import process_started
from holdfast.trust.keys import load_keys

RUN = variable("run")
LEDGER, KEYS, HOST = variable("ledger"), variable("keys"), variable("host")
START_S = 60.0


def environment_of_process(variables: MutableMapping[str, str] | None = None) -> WorkerEnvironment | None:
    """What an agent told this process; else what is made of its launcher's words. None: it is a run of one.

    From then on the process has the variables that an agent would have set.
    """
    found = os.environ if variables is None else variables
    if RUN_DIR in found:
        return WorkerEnvironment.from_variables(found)
    launch = read_launch(found, _parent())
    if launch is None or launch.size == 1:
        if not found.get(LEDGER) or not found.get(RUN):
            return None
        launch = launch or _by_hand(found)
    environment = _place(launch, found)
    found.update(environment.to_variables())
    return environment


def _by_hand(variables: Mapping[str, str]) -> Launch:
    """A host of its own, beside whatever else of the run this machine has."""
    host = variables.get(HOST) or f"{host_name()[:50]}-{os.getpid()}"
    return Launch(launcher=NOBODY, rank=0, size=1, local_rank=0, local_size=1, hosts=2, id="", host=host)


def without_launch(variables: Mapping[str, str]) -> dict[str, str]:
    """For a process that is to be a run of one, whoever has started this one."""
    ours = (RUN_DIR, LEDGER, *RANK_VARIABLES)
    return {name: value for name, value in variables.items() if name not in ours}


def _parent() -> str:
    return f"{os.getppid()}.{process_started(os.getppid())}"


def _place(launch: Launch, variables: MutableMapping[str, str]) -> WorkerEnvironment:
    url = variables.get(LEDGER, "")
    name = variables.get(RUN) or run_name(_script(), launch)
    host = (variables.get(HOST) or launch.host or host_name()) if url else ""
    keys = variables.get(KEYS, "")
    _check(launch, name, url, keys, host)
    directory = RunDirectory(home_directory(None), name, host)
    directory.create()
    with locked_for_launch(directory.path):
        secret = directory.secret()
        known = directory.read()
        socket_dir = directory.socket_dir()
        if not known or known.get("workers") != launch.local_size:
            directory.write(_described(launch, directory, socket_dir, url, keys))
    if url:
        secret = load_keys(keys).secret
    environment = WorkerEnvironment(
        run_dir=directory.path,
        worker="",
        socket_dir=socket_dir,
        launcher=launch.launcher,
        ledger=url,
        keys=str(Path(keys).expanduser().resolve()) if keys else "",
        host=host,
        listen=variables.get(variable("listen"), "") or (address_towards(url) if url else ""),
        advertise=variables.get(variable("advertise"), ""),
        checkpoint=CheckpointSettings().placed(directory.path, alone=not url).encode(),
    )
    environment = replace(environment, outage_s=environment.outage_s if url else 0.0)
    if not url:
        see_that_it_is_served(directory.path, socket_dir, wait_s=START_S, fresh=not launch.again)
    ledger = open_ledger(url, name, environment.ledger_socket, secret)
    try:
        worker = _patiently(lambda: _take_id(ledger, launch, host))
    finally:
        ledger.close()
    if launch.rank == 0 and launch.launcher != NOBODY:
        many = f"{launch.size} processes of {launch.launcher}"
        print(f"holdfast: {many} are run {name}: `holdfast status {name}`", file=sys.stderr, flush=True)
    return replace(environment, worker=worker)


def _check(launch: Launch, name: str, url: str, keys: str, host: str) -> None:
    if launch.hosts > 1 and not url:
        raise ConfigError(
            f"{launch.launcher} has started {launch.size} processes on several hosts, and no ledger is named "
            "that all of them reach",
            hint=f"set {LEDGER}=etcd://HOST:2379 and {KEYS}=DIR for all of them, or start `holdfast run` on each host",
        )
    check_name(name)
    if url and not keys:
        raise ConfigError(
            f"{LEDGER} is set: a run on several hosts needs keys, so that nobody else can join it",
            hint=f"make them once with `holdfast keys create DIR`, copy DIR to every host, and set {KEYS}=DIR",
        )
    if url and not NAME.fullmatch(host):
        raise ConfigError(f"{host!r} cannot be the name of a host", hint=f"give it another for this run: {HOST}=NAME")


def _take_id(ledger: Ledger, launch: Launch, host: str) -> str:
    """The next number of this slot, and how many workers this host has, in the ledger."""
    slot = launch.local_rank if host else launch.rank
    key = f"{KEY_INCARNATIONS}{slot}@{host}" if host else f"{KEY_INCARNATIONS}{slot}"
    size_key, size = KEY_SIZE + host, encode_json({"workers": launch.local_size if host else launch.size})
    entry = ledger.get(size_key)
    if entry is None or entry.value != size:
        ledger.put(size_key, size)
    while True:
        entry = ledger.get(key)
        count = decode_whole(entry.value, "count") + 1 if entry is not None else 1
        expected = entry.revision if entry is not None else 0
        if ledger.compare_and_set(key, encode_json({"count": count}), expected=expected) is not None:
            return worker_id(slot, count, host)


def _patiently(call: Callable[[], str]) -> str:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return call()
        except LedgerUnavailable as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"the run's ledger does not answer: {error.message}",
                    hint=f"see `holdfast ledger status`, or what {LEDGER} names",
                ) from error
            time.sleep(0.2)


def _described(launch: Launch, directory: RunDirectory, socket_dir: Path, url: str, keys: str) -> dict[str, Any]:
    """run.json, for `holdfast status` and its like."""
    return {
        "name": directory.name,
        "script": _script(),
        "arguments": sys.argv[1:],
        "module": False,
        "workers": launch.local_size,
        "spares": 0,
        "host": directory.host,
        "ledger": url,
        "keys": keys,
        "launcher": launch.launcher,
        "socket_dir": str(socket_dir),
        "cwd": str(Path.cwd()),
        "command": f"{RUN}={directory.name} {_launching_command(launch)}",
    }


def _launching_command(launch: Launch) -> str:
    """As it was typed, where the process that was typed is our parent."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        words = []
    if _script() in words:
        return shlex.join(words)
    return shlex.join([launch.launcher, sys.executable, *sys.argv])


def _script() -> str:
    return sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script.py"
