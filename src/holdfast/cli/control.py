"""`holdfast scale` and `holdfast stop`: a word to a run's agent, through its ledger."""

from __future__ import annotations

from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_SIZE, encode_json
from holdfast.launch.asking import ask_to_stop, ledger_of
from holdfast.launch.directory import RunDirectory, home_directory, runs_in
from holdfast.launch.settings import check_name, check_workers, host_name


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
    print(ask_to_stop(find_run(name, home), "holdfast stop"))
    return 0
