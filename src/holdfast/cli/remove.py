"""`holdfast rm`: delete runs that are over, with what they left on disk and in memory; checkpoints only if asked to.

A run is renamed before it is deleted, so that one that is half deleted is never listed as a run. Its lock is held
meanwhile: no agent can start in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.agent.asking import ledger_of
from holdfast.agent.hosts.presence import other_hosts
from holdfast.checkpoint.host_memory.place import kept_steps, memory_of, remove_memory
from holdfast.checkpoint.settings import NOWHERE
from holdfast.checkpoint.storage.opening import scheme_of
from holdfast.cli.control import find_run
from holdfast.cli.places import place_of_run
from holdfast.cli.runs import disk_bytes, look
from holdfast.cli.tables import size_words
from holdfast.core.durations import parse_duration
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.events.telling import count
from holdfast.placement.directory import RunDirectory, home_directory, runs_directory, runs_in
from holdfast.placement.naming import NAME
from holdfast.placement.proc import living_runs

if TYPE_CHECKING:
    from holdfast.checkpoint.storage.port import Storage

CHECKPOINTS = "checkpoints"  # in the run directory
DELETING = ".deleting-"  # what is on its way out: no run has a name like this


@dataclass(frozen=True)
class Doomed:
    """A run that is to be deleted, and what of it is a checkpoint."""

    run: RunDirectory
    inside: Path | None  # checkpoints in its own directory
    elsewhere: str  # the URI of those that are not; empty if none are asked for
    memory: Path | None

    @property
    def loses(self) -> list[str]:
        """What nobody could train on from afterwards, in words."""
        lost = []
        if self.inside is not None:
            lost.append(f"its checkpoints in {self.inside} ({size_words(disk_bytes(self.inside))})")
        if self.elsewhere:
            lost.append(f"its checkpoints in {self.elsewhere}")
        if self.memory is not None and kept_steps(self.memory):
            lost.append(f"its snapshot of step {kept_steps(self.memory)[0]} in this host's memory")
        return lost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Delete runs that are over: logs, events, ledger, and what they keep in this host's memory. Checkpoints stay, "
        "unless --checkpoints is given."
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="their names")
    parser.add_argument("--older-than", metavar="T", help="only runs that have not changed for the time T, such as 7d")
    parser.add_argument("--checkpoints", action="store_true", help="delete their checkpoints too, wherever they are")
    parser.add_argument("--yes", action="store_true", help="do not ask before checkpoints are deleted")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.set_defaults(command=_remove)


def _remove(options: argparse.Namespace) -> int:
    if not options.runs and options.older_than is None:
        raise ConfigError("RUN is missing", hint="name the runs, or give --older-than 7d for all old ones")
    home = home_directory(options.dir)
    age_s = None if options.older_than is None else parse_duration("--older-than", options.older_than)
    named = [_named(name, options.dir) for name in dict.fromkeys(options.runs)] if options.runs else runs_in(home)
    doomed = [_doom(run, checkpoints=options.checkpoints) for run in _chosen(named, age_s, asked=bool(options.runs))]
    if not doomed:
        print(f"no run in {home} is that old" if age_s is not None else "there is nothing to delete")
        return 0
    if options.dry_run:
        for one in doomed:
            print(f"would delete run {one.run.path.name}" + "".join(f", {lost}" for lost in one.loses))
        return 0
    _ask(doomed, yes=options.yes)
    _sweep(home)
    for one in doomed:
        print(_delete(one, checkpoints=options.checkpoints))
    return 0


def _named(name: str, home: str | None) -> RunDirectory:
    """The run; or what an earlier `holdfast rm` has left of it."""
    base, _, host = name.partition("@")
    if NAME.fullmatch(base) and (not host or NAME.fullmatch(host)):
        left = RunDirectory(home_directory(home), base, host)
        with suppress(OSError):  # a directory of somebody else's
            if not left.exists() and (left.path / CHECKPOINTS).is_dir():
                return left
    return find_run(name, home)


def _chosen(runs: Sequence[RunDirectory], age_s: float | None, *, asked: bool) -> Iterator[RunDirectory]:
    """Without those that are too young. One that lives is an error if it was asked for by name."""
    living, now = living_runs(), time.time()
    for run in runs:
        agent = run.agent()
        if agent is not None or run.path in living:
            if not asked:
                continue
            who = f"its agent is process {agent}" if agent is not None else "its workers train without an agent"
            raise ConfigError(
                f"run {run.name} is running, and is not deleted: {who}", hint=f"`holdfast stop {run.name}` first"
            )
        if age_s is not None:
            changed = look(run, lives=False)["changed_s"]
            if changed is not None and now - changed < age_s:
                continue
        yield run


def _doom(run: RunDirectory, *, checkpoints: bool) -> Doomed:
    inside = run.path / CHECKPOINTS
    elsewhere = ""
    if checkpoints:
        with suppress(ConfigError):  # it keeps none
            place = place_of_run(run)
            elsewhere = "" if Path(place) == inside or place == NOWHERE else place
        if elsewhere:
            _check_other_hosts(run)
    has = checkpoints and inside.is_dir() and any(inside.iterdir())
    return Doomed(run, inside if has else None, elsewhere, memory_of(run.path))


def _check_other_hosts(run: RunDirectory) -> None:
    """On several hosts the checkpoints are those of all: nobody may still train."""
    if not run.read().get("ledger"):
        return
    try:
        with ledger_of(run) as ledger:
            hosts = other_hosts({entry.key: entry.value for entry in ledger.read("").entries}, "")
    except (HoldfastError, OSError, AssertionError) as error:
        raise ConfigError(
            f"whether other hosts still train run {run.name} cannot be known: {str(error).partition(chr(10))[0]}",
            hint="leave --checkpoints out, or delete them where they are",
        ) from error
    if hosts:
        raise ConfigError(
            f"run {run.name} is running on {', '.join(hosts)}, and its checkpoints are not deleted",
            hint=f"`holdfast stop {run.name}` first, or leave --checkpoints out",
        )


def _ask(doomed: Sequence[Doomed], *, yes: bool) -> None:
    """Before anything goes that somebody could go on from."""
    losing = [one for one in doomed if one.loses]
    if yes or not losing:
        return
    what = "; ".join(f"run {one.run.path.name}: {', '.join(one.loses)}" for one in losing)
    if not sys.stdin.isatty():
        raise ConfigError(f"this deletes checkpoints ({what}), and nobody is there to be asked", hint="add --yes")
    print(f"This deletes {what}. Nothing brings them back.")
    try:
        answer = input("Delete? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was deleted", hint="answer y to delete, or leave --checkpoints out")


def _delete(one: Doomed, *, checkpoints: bool) -> str:
    run, more = one.run, []
    freed = disk_bytes(run.path)
    if one.elsewhere:
        more.append(_delete_elsewhere(one.elsewhere, run.name))
    with run.locked():
        described = run.read()
        socket_dir = described.get("socket_dir")
        going = run.path.with_name(f"{DELETING}{os.getpid()}-{run.path.name}")
        kept = run.path / CHECKPOINTS
        if not checkpoints and kept.is_dir() and any(kept.iterdir()):
            going.mkdir(mode=0o700)
            # run.json first: without it this is no run any more, whatever happens to us.
            for path in sorted(run.path.iterdir(), key=lambda path: path.name != "run.json"):
                if path.name != CHECKPOINTS:
                    path.rename(going / path.name)
            freed -= disk_bytes(kept)
            more.append(f"its checkpoints stay in {kept}: `holdfast rm --checkpoints {run.path.name}` deletes them")
        else:
            run.path.rename(going)
        if isinstance(socket_dir, str) and socket_dir and Path(socket_dir).name.startswith("holdfast-"):
            run.remove_sockets(Path(socket_dir))
    if one.memory is not None:
        freed += disk_bytes(one.memory)
        remove_memory(one.memory)
    shutil.rmtree(going, ignore_errors=True)
    if described.get("ledger"):
        more.append(f"its ledger still knows it: `holdfast ledger forget {run.name}`")
    return f"deleted run {run.path.name}, {size_words(freed)}" + "".join(f"; {sentence}" for sentence in more)


def _delete_elsewhere(uri: str, name: str) -> str:
    """Those that this run has made: the place may hold others' too."""
    from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest
    from holdfast.checkpoint.saving.retention import delete_checkpoint
    from holdfast.checkpoint.storage.opening import open_storage

    with closing(open_storage(uri)) as storage:
        listed = list_checkpoints(storage)
        own, others = [], 0
        for entry in listed:
            if entry.committed:
                try:
                    mine = read_manifest(storage, entry.step).run == name
                except HoldfastError:
                    mine = False  # damaged: somebody should look at it
                own += [entry.step] if mine else []
                others += not mine
        if not others:  # what was never committed says not whose it is
            own += [entry.step for entry in listed if not entry.committed]
        for step in own:
            delete_checkpoint(storage, step)
        _give_back(storage, name, empty=not others)
    if not scheme_of(uri) and not others:
        with suppress(OSError):
            Path(uri).rmdir()
    left = f", {count(others, 'checkpoint')} of others stay there" if others else ""
    return f"{count(len(own), 'checkpoint')} deleted in {uri}{left}"


def _give_back(storage: Storage, name: str, *, empty: bool) -> None:
    """A place that was the run's is nobody's any more; where others' checkpoints are, it is released to the next."""
    from holdfast.checkpoint.format.owner import PREFIX, newest_owner, release

    _, owner = newest_owner(storage)
    if owner is None or owner.run != name:
        return
    if not empty:
        release(storage)
        return
    for entry in storage.list(PREFIX):
        storage.delete(entry.name)


def _sweep(home: Path) -> None:
    """What an earlier `holdfast rm` was killed over."""
    for path in runs_directory(home).glob(f"{DELETING}*"):
        pid = path.name.removeprefix(DELETING).partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
