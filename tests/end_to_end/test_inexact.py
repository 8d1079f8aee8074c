"""Runs that come to their end and are known not to be exact: they say so last, and exit with a code of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mistaken
import pytest
from harness import holdfast

from holdfast.core.errors import EXIT_INEXACT
from holdfast.events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
SAYS = f"holdfast | run r is not exact, and ends with exit code {EXIT_INEXACT}: "


def run(home: Path, mistake: str) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit code, the last line, the events."""
    ended = holdfast("run", "--run", "r", "--workers", "3", str(mistaken.__file__), mistake, "20", home=home)
    events = [dict(event) for event in read_events(home / "runs" / "r" / "events")]
    return ended.returncode, ended.stdout.strip().splitlines()[-1], events


def test_a_shard_that_gives_other_bits_each_time(tmp_path: Path) -> None:
    code, last, events = run(tmp_path, "own generator")
    found = [event for event in events if event["kind"] == "inexact"]
    assert len(found) == 1 and found[0]["step"] == 1 and "a random generator of the script's own" in found[0]["hint"]
    assert found[0]["reason"].endswith(
        f"of step 1 gave other gradients each of the 3 times that {found[0]['who']} computed it"
    )
    assert (code, last) == (EXIT_INEXACT, SAYS + found[0]["reason"])


def test_workers_that_end_with_different_weights(tmp_path: Path) -> None:
    """After the last comparison of states, so that nothing else can tell."""
    code, last, events = run(tmp_path, "leader's last weight")
    ends = {event["who"]: event["digest"] for event in events if event["kind"] == "finished"}
    assert len(ends) == 3 and len(set(ends.values())) == 2
    assert code == EXIT_INEXACT and last.startswith(f"{SAYS}the workers ended with different weights: ")
    for worker, digest in ends.items():
        assert worker in last.partition(digest)[2].partition(";")[0]


def test_an_exact_run_that_records_the_time(tmp_path: Path) -> None:
    """A metric may be other each time."""
    code, last, events = run(tmp_path, "none")
    assert code == 0 and "weights: " in last and not [event for event in events if event["kind"] == "inexact"]
