"""Real runs, started as a user starts them, with a deadline for everything and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast.events import read_events
from holdfast.placement.proc import find_workers
from holdfast.testing.observed_run import ObservedRun
from tests.harness.gate import Gate

TRAIN = str(Path(__file__).with_name("train.py"))
DEADLINE_S = 90.0


class Training(ObservedRun):
    """A run of train.py that can be held at a step."""

    def __init__(self, home: Path, *options: str, script: list[str], held_at: int | None = None) -> None:
        self.gate = Gate(home / "gate")
        self.let_go = self.gate.open_to
        if held_at is not None:
            self.let_go(held_at)
            script = [*script, "--gate", str(self.gate.path)]
        super().__init__(home, "r", list(options), script)

    def at(self, step: int, workers: int) -> bool:
        """Whether so many workers of the present have come to this step."""
        return len(self.gate.at(step, self.pids)) >= workers

    def kill(self, *workers: str) -> None:
        for worker in workers:
            os.kill(self.pids[worker], signal.SIGKILL)

    def said(self, text: str) -> bool:
        return text in self.log()

    def end(self) -> None:
        super().end()
        for found in find_workers(self.directory.path):
            os.kill(found.pid, signal.SIGKILL)


@contextmanager
def training(home: Path, *options: str, script: list[str], held_at: int | None = None) -> Iterator[Training]:
    """A run that ends with the block, whatever happens; a failure shows the agent's log."""
    run = Training(home, *options, script=script, held_at=held_at)
    run.start()
    try:
        yield run
    except BaseException:
        print(f"--- the agent said\n{run.log()[-8000:]}")
        for event in read_events(run.directory.events)[-40:]:
            print(event)
        raise
    finally:
        run.end()


def holdfast(
    *arguments: str, home: Path, variables: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end. What it started is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOLDFAST_DIR": str(home), **(variables or {})},
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not over after {deadline_s:.0f} s\n{out[-4000:]}\n{err[-4000:]}") from None
    finally:
        for directory in (home / "runs").glob("*"):
            for found in find_workers(directory):
                os.kill(found.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)
