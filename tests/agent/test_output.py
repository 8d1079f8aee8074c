"""What the agent shows: labelled lines, withheld tracebacks, the progress line, the summary."""

from __future__ import annotations

import copy
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agent_harness import FAKE_WORKER

from holdfast.agent.output.tail import READ_BYTES_MAX, Tails, last_words
from holdfast.observe.fold import RunRecord
from holdfast.observe.summary import closing_lines, progress_line, started_over_line
from holdfast.observe.terminal import Narrator, ProgressClock


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


def test_the_last_lines_of_a_dead_worker_come_at_once_but_for_its_traceback(tmp_path: Path) -> None:
    tails = tails_of(tmp_path / "log", "epoch 3\nloss 0.5Traceback (most recent call last):\nKeyError: 1")
    tails.failures_matter = False
    tails.end("w0.1", failed=True)
    assert tails.last_lines("w0.1", 0.0) == ["epoch 3"]
    assert tails.drop_withheld("w0.1") == []
    tails = tails_of(tmp_path / "log", "epoch 3\nno end of line")
    tails.end("w0.1", failed=False)
    assert tails.last_lines("w0.1", 0.0) == ["epoch 3", "no end of line"]


def test_what_was_withheld_before_the_last_traceback_is_shown(tmp_path: Path) -> None:
    tails = tails_of(tmp_path / "log", "epoch 3\nTraceback (most recent call last):\nKeyError: 1\n")
    tails.look(0.0)
    assert tails.drop_withheld("w0.1") == ["epoch 3"]


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
    record.feed({"t": 63.0, "who": "w2.1", "kind": "finished", "step": 9, "digest": "d1"})
    assert closing_lines(record, "r")[-1] == (
        "run r is not exact, and ends with exit code 65: the workers ended with different weights: "
        "d1 on w0.1, w2.1; d2 on w1.2"
    )


def test_a_script_that_fails_after_its_training_has_survived_nothing() -> None:
    record = RunRecord()
    record.feed({"t": 2.0, "who": "w0.1", "kind": "view", "view": 1, "members": ["w0.1"], "reason": "begin", "step": 0})
    record.feed({"t": 4.0, "who": "w0.1", "kind": "progress", "view": 1, "step": 1, "steps": 1, "metrics": {}})
    exited = {"t": 5.0, "who": "agent", "kind": "worker_exited", "worker": "w0.1", "pid": 5, "reason": "failed"}
    raised = copy.deepcopy(record)
    raised.feed(exited)  # an exception before the end of the script
    assert closing_lines(raised, "r") == ["run r has made its 1 step, and its script failed after the last"]
    record.feed({"t": 5.0, "who": "w0.1", "kind": "finished", "step": 1, "digest": "d1"})
    record.feed(exited)  # sys.exit(3) at the end of it
    assert closing_lines(record, "r")[0] == "run r is finished: 1 step in 3.0 s, 1 view, 0 failures survived"


def test_what_everyone_tells_is_said_once() -> None:
    narrator = Narrator()
    view = {"kind": "view", "view": 2, "members": ["w0.1"], "reason": "w1.1 died"}
    assert narrator.sentence({"who": "w0.1", **view}) == "view 2: w0.1 (w1.1 died)"
    assert narrator.sentence({"who": "w2.1", **view}) == ""
    wait = {"kind": "waiting", "step": 4, "reason": "for the ledger"}
    assert [bool(narrator.sentence({"who": who, **wait})) for who in ("w0.1", "w2.1")] == [True, False]
    assert narrator.sentence({"who": "w0.1", "kind": "progress"}) == ""


def test_who_only_closed_its_connections_is_not_said_to_be_lost() -> None:
    """Two hosts: w0.1@b dies. w0.1@a notices it first and gives the group up, so that w1.1@a loses w0.1@a, too."""
    narrator, record = Narrator(), RunRecord()
    record.feed({"t": 1.0, "who": "w0.1@a", "kind": "view", "view": 1, "members": ["w0.1@a", "w1.1@a", "w0.1@b"]})
    told = [
        {"t": 2.0, "who": "w0.1@a", "kind": "lost", "view": 1, "peer": "w0.1@b", "step": 4, "reason": "reset"},
        {"t": 2.0, "who": "w1.1@a", "kind": "lost", "view": 1, "peer": "w0.1@a", "step": 4, "reason": "closed"},
        {"t": 2.1, "who": "w1.1@a", "kind": "lost", "view": 1, "peer": "w0.1@b", "step": 4, "reason": "closed"},
    ]
    assert [narrator.sentence(event) for event in told] == ["", "", ""]
    view = {"t": 2.2, "who": "w0.1@a", "kind": "view", "view": 2, "members": ["w0.1@a", "w1.1@a"]}
    for event in (*told, view, told[2]):
        record.feed(event)
    assert narrator.losses(members=view["members"]) == ["w0.1@b is lost to w0.1@a at step 4: reset"]
    assert narrator.losses() == []
    assert record.workers.failures == 1
    record.feed({**view, "view": 3})
    assert record.workers.failures == 1


def test_without_a_view_a_loss_is_said_after_a_moment_and_without_a_step_that_nobody_has() -> None:
    narrator = Narrator()
    narrator.sentence({"t": 5.0, "who": "w0.1", "kind": "lost", "peer": "w1.1", "reason": "reset", "step": None})
    assert narrator.losses(until=4.9) == []
    assert narrator.losses(until=5.1) == ["w1.1 is lost to w0.1: reset"]


def test_training_that_goes_on_is_not_called_paused() -> None:
    """Only the first worker of a host tells of progress; the others' last word may be that they wait."""
    record = RunRecord()
    members = ["w0.1", "w1.1"]
    record.feed({"t": 1.0, "who": "w0.1", "kind": "view", "view": 1, "members": members, "step": 0})
    for who in (*members, "w2.1"):
        record.feed({"t": 2.0, "who": who, "kind": "waiting", "step": 4, "reason": "the ledger is away"})
    assert "paused" in progress_line(record, workers=2)
    record.feed({"t": 3.0, "who": "w0.1", "kind": "progress", "view": 1, "step": 5})
    assert list(record.workers.waiting) == ["w2.1"]  # which is no member


def test_refused_and_scaled_away_workers_are_no_failures() -> None:
    record = RunRecord()
    for worker, reason in (("w0.1", "refused"), ("w1.1", "left"), ("w2.1", "did not leave in time")):
        record.feed({"t": 1.0, "who": "agent", "kind": "worker_exited", "worker": worker, "reason": reason})
    assert record.workers.failures == 0


def test_beginning_again_says_what_was_lost_and_what_would_have_kept_it() -> None:
    record = RunRecord()
    over = {"t": 2.0, "who": "w0.2", "kind": "started_over", "view": 2, "step": 0, "keeps": False}
    record.feed(over)
    assert started_over_line(record, keeps=False) == ""  # it had not got anywhere
    record.feed({"t": 3.0, "who": "w0.2", "kind": "progress", "view": 2, "step": 777})
    for who in ("w0.3", "w1.3"):
        record.feed({**over, "who": who, "view": 3})
    line = started_over_line(record, keeps=False)
    assert "begins again at step 0, although it had got to step 777" in line and "--checkpoint" in line
    assert "--save-every" in started_over_line(record, keeps=True)
    assert record.step == 0


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


def test_a_new_best_is_always_said_and_other_values_now_and_then() -> None:
    narrator, record = Narrator(), RunRecord()

    def said(t: float, step: int, *, best: bool = False) -> str:
        event = {"t": t, "who": "w0.1", "kind": "recorded", "step": step, "metrics": {"val_loss": 0.5}, "best": best}
        record.feed(event)
        return narrator.sentence(event)

    assert said(1.0, 10) == "recorded at step 10: val_loss 0.5"
    assert said(1.1, 11) == "" and said(1.2, 12, best=True) == "recorded at step 12: val_loss 0.5, the best so far"
    assert said(7.0, 13) == "recorded at step 13: val_loss 0.5"
    record.feed({"t": 8.0, "who": "w0.1", "kind": "progress", "step": 14, "metrics": {"loss": 1.0}})
    assert record.metrics == {"val_loss": 0.5, "loss": 1.0}
    stop = {"t": 9.0, "who": "w0.1", "kind": "early_stop", "step": 14, "reason": "enough"}
    assert narrator.sentence(stop) == "the script ends the training at step 14: enough" and not narrator.sentence(stop)
