"""`holdfast events`: sentences and JSON, filters, following, and its ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.core.events import KINDS
from holdfast.events import EventLog
from holdfast.events.telling import sentence
from holdfast.placement.directory import RunDirectory


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "home"))
    directory = RunDirectory(tmp_path / "home", "first")
    directory.create()
    directory.write({"workers": 2})
    return directory


def log_of(run: RunDirectory, who: str, *, ago_s: float = 0.0) -> EventLog:
    return EventLog(run.events / f"{who}.jsonl", who, wall_clock=lambda: time.time() - ago_s)


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["events", "first", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_kind_has_a_sentence_of_its_own() -> None:
    """Also where fields are missing or of another kind, as a newer worker or a damaged file may have them."""
    for kind in KINDS:
        assert sentence({"t": 1.0, "who": "w0.1", "kind": kind})
        assert sentence({"t": 1.0, "who": "w0.1", "kind": kind, **{name: [["x"]] for name in KINDS[kind]}})
    assert sentence({"kind": "unheard_of", "who": "w0.1", "t": 1.0, "step": 3}) == "unheard of: step 3"


def test_a_sentence_is_one_line_without_escapes() -> None:
    said = sentence({"t": 1.0, "who": "w0.1", "kind": "failed", "reason": "boom\n\x1b[31mred\x07"})
    assert said == "w0.1 failed: boom [31mred"


def test_sentences_in_order_with_time_and_writer(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    log_of(run, "w1.1", ago_s=60).write("lost", view=2, peer="w0.1", reason="gone", step=7)
    log_of(run, "agent", ago_s=90).write("worker_exited", worker="w0.1", pid=9, signal=9, reason="killed")
    log_of(run, "w1.1", ago_s=30).write("recovered", view=3, step=7, duration_s=0.0421)
    told = lines(capsys)
    assert [line.split(maxsplit=3)[2:] for line in told] == [
        ["agent", "w0.1 ended: killed, signal 9"],
        ["w1.1", "w0.1 is lost to w1.1 at step 7: gone"],
        ["w1.1", "training goes on at step 7, 42 ms later"],
    ]
    assert all(line[4] == line[7] == "-" and line[13] == ":" for line in told)


def test_filters_and_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    log_of(run, "agent", ago_s=7200).write("worker_started", worker="w0.1", pid=9)
    log_of(run, "w0.1", ago_s=600).write("left", step=3, reason="asked to")
    log_of(run, "w10.1", ago_s=5).write("left", step=4, reason="asked to")

    def found(*arguments: str) -> list[tuple[Any, Any]]:
        events = [json.loads(line) for line in lines(capsys, "--json", *arguments)]
        return [(event["who"], event["kind"]) for event in events]

    assert found() == [("agent", "worker_started"), ("w0.1", "left"), ("w10.1", "left")]
    assert found("--kind", "left,failed") == [("w0.1", "left"), ("w10.1", "left")]
    assert found("--worker", "w0.1") == [("agent", "worker_started"), ("w0.1", "left")]
    assert found("--worker", "w0", "--kind", "left") == [("w0.1", "left")]
    assert found("--since", "1h") == [("w0.1", "left"), ("w10.1", "left")]
    assert found("--since", "30") == [("w10.1", "left")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["events", "second"], "there is no run second"),
        (["events", "first", "--kind", "left,leftt"], "there are no events of kind 'leftt'"),
        (["events", "first", "--since", "yesterday"], "--since is 'yesterday'"),
    ],
)
def test_what_is_unknown_is_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and told[0].startswith(f"holdfast: {said}") and told[1].startswith("  hint: ")


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Ends with the test, also where that fails."""
    words = [sys.executable, "-m", "holdfast", "events", "first", *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_following_a_run_that_lives_and_ctrl_c(run: RunDirectory) -> None:
    log = log_of(run, "w0.1")
    log.write("left", step=1)
    with run.locked(), command("--follow", "--json") as following:  # locked as by an agent
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["step"] == 1
        log.write("left", step=2)
        assert json.loads(following.stdout.readline())["step"] == 2
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=30)
    assert following.returncode == 130 and errors == ""


def test_following_ends_with_the_run_and_with_the_pipe(run: RunDirectory) -> None:
    log_of(run, "w0.1").write("left", step=1)
    with run.locked(), command("--follow") as following:
        assert following.stdout is not None and "leaves at step 1" in following.stdout.readline()
        following.stdout.close()  # nothing more happens in the run, and still it is noticed
        assert following.wait(timeout=30) == 141
        assert following.stderr is not None and following.stderr.read() == ""
    with command("--follow") as following:
        told, errors = following.communicate(timeout=30)
    assert following.returncode == 0 and errors == "" and len(told.splitlines()) == 1


def test_a_pipe_that_is_closed_early_is_no_error(run: RunDirectory) -> None:
    log = log_of(run, "w0.1")
    for step in range(3000):
        log.write("left", step=step, reason="x" * 50)
    with command() as reading:
        assert reading.stdout is not None and reading.stderr is not None
        reading.stdout.readline()
        reading.stdout.close()
        assert reading.wait(timeout=30) == 141 and reading.stderr.read() == ""
