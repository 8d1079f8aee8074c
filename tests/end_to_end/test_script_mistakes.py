"""Mistakes that people make in scripts: the run stops once, says which, and suspects no hardware."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import mistaken
import pytest
from harness import holdfast

from holdfast.core.words import KEY_LIARS
from holdfast.events import read_events
from holdfast.ledger.journal import Journal

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def run(home: Path, mistake: str, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    given = ("--run", "r", "--workers", "3", "--audit-every", "12", *options)
    ended = holdfast("run", *given, str(mistaken.__file__), mistake, "60", home=home)
    return ended, [dict(event) for event in read_events(home / "runs" / "r" / "events")]


@pytest.mark.parametrize(
    ("mistake", "words", "hint", "rewinds"),
    [
        ("leader steps", "optimizer.step() was called on w0.1 only at step 0", "on every worker", 0),
        ("leader's extra", "differ in the extra 'best', key loss (", "under `if run.leader:`", 0),
        (
            "second optimizer",
            "another optimizer, of a SGD on parameters of the model, was called inside",
            "one level",
            0,
        ),
        ("leader's weight", "differ in the parameter 0.weight (w", "under `if run.leader:`", 1),
    ],
)
def test_a_mistake_is_named_in_one_stop(mistake: str, words: str, hint: str, rewinds: int, tmp_path: Path) -> None:
    ended, events = run(tmp_path, mistake)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    # Who is the leader is decided by who comes first.
    said = ended.stderr.replace("w1.1", "w0.1").replace("w2.1", "w0.1")
    assert words in said and hint in said.partition("hint:")[2]
    assert "memory" not in ended.stderr and "corrupt" not in ended.stderr
    kinds = [event["kind"] for event in events]
    assert len({event["number"] for event in events if event["kind"] == "rewound"}) == rewinds
    assert not rewinds or "it came back" in said
    if not rewinds:
        assert "corruption" not in kinds and "evicted" not in kinds
    journal, ledger = Journal.open(tmp_path / "runs" / "r" / "ledger", now=0.0)
    journal.close()
    assert not ledger.read(KEY_LIARS).entries


def test_a_leader_that_raises_again_and_again_is_named_with_its_line(tmp_path: Path) -> None:
    ended, events = run(tmp_path, "leader raises")
    place = f"mistaken.py:{_line_of('raise FileNotFoundError')}"
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"the script raised the same exception at {place} in " in ended.stderr
    assert "FileNotFoundError: no such directory: plots" in ended.stderr
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert sum(place in text and "`if run.leader:`" in text for text in warnings) == 1
    assert len([event for event in events if event["kind"] == "failed"]) <= 6


def _line_of(text: str) -> int:
    lines = Path(mistaken.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
