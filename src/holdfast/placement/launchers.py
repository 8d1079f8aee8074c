"""Which process of how many this is, by the variables of its launcher: torchrun, Slurm's srun, or those of MPI.

Pure. Holdfast's own agent tells its workers in other words (environment.py), and where those are, nobody looks here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from holdfast.core.errors import ConfigError

TORCHRUN, SLURM, OPEN_MPI, HYDRA, NOBODY = "torchrun", "srun", "Open MPI", "MPICH", "you"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_RANKS = {  # launcher: rank, size, rank on this host, how many are on this host
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    OPEN_MPI: (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    HYDRA: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Of the step: a batch script has SLURM_PROCID and SLURM_NTASKS too, and is no task of several.
    SLURM: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
RANK_VARIABLES = tuple(names[0] for names in _RANKS.values())  # without them, nobody has started several


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One of `size` processes that were started together. `id` is the same in all of them, and in no other launch."""

    launcher: str
    rank: int
    size: int
    local_rank: int  # among those of this host
    local_size: int
    hosts: int
    id: str
    host: str = ""  # what the launcher calls this host; empty: what it calls itself
    again: bool = False  # the launcher has started all of them once more, after one of them failed


def read_launch(variables: Mapping[str, str], parent: str) -> Launch | None:
    """None: nobody has started several. `parent` names the process that started this one, for want of a better id."""
    for launcher, names in _RANKS.items():
        rank, size = (_whole(variables, name) for name in names[:2])
        if rank is None or size is None or (launcher == HYDRA and names[3] not in variables):
            continue  # srun with PMI has tasks of its own way
        if not 0 <= rank < size:
            raise ConfigError(
                f"{names[0]}={rank} is no process of {names[1]}={size}",
                hint=f"unset them if nobody but you has set them; {launcher} sets both",
            )
        local_rank, local_size, hosts = _on_this_host(launcher, variables, rank, size)
        return Launch(
            launcher=launcher,
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            hosts=hosts,
            id=_id(launcher, variables, parent),
            host=variables.get("SLURMD_NODENAME", "") if launcher == SLURM else "",
            again=bool(_whole(variables, "TORCHELASTIC_RESTART_COUNT")) or bool(_restarts(launcher, variables)),
        )
    return None


def run_name(script: str, launch: Launch) -> str:
    """What the run of these processes is called where nobody has named it: the same in all of them."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(script).stem).lstrip("._-")[:32] or "run"
    return f"{stem}-{launch.id}"


def _whole(variables: Mapping[str, str], name: str) -> int | None:
    found = variables.get(name, "") if name else ""
    if not found:
        return None
    try:
        return int(found)
    except ValueError:
        raise ConfigError(
            f"{name}={found} is not a number", hint=f"unset {name}, or set what a launcher sets"
        ) from None


def _on_this_host(launcher: str, variables: Mapping[str, str], rank: int, size: int) -> tuple[int, int, int]:
    """Rank and number on this host, and how many hosts there are (2: more than one)."""
    _, _, rank_name, size_name = _RANKS[launcher]
    local_rank = _whole(variables, rank_name)
    if launcher == SLURM:
        nodes = _whole(variables, "SLURM_STEP_NUM_NODES") or _whole(variables, "SLURM_NNODES") or 1
        each = tasks_of_nodes(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = _whole(variables, "SLURM_NODEID") or 0
        local_size = each[node] if node < len(each) else size if nodes == 1 else 1
        return local_rank or 0, local_size, nodes
    found = _whole(variables, size_name)
    if local_rank is None or found is None:
        # Some set only RANK and WORLD_SIZE. Where the first is said to be on loopback, so are all.
        if variables.get("MASTER_ADDR", "") in _LOOPBACK:
            return rank, size, 1
        return local_rank or 0, 1, 1 if size == 1 else 2
    return local_rank, found, 1 if found == size else 2


def tasks_of_nodes(text: str) -> list[int]:
    """Slurm's way to say how many tasks each node has: "2(x3),1" is 2, 2, 2, 1."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _restarts(launcher: str, variables: Mapping[str, str]) -> int | None:
    return _whole(variables, "SLURM_RESTART_COUNT") if launcher == SLURM else None


def _id(launcher: str, variables: Mapping[str, str], parent: str) -> str:
    if launcher == SLURM:
        return f"{variables.get('SLURM_JOB_ID', '0')}.{variables.get('SLURM_STEP_ID', '0')}"
    if launcher == TORCHRUN:
        # The directory of a launch's error files is its own; its name for the run may be "none", and its port changes.
        errors = PurePath(variables.get("TORCHELASTIC_ERROR_FILE", ""))
        said = variables.get("TORCHELASTIC_RUN_ID", "")
        mark = [said] if said not in ("", "none") else [str(errors.parents[2])] if len(errors.parts) > 3 else []
        mark = mark or [variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", ""), parent]
    else:
        space = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
        mark = [space or parent]
    return hashlib.sha256("\0".join([launcher, *mark]).encode()).hexdigest()[:10]
