"""Workers that no agent of ours has started: by torchrun, by variables as MPI's launchers set them, by hand."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import TRAIN, holdfast

from holdfast.agent.hosts.etcd_cluster import EtcdCluster, find_etcd
from holdfast.core.errors import ConfigError
from holdfast.events import read_events
from holdfast.placement.proc import children, process_state
from tests.harness import ROOT
from tests.harness.gate import Gate

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500), pytest.mark.xdist_group("launchers")]
long = pytest.mark.skipif(os.environ.get("HOLDFAST_DRILLS") != "all", reason="a long test: HOLDFAST_DRILLS=all")
DEADLINE_S = 600.0
STEPS = ["--steps", "12"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Launched:
    """Processes of one launch, and what they print."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.processes: list[subprocess.Popen[str]] = []
        self.gate = Gate(home / "gate")
        self.gate.open_to(0)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """With one compute thread, as an agent would say."""
        output = (self.home / f"output{len(self.processes)}").open("w")
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "HOLDFAST_DIR": str(self.home), "OMP_NUM_THREADS": "1", **variables},
        )
        output.close()
        self.processes.append(process)
        return process

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.home.glob("output*")))

    def digests(self) -> list[str]:
        lines = self.output().splitlines()
        return [line.split()[-1] for line in lines if line.startswith("digest ")]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.output()}\n{self.events()[-30:]}"
            time.sleep(0.05)

    def who(self, kind: str) -> set[str]:
        return {event["who"] for event in self.events(kind)}

    def hold_all_at(self, step: int) -> None:
        """All three. Who comes late joins between steps, so nobody is held before all have come."""
        self.wait(lambda: len(self.who("registered")) == 3, "three workers")
        self.gate.open_to(step)
        self.wait(lambda: len(self.gate.at(step, ["w0.1", "w1.1", "w2.1"])) == 3, f"step {step}")

    def finish(self) -> list[int]:
        for process in self.processes:
            self.wait(lambda process=process: process.poll() is not None, "the end")  # type: ignore[misc]
        return [process.returncode for process in self.processes]

    @property
    def runs(self) -> list[Path]:
        return sorted((self.home / "runs").glob("*"))

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        events = [event for run in self.runs for event in read_events(run / "events")]
        return [event for event in events if not kind or event["kind"] == kind]

    def end(self) -> None:
        """Nothing is left behind: every process with our home in its variables goes."""
        mark = f"HOLDFAST_DIR={self.home}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                continue
        for process in self.processes:
            process.wait(30)


@contextmanager
def launched(home: Path) -> Iterator[Launched]:
    found = Launched(home)
    try:
        yield found
    finally:
        found.end()


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `holdfast run --workers 3` comes to."""
    done = holdfast("run", "--workers", "3", TRAIN, *STEPS, home=tmp_path_factory.mktemp("run"), deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stdout
    return next(line.split()[-1] for line in done.stdout.splitlines() if "weights:" in line)


def test_torchrun_alone_is_holdfast_run(tmp_path: Path, digest: str) -> None:
    with launched(tmp_path) as launch:
        launch.start(*TORCHRUN, "--nproc-per-node", "3", TRAIN, *STEPS)
        assert launch.finish() == [0], launch.output()
        assert launch.digests() == [digest] * 3
        assert {event["who"] for event in launch.events("finished")} == {"w0.1", "w1.1", "w2.1"}
        (run,) = launch.runs
        assert f"3 processes of torchrun are run {run.name}" in launch.output()
        status = holdfast("status", run.name, home=tmp_path)
        assert "finished" in status.stdout and digest in status.stdout, status


@long
def test_the_page_as_it_stands(tmp_path: Path) -> None:
    """Its script by its command, and alone."""
    page = (ROOT / "docs" / "how-to" / "torchrun.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^PYTHONHASHSEED=0 torchrun (.*)$", page, re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    words = [str(tmp_path / word) if word == "train.py" else word for word in shlex.split(command)]
    with launched(tmp_path) as launch:
        launch.start(*TORCHRUN, *words, PYTHONHASHSEED="0")
        assert launch.finish() == [0], launch.output()
        launch.processes.clear()
        together = launch.digests()
        launch.start(sys.executable, str(tmp_path / "train.py"))
        assert launch.finish() == [0], launch.output()
        assert together == launch.digests() * 3


def test_torchrun_starts_all_again_and_they_go_on_at_the_step(tmp_path: Path, digest: str) -> None:
    """It ends all workers when one fails. The others save the step that they are in."""
    with launched(tmp_path) as launch:
        script = [TRAIN, *STEPS, "--gate", str(launch.gate.path)]
        torchrun = launch.start(*TORCHRUN, "--nproc-per-node", "3", "--max-restarts", "1", *script)
        launch.hold_all_at(6)
        os.kill(_rank(torchrun.pid, 1), signal.SIGKILL)
        launch.gate.open_to()
        assert launch.finish() == [0], launch.output()
        assert launch.digests()[-3:] == [digest] * 3
        resumed = launch.events("resumed")
        assert resumed and resumed[-1]["step"] >= 6, resumed
        assert {event["who"] for event in launch.events("finished")} == {"w0.2", "w1.2", "w2.2"}


def _rank(torchrun: int, rank: int) -> int:
    for pid in children(torchrun):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"torchrun has no process of rank {rank}")


MPI = [
    {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    }
    for rank in range(3)
]


def _server(run: Path) -> int:
    """The process that serves the ledger; 0: there is none."""
    return int(((run / "agent.lock").read_text().split() or ["0"])[0])


def test_no_process_of_a_launch_on_one_host_is_irreplaceable(tmp_path: Path, digest: str) -> None:
    """Not the one of rank 0, and not the one that serves the ledger: it dies too, and a worker starts another."""
    with launched(tmp_path) as launch:
        script = [sys.executable, TRAIN, *STEPS, "--gate", str(launch.gate.path)]
        for variables in MPI:
            launch.start(*script, **variables)
        launch.hold_all_at(4)
        (run,) = launch.runs
        server = _server(run)
        assert process_state(server)
        os.kill(server, signal.SIGKILL)
        launch.gate.open_to(8)  # nobody needs the ledger for steps
        launch.wait(lambda: len(launch.gate.at(8, ["w0.1", "w1.1", "w2.1"])) == 3, "step 8")
        launch.wait(lambda: _server(run) not in (0, server), "another process to serve the ledger")
        launch.processes[0].kill()
        launch.gate.open_to()
        assert launch.finish()[1:] == [0, 0], launch.output()
        assert launch.digests() == [digest] * 2
        assert {event["who"] for event in launch.events("finished")} == {"w1.1", "w2.1"}


@long
def test_a_notice_to_leave_is_a_saved_step(tmp_path: Path, digest: str) -> None:
    """SIGTERM and SIGUSR1 alike; the exit codes say that it is not finished, and the same launch again goes on."""
    with launched(tmp_path) as launch:
        script = [sys.executable, TRAIN, *STEPS, "--gate", str(launch.gate.path)]
        started = [launch.start(*script, HOLDFAST_RUN="again", **variables) for variables in MPI]
        launch.hold_all_at(5)
        for process, number in zip(started, (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM), strict=True):
            process.send_signal(number)
        launch.gate.open_to()
        assert launch.finish() == [143, 138, 143], launch.output()
        assert len(launch.events("left")) == 3 and not launch.digests()
        saved = max(event["step"] for event in launch.events("left"))
        launch.processes.clear()
        for variables in MPI:
            launch.start(*script, HOLDFAST_RUN="again", **variables)
        assert launch.finish() == [0, 0, 0], launch.output()
        assert launch.digests() == [digest] * 3
        assert launch.events("resumed")[-1]["step"] == saved >= 5


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(error.message)
    with EtcdCluster(tmp_path / "etcd", 1) as cluster:
        yield cluster


def test_hosts_meet_in_the_etcd_that_a_variable_names(tmp_path: Path, etcd: EtcdCluster, digest: str) -> None:
    """Two hosts of a launch, and one worker more by hand; one without the run's keys is told what it lacks."""
    assert holdfast("keys", "create", str(tmp_path / "keys"), home=tmp_path).returncode == 0
    places: list[Mapping[str, str]] = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for rank in (0, 1)
    ]
    ledger = {"HOLDFAST_LEDGER": etcd.url, "HOLDFAST_RUN": "far"}
    keys = {"HOLDFAST_KEYS": str(tmp_path / "keys")}
    with launched(tmp_path) as launch:
        script = [sys.executable, TRAIN, *STEPS, "--gate", str(launch.gate.path)]
        for place, host in zip(places, ("a", "b"), strict=True):
            launch.start(*script, **place, **ledger, **keys, HOLDFAST_HOST=host)
        launch.start(*script, **ledger, **keys)
        launch.wait(lambda: len(launch.who("registered")) == 3, "three workers")
        launch.gate.open_to()
        assert launch.finish() == [0, 0, 0], launch.output()
        assert launch.digests() == [digest] * 3
        names = {event["who"].partition("@")[2] for event in launch.events("finished")}
        assert len(names) == 3 and names >= {"a", "b"}
        launch.processes.clear()
        launch.start(*script, **places[0], **ledger)
        assert launch.finish() == [2] and "holdfast keys create DIR" in launch.output()
