"""What the agent shows: labelled lines, withheld tracebacks, the progress line, the summary."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agent_harness import FAKE_WORKER

from holdfast.launch.summary import RunRecord, closing_lines, progress_line
from holdfast.launch.tail import READ_BYTES_MAX, Tails, last_words
from holdfast.launch.terminal import Narrator, ProgressClock


def tails_of(path: Path, text: str) -> Tails:
    path.write_text(text)
    tails = Tails()
    tails.follow("w0.1", path, from_end=False)
    return tails


def test_lines_of_a_registered_worker_come_at_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tails = tails_of(path, "one\ntw")
    tails.settle("w0.1")
    assert tails.look(0.0) == [("w0.1", "one")]
    with path.open("a") as file:
        file.write("o\n")
    assert tails.look(0.0) == [("w0.1", "two")]


def test_lines_before_registration_come_a_moment_later(tmp_path: Path) -> None:
    tails = tails_of(tmp_path / "log", "importing\n")
    assert tails.look(0.0) == []
    assert tails.look(1.1) == [("w0.1", "importing")]


def test_last_words_of_a_failure_before_the_first_step_are_withheld_until_there_is_one(tmp_path: Path) -> None:
    tails = tails_of(tmp_path / "log", "Traceback (most recent call last):\nKeyError: 1")
    tails.look(0.0)
    tails.end("w0.1", failed=True)
    assert tails.look(100.0) == []
    tails.failures_matter = False
    assert [line for _, line in tails.look(100.0)] == ["Traceback (most recent call last):", "KeyError: 1"]
    assert not tails.look(100.0)
    assert not tails


def test_a_long_log_of_a_dead_worker_is_shown_to_its_end(tmp_path: Path) -> None:
    count = READ_BYTES_MAX // 50 + 100
    tails = tails_of(tmp_path / "log", ("x" * 99 + "\n") * count)
    tails.end("w0.1", failed=False)
    shown = 0
    while tails:
        shown += len(tails.look(0.0))
    assert shown == count


def test_colours_and_redrawn_lines_are_made_plain(tmp_path: Path) -> None:
    tails = tails_of(tmp_path / "log", "\x1b[31mred\x1b[0m\n10%\r50%\r100%\n\x07bell\n")
    assert [line for _, line in tails.look(0.0) + tails.look(2.0)] == ["red", "100%", "bell"]


def test_last_words_begin_with_the_traceback(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("noise\n" * 200 + "Traceback (most recent call last):\n  File\nKeyError: 1\n")
    assert last_words(path) == ["Traceback (most recent call last):", "  File", "KeyError: 1"]
    assert last_words(tmp_path / "none") == []


def test_the_record_of_a_run_and_its_lines() -> None:
    record = RunRecord()
    for event in [
        {"t": 1.0, "who": "agent", "kind": "worker_started", "worker": "w0.1", "pid": 5},
        {"t": 2.0, "who": "w0.1", "kind": "view", "view": 1, "members": ["w0.1", "w1.1"], "reason": "begin", "step": 0},
        {
            "t": 3.0,
            "who": "agent",
            "kind": "worker_exited",
            "worker": "w1.1",
            "pid": 6,
            "signal": 9,
            "reason": "killed",
        },
        {"t": 3.1, "who": "w0.1", "kind": "recovered", "view": 2, "step": 5, "duration_s": 0.05},
        {"t": 3.1, "who": "w2.1", "kind": "recovered", "view": 2, "step": 5, "duration_s": 0.08},
        {
            "t": 4.0,
            "who": "w0.1",
            "kind": "progress",
            "view": 2,
            "step": 7,
            "steps": 9,
            "metrics": {"loss": 0.5},
            "samples_per_s": 1234.5,
        },
    ]:
        record.feed(event)
    line = progress_line(record, workers=4)
    assert line == "step 7/9 · loss 0.5 · 1,234 samples/s · 4 workers · view 2 · 1 failure survived"
    record.feed({"t": 63.0, "who": "w0.1", "kind": "finished", "step": 9, "digest": "d1"})
    assert closing_lines(record, "r") == [
        "run r is finished: 9 steps in 1 min 02 s, 2 views, 1 failure survived",
        "recovery: median 80 ms, worst 80 ms after a loss was noticed",
        "weights: d1",
    ]
    record.feed({"t": 63.0, "who": "w1.2", "kind": "finished", "step": 9, "digest": "d2"})
    assert closing_lines(record, "r")[-1] == "warning: the workers ended with different weights: d1, d2"


def test_what_everyone_tells_is_said_once() -> None:
    narrator = Narrator()
    view = {"kind": "view", "view": 2, "members": ["w0.1"], "reason": "w1.1 died"}
    assert narrator.sentence({"who": "w0.1", **view}) == "view 2: w0.1 (w1.1 died)"
    assert narrator.sentence({"who": "w2.1", **view}) == ""
    lost = {"kind": "lost", "peer": "w1.1", "step": 4, "reason": "reset"}
    assert [bool(narrator.sentence({"who": who, **lost})) for who in ("w0.1", "w2.1")] == [True, False]
    assert narrator.sentence({"who": "w0.1", "kind": "progress"}) == ""


def test_plain_progress_comes_every_five_seconds_and_only_when_it_changed() -> None:
    clock = ProgressClock(redraws=False)
    said = [clock.due(text, now) for text, now in [("a", 1.0), ("b", 2.0), ("b", 6.1), ("b", 20.0), ("c", 21.0)]]
    assert said == [True, False, True, False, True]


@pytest.mark.processes
def test_on_a_terminal_the_progress_is_one_line_redrawn(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "holdfast", "run", "--workers", "1", "--dir", str(tmp_path)]
    agent = subprocess.Popen([*command, FAKE_WORKER, "--steps", "40"], stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while True:
        try:
            data = os.read(controller, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(controller)
    assert agent.wait(timeout=20) == 0
    text = shown.decode()
    assert len(re.findall(r"\r\x1b\[2Kstep \d+/40 · loss", text)) >= 2
    assert "\x1b[2Kholdfast | run fake_worker-" in text


@pytest.mark.processes
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "run", "--workers", "1", "--run", "r", "--dir", str(tmp_path)]
    agent = subprocess.Popen([*command, FAKE_WORKER, "--steps", "10"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert agent.stdout is not None
    assert agent.stderr is not None
    agent.stdout.close()
    assert agent.wait(timeout=20) == 0
    assert agent.stderr.read() == b""
    agent.stderr.close()


@pytest.mark.processes
def test_a_deep_run_directory_gets_its_sockets_elsewhere_and_leaves_none_behind(tmp_path: Path) -> None:
    home = tmp_path / ("deep" * 20) / ("deeper" * 10)
    command = [sys.executable, "-m", "holdfast", "run", "--workers", "1", "--run", "r", "--dir", str(home)]
    done = subprocess.run([*command, FAKE_WORKER, "--steps", "3"], capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    socket_dir = Path(json.loads((home / "runs" / "r" / "run.json").read_text())["socket_dir"])
    assert len(str(socket_dir)) <= 72
    assert not socket_dir.exists()
    assert (home / "runs" / "r" / "secret").stat().st_mode & 0o777 == 0o600
