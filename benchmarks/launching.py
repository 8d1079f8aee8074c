"""Starting the processes of a benchmark, and leaving none behind however it ends. Processes end by their id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BENCHMARKS = Path(__file__).parent
GRACE_S = 5.0
LOG_LINES = 15


class BenchmarkError(Exception):
    """A process under test failed or did not end in time; the text has the end of its log."""


def holdfast_command(home: Path, *, run: str, workers: int, script: str, options: Sequence[str] = ()) -> list[str]:
    where = ["--dir", str(home), "--run", run, "--workers", str(workers)]
    return [sys.executable, "-m", "holdfast", "run", *where, *options, str(BENCHMARKS / script)]


@contextmanager
def processes(commands: Sequence[Sequence[str]], log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The commands, running, with their output in `log`. Whatever still lives at the end is ended."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as output:
            for command in commands:
                running.append(subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL))
        yield running
    finally:
        end(running)


def run_to_end(commands: Sequence[Sequence[str]], log: Path, *, timeout_s: float) -> None:
    """Wait for all of them; one failure, or none left to wait for by the deadline, is an error."""
    deadline = time.monotonic() + timeout_s
    with processes(commands, log) as running:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break
            if time.monotonic() > deadline:
                raise BenchmarkError(f"not done after {timeout_s:g} s: {' '.join(commands[0])}\n{last_lines(log)}")
            time.sleep(0.02)
        failed = [process.returncode for process in running if process.returncode]
        if failed:
            raise BenchmarkError(f"exit code {failed[0]}: {' '.join(commands[0])}\n{last_lines(log)}")


def last_lines(log: Path) -> str:
    return "\n".join(f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask, then insist. An agent's workers outlive it by design, so they are noted before and ended after."""
    alive = [process for process in running if process.poll() is None]
    family = {pid: start for process in alive for pid, start in _descendants(process.pid).items()}
    for process in alive:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_S
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            family |= _descendants(process.pid)
            process.kill()
            process.wait()
    for pid, start in family.items():
        if _parent_and_start(pid)[1] == start:  # not a stranger who was given the same id since
            os.kill(pid, signal.SIGKILL)


def _descendants(ancestor: int) -> dict[int, int]:
    """Process id -> start time of everyone below `ancestor`."""
    parents = {int(path.name): _parent_and_start(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found: dict[int, int] = {}
    generation = {ancestor}
    while generation:
        generation = {pid for pid, (parent, _) in parents.items() if parent in generation}
        found |= {pid: parents[pid][1] for pid in generation}
    return found


def _parent_and_start(pid: int) -> tuple[int, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1, -1
    return int(fields[1]), int(fields[19])
