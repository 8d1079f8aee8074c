"""Lightning's fit in tasks of Slurm: as `srun --ntasks=2 python train.py` starts them, with the job's notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.events import read_events
from tests.harness.gate import Gate

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("lightning") is None, reason="there is no Lightning here"),
]
TRAINING = str(Path(__file__).with_name("training.py"))
DEADLINE_S = 200.0


def task(home: Path, number: int) -> dict[str, str]:
    """The variables of one of two. There is no SLURM_NTASKS_PER_NODE, as the page's srun says nothing of it."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    place = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "SLURM_NODEID": "0"}
    own = {"SLURM_STEP_TASKS_PER_NODE": "2", "HOLDFAST_DIR": str(home), "OMP_NUM_THREADS": "1"}
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **step, **job, **place, **own, "PATH": path, "HOLDFAST_CHECKPOINT": str(home / "kept")}


def wait(condition: Callable[[], bool], what: str, home: Path, *live: subprocess.Popen[bytes]) -> None:
    """`live`: who must not end before that."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        said = "".join(path.read_text() for path in sorted(home.glob("output*")))
        in_time = time.monotonic() < deadline and all(one.poll() is None for one in live)
        assert in_time, f"waited for {what}\n{said[-6000:]}"
        time.sleep(0.05)


def test_the_jobs_notice_saves_the_step_and_lightning_requeues_nothing(tmp_path: Path) -> None:
    home, gate = tmp_path, Gate(tmp_path / "gate")
    (home / "bin").mkdir()
    requeued = home / "requeued"
    (home / "bin" / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {requeued}\n")
    (home / "bin" / "scontrol").chmod(0o755)
    gate.open_to(0)
    words = [sys.executable, TRAINING, "--epochs", "3", "--gate", str(gate.path), "--home", str(home / "files")]
    tasks = []
    try:
        for number in range(2):
            with (home / f"output{number}").open("w") as output:
                tasks.append(subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=task(home, number)))
        wait(lambda: len(registered(home)) == 2, "two workers", home, *tasks)
        gate.open_to(5)
        wait(lambda: len(gate.at(5, ["0", "1"])) == 2, "step 5 on both", home, *tasks)
        for one in tasks:
            one.send_signal(signal.SIGUSR1)
        gate.open_to()
        wait(lambda: all(one.poll() is not None for one in tasks), "the end", home)
    finally:
        for one in tasks:
            if one.poll() is None:
                one.kill()
            one.wait(30)
    assert [one.returncode for one in tasks] == [128 + signal.SIGUSR1] * 2, (home / "output0").read_text()
    assert not requeued.exists() and not list((home / "files").rglob("hpc_ckpt*"))


def registered(home: Path) -> set[str]:
    runs = (home / "runs").glob("*")
    return {one["who"] for run in runs for one in read_events(run / "events") if one["kind"] == "registered"}
