"""What Slurm says of the step that this agent is a task of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.errors import ConfigError

MEMBERS = 3  # of etcd: one of them may be lost
_HINT = "start one agent a node, within a job: srun --ntasks-per-node=1 holdfast run --ledger slurm …"


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    job: str
    mark: str  # this step, and this time that the job runs: one that was put back into the queue runs again
    node: int
    nodes: int
    name: str  # of this node
    launched_from: str  # an address on the way to the other nodes

    @property
    def members(self) -> int:
        """How many of the first nodes serve the ledger: three outlive the loss of one; two would outlive none."""
        return MEMBERS if self.nodes >= MEMBERS else 1

    @property
    def serves(self) -> bool:
        return self.node < self.members

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> SlurmStep:
        """ConfigError where this is no step of Slurm's, or one with several tasks on a node."""
        try:
            job, step = variables["SLURM_JOB_ID"], variables["SLURM_STEP_ID"]
            tasks, nodes = int(variables["SLURM_STEP_NUM_TASKS"]), int(variables["SLURM_STEP_NUM_NODES"])
            node, restarts = int(variables["SLURM_NODEID"]), int(variables.get("SLURM_RESTART_COUNT") or 0)
        except KeyError as error:
            raise ConfigError(
                f"--ledger slurm is for a step of a Slurm job, and {error.args[0]} is not set", hint=_HINT
            ) from error
        except ValueError as error:
            raise ConfigError(f"Slurm's variables make no sense: {error}", hint=_HINT) from error
        if tasks != nodes:
            raise ConfigError(f"--ledger slurm: {tasks} tasks on {nodes} nodes are not one agent a node", hint=_HINT)
        return cls(
            job=job,
            mark=f"{job}.{step}.{restarts}",
            node=node,
            nodes=nodes,
            name=variables.get("SLURMD_NODENAME", ""),
            launched_from=variables.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        )


def run_name(step: SlurmStep) -> str:
    """Of a run that nobody has named: the job's, so that a job that was put back into the queue goes on with it."""
    return f"slurm-{step.job}"
