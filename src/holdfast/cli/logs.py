"""`holdfast logs`: what the workers of a run printed, by time, with their names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from holdfast.agent.output.log_files import LogFile, by_time, log_files
from holdfast.cli.control import find_run
from holdfast.cli.following import while_it_lives
from holdfast.core.errors import ConfigError
from holdfast.events.telling import names
from holdfast.placement.directory import RunDirectory

TAIL_MAX = 1_000_000
IMPORTS = "imports"  # what packages said before there were workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "What the workers of a run printed, each line with the name of its worker."
    parser.add_argument("worker", nargs="?", default="", metavar="WORKER", help="only this one: w0.1; w0: its slot's")
    parser.add_argument("--follow", action="store_true", help="go on with what they print, until the run is over")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last N lines")
    parser.set_defaults(command=_logs)


def _logs(options: argparse.Namespace) -> int:
    if options.tail is not None and not 0 <= options.tail <= TAIL_MAX:
        raise ConfigError(f"--tail is {options.tail}", hint=f"give a number of lines, from 0 to {TAIL_MAX}")
    directory = find_run(options.run, options.dir)
    logs = _chosen(directory, options.worker)
    bare = options.worker and all(log.name == options.worker for log in logs)
    given = by_time(logs, directory.logs, whole=not options.follow, last=options.tail)
    _print(given, bare=bare)
    if options.follow:
        _follow(directory, logs, options.worker, bare=bare)
    elif not any(log.position for log in logs):
        print(f"holdfast: the workers of run {directory.name} have printed nothing", file=sys.stderr)
    return 0


def _follow(directory: RunDirectory, logs: list[LogFile], worker: str, *, bare: bool) -> None:
    known = {log.name: log for log in logs}
    for _ in while_it_lives(directory):
        for log in log_files(directory.logs):
            if not worker or is_of(log.name, worker):
                known.setdefault(log.name, log)
        for log in known.values():
            _print(((log.name, line) for _, line in log.lines(whole=False)), bare=bare)
    for log in known.values():
        _print(((log.name, line) for _, line in log.lines(whole=True)), bare=bare)


def _print(lines: Iterable[tuple[str, str]], *, bare: bool) -> None:
    for name, line in lines:
        print(line if bare else f"{name} | {line}")
    sys.stdout.flush()


def _chosen(directory: RunDirectory, worker: str) -> list[LogFile]:
    logs = log_files(directory.logs)
    chosen = [log for log in logs if not worker or is_of(log.name, worker)]
    if worker and not chosen:
        found = [log.name for log in logs if log.name != IMPORTS]
        hint = f"there are {names(found)}" if found else "no worker was started yet"
        if worker == "agent":
            hint = f"what the agent says is in `holdfast events {directory.name}`"
        raise ConfigError(f"run {directory.name} has no output of a worker {worker!r:.80}", hint=hint)
    return chosen


def is_of(name: str, worker: str) -> bool:
    """Whether the log is that worker's. `w0` stands for w0.1, w0.2 and so on; a host's name may be left out."""
    return name == worker or name.startswith(f"{worker}.") or name.partition("@")[0] == worker
