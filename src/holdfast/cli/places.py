"""Which place for checkpoints a word means: a URI, a path, or the name of a run, whose checkpoints are then meant."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.settings import NOWHERE
from holdfast.checkpoint.storage.opening import check_there, scheme_of
from holdfast.checkpoint.storage.spelling import check_spelling
from holdfast.cli.control import find_run
from holdfast.cli.parser import meant, nearest
from holdfast.core.errors import ConfigError
from holdfast.observe.reading import read_record
from holdfast.placement.directory import RunDirectory, home_directory, runs_directory, runs_in
from holdfast.placement.naming import NAME


def place_of(word: str, home: str | None, *, may_be_new: bool = False) -> str:
    """The URI or path. A name that is both a run's and a directory's is the run's; ./name is the directory.

    ConfigError if it is neither, unless the place `may_be_new`.
    """
    if _is_name(word):
        run = _run_named(word, home)
        if run is not None:
            return place_of_run(run)
        if not Path(word).exists() and not may_be_new:
            near = nearest(word, {found.name for found in runs_in(home_directory(home))})
            raise ConfigError(
                f"there is neither a run {word} in {home_directory(home)} nor a directory {word} here",
                hint=meant(near, "list the runs with `holdfast runs`, or give its --dir"),
            )
    elif word:
        check_spelling(word)
    if word and not may_be_new:
        check_there(word)
    return word


def place_of_run(run: RunDirectory) -> str:
    """Where a run keeps its checkpoints: where it said that it saved last, else where it was told to."""
    saved_to = read_record(run.events).saved_to
    if scheme_of(saved_to) or saved_to.startswith("/"):
        return saved_to
    described = run.read()
    checkpoint = described.get("checkpoint")
    told = str(checkpoint.get("uri") or "") if isinstance(checkpoint, dict) else ""
    if told == NOWHERE or (not told and described.get("ledger")):
        raise ConfigError(
            f"run {run.name} keeps no checkpoints", hint="start it with --checkpoint URI, and it saves there"
        )
    return told or str(run.path / "checkpoints")


def _run_named(word: str, home: str | None) -> RunDirectory | None:
    """The run; or what `holdfast rm` has left of one, its checkpoints."""
    name, _, host = word.partition("@")
    if any(run.name == name and host in ("", run.host) for run in runs_in(home_directory(home))):
        return find_run(word, home)
    with suppress(OSError, ConfigError):
        left = RunDirectory(home_directory(home), name, host)
        if left.path.parent == runs_directory(home_directory(home)) and (left.path / "checkpoints").is_dir():
            return left
    return None


def _is_name(word: str) -> bool:
    name, at, host = word.partition("@")
    return bool(NAME.fullmatch(name)) and (not at or bool(NAME.fullmatch(host)))
