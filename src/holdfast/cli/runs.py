"""`holdfast runs`: the runs of this host, with what they are doing, since when, and what they take up."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.checkpoint.host_memory.place import memory_of
from holdfast.cli.tables import age_words, aligned, clock_words, size_words
from holdfast.core.errors import ConfigError
from holdfast.observe.reading import read_record
from holdfast.observe.summary import run_state
from holdfast.placement.directory import RunDirectory, home_directory, runs_in
from holdfast.placement.proc import living_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(command=_runs)


def _runs(options: argparse.Namespace) -> int:
    place = home_directory(options.dir)
    if options.dir and not place.is_dir():
        what = "is a file" if place.exists() else "does not exist"
        raise ConfigError(f"the directory {place} {what}", hint="give the --dir that the runs were started with")
    living = living_runs()
    rows = [look(run, lives=run.path in living) for run in runs_in(place)]
    rows.sort(key=lambda row: row["changed_s"] or 0.0)
    if options.json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print(f"no runs in {place}")
    else:
        print("\n".join(_table(rows, now=time.time())))
    return 0


def look(directory: RunDirectory, *, lives: bool) -> dict[str, Any]:
    """What `holdfast runs` says of one, for programs. `lives`: it has a living worker on this host."""
    record = read_record(directory.events)
    described = directory.read()
    memory = memory_of(directory.path)
    checkpoint = described.get("checkpoint")
    return {
        "run": directory.name,
        "host": directory.host or None,
        "state": run_state(record, agent=directory.agent() is not None, lives=lives),
        "step": record.step,
        "steps": record.steps or None,
        "started_s": record.began,
        "changed_s": record.last or _changed(directory.path / "run.json"),
        "bytes": disk_bytes(directory.path),
        "memory_bytes": disk_bytes(memory) if memory is not None else 0,
        "directory": str(directory.path),
        "checkpoint_uri": record.saved_to or (checkpoint.get("uri") if isinstance(checkpoint, dict) else None) or None,
    }


def disk_bytes(root: Path) -> int:
    """What the files below take up; a file with two names once. What vanishes meanwhile is passed over."""
    total, seen, waiting = 0, set(), [os.fspath(root)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif (found.st_dev, found.st_ino) not in seen:
                        seen.add((found.st_dev, found.st_ino))
                        total += found.st_blocks * 512
        except OSError:
            continue
    return total


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _table(rows: Iterable[dict[str, Any]], *, now: float) -> list[str]:
    lines = [("run", "state", "step", "started", "last change", "size")]
    for row in rows:
        name = f"{row['run']}@{row['host']}" if row["host"] else row["run"]
        steps = f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"])
        changed = "-" if row["changed_s"] is None else f"{age_words(now - row['changed_s'])} ago"
        memory = f" + {size_words(row['memory_bytes'])} in memory" if row["memory_bytes"] else ""
        started = clock_words(row["started_s"], "%Y-%m-%d %H:%M", "-")
        lines.append((name, row["state"], steps, started, changed, size_words(row["bytes"]) + memory))
    return aligned(lines, right=0)
