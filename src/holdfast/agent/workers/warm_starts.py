"""Starting workers by forking a process that has their imports behind it: warm_process.py.

A start takes seconds of a processor, nearly all of them to import torch and what else the script needs, and a run
whose workers vanish starts many. So the agent starts one process, which imports it all and then becomes any number of
workers, each in hundredths of a second. Whatever speaks against it (threads, an opened GPU, a process that dies or
does not answer) costs the time that it would have saved: workers then start as separate commands.

Threads: `WarmStarts` belongs to the agent's main thread; `bury` may be called by any. One thread of its own waits for
the imports and ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.placement.environment import WORKER
from holdfast.placement.warm_process import DESCRIPTOR, NAME_MAX

READY_S = 120.0  # imports that take longer are not waited for
ANSWER_S = 2.0
BURY_S = 0.5  # the agent's other deaths wait meanwhile
AGAIN_S = 30.0  # between attempts to have one, after the first has died


@dataclass(frozen=True)
class WarmedUp:
    """Imports are done, or will not be: workers can be started now. `trouble` says what is in the way."""

    seconds: float = 0.0
    trouble: str = ""


class WarmStarts:
    def __init__(self, command: Sequence[str], log: Path, post: Callable[[WarmedUp], None]) -> None:
        self._command = list(command)
        self._log = log
        self._post = post
        self._warm: _WarmProcess | None = None
        self._began = 0.0
        self._unfit = False

    def prepare(self, variables: Mapping[str, str]) -> bool:
        """Begin to import, unless that is done or in vain. `post` is called when it is over, if this says True."""
        now = time.monotonic()
        lives = self._warm is not None and self._warm.usable
        if lives or self._unfit or (self._began and now < self._began + AGAIN_S):
            return False
        self._began = now
        try:
            self._warm = _WarmProcess(self._command, {**variables, WORKER: " " * NAME_MAX}, self._log)
        except OSError:
            return False
        threading.Thread(target=self._wait, args=(self._warm,), name="holdfast-warm", daemon=True).start()
        return True

    def _wait(self, warm: _WarmProcess) -> None:
        answer = warm.wait_until_ready()
        self._unfit |= "unfit" in answer
        trouble = str(answer.get("unfit", "")) or ("" if "ready" in answer else "the process that should import died")
        self._post(WarmedUp(float(answer.get("ready", 0.0)), trouble))

    @property
    def ready(self) -> bool:
        return self._warm is not None and self._warm.ready

    def start(self, variables: Mapping[str, str], log: Path) -> tuple[int, _WarmProcess] | None:
        """The id of a new worker's process and its parent; None if there is no way to have one like this."""
        warm = self._warm
        if warm is None or not warm.ready:
            return None
        answer = warm.ask({"start": dict(variables), "log": str(log)})
        return (int(answer["pid"]), warm) if "pid" in answer else None

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()


class _WarmProcess:
    """One such process, seen from the agent."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._lock = threading.Lock()
        self.ready = False
        self.usable = True
        self._control, theirs = socket.socketpair()
        try:
            with theirs, _open_log(log) as output:
                self._child = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                    env={**variables, DESCRIPTOR: str(theirs.fileno())},
                )
        except OSError:
            self._control.close()
            raise
        self._answers = self._control.makefile("rb")

    def wait_until_ready(self) -> dict[str, Any]:
        with self._lock:
            answer = self._read(READY_S)
            if not answer and self._child.poll() is None:
                answer = {"unfit": f"the imports are not done after {READY_S:g} s"}
            self.ready = "ready" in answer
            if not self.ready:
                self._end()
            return answer

    def ask(self, request: Mapping[str, Any], patience_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer; an empty one if there is none, and then there will be none any more."""
        with self._lock:
            if not self.usable:
                return {}
            try:
                self._control.settimeout(patience_s)
                self._control.sendall(json.dumps(request).encode() + b"\n")
            except OSError:
                self._end()
                return {}
            answer = self._read(patience_s)
            if not answer:
                self._end()
            return answer

    def bury(self, pid: int) -> int | None:
        """The exit code of a worker that is gone; None if it took it with it."""
        code = self.ask({"bury": pid}, BURY_S).get("code")
        return int(code) if code is not None else None

    def _read(self, patience_s: float) -> dict[str, Any]:
        try:
            self._control.settimeout(patience_s)
            line = self._answers.readline()
            answer = json.loads(line) if line.endswith(b"\n") else {}
            return answer if isinstance(answer, dict) else {}
        except (OSError, ValueError):
            return {}

    def _end(self) -> None:
        self.ready = self.usable = False
        self._child.kill()
        self._child.wait()
        self._answers.close()
        self._control.close()

    def close(self) -> None:
        """Its workers, if any live, go on."""
        self._child.kill()  # first: `wait_until_ready` holds the lock
        with self._lock:
            if self.usable:
                self._end()


def _open_log(log: Path) -> Any:
    try:
        return log.open("ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)
