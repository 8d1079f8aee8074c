"""`holdfast scale`, `stop` and `give-up`: a word to a run's agent, through its ledger."""

from __future__ import annotations

import argparse

from holdfast.agent.asking import ask_to_stop, declare_gone, ledger_of
from holdfast.agent.settings import check_workers
from holdfast.cli.parser import meant, nearest
from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_SIZE, encode_json
from holdfast.events.telling import count
from holdfast.placement.directory import RunDirectory, home_directory, runs_in
from holdfast.placement.naming import check_name, host_name


def find_run(name: str, home: str | None) -> RunDirectory:
    """`NAME`, or `NAME@HOST` for one host's part of a run on several; here there is usually only one."""
    place = home_directory(home)
    name, _, host = name.partition("@")
    check_name(name)
    runs = runs_in(place)
    found = [run for run in runs if run.name == name and (not host or run.host == host)]
    if len(found) > 1:
        found = [run for run in found if run.host in ("", host_name())] or found
    if not found:
        near = nearest(name, {run.name for run in runs})
        part = f"{name} of host {host}" if host else name
        raise ConfigError(
            f"there is no run {part} in {place}",
            hint=meant("" if near == name else near, "list them with `holdfast runs`, or give its --dir"),
        )
    if len(found) > 1:
        parts = ", ".join(f"{run.name}@{run.host}" for run in found)
        raise ConfigError(f"several hosts of run {name} keep their part here: {parts}", hint="name one of them")
    return found[0]


def scale(options: argparse.Namespace) -> int:
    name, workers = options.run, options.workers
    check_workers(workers)
    directory = find_run(name, options.dir)
    if directory.agent() is None:
        command = directory.read().get("command", f"holdfast run --run {name}")
        raise ConfigError(
            f"run {name} has no agent, so its size cannot be changed", hint=f"take it over with: {command}"
        )
    described = directory.read()
    if described.get("workers") == 0 and not described.get("script"):
        raise ConfigError(
            f"host {directory.host} of run {name} only serves: it was started without a script",
            hint="end it there with Ctrl-C, and start it with --workers N and the script",
        )
    with ledger_of(directory) as ledger:
        ledger.put(KEY_SIZE + directory.host, encode_json({"workers": workers}))
    at = f" on host {directory.host}" if directory.host else ""
    print(f"run {name} is asked to have {count(workers, 'worker')}{at}")
    return 0


def give_up(options: argparse.Namespace) -> int:
    print(declare_gone(find_run(options.run, options.dir), options.hosts))
    return 0


def stop(options: argparse.Namespace) -> int:
    print(ask_to_stop(find_run(options.run, options.dir), "holdfast stop"))
    return 0
