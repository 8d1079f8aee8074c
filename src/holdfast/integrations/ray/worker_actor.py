"""The actor that is one worker: its process takes part in the run, and says how its function ended.

What the driver sends is an `ActorPlace` of plain values and the function's arguments as text, and what comes back is
text, too: both are read as data (state/objects.py). The function itself travels as Ray carries functions.

Threads: the function runs in one thread of the actor, `leave` comes in another, and `progress` in a third.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, WorkerEnded
from holdfast.integrations.ray.finding import find_ray, node_address
from holdfast.placement.directory import RunDirectory, home_directory
from holdfast.placement.environment import WorkerEnvironment
from holdfast.trust.keys import FILES

RETURNED_BYTES_MAX = 256 * 2**20
JOIN_S = 120.0
_PRIVATE = 0o600


@dataclass(frozen=True, kw_only=True)
class ActorPlace:
    """Where a worker belongs, as the driver says it. `variables` are those of a WorkerEnvironment that every node
    shares; those that name places of the node are added there."""

    run: str
    home: str  # where runs are kept on each node; empty: where Holdfast keeps them anyway
    host: str
    worker: str
    variables: dict[str, str]
    keys: dict[str, str]  # the contents of the run's keys, by the files' names


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a function ended. `kind`: returned, left, raised or refused (a ConfigError: it would everywhere)."""

    kind: str
    reason: str = ""
    code: int = 0
    said: str = ""  # the traceback, or what was returned
    leader: bool = False
    step: int = 0
    digest: str = ""


class WorkerActor:
    """Made into an actor by the driver."""

    def where(self) -> dict[str, Any]:
        """Of this process: its node, the address by which other nodes reach it, and its process id."""
        node = find_ray().get_runtime_context().get_node_id()
        return {"node": node, "address": node_address(), "pid": os.getpid()}

    def work(self, place: dict[str, Any], fn: Callable[..., Any], arguments: str) -> str:
        """Call the function as a worker of the run. Ray sees no exception of it."""
        from holdfast.engine.api.process_edge import newest_run, release_left
        from holdfast.state.objects import pack_object, unpack_object

        ended = Ended(kind="left")
        try:
            enter(ActorPlace(**place))
            args, kwargs = unpack_object(arguments)
            returned = fn(*args, **kwargs)
            run = newest_run()
            leader = run is not None and run.leader
            said = pack_object(returned, path="what the function returns", bytes_max=RETURNED_BYTES_MAX)
            step, digest = (run.step, run.digest()) if run is not None else (0, "")
            if run is not None:
                run.close()
            ended = Ended(kind="returned", said=said, leader=leader, step=step, digest=digest)
        except WorkerEnded as end:
            ended = Ended(kind="left", reason=end.reason, code=end.code)
            _close(failed=False)
        except BaseException as error:
            kind = "refused" if isinstance(error, ConfigError) else "raised"
            ended = Ended(kind=kind, reason=str(error), said=traceback.format_exc())
            _close(failed=True)
        release_left()
        return json.dumps(asdict(ended))

    def progress(self) -> tuple[int, bool]:
        """The step that it is at, and whether its loop has come to its end."""
        from holdfast.engine.api.process_edge import progress_of_newest

        return progress_of_newest()

    def leave(self) -> bool:
        """Finish the step and leave the run. Who has not joined yet does so first."""
        from holdfast.engine.api.process_edge import ask_to_leave

        deadline = time.monotonic() + JOIN_S
        while not (asked := ask_to_leave()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return asked


def enter(place: ActorPlace) -> None:
    """Make what the node needs for the run, and be this worker from now on."""
    directory = RunDirectory(home_directory(place.home or None), place.run, place.host)
    directory.create()
    keys = directory.path / "keys"
    with (directory.path / "place.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one node come at the same time
        keys.mkdir(mode=0o700, exist_ok=True)
        for name in FILES:
            _write_once(keys / name, place.keys[name])
        socket_dir = directory.socket_dir()
        if not directory.exists():  # for `holdfast status` and `holdfast events`, on this node
            about = {"name": place.run, "host": place.host, "script": "launched on Ray", "workers": 0, "spares": 0}
            ledger = {"ledger": place.variables["HOLDFAST_LEDGER"], "keys": str(keys), "socket_dir": str(socket_dir)}
            directory.write({**about, **ledger, "cwd": str(Path.cwd()), "command": "launched on Ray"})
    environment = WorkerEnvironment.from_variables(
        {
            **place.variables,
            "HOLDFAST_RUN_DIR": str(directory.path),
            "HOLDFAST_WORKER": place.worker,
            "HOLDFAST_SOCKET_DIR": str(socket_dir),
            "HOLDFAST_HOST": place.host,
            "HOLDFAST_KEYS": str(keys),
        }
    )
    assert environment is not None
    os.environ.update(environment.to_variables())


def _write_once(path: Path, content: str) -> None:
    if path.exists():
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE), "w") as file:
        file.write(content)
    partial.replace(path)


def _close(*, failed: bool) -> None:
    from holdfast.engine.api.process_edge import newest_run

    run = newest_run()
    if run is not None:
        try:
            run.close(failed=failed)
        except WorkerEnded:
            pass  # it has said so in its event log
