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
from holdfast.launch.proc import find_workers
from holdfast.testing.exactness import Watched

TRAIN = str(Path(__file__).with_name("train.py"))
DEADLINE_S = 90.0


class Training(Watched):
    """A run of train.py that can be held at a step."""

    def __init__(self, home: Path, *options: str, script: list[str], held_at: int | None = None) -> None:
        self.gate = home / "gate"
        if held_at is not None:
            self.let_go(held_at)
            script = [*script, "--gate", str(self.gate)]
        super().__init__(home, "r", list(options), script)

    def let_go(self, step: int = 1_000_000) -> None:
        partial = self.gate.with_suffix(".new")
        partial.write_text(str(step))
        partial.replace(self.gate)

    def at(self, step: int, workers: int) -> bool:
        """Whether so many workers of the present have come to this step."""
        places = [self.home / f"at-{worker}" for worker in self.pids]
        return sum(path.exists() and path.read_text() == str(step) for path in places) >= workers

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
