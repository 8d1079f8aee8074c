"""Jobs on a real Slurm: munged, slurmctld and two slurmd on loopback. Scripts: docs/how-to/slurm.md."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import TRAIN, holdfast

from holdfast.agent.hosts.etcd_cluster import EtcdCluster, find_etcd
from holdfast.core.errors import ConfigError
from holdfast.events import read_events
from tests.harness import ROOT
from tests.harness.gate import Gate
from tests.harness.slurm_cluster import SlurmCluster, why_not

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500), pytest.mark.xdist_group("slurm")]
long = pytest.mark.skipif(os.environ.get("HOLDFAST_DRILLS") != "all", reason="a long test: HOLDFAST_DRILLS=all")
DEADLINE_S = 600.0
STEPS = ["--steps", "12"]
PAGE = ROOT / "docs" / "how-to" / "slurm.md"


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def etcd() -> None:
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one worker comes to."""
    home = tmp_path_factory.mktemp("run")
    done = holdfast("run", "--workers", "1", TRAIN, *STEPS, home=home, deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stdout
    return next(line.split()[-1] for line in done.stdout.splitlines() if "weights:" in line)


def scripts() -> list[str]:
    return re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE.read_text(), re.DOTALL)


class Job:
    """A directory to submit from, with a train.py that waits at a gate, and `holdfast` on the path."""

    def __init__(self, slurm: SlurmCluster, directory: Path, script: str) -> None:
        self.slurm = slurm
        self.directory = directory
        self.gate = Gate(directory / "gate")
        self.output = directory / "output"
        words = [TRAIN, *STEPS, "--gate", str(self.gate.path)]
        (directory / "train.py").write_text(
            f"import runpy, sys\nsys.argv = {words!r}\nsys.path[0] = {str(Path(TRAIN).parent)!r}\n"
            f"runpy.run_path({TRAIN!r}, run_name='__main__')\n"
        )
        (directory / "bin").mkdir()
        shim = directory / "bin" / "holdfast"
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m holdfast "$@"\n')
        shim.chmod(0o755)
        (directory / "job.sh").write_text(script.replace("\n\n", f"\nexport PATH={directory / 'bin'}:$PATH\n", 1))
        self.number = ""

    def submit(self, *options: str, **variables: str) -> None:
        options = (f"--chdir={self.directory}", *options)
        here = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **variables}
        self.number = self.slurm.submit(self.directory / "job.sh", *options, variables=here, output=self.output)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.said()}\n{self.slurm.last_words()}"
            time.sleep(0.1)

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def at(self, step: int, workers: int) -> bool:
        return len([path for path in self.directory.glob("at-*") if path.read_text() == str(step)]) >= workers

    def hold_all_at(self, step: int, workers: int, *, registered: int = 0) -> None:
        """Who comes late joins between steps, so nobody is held before all have come."""
        wanted = registered or workers
        self.wait(lambda: len({event["who"] for event in self.events("registered")}) >= wanted, f"{wanted} workers")
        self.gate.open_to(step)
        self.wait(lambda: self.at(step, workers), f"{workers} workers at step {step}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        runs = sorted((self.directory / "holdfast" / "runs").glob("*"))
        return [event for run in runs for event in read_events(run / "events") if event["kind"] == kind]

    def digests(self) -> set[str]:
        return {event["digest"] for event in self.events("finished")}

    def lose_task(self, task: str) -> None:
        """Its agent, workers and script at once, as with its node. `scancel` would ask first."""
        mark = f"SLURM_ARRAY_TASK_ID={task}".encode()
        for pid in self.slurm.processes():
            try:
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue

    def end(self) -> None:
        self.slurm.run("scancel", self.number)


@pytest.fixture
def make_job(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    jobs: list[Job] = []

    def make(script: str) -> Job:
        jobs.append(Job(slurm, tmp_path, script))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def test_srun_alone_is_holdfast_run(make_job: Callable[[str], Job], slurm: SlurmCluster, digest: str) -> None:
    """Three tasks on one node, without an agent."""
    command = f"srun --nodes=1 --ntasks=3 {shlex.quote(sys.executable)} train.py"
    job = make_job(f"#!/bin/bash\n\nexport HOLDFAST_DIR=$PWD/holdfast\n{command}\n")
    job.submit("--nodes=1", "--ntasks=3")
    assert slurm.wait_state(job.number, "COMPLETED", "FAILED", deadline_s=DEADLINE_S) == "COMPLETED", job.said()
    assert job.digests() == {digest} and job.said().count(f"digest {digest}") == 3
    assert {event["who"] for event in job.events("finished")} == {"w0.1", "w1.1", "w2.1"}
    assert f"3 processes of srun are run train-{job.number}.0" in job.said()


@long
def test_a_job_of_two_agents_is_told_to_end_is_requeued_and_goes_on(
    make_job: Callable[[str], Job], slurm: SlurmCluster, etcd: None, digest: str
) -> None:
    """The first script of the page: its ledger is on the first node."""
    job = make_job(scripts()[0])
    job.gate.open_to(0)
    job.submit()
    job.hold_all_at(5, 4)
    slurm.ask("scancel", "--signal=TERM", job.number)
    job.gate.open_to()
    job.wait(lambda: slurm.restarts(job.number) == 1, "the job to be requeued")
    left = job.events("left")
    saved = max(event["step"] for event in left)
    assert len(left) == 4 and 5 <= saved < 12, left
    job.gate.open_to(saved)
    slurm.start_now(job.number)
    job.hold_all_at(11, 4, registered=8)
    job.gate.open_to()
    assert slurm.wait_state(job.number, "COMPLETED", "FAILED", deadline_s=DEADLINE_S) == "COMPLETED", job.said()
    assert job.digests() == {digest}
    assert {event["step"] for event in job.events("resumed")} == {saved}
    assert {event["who"] for event in job.events("finished")} == {"w0.2@n1", "w1.2@n1", "w0.2@n2", "w1.2@n2"}
    left_behind = [path.name for path in (job.directory / "holdfast" / "slurm").glob("*")]
    assert left_behind == [f"slurm-{job.number}.ledger.json"]  # no certificate, no address


@long
def test_no_task_of_an_array_is_irreplaceable(
    make_job: Callable[[str], Job], slurm: SlurmCluster, etcd: None, tmp_path: Path, digest: str
) -> None:
    """The last script of the page, with three tasks. One is lost, and a spare of another takes its place."""
    assert holdfast("keys", "create", str(tmp_path / "keys"), home=tmp_path).returncode == 0
    job = make_job(scripts()[-1])
    job.gate.open_to(0)
    with EtcdCluster(tmp_path / "etcd", 1) as cluster:
        job.submit("--array=0-2", LEDGER=cluster.url, HOLDFAST_DIR=str(tmp_path / "holdfast"))
        job.hold_all_at(4, 3, registered=6)
        job.lose_task("0")
        job.gate.open_to(8)
        job.wait(lambda: job.at(8, 3), "three workers at step 8")
        job.gate.open_to()
        for task in ("1", "2"):
            done = slurm.wait_state(f"{job.number}_{task}", "COMPLETED", "FAILED", deadline_s=DEADLINE_S)
            assert done == "COMPLETED", job.said()
    assert job.digests() == {digest}
    finished = {event["who"].partition("@")[2] for event in job.events("finished")}
    assert finished == {"task1", "task2"} and len(job.events("finished")) == 3


@pytest.mark.parametrize(
    ("variables", "told"),
    [({}, "SLURM_JOB_ID is not set"), ({"SLURM_STEP_NUM_TASKS": "4"}, "4 tasks on 2 nodes are not one agent a node")],
)
def test_a_ledger_of_slurm_without_a_job(variables: dict[str, str], told: str, tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0"}
    done = holdfast(
        "run",
        "--ledger",
        "slurm",
        "--workers",
        "1",
        TRAIN,
        home=tmp_path,
        variables=({**step, **variables} if variables else {}),
    )
    assert done.returncode == 2 and told in done.stderr and "srun --ntasks-per-node=1 holdfast run" in done.stderr
