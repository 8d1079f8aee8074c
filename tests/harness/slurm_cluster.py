"""A real Slurm on this machine, for tests: munged, slurmctld, and a slurmd for each of some nodes, all on loopback.

    with SlurmCluster() as slurm:
        job = slurm.submit("job.sh", "--nodes=2", variables={…})
        slurm.wait_state(job, "RUNNING")

The programs are those that scripts/install_slurm.sh unpacks, or those in $HOLDFAST_SLURM. Everything that a cluster
needs is in one directory of its own; whatever it or its jobs have started carries the path of its configuration, and
is ended by that, each process by its id. One thread at a time.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

PROGRAMS = "HOLDFAST_SLURM"
START_S = 180.0
WAIT_S = 240.0
_CHECKOUT_PROGRAMS = Path(".tools", "slurm")  # where scripts/install_slurm.sh puts them
_ASK_S = 60.0
_END_S = 10.0
_PORTS = range(20_000, 32_000)  # below those that the kernel gives to outgoing connections: free stays free

_SETTINGS = """ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=30
KillWait=5
JobRequeue=1
MailProg=/bin/true
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def programs() -> Path:
    return Path(os.environ.get(PROGRAMS) or _CHECKOUT_PROGRAMS).resolve() / "usr"


def why_not() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    if os.getuid() != 0:
        return "Slurm's daemons are started as root here, and this is another user"
    if not (programs() / "sbin" / "slurmctld-wlm").exists():
        return f"there is no Slurm in {programs()} (scripts/install_slurm.sh unpacks one)"
    return ""


class SlurmCluster:
    """`nodes` nodes n1, n2, …, each of which believes that it has 4 processors."""

    def __init__(self, nodes: int = 2) -> None:
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets in it need a short path
        self._conf = self.directory / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def variables(self) -> dict[str, str]:
        """For Slurm's commands, also within jobs."""
        libraries = programs() / "lib" / f"{platform.machine()}-linux-gnu"
        return {
            "SLURM_CONF": str(self._conf),
            "LD_LIBRARY_PATH": f"{libraries / 'slurm-wlm'}:{libraries}",
            "PATH": f"{programs() / 'bin'}:{programs() / 'sbin'}:{os.environ['PATH']}",
        }

    # -- all of it

    def start(self) -> None:
        (self.directory / "state").mkdir()
        (self.directory / "munge.key").write_bytes(os.urandom(128))
        (self.directory / "munge.key").chmod(0o400)
        self._conf.write_text(self._settings())
        try:
            munge = [f"--{name}={self.directory}/munge.{name.split('-')[0]}" for name in _MUNGE]
            self._launch("munged", "--foreground", "--force", *munge)
            self._wait(lambda: (self.directory / "munge.socket").exists(), "munged", START_S)
            self._launch("slurmctld-wlm", "-D", "-c", "-f", str(self._conf))
            for node in self.nodes:
                stepd = programs() / "sbin" / "slurmstepd-wlm"
                self._launch("slurmd-wlm", "-D", "-N", node, "-f", str(self._conf), "-d", str(stepd))
            self._wait(self._all_idle, "the nodes to be idle", START_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End whatever is left of it and of its jobs. Nothing of theirs is needed afterwards."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait(_END_S)
        deadline = time.monotonic() + _END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def processes(self) -> list[int]:
        """Whatever lives and was started with this cluster's configuration."""
        mark, found = f"SLURM_CONF={self._conf}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    # -- jobs

    def submit(
        self, script: Path, *options: str, variables: Mapping[str, str] | None = None, output: Path | None = None
    ) -> str:
        """Give a batch script to Slurm; the job's number."""
        words = ["--parsable", f"--output={output or self.directory / 'job-%j.out'}", "--open-mode=append", *options]
        return self.ask("sbatch", *words, str(script), variables=variables).strip().partition(";")[0]

    def ask(self, *command: str, variables: Mapping[str, str] | None = None, deadline_s: float = _ASK_S) -> str:
        """What one of Slurm's commands prints."""
        done = self.run(*command, variables=variables, deadline_s=deadline_s)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def run(
        self, *command: str, variables: Mapping[str, str] | None = None, deadline_s: float = _ASK_S
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **(variables or {}), **self.variables}
        return subprocess.run(
            list(command), env=environment, capture_output=True, text=True, timeout=deadline_s, check=False
        )

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, …"""
        return self._shown(job, "JobState")

    def restarts(self, job: str) -> int:
        return int(self._shown(job, "Restarts") or 0)

    def wait_state(self, job: str, *states: str, deadline_s: float = WAIT_S) -> str:
        self._wait(lambda: self.state(job) in states, f"job {job} to be {' or '.join(states)}", deadline_s)
        return self.state(job)

    def start_now(self, job: str) -> None:
        """A job that was put back into the queue waits for its old credential to run out, and longer.

        Not at once: a credential of the second in which the old one was revoked counts as revoked too.
        """
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def _shown(self, job: str, name: str) -> str:
        for word in self.ask("scontrol", "show", "job", job).split():
            key, _, value = word.partition("=")
            if key == name:
                return value
        return ""

    # -- inside

    def _settings(self) -> str:
        controller_port, *ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for node, port in zip(self.nodes, ports, strict=True)
        )
        plugins = programs() / "lib" / f"{platform.machine()}-linux-gnu" / "slurm-wlm"
        return _SETTINGS.format(directory=self.directory, plugins=plugins, controller_port=controller_port, nodes=nodes)

    def _launch(self, program: str, *arguments: str) -> None:
        with (self.directory / f"{program}.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    [str(programs() / "sbin" / program), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, **self.variables},
                )
            )

    def _all_idle(self) -> bool:
        found = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").stdout.split("\n")
        return [line.split() for line in found if line] == [[node, "idle"] for node in self.nodes]

    def _wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            for daemon in self._daemons:
                if daemon.poll() is not None:
                    raise AssertionError(f"one of Slurm's daemons has ended\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {deadline_s:g} s for {what}\n{self.last_words()}")
            time.sleep(0.1)

    def last_words(self) -> str:
        """The ends of all logs and jobs' outputs."""
        texts = [*self.directory.glob("*.out"), *self.directory.glob("*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(texts))


_MUNGE: Sequence[str] = ("key-file", "socket", "pid-file", "log-file", "seed-file")


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for _ in range(1000):
        port = random.choice(_PORTS)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no ports are free")
