"""The agent's process, followed to its end by the one that launched it: what it prints, how far the run is, Ctrl-C.

An agent that was killed is started again, and takes its workers over. Belongs to the thread that called launch.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.events import EventReader
from holdfast.launching.progress import Face
from holdfast.observe.fold import RunRecord
from holdfast.placement.directory import RunDirectory

LOOK_S = 0.2
READ_BYTES_MAX = 64 * 1024
AGENTS_MAX = 10  # that are started one after the other, where each was killed
LEAVE_S = 10.0  # for an agent that was told to end, before it is told again
_PROGRESS = re.compile(r"holdfast \| step \d+(/| ·)")  # the agent's own lines of progress, where a bar shows it


@dataclass(eq=False)
class Following:
    """One launch's agent, or agents. `record` and what was heard of this launch's end are as of the last look."""

    command: Sequence[str]
    directory: RunDirectory
    face: Face
    record: RunRecord = field(default_factory=RunRecord)
    finished: Mapping[str, Any] = field(default_factory=dict)  # what an agent said of a training that is over
    ended: Mapping[str, Any] = field(default_factory=dict)  # the last agent's last word
    failed: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # the last failure of each worker, by order
    interrupts: int = 0
    _partial: bytes = b""

    def __post_init__(self) -> None:
        self._reader = EventReader(self.directory.events)
        self.began = time.time()

    def run(self) -> int:
        """The exit code of the last agent; less than 0: it was killed, again and again."""
        for _ in range(AGENTS_MAX):
            code = self._follow_one()
            if code >= 0 or self.interrupts:
                break
            self.face.line("holdfast | the agent was killed; another one takes the workers over")
        return code

    def _follow_one(self) -> int:
        child = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C reaches this process only, which hands it on
        )
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        try:
            while True:
                try:
                    over = child.poll() is not None
                    self._look(child, wait_s=0.0 if over else LOOK_S)
                    if over:
                        self._say(b"\n" if self._partial else b"")
                        return child.wait()
                except KeyboardInterrupt:
                    self.interrupts += 1
                    child.send_signal(signal.SIGINT)
        finally:
            _end(child)
            child.stdout.close()

    def _look(self, child: subprocess.Popen[bytes], *, wait_s: float) -> None:
        assert child.stdout is not None
        if select.select([child.stdout], [], [], wait_s)[0]:
            while data := child.stdout.read(READ_BYTES_MAX):
                self._say(data)
            if data == b"" and wait_s:
                time.sleep(0.01)  # it has closed its output, and is about to end
        for event in self._reader.poll():
            self.record.feed(event)
            if float(event["t"]) >= self.began:
                self._note(event)
        self.face.show(self.record)

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "run_finished":
            self.finished = event
        elif event["kind"] == "agent_stopped":
            self.ended = event
        elif event["kind"] in ("failed", "worker_exited"):
            who = str(event.get("worker", event["who"]))
            if event["kind"] == "failed" or event.get("reason") in ("failed", "refused"):
                self.failed.pop(who, None)
                self.failed[who] = event

    def _say(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if not (self.face.has_bar and _PROGRESS.match(text)):
                self.face.line(text)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Whatever this process was interrupted by: the agent does not outlive the launch."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # in order, at once, and without its workers
        if child.poll() is None:
            child.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                child.wait(LEAVE_S)


def agent_command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli.tied_agent", str(os.getpid()), "run", *words]
