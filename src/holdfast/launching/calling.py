"""The worker's side of holdfast.launch: calls the function with the arguments that were sent, keeps what it returns.

What stands in the run's directory for it:

    launched.py     what the workers execute: imports or defines the function, and calls it
    launched.json   its arguments, and the values that it uses of a notebook's session, as data
    returned/w0.1   what the function returned in this worker, as data, and whether that worker was the leader

Does not import the agent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.placement.environment import WorkerEnvironment

SCRIPT, ARGUMENTS, RETURNED = "launched.py", "launched.json", "returned"
ARGUMENTS_BYTES_MAX, RETURNED_BYTES_MAX = 64 * 2**20, 256 * 2**20
MAIN = "__holdfast_main__"  # what the caller's script is called in a worker: not __main__, so that it does not launch


def call(fn: Callable[..., Any]) -> None:
    """Call it as the caller of launch asked for, and keep what it returns."""
    directory = _directory()
    sent = _sent(directory)
    returned = fn(*sent["args"], **sent["kwargs"])
    _keep(directory, fn.__name__, returned)


def value(name: str) -> Any:
    """A value of the caller's session."""
    return _sent(_directory())["values"][name]


def function_of_file(path: str, name: str) -> Callable[..., Any]:
    """A function of the script that called launch, which is run for it as multiprocessing does."""
    spec = importlib.util.spec_from_file_location(MAIN, path, loader=SourceFileLoader(MAIN, path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN] = module
    spec.loader.exec_module(module)
    held: Any = module
    for part in name.split("."):
        held = getattr(held, part, None)
    if not callable(held):
        raise ConfigError(
            f"{path} defines {name} only when it is the main script",
            hint='define it outside of `if __name__ == "__main__":`, and only call holdfast.launch there',
        )
    return held  # type: ignore[no-any-return]


def refuse_in_worker() -> None:
    """ConfigError in a process that a launch, or `holdfast run`, has started."""
    if WorkerEnvironment.from_variables() is not None:
        raise ConfigError(
            "holdfast.launch was called in a worker of a run",
            hint='in a script, call it under `if __name__ == "__main__":`; workers run the rest of the file, too',
        )


_read: dict[Path, dict[str, Any]] = {}


def _directory() -> Path:
    environment = WorkerEnvironment.from_variables()
    if environment is None:
        raise ConfigError("this script is for the workers of a launch", hint="start it with holdfast.launch")
    return environment.run_dir


def _sent(directory: Path) -> dict[str, Any]:
    if directory not in _read:
        from holdfast.state.objects import unpack_object

        texts = json.loads((directory / ARGUMENTS).read_text())
        _read[directory] = {name: unpack_object(text) for name, text in texts.items()}
    return _read[directory]


def _keep(directory: Path, name: str, returned: Any) -> None:
    from holdfast.engine.api.process_edge import newest_run
    from holdfast.state.objects import pack_object

    run = newest_run()
    packed = pack_object(returned, path=f"what {name} returns", bytes_max=RETURNED_BYTES_MAX)
    me = run.id if run is not None else os.environ.get("HOLDFAST_WORKER", "w0.1")
    leader = run is not None and run.leader
    place = directory / RETURNED
    place.mkdir(mode=0o700, exist_ok=True)
    partial = place / f".{me}.new"
    partial.write_text(json.dumps({"leader": leader, "step": run.step if run is not None else 0, "value": packed}))
    partial.replace(place / me)
