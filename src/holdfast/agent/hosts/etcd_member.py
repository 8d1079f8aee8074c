"""One local etcd process: starting it, asking it, ending it.

Besides its network addresses every member listens on a unix socket in its own directory (mode 0700). Questions go
through that, so that a member in another network namespace, or one whose network is cut, can still be asked.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.placement.proc import process_started

BINARY = "HOLDFAST_ETCD"
CHECKOUT_BINARY = Path(".tools", "etcd", "usr", "bin", "etcd")  # where scripts/install_etcd.sh puts it
_CONTROL = "control:1"  # etcd wants the form host:port of any address, and makes a file of that name
_ASK_S = 2.0
_END_S = 10.0


@dataclass(frozen=True)
class Tls:
    """PEM files. Clients must have a certificate that `ca` signed, and so must the other members."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, kw_only=True)
class MemberPlan:
    """Where a member runs. It stays the same over restarts."""

    name: str
    host: str
    client_port: int
    peer_port: int
    prefix_command: tuple[str, ...] = ()  # for example ip netns exec NAME


def find_etcd() -> str:
    """$HOLDFAST_ETCD, else the one on the PATH, else the one of this checkout. Raises ConfigError."""
    chosen = os.environ.get(BINARY)
    if chosen:
        if not os.access(chosen, os.X_OK):
            raise ConfigError(f"${BINARY} is {chosen}, which cannot be run", hint="give the path of an etcd")
        return chosen
    found = shutil.which("etcd")
    if found is not None:
        return found
    own = Path(__file__).resolve().parents[4] / CHECKOUT_BINARY
    if os.access(own, os.X_OK):
        return os.fspath(own)
    raise ConfigError(
        "there is no etcd on this host",
        hint="Debian and Ubuntu: apt install etcd-server; elsewhere: a release of etcd-io/etcd, 3.4 or 3.5.3 and later",
    )


class EtcdMember:
    """A member with its directory. Its process is a child, or one that an earlier command left in the background."""

    def __init__(self, plan: MemberPlan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.log = directory / "log"
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.pid = 0

    # -- the process

    def start(self, arguments: Sequence[str], *, tied: bool) -> None:
        """Start it. A `tied` one dies with the thread that starts it, however that ends."""
        assert not self.alive, f"{self.plan.name} runs already"
        self._forget()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.directory / _CONTROL).unlink(missing_ok=True)  # one that was killed leaves it behind
        tie = ["setpriv", "--pdeathsig", "KILL", "--"] if tied and shutil.which("setpriv") else []
        variables = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        variables["ETCD_UNSUPPORTED_ARCH"] = {"aarch64": "arm64"}.get(platform.machine(), "")
        with self.log.open("ab", buffering=0) as log:
            self._child = subprocess.Popen(
                [*self.plan.prefix_command, *tie, find_etcd(), *arguments],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is for whoever started it
                env=variables,
            )
        self.pid = self._child.pid
        self._pidfd = os.pidfd_open(self.pid)

    def adopt(self, pid: int, started: int) -> bool:
        """Take over the process of an earlier command, if it still lives."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        if process_started(pid) != started:  # after opening: the id may be another's by now
            os.close(descriptor)
            return False
        self._forget()
        self.pid, self._pidfd = pid, descriptor
        return True

    @property
    def alive(self) -> bool:
        return self._pidfd >= 0 and not self._gone(0.0)

    def signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Its data stays."""
        self.signal(signal.SIGKILL)
        if self._pidfd >= 0:
            self._gone(_END_S)
        self._forget()

    def wait_gone(self, wait_s: float) -> bool:
        return self._pidfd < 0 or self._gone(wait_s)

    def _gone(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def _forget(self) -> None:
        if self._child is not None:
            self._child.wait(_END_S)
            self._child = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self.pid = 0

    # -- questions

    def serves(self) -> bool:
        """Whether it can read with a majority behind it."""
        text = self.request("GET", "/health")
        return text is not None and json.loads(text).get("health") in ("true", True)

    def last_words(self) -> str:
        """The last complaint in its log, for a message that says why it did not start."""
        try:
            lines = self.log.read_bytes()[-16_384:].decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        for line in reversed(lines):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.get("level") in ("fatal", "panic", "error"):
                return ": ".join(str(row[field]) for field in ("msg", "error") if row.get(field))
        return lines[-1][-200:] if lines else f"nothing is in {self.log}"

    def request(self, method: str, path: str, body: str | None = None, timeout_s: float = _ASK_S) -> str | None:
        """What etcd answers to one of its calls in their JSON form; None if it does not answer or refuses."""
        try:
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return None
        try:
            # Through the descriptor: a socket's path has at most 107 bytes, a directory's may be longer.
            connection = _UnixConnection(f"/proc/self/fd/{descriptor}/{_CONTROL}", timeout_s)
            try:
                connection.request(method, path, body=body)
                answer = connection.getresponse()
                return answer.read().decode() if answer.status == 200 else None
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            os.close(descriptor)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def end_all(members: Sequence[EtcdMember], patience_s: float) -> None:
    """SIGTERM to all, then SIGKILL to those that do not go: a leader may look long for someone to succeed it.

    Nothing is lost by a SIGKILL; what etcd has acknowledged is on its disk.
    """
    for member in members:
        member.signal(signal.SIGCONT)
        member.signal(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    for member in members:
        member.wait_gone(max(0.0, deadline - time.monotonic()))
        member.kill()


def control_url() -> str:
    return f"unix://{_CONTROL}"
