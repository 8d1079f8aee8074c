"""Scripts run alone, as by `python script.py`, in forks of one process that has imported torch: imports take seconds.

As a program it is that process: it reads a script's path and a log's from its input, a line each, and answers with the
exit code, or with `hung`.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

from holdfast.core.errors import WorkerEnded

ALONE_S = 240.0  # far more than a shape takes on a quiet machine
HUNG = "hung"


class Alone:
    """One such process, for any number of threads; started with the first script."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: Path) -> tuple[str, str]:
        """The exit code, or HUNG, and what it printed."""
        log = script.with_suffix(".log")
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                )
            assert self._process.stdin and self._process.stdout
            self._process.stdin.write(f"{script}\n{log}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline().strip()
        return answer, log.read_text(errors="replace")

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # it ends with its input


def serve() -> None:

    import holdfast.engine.api.joining  # noqa: F401

    for line in sys.stdin:
        print(supervise(line.strip(), sys.stdin.readline().strip()), flush=True)


def supervise(script: str, log: str) -> str:
    child = os.fork()
    if not child:
        become(script, log)
    deadline = time.monotonic() + ALONE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.02)
    os.kill(child, signal.SIGUSR1)  # the template writes its stacks
    time.sleep(1.0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


def become(script: str, log: str) -> None:
    """The script, in this process, to its end."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)
    sys.argv = [script]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except WorkerEnded as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.exit(code)  # by way of atexit, where a run of one comes to its end


if __name__ == "__main__":
    serve()
