"""`holdfast top`: what it shows in how much room, and its manners at a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.cli.main import main
from holdfast.cli.screen import screen
from holdfast.events import EventLog
from holdfast.observe.fold import record_of
from holdfast.observe.picture import picture as picture_of
from holdfast.placement.directory import RunDirectory


def event(t: float, who: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "who": who, "kind": kind, **fields}


def events(workers: int) -> list[dict[str, Any]]:
    members = [f"w{slot}.1" for slot in range(workers)]
    return [
        event(0.0, "agent", "agent_started", pid=1, workers=workers, spares=0, script="train.py"),
        *(event(0.0, "agent", "worker_started", worker=worker, pid=9) for worker in members),
        *(event(1.0, worker, "view", view=1, members=members, reason="the run starts", step=0) for worker in members),
        event(2.0, "w0.1", "rebalanced", view=1, step=5, shards={"w0.1": 4}, paces_s={"w0.1": 0.0123}),
        event(2.0, "w0.1", "progress", view=1, step=10, steps=100, metrics={"loss": 0.25}, samples_per_s=1234.0),
        event(3.0, "w0.1", "progress", view=1, step=20, steps=100, metrics={"loss": 0.125}, samples_per_s=1234.0),
        event(3.0, "w0.1", "checkpoint", step=20, uri="/x", bytes=5e6, duration_s=0.5, held_s=0.01),
        event(3.5, "w0.1", "spent", seconds={"computing": 3.0, "recovering": 0.5}, doing="computing"),
        event(4.0, "agent", "worker_exited", worker="w1.1", pid=9, signal=9, reason="killed"),
        event(4.0, "w0.1", "warning", text="boom\n\x1b[31mred [bold]x[/bold]"),
    ]


def drawn(workers: int, width: int, height: int, facts: dict[str, Any] | None = None) -> list[str]:
    picture = picture_of(record_of(events(workers)), 5.0, state="running")
    picture |= {"run": {"name": "first", "host": "", "script": "train.py"}, "facts": facts or {}}
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(screen(picture, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_run_at_a_glance() -> None:
    facts = {"w0.1": {"level": "suspect", "phi": 4.25, "step": 21, "rss": 430e6, "activity": "in a shard"}}
    lines = drawn(2, 80, 24, facts)
    assert lines[0].startswith("run first: running · step 20/100 (20%) · 8.0 s left · 1 failure survived")
    assert re.match(r"1,234 samples/s · goodput \d+\.\d % · view 1 · 2 of 2 workers", lines[1])
    assert lines[2].rstrip() == "loss 0.125 · saved step 20, 2.0 s ago"
    row = next(line for line in lines if line.startswith("w0.1"))
    assert re.search(r"computing +21 +suspect 4\.\d +12 ms +4 +430 MB +in a shard", row), row
    assert "dead" in next(line for line in lines if line.startswith("w1.1"))
    assert any("w1.1 ended: killed, signal 9" in line for line in lines)
    assert any("boom [31mred [bold]x[/bold]" in line for line in lines)  # no command to the terminal
    assert lines[-1].rstrip() == "q: quit"


@pytest.mark.parametrize(
    ("workers", "width", "height"), [(2, 80, 24), (256, 80, 24), (256, 200, 60), (3, 40, 10), (4, 20, 5)]
)
def test_it_fits(workers: int, width: int, height: int) -> None:
    lines = drawn(workers, width, height)
    assert all(len(line) <= width for line in lines)
    if height >= 10:
        assert len(lines) <= height
    if workers == 256:
        assert any(line.startswith("w1.1") for line in lines)  # the dead one is among those that are shown
        assert any(re.match(r"… and \d+ more", line) for line in lines)


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "home"))
    directory = RunDirectory(tmp_path / "home", "first")
    directory.create()
    directory.write({"workers": 2})
    return directory


def test_without_a_terminal_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "first"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "holdfast: holdfast top draws on a terminal, and this is none" and len(told) == 2
    assert main(["top", "second"]) == 2


class Terminal:
    """holdfast top at a terminal of 80 columns and 24 lines."""

    def __init__(self) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(terminal)
        self._terminal = terminal
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "top", "first"],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        self.shown = ""

    def read_until(self, text: str, deadline_s: float = 30.0) -> None:
        by = time.monotonic() + deadline_s
        while text not in self.shown:
            assert time.monotonic() < by, self.shown[-3000:]
            if select.select([self._controller], [], [], 0.1)[0]:
                self.shown += re.sub(r"\x1b\[[0-9;]*m", "", os.read(self._controller, 65536).decode())

    def press(self, key: str) -> None:
        os.write(self._controller, key.encode())

    def ended(self) -> int:
        by = time.monotonic() + 30.0
        while self.process.poll() is None and time.monotonic() < by:
            if select.select([self._controller], [], [], 0.1)[0]:
                self.shown += os.read(self._controller, 65536).decode()
        return self.process.wait(timeout=1)

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._terminal) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._controller)
        os.close(self._terminal)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.mark.parametrize("how", ["q", "signal"])
def test_it_follows_and_leaves_the_terminal_as_it_was(run: RunDirectory, terminal: Terminal, how: str) -> None:
    log = EventLog(run.events / "w0.1.jsonl", "w0.1")
    log.write("progress", step=7, steps=50, view=1)
    terminal.read_until("step 7/50")
    log.write("progress", step=8, steps=50, view=1)
    terminal.read_until("step 8/50")
    assert not terminal.is_as_before()
    if how == "q":
        terminal.press("\x1b[A")  # an arrow does nothing
        log.write("progress", step=9, steps=50, view=1)
        terminal.read_until("step 9/50")
        terminal.press("q")
        assert terminal.ended() == 0
    else:
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.ended() == 130
    assert terminal.is_as_before() and "\x1b[?1049l" in terminal.shown and "Traceback" not in terminal.shown


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 40), (60, 20)])
def test_servers_and_what_they_lead_are_shown_too(width: int, height: int) -> None:
    told = {"slices": {}, "leads": 1, "entries": 7, "log_bytes": 10, "updates": 33, "lags_s": {"s1.1": 0.0021}}
    placed = {"slice": "parameters/0", "primary": "s0.1", "servers": ["s0.1", "s1.1"], "epoch": 4, "reason": ""}
    more = [
        *(event(0.0, "agent", "server_started", server=server, pid=9) for server in ("s0.1", "s1.1")),
        event(1.0, "agent", "placed", **placed),
        *(event(1.0, server, "serving", **told) for server in ("s0.1", "s1.1")),
    ]
    picture = picture_of(record_of([*events(2), *more]), 5.0, state="running")
    picture |= {"run": {"name": "first", "host": "", "script": "train.py"}, "facts": {}}
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(screen(picture, width, height))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= height
    shown = next(line for line in lines if line.startswith("s0"))
    if width >= 80:
        assert "serving" in shown
        assert "parameters/0 (epoch 4)" in shown and " 33 " in shown
        assert "2.1 ms" in next(line for line in lines if line.startswith("s1.1"))
