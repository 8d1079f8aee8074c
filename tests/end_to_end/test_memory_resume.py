"""Everything is killed, and the run goes on from this host's memory: storage is broken, or there is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import train
from harness import DEADLINE_S, TRAIN, Training, training

from holdfast.checkpoint.host_memory.place import kept_steps, memory_directory, sweep
from holdfast.checkpoint.restoring.reading import list_checkpoints
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.events import read_events
from holdfast.testing.observed_run import ObservedRun
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
STEPS = 60
SCRIPT = [TRAIN, "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def quiet() -> str:
    """The digest of a run in which nothing happened."""
    return agreed(forked(lambda: train.main(SCRIPT[1:]), workers=1))


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Also of a run that a failing test has left unfinished."""
    yield
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    sweep()


def happened(run: ObservedRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.directory.events) if event["kind"] == kind]


def memory_of(run: ObservedRun) -> Path:
    return memory_directory(run.directory.path, run.directory.secret())


def wait_at(run: Training, step: int) -> None:
    run.wait(lambda: run.at(step, workers=2), f"step {step}", DEADLINE_S)


def resumed(run: Training, times: int) -> dict[str, Any]:
    run.wait(lambda: len(happened(run, "resumed")) >= times, "the run to go on", DEADLINE_S)
    return happened(run, "resumed")[-1]


def test_memory_alone_brings_a_run_back_whatever_ends(quiet: str, tmp_path: Path) -> None:
    """The workers, then they and the agent, then all of it in order: there is no storage at all."""
    options = ["--workers", "2", "--checkpoint", "none", "--memory", "plain", "--save-every", "5"]
    with training(tmp_path, *options, script=SCRIPT, held_at=13) as run:
        wait_at(run, 13)
        kept = kept_steps(memory_of(run))
        assert len(kept) == 2 and 13 >= kept[0] >= 10
        run.kill(*run.pids)
        event = resumed(run, 1)
        assert (event["step"], event["uri"]) == (kept[0], "memory of this host")

        run.let_go(22)
        wait_at(run, 22)
        run.power_off()
        kept = kept_steps(memory_of(run))
        run.start()
        event = resumed(run, 2)
        assert (event["step"], event["uri"]) == (kept[0], "memory of this host")

        wait_at(run, 22)
        assert run.agent is not None
        run.agent.send_signal(signal.SIGTERM)
        run.let_go(40)
        assert run.agent.wait(DEADLINE_S) == 128 + signal.SIGTERM
        left_at = happened(run, "left")[-1]["step"]
        assert kept_steps(memory_of(run))[:1] == [left_at], "a run that was stopped has only this"
        run.start()
        assert resumed(run, 3)["step"] == left_at

        run.let_go()
        assert run.finish(DEADLINE_S) == quiet
        assert not memory_of(run).exists()
        assert not happened(run, "warning")


def test_broken_storage_is_not_needed_and_damaged_memory_falls_back_on_it(tmp_path: Path) -> None:
    """Asked to stop, the run saves to storage, and nothing stays in memory."""
    store = tmp_path / "store"
    options = ["--workers", "2", "--checkpoint", str(store), "--memory", "2+1", "--save-every", "5"]
    with training(tmp_path, *options, script=SCRIPT, held_at=13) as run:
        wait_at(run, 13)
        run.power_off()
        kept = kept_steps(memory_of(run))
        store.rename(tmp_path / "aside")
        store.write_text("a file where there should be a directory")
        run.start()
        event = resumed(run, 1)
        assert (event["step"], event["uri"]) == (kept[0], "memory of this host")
        assert any("storage cannot be looked into" in event["text"] for event in happened(run, "warning"))

        store.unlink()
        (tmp_path / "aside").rename(store)
        run.let_go(23)
        wait_at(run, 23)
        run.wait(lambda: newest_in(store) >= 20, "step 20 in storage", DEADLINE_S)
        run.power_off()
        for path in memory_of(run).rglob("part-*"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        run.start()
        event = resumed(run, 2)
        assert (event["step"], event["uri"]) == (newest_in(store), str(store))
        assert any("in the memory of this host" in event["text"] for event in happened(run, "warning"))

        stop = [sys.executable, "-m", "holdfast", "stop", "--dir", str(tmp_path), "r"]
        subprocess.run(stop, check=True, capture_output=True, timeout=DEADLINE_S)
        run.let_go(50)
        assert run.agent is not None and run.agent.wait(DEADLINE_S) == 0
        assert newest_in(store) == happened(run, "left")[-1]["step"]
        assert not memory_of(run).exists()


def newest_in(store: Path) -> int:
    return max((entry.step for entry in list_checkpoints(LocalStorage(store)) if entry.committed), default=-1)


def test_a_small_shared_memory_is_one_warning_and_costs_nothing_else(quiet: str, tmp_path: Path) -> None:
    """In a mount namespace of its own, where /dev/shm has 64 KiB."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a mount namespace needs root and unshare")
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    run = ObservedRun(
        tmp_path,
        "r",
        ["--workers", "2", "--memory", "plain", "--save-every", "5"],
        SCRIPT,
        prefix=["unshare", "--mount", "sh", "-c", mount, "sh"],
    )
    run.start()
    try:
        assert run.finish(DEADLINE_S) == quiet
        warnings = [event["text"] for event in happened(run, "warning")]
        assert len(warnings) == 2, "one for each worker, however often it is saved"
        assert all("is not kept in memory" in text and "room for" in text for text in warnings)
        steps = [event["step"] for event in happened(run, "checkpoint")]
        assert len(steps) > 2 and steps[-1] == STEPS
    finally:
        run.end()


def test_a_code_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "run", "--dir", str(tmp_path), "--workers", "1", "--memory", "60+5"]
    done = subprocess.run([*command, *SCRIPT], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "--memory is '60+5'" in done.stderr and "hint: plain, or K+M" in done.stderr
