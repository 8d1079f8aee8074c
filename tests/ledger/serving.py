"""A ledger server in a process of its own, so that tests can kill and stop it.

Run as a program it serves until it is killed:  python serving.py DIRECTORY SOCKET SECRET_HEX
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer

SECRET = bytes(range(32))
START_S = 20.0


class ServerProcess:
    def __init__(self, directory: Path, socket_path: Path) -> None:
        self.directory = directory
        self.socket_path = socket_path
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        arguments = [os.fspath(self.directory), os.fspath(self.socket_path), SECRET.hex()]
        self._process = subprocess.Popen([sys.executable, os.fspath(__file__), *arguments])

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def client(self, timeout_s: float = START_S) -> EmbeddedLedger:
        return EmbeddedLedger(self.socket_path, SECRET, timeout_s=timeout_s)


if __name__ == "__main__":
    EmbeddedServer(Path(sys.argv[1]), Path(sys.argv[2]), bytes.fromhex(sys.argv[3])).start()
    while True:
        time.sleep(60)
