"""Where a run keeps snapshots in this host's memory, and how that goes away again. Loads no torch: agents use it.

The directory's name is a digest of the run's secret and of its directory on this host, in which the host's name is, so
two runs never share one, nor do two hosts that are on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
MEMORY_ONLY = "memory"  # what stands for a place where nothing is kept elsewhere
OWNER = "run.json"  # in the directory: whose it is
_STEP = re.compile(r"checkpoint-(\d{12})")


def memory_directory(run_directory: Path, secret: bytes, *, parent: Path = SHARED_MEMORY) -> Path:
    """Where the run whose part on this host lives in `run_directory` keeps snapshots in memory."""
    mark = hashlib.blake2b(secret + b"\0memory\0" + os.fsencode(run_directory), digest_size=8).hexdigest()
    return parent / f"holdfast-{os.getuid()}-{mark}"


def remove_memory(root: Path) -> None:
    """No error if there is nothing."""
    shutil.rmtree(root, ignore_errors=True)


def kept_steps(root: Path) -> list[int]:
    """The steps that are complete in a run's directory, as far as one host is concerned; newest first."""
    try:
        found = [(match, path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    except OSError:
        return []
    return sorted((int(match[1]) for match, path in found if (path / "manifest.json").exists()), reverse=True)


def memory_of(run_directory: Path, *, parent: Path = SHARED_MEMORY) -> Path | None:
    """Where that run keeps snapshots in this host's memory now, by what is written there; None if nowhere."""
    return next((root for root, owner in _owned(parent) if owner == run_directory), None)


def sweep(parent: Path = SHARED_MEMORY) -> None:
    """Remove what this user's runs have left whose run directory was deleted, where that can be seen from here."""
    for root, owner in _owned(parent):
        if not owner.exists():
            remove_memory(root)


def _owned(parent: Path) -> Iterator[tuple[Path, Path]]:
    """What this user's runs keep in memory, each with its run directory, where that can be seen from here."""
    for root in parent.glob(f"holdfast-{os.getuid()}-*"):
        try:
            owner = json.loads((root / OWNER).read_text())
            place, directory = owner["place"], Path(owner["run_directory"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # just being made, or being removed
        if place == place_mark():
            yield root, directory


@lru_cache(maxsize=1)
def place_mark() -> str:
    """Where the ids of processes and the paths of this host mean what they mean to us: this start of it, and this
    container. Others that share its memory or its storage may see neither."""
    mark = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    return hashlib.blake2b(mark.encode(), digest_size=8).hexdigest()
