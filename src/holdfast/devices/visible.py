"""Which of a host's accelerators each of its workers sees: one, by what `holdfast run --devices` says. No torch, and
none is opened: the agent counts what the kernel shows of them.

A worker gets its device by environment variables that the makers' libraries read when they are first used. What is
set there already bounds what there is: a scheduler may have given this host's run some of its devices only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.core.options.run import AUTO, NONE

CUDA = "CUDA_VISIBLE_DEVICES"  # AMD's library reads it too
WITHOUT_OPENING = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch then says whether there are devices without opening one
VARIABLES = (CUDA, "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")  # NVIDIA, AMD, Intel
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = ":4096:8"  # with another one, or none, the same products may have other bits


def devices_of(asked: str, variables: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...] | None:
    """What this host's workers share, as the variables call them; None: what they see is left as it is."""
    if asked == NONE:
        return ()
    given = next((variables[name] for name in VARIABLES if name in variables), None)
    there = tuple(one.strip() for one in given.split(",") if one.strip()) if given is not None else None
    if asked == AUTO:
        found = there if there is not None else tuple(map(str, range(_count(root))))
        return found or None
    count = int(asked)
    return (there if there is not None else tuple(map(str, range(count))))[:count]


def variables_for(slot: int, devices: tuple[str, ...] | None, variables: Mapping[str, str]) -> dict[str, str]:
    """For the worker in this slot of the host. Workers share devices where they are more than these."""
    found = {WORKSPACE: variables.get(WORKSPACE, WORKSPACES), WITHOUT_OPENING: "1"}
    if devices is None:
        return found
    seen = devices[slot % len(devices)] if devices else ""
    return {**found, **dict.fromkeys(VARIABLES, seen)}


def _count(root: Path) -> int:
    """Devices of which the kernel's drivers tell."""
    nvidia = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    if nvidia:
        return nvidia
    return sum(map(_computes, (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")))  # AMD


def _computes(properties: Path) -> bool:
    """Of a node of AMD's driver, processors are among which: it has units that compute as a GPU's do."""
    try:
        lines = properties.read_text().splitlines()
    except OSError:
        return False
    return any(line.split()[:1] == ["simd_count"] and line.split()[1:] != ["0"] for line in lines)
