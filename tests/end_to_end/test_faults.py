"""Real processes, real faults at chosen moments, and the weights of a run in which nothing happened."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import DEADLINE_S, TRAIN, training

from holdfast.core.words import KEY_WORKERS, Registration
from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import LEDGER_SOCKET

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
STEPS = 120  # enough for joiners to come while the faults wait for them
SCRIPT = [TRAIN, "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def quiet() -> str:
    """The digest of a run in which nothing happened."""
    done = subprocess.run([sys.executable, *SCRIPT], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.parametrize(
    ("path", "seed", "loops"), [("shared-memory", 1, 1), ("network", 2, 4), ("shared-memory", 3, 3)]
)
def test_exactness_under_random_faults(path: str, seed: int, loops: int) -> None:
    """In a script of one loop, and in one of several: left early, empty, with lines between that change weights."""
    command = [sys.executable, "-m", "tests.soak.exactness", "--workers", "3", "--steps", str(STEPS)]
    options = ["--faults", "6", "--seed", str(seed), "--path", path, "--loops", str(loops)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=190, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}: exact: " in done.stdout


def test_a_kill_at_the_last_step_and_strangers_at_the_doors(quiet: str, tmp_path: Path) -> None:
    """While the workers wait at their last step: garbage and idle connections on every socket, then a kill."""
    with training(tmp_path, "--workers", "2", script=SCRIPT, held_at=STEPS - 1) as run:
        run.wait(lambda: run.at(STEPS - 1, workers=2), "the last step", DEADLINE_S)
        sockets = addresses(run.directory.path)
        assert len(sockets) == 3
        strangers = [stranger for path in sockets for stranger in knock(path)]
        victim = run.living_members()[0]
        run.kill(victim)
        run.let_go()
        assert run.finish(DEADLINE_S) == quiet
        assert run.said(f"{victim} ended: killed, signal 9")
        assert run.said(f"weights: {quiet}")
        for stranger in strangers:
            stranger.close()


def addresses(directory: Path) -> list[str]:
    """The unix sockets of the run's ledger and of its workers."""
    run = RunDirectory(directory.parents[1], directory.name)
    folder = run.socket_dir()
    ledger = EmbeddedLedger(folder / LEDGER_SOCKET, run.secret())
    try:
        found = [Registration.decode(entry.value).address for entry in ledger.read(KEY_WORKERS).entries]
    finally:
        ledger.close()
    return [str(folder / LEDGER_SOCKET), *(address.removeprefix("unix:") for address in found)]


def knock(path: str) -> list[socket.socket]:
    """200 connections that say nothing, and a few that say too much."""
    strangers = []
    for number in range(210):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.settimeout(5.0)
        try:
            stranger.connect(path)
            if number >= 200:
                stranger.sendall(os.urandom(100_000) if number % 2 else b"\xff\xff\xff\x7f" * 64)
        except OSError:
            pass  # not let in, or thrown out while it talked: that is what should happen
        strangers.append(stranger)
    return strangers


def test_all_workers_are_killed_at_once(quiet: str, tmp_path: Path) -> None:
    """There is no checkpoint yet: the run starts over, says so, and still ends exact."""
    with training(tmp_path, "--workers", "2", script=SCRIPT, held_at=6) as run:
        run.wait(lambda: run.at(6, workers=2), "step 6", DEADLINE_S)
        run.kill(*run.living_members())
        run.let_go()
        assert run.finish(DEADLINE_S) == quiet
        assert run.said("all workers of view 1 are lost")


def test_strangers_are_refused_with_a_sentence_and_harm_nobody(
    quiet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare with another arithmetic and a spare with other settings: neither is let in, the run ends exact."""
    monkeypatch.setenv("TEST_FIRST", str(tmp_path / "first"))
    with training(tmp_path, "--workers", "1", "--spares", "2", script=SCRIPT, held_at=5) as run:
        same = "this machine's arithmetic does not give the same bits as w0.1 (torch"
        run.wait(
            lambda: run.said("w2.1 | holdfast: this worker has batch_size=64, but the run has batch_size=32"),
            "settings",
        )
        run.wait(lambda: run.said(f"w1.1 | holdfast: {same}"), "the refusal of another arithmetic")
        run.let_go()
        assert run.finish(DEADLINE_S) == quiet
        assert run.said("w1.1 |   hint: use the same CPU type, torch version and threads on all hosts")
        assert run.said("w2.1 |   hint: all workers of a run need the same script and settings")
        assert "Traceback" not in run.log()


def test_a_stopped_worker_is_replaced(quiet: str, tmp_path: Path) -> None:
    with training(tmp_path, "--workers", "2", "--lease", "0.5", script=SCRIPT, held_at=8) as run:
        run.wait(lambda: run.at(8, workers=2), "step 8", DEADLINE_S)
        victim = run.living_members()[0]
        os.kill(run.pids[victim], signal.SIGSTOP)
        run.let_go(STEPS - 1)
        run.wait(lambda: run.said(f"{victim} ended: hung"), "the end of the stopped worker", DEADLINE_S)
        run.let_go()
        assert run.finish(DEADLINE_S) == quiet
