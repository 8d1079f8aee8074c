"""What a server may still take, where its container has less than the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.servers.free_memory import UNKNOWN, free_bytes

MEMINFO = "MemTotal: 3000 kB\nMemFree: 100 kB\nMemAvailable: 2000 kB\n"


def written(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


def two(at: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    """Of a group of version 2."""
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n"}
    return {f"cgroup/{at}{name}": text for name, text in {**files, "memory.stat": f"inactive_file {cached}\n"}.items()}


def one(at: str, limit: int, used: int, cached: int = 0) -> dict[str, str]:
    files = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used)}
    stat = {"memory.stat": f"cache 9\ntotal_inactive_file {cached}\n"}
    return {f"cgroup/memory/{at}{name}": text for name, text in {**files, **stat}.items()}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 2_048_000),
        ({"proc/self/cgroup": "0::/a\n", **two("a/", "max", 5)}, 2_048_000),
        ({"proc/self/cgroup": "0::/a\n", **two("a/", "1000", 700, 50)}, 350),
        ({"proc/self/cgroup": "0::/a/b\n", **two("a/", "1000", 900), **two("a/b/", "max", 5)}, 100),
        ({"proc/self/cgroup": "0::/\n", **two("", "1000", 1200)}, 0),
        ({"proc/self/cgroup": "4:memory:/x/y\n0::/\n", **one("x/y/", 1000, 300, 100)}, 800),
        ({"proc/self/cgroup": "4:cpu,memory:/x\n", **one("x/", 1 << 60, 300), **one("", 500, 300)}, 200),
        ({"proc/self/cgroup": "3:cpuset:/\nnonsense\n0::/gone\n"}, 2_048_000),
        ({"proc/self/cgroup": "0::/a\n", **two("a/", "a lot", 5)}, 2_048_000),
    ],
)
def test_the_least_of_the_machine_and_of_all_groups_that_it_is_in(
    tmp_path: Path, files: dict[str, str], free: int
) -> None:
    assert free_bytes(*written(tmp_path, {"proc/meminfo": MEMINFO, **files})) == free


def test_where_nothing_says_it_there_is_no_limit(tmp_path: Path) -> None:
    assert free_bytes(tmp_path, tmp_path) == UNKNOWN
    assert 0 < free_bytes() < UNKNOWN
