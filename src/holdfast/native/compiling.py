"""Compiles a small C file of the package at first use, into a cache directory of the user, and loads it.

A library's name has a hash of the source, the compiler, the flags and this machine's processor: a cache that several
machines share never hands one of them instructions that it does not have. It is written to a temporary name and
renamed, so two processes that compile at once do no harm. Where anything fails there is no library, and the caller
computes without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

COMPILE_TIMEOUT_S = 60.0
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-w",
    "-shared",
    "-fPIC",
)


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "holdfast" / "kernels"


@lru_cache(maxsize=8)
def library(source: Path, *defines: str) -> ctypes.CDLL | None:
    """The compiled file, with these `NAME=value` defined, or None: no compiler, no cache, no such flags."""
    try:
        return ctypes.CDLL(str(compiled(source, cache_directory(), *defines)))
    except (OSError, subprocess.SubprocessError, RuntimeError):
        return None


def compiled(source: Path, directory: Path, *defines: str) -> Path:
    """Where the library is, compiled now if it is not there yet. OSError or SubprocessError if that cannot be done."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    words = [compiler, *FLAGS, *(f"-D{define}" for define in defines)]
    digest = hashlib.sha256("\0".join([*words, _processor(), source.read_text()]).encode()).hexdigest()[:32]
    target = directory / f"{source.stem}-{digest}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(prefix=f"{target.stem}.", suffix=".tmp", dir=directory)
    os.close(handle)
    unfinished = Path(name)
    try:
        subprocess.run(
            [*words, str(source), "-o", name, "-lm"],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        unfinished.chmod(0o700)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("flags", "Features", "model name", "cpu family", "CPU part"))}
    return "\n".join([platform.machine(), *sorted(told)])
