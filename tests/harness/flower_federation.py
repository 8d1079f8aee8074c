"""A real federation of Flower on this host: a SuperLink, SuperNodes, and `flwr run`, each as processes of its own.

The commands and the configuration are those of docs/how-to/flower.md, with other ports.

Everything listens on loopback, at ports that the kernel chose. Each process that is started here has a mark of its own
in its environment, which whatever it starts inherits, and these are ended one by one, by their numbers. Nothing is
asked of the network: no telemetry, no look for updates, no packages.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.harness import ROOT

PAGE = ROOT / "docs" / "how-to" / "flower.md"
APP = "examples/flower"
PORT, NODE_PORT = "9092", "9100"  # on the page
START_S = 120.0
MARK = "HOLDFAST_TEST_FEDERATION"
_BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Federation:
    """`home` has everything of it: configuration, installed apps, logs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._name = secrets.token_hex(8)
        (home / "flwr").mkdir(parents=True)
        (home / "flwr" / "config.toml").write_text(self._ours(_block("toml", "[superlink]")))
        self._environment = {
            **os.environ,
            "FLWR_HOME": str(home / "flwr"),
            "XDG_STATE_HOME": str(home / "kept"),  # of clients in masked rounds
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }

    # -- processes

    def start_superlink(self) -> None:
        self._start("superlink", self._command("flower-superlink"))
        self.until(self._accepts, "the SuperLink accepts connections")

    def start_client(self, number: int, clients: int, attack: str = "none") -> None:
        words = self._command("flower-supernode")
        words[words.index("--node-config") + 1] = f"partition-id={number} num-partitions={clients} attack='{attack}'"
        self._start(f"client-{number}", words)

    def run(self, name: str, **config: object) -> Run:
        """`flwr run` of the example, with these settings."""
        words = self._command("flwr run")
        told = " ".join(f"{key.replace('_', '-')}={_toml(value)}" for key, value in config.items())
        words[words.index("--run-config") + 1] = told
        self._start(name, words)
        return Run(self, name)

    def node(self, number: int) -> int:
        """How Flower calls this client; it must have connected."""
        said = re.compile(r"SuperNode ID: (\d+)")
        log = self.log(f"client-{number}")
        self.until(lambda: said.search(log.read_text()) is not None, f"client {number} is connected")
        found = said.search(log.read_text())
        assert found is not None
        return int(found[1])

    def _command(self, begins: str) -> list[str]:
        """That of the page, with our ports and paths."""
        (line,) = [one for one in PAGE.read_text().splitlines() if one.startswith((f"{begins} -", f"{begins} e"))]
        return shlex.split(self._ours(line))

    def _ours(self, text: str) -> str:
        return text.replace(PORT, str(self.port)).replace(NODE_PORT, str(free_port())).replace(APP, str(ROOT / APP))

    def _start(self, name: str, command: Sequence[str]) -> None:
        with self.log(name).open("wb") as output:
            self._processes[name] = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self._environment, MARK: f"{self._name}/{name}"},
                cwd=self.home,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """It and whatever it has started, at once."""
        process = self._processes.pop(name)
        while found := self._descent(name):
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it has ended meanwhile
            if process.pid in found:
                process.wait(timeout=START_S)
        process.wait(timeout=START_S)

    def kill_server_app(self) -> None:
        """SIGKILL for the process that runs the strategy, which the SuperLink has started. It must be there."""
        (pid,) = self.members("superlink", "flwr-serverapp")
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: pid not in self.members("superlink", "flwr-serverapp"), "the server app is gone")

    def members(self, name: str, command: str) -> list[int]:
        """The processes with this command among those that `name` has started."""
        return [pid for pid in self._descent(name) if command.encode() in _read(pid, "cmdline")]

    def _descent(self, name: str) -> list[int]:
        """It and all that it has started, and these: they have its mark in their environment, wherever they belong."""
        mark = f"{MARK}={self._name}/{name}".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if mark in _read(pid, "environ").split(b"\0")]

    def running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    # -- what is seen

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        ends_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > ends_s:
                tails = "\n".join(
                    f"--- {one.name}\n{one.read_text()[-3000:]}" for one in sorted(self.home.glob("*.log"))
                )
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{tails}")
            time.sleep(0.1)

    def _accepts(self) -> bool:
        assert self.running("superlink"), self.log("superlink").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Run:
    """One `flwr run`, by what it has printed."""

    def __init__(self, federation: Federation, name: str) -> None:
        self._federation, self._name = federation, name

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self._federation.log(self._name).read_text())

    def rounds(self) -> dict[int, str]:
        """The model's digest after each round that this run has finished."""
        found = re.findall(r"round (\d+) of \d+ took [\d.]+ s: model ([0-9a-f]{32})", self.text)
        return {int(number): digest for number, digest in found}

    def until_round(self, number: int, timeout_s: float) -> None:
        self._federation.until(lambda: number in self.rounds(), f"{self._name} is after round {number}", timeout_s)

    def accuracy(self, timeout_s: float) -> float:
        """That at the end, once it is told."""
        said = re.compile(r"^accuracy ([\d.]+) after round", re.MULTILINE)
        self._federation.until(lambda: said.search(self.text) is not None, f"{self._name} is done", timeout_s)
        found = said.search(self.text)
        assert found is not None
        return float(found[1])


def _read(pid: int, name: str) -> bytes:
    """Nothing, if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _block(language: str, begins: str) -> str:
    (found,) = [
        body
        for body in re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        if body.startswith(begins)
    ]
    return str(found)


def _toml(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


@contextmanager
def federation(home: Path) -> Iterator[Federation]:
    made = Federation(home)
    try:
        made.start_superlink()
        yield made
    finally:
        made.close()
