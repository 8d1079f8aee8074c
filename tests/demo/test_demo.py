"""What a newcomer runs first must work: the short form of `make demo`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from holdfast.placement.proc import process_state

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def demo(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DEMO), "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"TMPDIR": str(directory), "PATH": "/usr/bin:/bin"},
    )


def test_the_weights_are_those_of_a_run_without_faults() -> None:
    with tempfile.TemporaryDirectory() as directory:  # shorter than pytest's, for the sockets in it
        with demo(Path(directory)) as process:
            output, _ = process.communicate(timeout=150)
        left_behind = list(Path(directory).glob("holdfast*"))
    assert process.returncode == 0, output
    digests = re.findall(r"^  weights with.*? faults +(\w{32})", output, re.MULTILINE)
    assert len(digests) == 2 and len(set(digests)) == 1, output
    assert len(re.findall(r"^ +[\d.]+ s  >>> ", output, re.MULTILINE)) == 3, output
    assert not left_behind


def test_an_interrupted_demo_leaves_nothing_behind() -> None:
    with tempfile.TemporaryDirectory() as directory:
        with demo(Path(directory)) as process:
            assert process.stdout is not None
            pids = []
            for line in process.stdout:
                if found := re.search(r"w\d\.1 started \(process (\d+)\)", line):
                    pids.append(int(found[1]))
                if len(pids) == 3:
                    break
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
        left_behind = list(Path(directory).glob("holdfast*"))
    assert process.returncode == 130, output
    deadline = time.monotonic() + 10  # a killed process takes a moment to go
    while any(map(process_state, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(process_state, pids))
    assert not left_behind
