"""holdfast.launch: train a function with several workers, from a notebook or a script, and wait for what it returns.

The agent runs in a process of its own, as `holdfast run` does, on a script that defines or imports the function
(function_script.py). This process follows it (following.py), shows what it says, and hands Ctrl-C on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import (
    EXIT_BAD_INPUT,
    EXIT_INEXACT,
    EXIT_UNWRITTEN,
    ConfigError,
    LaunchFailed,
)
from holdfast.launching.calling import RETURNED, refuse_in_worker
from holdfast.launching.following import Following, agent_command
from holdfast.launching.function_script import FunctionScript
from holdfast.launching.options import parse_launch_options
from holdfast.launching.progress import face_for
from holdfast.observe.summary import STOPS
from holdfast.placement.directory import RunDirectory, fresh_name

_FINE = (*STOPS, EXIT_INEXACT, EXIT_UNWRITTEN)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What became of a launch. `value` is what the function returned in the leader; None if the run was stopped."""

    value: Any
    outcome: str  # "finished"; "stopped": the training is not over, and the same run goes on from there
    reason: str  # of a stop
    run: str
    directory: Path
    step: int
    digest: str  # of the weights
    exit_code: int  # as `holdfast run` would have ended: 65 if the run is known not to be exact


def launch(
    fn: Callable[..., Any],
    *,
    workers: int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Launched:
    """Call `fn(*args, **kwargs)` in `workers` processes of one run, which `holdfast.join` in it takes part in.

    `options` are those of `holdfast run` by their names: run="mnist", spares=1, save_every="30s", checkpoint="s3://…".
    The dashboard is served for as long as the run goes, on a port that is free; dashboard=None: not at all.
    Raises LaunchFailed with the worker's traceback if the function fails, and KeyboardInterrupt after the run has
    stopped in order, if it was interrupted.
    """
    refuse_in_worker()
    asked = parse_launch_options(workers, options)
    script = FunctionScript(fn, args, kwargs or {})
    name = asked.name or fresh_name(asked.home, script.name, now=time.time())
    directory = RunDirectory(asked.home, name)
    if (agent := directory.agent()) is not None:
        raise ConfigError(
            f"run {name} already has an agent (process {agent})",
            hint=f"look at it with `holdfast status {name}`, or choose another name with run=…",
        )
    directory.create()
    path = script.write(directory.path)
    face = face_for(progress=progress)
    words = ["--run", name, "--dir", str(asked.home), *asked.words, str(path)]
    following = Following(agent_command(words), directory, face)
    try:
        code = following.run()
    finally:
        face.close()
    if following.interrupts:
        raise KeyboardInterrupt
    return _launched(following, directory, code)


def _launched(following: Following, directory: RunDirectory, code: int) -> Launched:
    if code not in _FINE:
        raise _failure(following, directory, code)
    end, place = following.finished, directory.path / RETURNED
    found, value = _returned(place, following.began)
    if end and not found:  # it was finished before this launch, and the function is not called any more
        found, value = _returned(place, 0.0)
    return Launched(
        value=value,
        outcome="finished" if end or found else "stopped",
        reason="" if end or found else str(following.ended.get("reason", "")),
        run=directory.name,
        directory=directory.path,
        step=int(end.get("step", following.record.step)),
        digest=str(end.get("digest", "")),
        exit_code=code,
    )


def _failure(following: Following, directory: RunDirectory, code: int) -> ConfigError | LaunchFailed:
    """In the words of the worker that failed last; all of them mostly fail in the same way."""
    from holdfast.agent.output.tail import last_words

    reason = str(following.ended.get("reason", "")) or "its agent ended without a word"
    worker = next(reversed(following.failed), "")
    said = last_words(directory.logs / f"{worker}.log") if worker else []
    if code == EXIT_BAD_INPUT and said:
        sentence = [line for line in said if line.strip()][-2:]
        at = next((number for number, line in enumerate(said) if line.startswith("holdfast: ")), None)
        sentence = said[at:] if at is not None else sentence
        message, hint = sentence[0].removeprefix("holdfast: "), " ".join(sentence[1:]).strip().removeprefix("hint: ")
        return ConfigError(message, hint=hint or f"all output is in {directory.logs}")
    return LaunchFailed(
        f"run {directory.name} failed at step {following.record.step}: {reason}",
        hint=f"all output is in {directory.logs}",
        worker=worker,
        traceback="\n".join(said),
        exit_code=code,
    )


def _returned(place: Path, since: float) -> tuple[bool, Any]:
    """Whether somebody came to the end since then, and what the function returned: in the leader, else in the first."""
    found: list[tuple[bool, int, list[int], str]] = []
    for path in place.glob("w*"):
        if path.stat().st_mtime < since:
            continue
        kept = json.loads(path.read_text())
        slot, incarnation = map(int, path.name[1:].split("."))
        found.append((kept["leader"], kept["step"], [-slot, incarnation], kept["value"]))
    if not found:
        return False, None
    from holdfast.state.objects import unpack_object

    return True, unpack_object(max(found)[3])
