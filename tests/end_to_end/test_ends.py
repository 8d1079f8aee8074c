"""However a run ends: its final state is in storage and it says that it is finished, or its exit code is not 0."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import DEADLINE_S, holdfast, training

from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.core.errors import EXIT_CUT_SHORT, EXIT_UNSAVED
from holdfast.events import read_events
from holdfast.placement.directory import RunDirectory, home_directory
from tests.harness import s3_server
from tests.harness.s3_server import S3Server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
SCRIPT = str(Path(__file__).with_name("ending.py"))
STEPS, AT = 12, 7
FEW = ["--workers", "2"]


def saved_in(uri: str | Path) -> int | None:
    found = newest_valid(open_storage(str(uri)), warn=pytest.fail)
    return found[0].step if found is not None else None


def events_of(home: Path, name: str = "r") -> list[dict[str, object]]:
    return list(read_events(RunDirectory(home_directory(str(home)), name).events))


def run(home: Path, *options: str, how: str = "end", steps: int = STEPS) -> subprocess.CompletedProcess[str]:
    return holdfast("run", "--run", "r", *FEW, *options, SCRIPT, how, str(steps), home=home)


def said(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.returncode}\n{done.stdout}\n--- stderr\n{done.stderr}"


@pytest.mark.parametrize(
    ("how", "code", "step", "sentence"),
    [
        ("break", 0, AT + 1, f"run r is finished: {AT + 1} steps"),
        ("exit", EXIT_CUT_SHORT, AT + 1, f"run r is not finished: the script ended at step {AT + 1} of {STEPS}"),
        ("raise after", 1, STEPS, f"run r has made its {STEPS} steps, and its script failed after the last"),
    ],
)
def test_a_script_ends(how: str, code: int, step: int, sentence: str, tmp_path: Path) -> None:
    done = run(tmp_path, how=how)
    assert done.returncode == code, said(done)
    assert sentence in done.stdout + done.stderr, said(done)
    assert saved_in(tmp_path / "runs" / "r" / "checkpoints") == step
    finished = [event for event in events_of(tmp_path) if event["kind"] == "finished"]
    assert bool(finished) == (code == 0), finished


def test_ctrl_c(tmp_path: Path) -> None:
    with training(tmp_path, *FEW, script=[SCRIPT, "slow", "10000"]) as watched:
        watched.wait(lambda: watched.step >= 3, "steps")
        assert watched.agent is not None
        watched.agent.send_signal(signal.SIGINT)
        assert watched.agent.wait(DEADLINE_S) == 130
        left = [event for event in read_events(watched.directory.events) if event["kind"] == "left"]
        assert {event["step"] for event in left} == {saved_in(watched.directory.path / "checkpoints")}


# ---- a place that does not take checkpoints


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "holdfast-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_place_that_is_read_only(disk: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = run(tmp_path, "--checkpoint", str(disk / "kept"))
    assert done.returncode == 2, said(done)
    assert "the file system is read-only" in done.stderr and len(done.stderr.splitlines()) == 2, said(done)
    assert not [event for event in events_of(tmp_path) if event["kind"] == "progress"]


def test_a_place_that_is_full_at_the_end(disk: Path, tmp_path: Path) -> None:
    place = disk / "kept"
    done = run(tmp_path, "--checkpoint", str(place), "--save-every", "4", how=f"full {disk}")
    assert done.returncode == EXIT_UNSAVED, said(done)
    last = done.stdout.splitlines()[-1]
    assert f"(step {STEPS}) is not saved" in last and "the disk is full" in last, said(done)
    newest = saved_in(place)
    assert newest is not None and f"the newest checkpoint is that of step {newest}, in {place}" in last, said(done)
    assert "is finished" not in done.stdout and "it waits for storage" in done.stdout, said(done)
    (disk / "ballast").unlink()
    again = run(tmp_path, "--checkpoint", str(place))
    assert again.returncode == 0 and f"training resumes at step {newest}" in again.stdout, said(again)
    assert saved_in(place) == STEPS


@pytest.mark.skipif(bool(s3_server.why_not()), reason=s3_server.why_not() or "-")
@pytest.mark.xdist_group("s3")
@pytest.mark.parametrize("made", [True, False])
def test_a_store_that_lists_and_refuses_every_write(
    made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket whose name it does not take. If it was made all the same, writes get a yes and leave nothing behind."""
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        if made:
            server.make_bucket("Not_a_Bucket")
        uri = server.uri("Not_a_Bucket/run")
        done = run(tmp_path, "--checkpoint", uri)
    assert done.returncode == 2, said(done)
    assert ("does not list it" if made else "there is no bucket") in done.stderr, said(done)
    assert len(done.stderr.splitlines()) == 2, said(done)
    assert not [event for event in events_of(tmp_path) if event["kind"] == "progress"]


# ---- one place, two runs


def test_a_place_belongs_to_one_run(tmp_path: Path) -> None:
    place = tmp_path / "kept"
    with training(tmp_path, *FEW, "--checkpoint", str(place), script=[SCRIPT, "slow", "10000"]) as first:
        first.wait(lambda: first.step >= 1, "a step")
        second = holdfast("run", "--run", "s", *FEW, "--checkpoint", str(place), SCRIPT, "end", "12", home=tmp_path)
        assert second.returncode == 2, said(second)
        assert f"{place} belongs to the run r" in second.stderr and "release" in second.stderr, said(second)
        alone = by_hand("end", place)
        assert alone.returncode != 0 and f"{place} belongs to the run r" in alone.stderr, said(alone)
        assert first.agent is not None
        first.agent.send_signal(signal.SIGINT)
        assert first.agent.wait(DEADLINE_S) == 130
    step = saved_in(place)
    released = holdfast("checkpoint", "release", str(place), home=tmp_path)
    assert released.returncode == 0 and "no longer belongs to the run r" in released.stdout, said(released)
    assert step is not None
    third = holdfast("run", "--run", "s", *FEW, "--checkpoint", str(place), SCRIPT, "end", str(step + 3), home=tmp_path)
    assert third.returncode == 0 and f"resumes at step {step}" in third.stdout, said(third)
    assert saved_in(place) == step + 3


# ---- a finished run goes on


def weights(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(re.findall(r"^w\S+ \| (end .*) trained \d+$", done.stdout, re.MULTILINE))


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    """With the bits, the scheduler and the count of a run that had them from the start."""
    assert run(tmp_path).returncode == 0
    again = run(tmp_path)
    assert again.returncode == 0 and f"run r is finished already, at step {STEPS}" in again.stdout, said(again)
    assert re.findall(r"trained (\d+)$", again.stdout, re.MULTILINE) == ["0", "0"], said(again)
    more = run(tmp_path, steps=STEPS + 6)
    assert more.returncode == 0 and f"run r is finished: {STEPS + 6} steps" in more.stdout, said(more)
    assert f"training resumes at step {STEPS}" in more.stdout
    at_once = by_hand("end", tmp_path / "other", steps=STEPS + 6)
    assert {line.removesuffix(" trained 18") for line in at_once.stdout.splitlines()} == weights(more), said(more)


def test_an_early_stop_holds_until_there_is_more_to_do(tmp_path: Path) -> None:
    assert by_hand("break", tmp_path).returncode == 0
    assert by_hand("end", tmp_path).stdout.endswith("trained 0\n")
    more = by_hand("end", tmp_path, steps=STEPS + 2)
    assert f"end {STEPS + 2} " in more.stdout and more.stdout.endswith(f"trained {STEPS + 2 - AT - 1}\n"), said(more)


# ---- started by hand


def by_hand(how: str, place: Path, steps: int = STEPS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, how, str(steps), str(place)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("how", "code", "step"),
    [
        ("break before", 0, AT),
        ("own exception", 0, AT + 1),
        ("kept break", 0, AT + 1),
        ("kept exit", EXIT_CUT_SHORT, AT + 1),
        ("exit", EXIT_CUT_SHORT, AT + 1),
    ],
)
def test_a_script_started_by_hand_ends(how: str, code: int, step: int, tmp_path: Path) -> None:
    done = by_hand(how, tmp_path)
    assert done.returncode == code, said(done)
    assert saved_in(tmp_path) == step
    if how.startswith("kept"):
        return
    again = by_hand(how, tmp_path)
    assert f"training resumes at step {step}, from {tmp_path}" in again.stderr, said(again)
    if code == 0:  # it stopped early, and does so again: it is not trained beyond that
        assert again.stdout.endswith("trained 0\n") and re.search(r"^end", again.stdout), said(again)
    else:
        assert saved_in(tmp_path) == STEPS


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_signal_to_a_script_started_by_hand(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "slow", "10000", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "at 0\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == code, err
    step = list_checkpoints(open_storage(str(tmp_path)))[0].step
    assert saved_in(tmp_path) == step and f"leaves at step {step}; that is saved in {tmp_path}" in err
    assert "Traceback" not in err
