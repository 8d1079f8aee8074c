"""Kill -9 at stages of a save and of a restore: what is committed is whole each time, and the run ends exact."""

from __future__ import annotations

import subprocess
import sys

import pytest
import train

from tests.harness.forked import agreed, forked
from tests.soak.checkpoint_faults import training_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def test_six_points_of_a_save() -> None:
    """`make soak` has many more of them."""
    quiet = agreed(forked(lambda: train.main(training_of(6)), workers=1))
    command = [sys.executable, "-m", "tests.soak.checkpoint_faults", "--points", "6", "--seed", "10"]
    done = subprocess.run([*command, "--digest", quiet], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all workers lost 3 times; exact" in done.stdout
