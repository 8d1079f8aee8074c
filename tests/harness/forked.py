"""Several workers at once, forked from this process: the real protocol, but no agent and no import of torch for each.

A forked worker is what a script started by an agent would be: it finds its place in the environment, joins, trains
and closes its run. The ledger is served by this process, after the fork. What a worker returns comes back as JSON.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from holdfast.agent.workers.processes import fence_worker
from holdfast.core.errors import WorkerEnded
from holdfast.core.words import KEY_SIZE, encode_json, host_of
from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer
from holdfast.placement.environment import LEDGER_SOCKET, WorkerEnvironment
from holdfast.trust.keys import load_keys

READY = "ready"
DEADLINE_S = 60.0


@dataclass
class Outcome:
    """How one worker ended: `value` is what its body returned, `error` the traceback if it raised."""

    worker: str
    value: Any = None
    error: str = ""
    code: int | None = None
    signal: int | None = None


@dataclass
class _Child:
    worker: str
    pid: int
    pipe: int
    data: bytearray = field(default_factory=bytearray)
    status: int | None = None


def forked(
    bodies: Mapping[str, Callable[[], Any]] | Callable[[], Any],
    *,
    workers: int = 0,
    path: str = "auto",
    lease_s: float = 5.0,
    size: int | None = None,
    keys: Path | None = None,
    deadline_s: float = DEADLINE_S,
    **told: Any,
) -> dict[str, Outcome]:
    """Run each body in a worker of its own, as one run; `bodies` by worker id, or one body for `workers` workers.

    Workers with a host in their id (`w0.1@a`) are on that host: those of others reach them over loopback TCP,
    encrypted if there are keys. `told` is more of what an agent tells them. The dead are fenced at once, as an agent
    does. Everything is gone when this returns.
    """
    if not isinstance(bodies, Mapping):
        bodies = {f"w{slot}.1": bodies for slot in range(workers)}
    run_dir = Path(tempfile.mkdtemp(prefix="holdfast-forked-"))  # short: a unix socket's path has 107 bytes
    secret = load_keys(keys).secret if keys else os.urandom(32)
    (run_dir / "secret").write_text(secret.hex())
    (run_dir / "events").mkdir()
    children: list[_Child] = []
    server = ledger = None
    try:
        for worker, body in bodies.items():
            place = replace(_place(run_dir, worker, path, lease_s, str(keys or "")), **told)
            children.append(_fork(worker, body, place, [child.pipe for child in children]))
        server = EmbeddedServer(run_dir / "ledger", run_dir / LEDGER_SOCKET, secret)
        server.start()
        ledger = EmbeddedLedger(run_dir / LEDGER_SOCKET, secret)
        ledger.put(KEY_SIZE, encode_json({"workers": size or len(bodies)}))
        (run_dir / READY).touch()
        return _gather(children, ledger, deadline_s)
    finally:
        for child in children:
            if child.status is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
            os.close(child.pipe)
        if ledger is not None:
            ledger.close()
        if server is not None:
            server.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


def _place(run_dir: Path, worker: str, path: str, lease_s: float, keys: str) -> WorkerEnvironment:
    host = host_of(worker)
    socket_dir = run_dir / host
    if host and not socket_dir.exists():
        socket_dir.mkdir()
        (socket_dir / LEDGER_SOCKET).symlink_to(run_dir / LEDGER_SOCKET)
    return WorkerEnvironment(
        run_dir=run_dir,
        worker=worker,
        socket_dir=socket_dir,
        path=path,
        lease_s=lease_s,
        host=host,
        keys=keys,
        listen="127.0.0.1" if host else "",
        outage_s=0.0,
        audit_every=0,
        late_after_s=0.0,
    )


def _fork(worker: str, body: Callable[[], Any], place: WorkerEnvironment, not_mine: list[int]) -> _Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        for fd in (reading, *not_mine):
            os.close(fd)
        _be_worker(body, place, writing)
    os.close(writing)
    return _Child(worker, pid, reading)


def _be_worker(body: Callable[[], Any], place: WorkerEnvironment, writing: int) -> NoReturn:
    """Nothing of the test process may run in here again, whatever happens: no fixture, no report, no atexit."""
    code = 1
    try:
        os.environ.update(place.to_variables())
        while not (place.run_dir / READY).exists():  # an agent, too, says how large the run is before it starts anyone
            time.sleep(0.002)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer: dict[str, Any]
        try:
            answer = {"value": body()}
            code = 0
        except WorkerEnded as end:
            answer = {"value": f"{type(end).__name__}: {end.reason}"}
            code = end.code
        except BaseException as error:
            answer = {"error": f"{''.join(traceback.format_exception(error))}"}
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(code)


def _gather(children: list[_Child], ledger: EmbeddedLedger, deadline_s: float) -> dict[str, Outcome]:
    deadline = time.monotonic() + deadline_s
    open_pipes = {child.pipe: child for child in children}
    while open_pipes:
        ready, _, _ = select.select(list(open_pipes), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(child.worker for child in open_pipes.values())
            raise AssertionError(f"{late} did not end within {deadline_s:.0f} s")
        for fd in ready:
            child = open_pipes[fd]
            data = os.read(fd, 65536)
            child.data += data
            if not data:
                del open_pipes[fd]
                _, child.status = os.waitpid(child.pid, 0)
                fence_worker(ledger, child.worker)
    return {child.worker: _outcome(child) for child in children}


def _outcome(child: _Child) -> Outcome:
    assert child.status is not None
    fields = json.loads(child.data) if child.data else {}
    code = os.waitstatus_to_exitcode(child.status)
    return Outcome(child.worker, code=code if code >= 0 else None, signal=-code if code < 0 else None, **fields)


def agreed(outcomes: Mapping[str, Outcome]) -> Any:
    """The value that every worker that lived returned."""
    for outcome in outcomes.values():
        assert not outcome.error, f"{outcome.worker} raised\n{outcome.error}"
    values = {outcome.worker: outcome.value for outcome in outcomes.values() if outcome.signal is None}
    assert values, "nobody lived"
    first = next(iter(values.values()))
    differ = [worker for worker, value in values.items() if value != first]
    assert not differ, (
        f"{', '.join(differ)} differ from {next(iter(values))}: {values[differ[0]]!r:.2000} {first!r:.2000}"
    )
    return first
