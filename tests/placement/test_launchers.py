"""What launchers say of a process, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import ConfigError
from holdfast.placement.launched import environment_of_process, without_launch
from holdfast.placement.launchers import Launch, read_launch, run_name, tasks_of_nodes

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/1/error.json",
}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "n2",
}


def launch_of(variables: dict[str, str], parent: str = "1.2") -> Launch:
    found = read_launch(variables, parent)
    assert found is not None
    return found


def where(launch: Launch) -> tuple[Any, ...]:
    return launch.rank, launch.size, launch.local_rank, launch.local_size, launch.hosts


def test_torchrun() -> None:
    found = launch_of(TORCHRUN)
    assert (found.launcher, *where(found)) == ("torchrun", 5, 8, 1, 4, 2)
    assert not found.again and launch_of({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).again


def test_every_process_of_a_launch_finds_the_same_name_and_no_other_launch_does() -> None:
    name = run_name("dir/my train.py", launch_of(TORCHRUN))
    assert name.startswith("my-train-")
    later = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    later["TORCHELASTIC_ERROR_FILE"] = "/tmp/torchelastic_a/none_b/attempt_1/0/error.json"
    assert run_name("my train.py", launch_of(later, parent="3.4")) == name
    other = {**TORCHRUN, "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_c/attempt_0/1/error.json"}
    assert run_name("my train.py", launch_of(other)) != name
    named = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "digits"}
    assert launch_of(named).id == launch_of({**named, "TORCHELASTIC_ERROR_FILE": ""}).id != launch_of(TORCHRUN).id
    plain = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert launch_of(plain).id == launch_of(plain).id != launch_of(plain, parent="9.9").id


@pytest.mark.parametrize(
    ("address", "expected"),
    [("localhost", (1, 2, 1, 2, 1)), ("127.0.0.1", (1, 2, 1, 2, 1)), ("10.0.0.1", (1, 2, 0, 1, 2))],
)
def test_only_rank_and_size(address: str, expected: tuple[int, ...]) -> None:
    """Some set no more. Whoever meets on loopback is on one host."""
    assert where(launch_of({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address})) == expected


def test_srun() -> None:
    found = launch_of(SRUN)
    assert (found.launcher, *where(found), found.host) == ("srun", 2, 3, 0, 1, 2, "n2")
    assert run_name("train.py", found) == "train-77.0" and not found.again
    assert launch_of({**SRUN, "SLURM_RESTART_COUNT": "1"}).again


def test_a_batch_script_is_no_task() -> None:
    """It has a rank and a number of tasks, and would wait for the others for ever."""
    batch = {name: SRUN[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")}
    assert read_launch({**batch, "SLURM_NTASKS": "3", "SLURM_NNODES": "2"}, "") is None


def test_what_starts_the_process_counts_and_not_what_is_around_it() -> None:
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert where(launch_of({**SRUN, **mpi})) == (1, 2, 1, 2, 1)
    assert where(launch_of({**SRUN, **hydra})) == (1, 2, 0, 1, 2)
    assert launch_of({**SRUN, "PMI_RANK": "0", "PMI_SIZE": "3"}).launcher == "srun"  # its own, with --mpi=pmi2
    assert launch_of({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_tasks_of_nodes() -> None:
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of_nodes("4") == [4]
    assert tasks_of_nodes("") == tasks_of_nodes("a few") == []


def test_a_rank_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="RANK=3 is no process of WORLD_SIZE=2"):
        read_launch({"RANK": "3", "WORLD_SIZE": "2"}, "")
    with pytest.raises(ConfigError, match="WORLD_SIZE=two is not a number"):
        read_launch({"RANK": "0", "WORLD_SIZE": "two"}, "")


def test_one_process_is_a_run_of_one() -> None:
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert environment_of_process(one) is None
    assert environment_of_process({}) is None
    assert environment_of_process({"HOLDFAST_LEDGER": "etcd://a"}) is None  # for `holdfast ledger`; no run is named
    assert without_launch({**TORCHRUN, **SRUN, "HOLDFAST_RUN_DIR": "/r"}).keys() >= {"MASTER_ADDR", "SLURM_JOB_ID"}
    assert read_launch(without_launch({**TORCHRUN, **SRUN}), "") is None


def test_several_hosts_need_a_ledger_and_keys() -> None:
    with pytest.raises(ConfigError, match="no ledger is named") as told:
        environment_of_process(dict(TORCHRUN))
    assert "HOLDFAST_LEDGER=etcd://" in str(told.value)
    with pytest.raises(ConfigError, match="needs keys"):
        environment_of_process({"HOLDFAST_LEDGER": "etcd://a", "HOLDFAST_RUN": "r"})
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        environment_of_process({"HOLDFAST_LEDGER": "etcd://a", "HOLDFAST_RUN": "../r"})
