"""Starts real agents as a user would, and waits for what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from holdfast.events import read_events
from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import LEDGER_SOCKET
from holdfast.placement.proc import find_servers, find_workers

FAKE_WORKER = str(Path(__file__).with_name("fake_worker.py"))
T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 15.0) -> T:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {timeout_s} s for {what}")


class Run:
    """One run directory and the agents that were started for it."""

    def __init__(self, home: Path, name: str = "r") -> None:
        self.home = home
        self.directory = RunDirectory(home, name)
        self.name = name
        self.agents: list[subprocess.Popen[bytes]] = []
        self.outputs: list[Path] = []

    def agent(self, *options: str, script: tuple[str, ...] = (FAKE_WORKER,)) -> subprocess.Popen[bytes]:
        self.home.mkdir(exist_ok=True)
        output = self.home / f"agent-{len(self.agents)}.out"
        command = [sys.executable, "-m", "holdfast", "run", "--run", self.name, "--dir", str(self.home)]
        with output.open("wb") as file:
            agent = subprocess.Popen(
                [*command, *options, *script], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.agents.append(agent)
        self.outputs.append(output)
        return agent

    @property
    def output(self) -> str:
        return self.outputs[-1].read_text()

    def living(self) -> dict[str, int]:
        return {found.worker: found.pid for found in find_workers(self.directory.path)}

    def servers(self) -> dict[str, int]:
        return {found.worker: found.pid for found in find_servers(self.directory.path)}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.directory.events) if event["kind"] == kind]

    def stepping(self, *workers: str) -> bool:
        """All of these are alive and have made a step."""
        done = {event["who"] for event in self.events("progress")}
        return set(workers) <= done & self.living().keys()

    def exit_of(self, worker: str) -> dict[str, Any]:
        return wait_for(
            lambda: next((e for e in self.events("worker_exited") if e["worker"] == worker), None), f"end of {worker}"
        )

    def ledger(self) -> EmbeddedLedger:
        socket = Path(json.loads((self.directory.path / "run.json").read_text())["socket_dir"]) / LEDGER_SOCKET
        return EmbeddedLedger(socket, self.directory.secret())

    def end(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        for pid in (*self.living().values(), *self.servers().values()):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def a_run(home: Path, name: str = "r") -> Iterator[Run]:
    run = Run(home, name)
    try:
        yield run
    except BaseException:
        for output in run.outputs:
            print(f"--- {output.name}\n{output.read_text()}")
        raise
    finally:
        run.end()


def holdfast(*arguments: str, home: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HOLDFAST_DIR": str(home), **(env or {})},
    )
