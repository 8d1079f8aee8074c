"""How much memory this process could still have: by the kernel's word of the machine, and by the limits of its cgroups.

A server in a container would be ended by the kernel for what it takes beyond its limit, without a word. What the page
cache holds counts as free: the kernel gives it up first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNKNOWN = 1 << 62
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def free_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    return min([_of_machine(proc), *_of_cgroups(proc, cgroups)])


def _of_machine(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration, IndexError):
        return UNKNOWN


def _of_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Of the group that this process is in, and of all that this one is in."""
    try:
        rows = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, place in (row for row in rows if len(row) == 3):
        if controllers == "":
            root, names, cache = cgroups, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cache = "total_inactive_file"
        else:
            continue
        inside = Path(place.lstrip("/"))
        for group in (root / inside, *(root / parent for parent in inside.parents)):
            try:
                limit, used = ((group / name).read_text().strip() for name in names)
                if limit != "max":
                    yield max(0, int(limit) - int(used) + _cached(group / "memory.stat", cache))
            except (OSError, ValueError):
                continue


def _cached(stat: Path, name: str) -> int:
    for line in stat.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
