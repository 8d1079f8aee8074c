"""Commands started with SIGINT ignored, as in the background of a shell script, end on SIGTERM, in order."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.events import EventLog
from holdfast.placement.directory import RunDirectory
from holdfast.placement.proc import find_workers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TINY = str(Path(__file__).parents[1] / "agent" / "tiny_training.py")
END_S = 10.0  # a couple of seconds, and what a busy machine adds


def ignoring() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def started(home: Path, *arguments: str, terminal: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    command = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *arguments],
        stdin=terminal,
        stdout=terminal if terminal is not None else subprocess.PIPE,
        stderr=terminal if terminal is not None else subprocess.STDOUT,
        env={**os.environ, "HOLDFAST_DIR": str(home), "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=ignoring,
    )
    try:
        yield command
    finally:
        command.kill()
        command.wait()


def read_until(descriptor: int, done: Callable[[bytes], bool], timeout_s: float = 60.0) -> bytes:
    data, deadline = b"", time.monotonic() + timeout_s
    while not done(data):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more came after {data[-500:]!r}"
        piece = os.read(descriptor, 65536)
        assert piece, f"it ended: {data[-2000:]!r}"
        data += piece
    return data


def terminated(command: subprocess.Popen[bytes]) -> bytes:
    command.send_signal(signal.SIGINT)  # is ignored
    command.send_signal(signal.SIGTERM)
    out, _ = command.communicate(timeout=END_S)
    assert b"Traceback" not in out, out
    return out


def a_run_that_was(home: Path) -> None:
    directory = RunDirectory(home, "r")
    directory.create()
    directory.write({"command": "holdfast run", "workers": 1})
    log = EventLog(directory.events / "agent.jsonl", "agent")
    log.write("agent_started", pid=1, took_over=False, workers=1, spares=0, script="x.py")
    log.close()


def test_following_events_and_a_dashboard(tmp_path: Path) -> None:
    a_run_that_was(tmp_path)
    with RunDirectory(tmp_path, "r").locked(), started(tmp_path, "events", "r", "--follow") as command:
        assert command.stdout is not None
        read_until(command.stdout.fileno(), lambda data: b"began" in data)
        terminated(command)
        assert command.returncode == 143
    with started(tmp_path, "dashboard", "r", "--port", "0") as command:
        assert command.stdout is not None
        read_until(command.stdout.fileno(), lambda data: b"http://" in data)
        terminated(command)
        assert command.returncode == 143


def test_top_gives_the_terminal_back(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    a_run_that_was(tmp_path)
    controller, terminal = pty.openpty()
    with started(tmp_path, "top", "r", terminal=terminal) as command:
        read_until(controller, lambda data: b"\x1b[?1049h" in data)  # the other screen
        command.send_signal(signal.SIGTERM)
        shown = read_until(controller, lambda data: b"\x1b[?1049l" in data, END_S)
        assert command.wait(END_S) == 143
    os.close(terminal)
    os.close(controller)
    assert b"Traceback" not in shown


def test_a_ledger_and_what_it_started(tmp_path: Path) -> None:
    with started(tmp_path, "ledger", "start", "--members", "1") as command:
        assert command.stdout is not None
        said = read_until(command.stdout.fileno(), lambda data: b"Ctrl-C ends it" in data or b"no etcd" in data)
        if b"no etcd" in said:
            pytest.skip("there is no etcd on this host")
        assert b"its data stays" in terminated(command)
        assert command.returncode == 143
    left = subprocess.run(
        [sys.executable, "-m", "holdfast", "ledger", "stop", "--dir", str(tmp_path)], capture_output=True, timeout=60
    )
    assert left.returncode == 2, "a member was left behind"


def test_an_agent_and_its_workers(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "r")
    script = (TINY, "--steps", "1000000")
    with started(tmp_path, "run", "--workers", "2", "--run", "r", *script) as command:
        assert command.stdout is not None
        read_until(command.stdout.fileno(), lambda data: b"holdfast | step " in data)
        assert len(find_workers(run.path)) == 2
        command.send_signal(signal.SIGTERM)
        out, _ = command.communicate(timeout=30)
        assert command.returncode == 143 and b"is stopped at step" in out and b"Traceback" not in out, out
        assert not find_workers(run.path)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8])
def test_right_after_the_start(tmp_path: Path, after_s: float) -> None:
    a_run_that_was(tmp_path)
    with started(tmp_path, "status", "r") as command:
        time.sleep(after_s)
        command.send_signal(signal.SIGTERM)
        out, _ = command.communicate(timeout=END_S)
        assert command.returncode in (143, -signal.SIGTERM, 0) and b"Traceback" not in out, out
