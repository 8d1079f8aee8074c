"""A run that ends and goes on: with other numbers of workers, at short notice, with another script, after damage."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import train
from harness import DEADLINE_S, TRAIN, Training, training

from holdfast.checkpoint.format.manifest import directory_of, manifest_name
from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid, verify
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.events import read_events
from tests.harness.forked import agreed, forked
from tests.trainings.staged_training import __file__ as STAGED
from tests.trainings.staged_training import cut_small

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
STEPS = 60
SCRIPT = [TRAIN, "--steps", str(STEPS)]


def alone(*arguments: str) -> str:
    """The digest of a run in which nothing happens."""
    return agreed(forked(lambda: train.main(list(arguments)), workers=1))


def happened(run: Training, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.directory.events) if event["kind"] == kind]


def test_four_workers_then_three_then_five(tmp_path: Path) -> None:
    """Each time they are asked to leave, and the next ones go on from the very step at which they left."""
    place = tmp_path / "checkpoints"
    left_at = 0
    for number, workers in enumerate((4, 3, 5)):
        options = ["--workers", str(workers), "--checkpoint", str(place), "--save-every", "100"]
        hold = 15 * (number + 1)
        with training(tmp_path, *options, script=SCRIPT, held_at=hold) as run:
            run.wait(lambda hold=hold, workers=workers: run.at(hold, workers=workers), f"step {hold}", DEADLINE_S)
            assert [event["step"] for event in happened(run, "resumed")][-1:] == [left_at][: number and 1]
            if workers == 5:
                run.let_go()
                assert run.finish(DEADLINE_S) == alone(*SCRIPT[1:])
                return
            assert run.agent is not None
            run.agent.send_signal(signal.SIGTERM)
            run.let_go(hold + 10)
            assert run.agent.wait(DEADLINE_S) == 128 + signal.SIGTERM
            left_at = {event["step"] for event in happened(run, "left")[-workers:]}.pop()
        assert hold < left_at <= hold + 10
        listed = list_checkpoints(LocalStorage(place))
        assert next(entry.step for entry in listed if entry.committed) == left_at


def test_a_hundred_megabytes_are_saved_within_the_notice(tmp_path: Path) -> None:
    """SIGTERM to all workers and the agent, as a machine gets that is about to vanish. benchmarks/notice.py says how
    soon; here other tests share the machine."""
    place = tmp_path / "checkpoints"
    script = [TRAIN, "--steps", "100000", "--width", "24400", "--shards", "2"]  # 50 MB, and as much momentum
    with training(
        tmp_path, "--workers", "2", "--checkpoint", str(place), "--save-every", "100000", script=script
    ) as run:
        run.wait(lambda: run.step >= 3, "a few steps", DEADLINE_S)
        assert run.agent is not None and len(run.living_members()) == 2
        asked_at = time.monotonic()
        for pid in (*run.pids.values(), run.agent.pid):
            os.kill(pid, signal.SIGTERM)
        while not (found := list(place.glob("*/manifest.json"))):
            assert time.monotonic() - asked_at < 20.0, "there is no manifest"
            time.sleep(0.002)
        took_s = time.monotonic() - asked_at
        run.agent.wait(DEADLINE_S)
        steps = {event["step"] for event in happened(run, "left")}
        manifest, snapshot = newest_valid(LocalStorage(place), warn=pytest.fail) or pytest.fail("nothing is there")
        print(f"{snapshot.nbytes / 1e6:.0f} MB were committed {took_s:.2f} s after the signal")
        assert snapshot.nbytes > 100e6
        # The signals come one after the other: the first may leave a step before the last, who then saves.
        assert max(steps) == manifest.step and found[0].parent.name == directory_of(manifest.step)


# ---- another script


CHANGING = """
import sys, torch, holdfast
from torch.nn import functional as F

how = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3, bias=how != "model"))
if how == "shape":
    model[0].bias = torch.nn.Parameter(torch.zeros(2, 4))
Optimizer = torch.optim.Adam if how == "optimizer" else torch.optim.SGD
optimizer = Optimizer(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 3))
run = holdfast.join(model, optimizer, dataset, batch_size=32 if how == "batch" else 16, shards=4)
for step in run.steps(6 if how == "as it is" else 9):
    for x, y in step:
        F.mse_loss(model(x), y).backward()
    optimizer.step()
"""


def contents(place: Path) -> Mapping[str, str]:
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in place.rglob("*") if path.is_file()}


def start(home: Path, place: Path, script: Path, workers: int, how: str) -> subprocess.Popen[str]:
    """The run r in a directory of its own: nothing but the checkpoint tells what it was before."""
    options = ["--dir", str(home), "--run", "r", "--checkpoint", str(place), "--workers", str(workers)]
    command = [sys.executable, "-m", "holdfast", "run", *options, str(script), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The script, and the checkpoints of a run of it that has ended."""
    home = tmp_path_factory.mktemp("trained")
    script, place = home / "script.py", home / "checkpoints"
    script.write_text(CHANGING)
    first = start(home / "first", place, script, 1, "as it is")
    out, err = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0, out + err
    assert len(contents(place)) >= 2
    return script, place


def check_answered(process: subprocess.Popen[str], sentence: str) -> None:
    out, err = process.communicate(timeout=DEADLINE_S)
    said = f"{process.args}:\n{out}\n--- stderr\n{err}"
    assert process.returncode == 2, said
    lines = err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("holdfast: ") and lines[1].startswith("  hint: "), said
    assert sentence in lines[0], said
    assert "Traceback" not in said


def test_another_batch_or_model_is_answered_by_a_sentence(trained: tuple[Path, Path], tmp_path: Path) -> None:
    script, place = trained
    before = contents(place)
    # One of them with two workers: only the first of them looks into storage, and both must come to an end.
    sentences = {
        "batch": (2, "was made with batch_size=16, and this run has batch_size=32"),
        "model": (1, "was made with a model with 83 trained numbers, and this run has a model with 80 trained numbers"),
        "shape": (1, "the parameter 0.bias has shape (8,) in the run and (2, 4) here"),
    }
    changed = {how: start(tmp_path / how, place, script, workers, how) for how, (workers, _) in sentences.items()}
    for how, process in changed.items():
        check_answered(process, sentences[how][1])
    assert contents(place) == before


def test_another_optimizer_is_answered_by_a_sentence(trained: tuple[Path, Path], tmp_path: Path) -> None:
    script, place = trained
    before = contents(place)
    check_answered(start(tmp_path, place, script, 1, "optimizer"), "optimizer")
    assert contents(place) == before


# ---- damage


def parts_of(place: Path, step: int) -> list[Path]:
    return sorted((place / directory_of(step)).glob("part-*"))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0x10
    path.write_bytes(data)


def swap_two(paths: list[Path]) -> tuple[Path, Path]:
    """Of the same size: a listing does not show it."""
    one, other = next((a, b) for a in paths for b in paths if a < b and a.stat().st_size == b.stat().st_size)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return one, other


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.checkpoint.format import parts

    monkeypatch.setattr(parts, "PART_BYTES", parts.PART_BYTES)
    monkeypatch.setattr(parts, "PIECE_BYTES_MAX", parts.PIECE_BYTES_MAX)
    cut_small()


def test_damage_is_named_and_the_older_checkpoint_is_used(tmp_path: Path, small_parts: None) -> None:
    """The newest five are damaged, each in its way. The run goes on from the sixth, and does not lose that one."""
    place = tmp_path / "checkpoints"
    storage = LocalStorage(place)
    staged = [STAGED, str(tmp_path / "nobody listens"), "--steps", str(STEPS), "--width", "1024"]
    saving = ["--workers", "1", "--checkpoint", str(place)]
    with training(tmp_path, *saving, "--save-every", "5", "--keep", "9", script=staged, held_at=41) as run:
        newest = [place / manifest_name(step) for step in (40, 41)]
        run.wait(lambda: run.at(41, workers=1) and any(path.exists() for path in newest), "step 40", DEADLINE_S)
        run.power_off()
    saved = [entry.step for entry in list_checkpoints(storage) if entry.committed]
    # Every fifth step, and one later where the last save was still on its way.
    assert saved[0] in (40, 41) and len(saved) == 8
    first, second, third, fourth, fifth, left = saved[:6]

    flipped = parts_of(place, first)[3]
    flip_a_bit(flipped)
    cut = parts_of(place, second)[2]
    os.truncate(cut, cut.stat().st_size - 1)
    gone = parts_of(place, third)[0]
    gone.unlink()
    swapped = swap_two(parts_of(place, fourth))
    flip_a_bit(place / manifest_name(fifth))

    # Only two are to be kept, and other steps are saved than before: the damaged ones must not count for the newest.
    with training(tmp_path, *saving, "--save-every", "1", "--keep", "2", script=staged, held_at=left + 4) as run:
        run.wait(lambda: run.at(left + 4, workers=1), "some steps", DEADLINE_S)
        assert [event["step"] for event in happened(run, "resumed")] == [left]
        # Not each of the four steps need be saved: the next may come while one is on its way.
        run.wait(
            lambda: any(left < event["step"] < left + 5 for event in happened(run, "checkpoint")), "a save", DEADLINE_S
        )
        run.power_off()
        warnings = [event["text"] for event in happened(run, "warning")]
    pattern = r"the checkpoint of step {} cannot be used: .*{}.*{}"
    named = (
        (first, flipped.name, "the bytes of .* are not those"),
        (second, cut.name, "bytes instead of"),
        (third, gone.name, "missing"),
        (fourth, f"({swapped[0].name}|{swapped[1].name})", "header"),  # which is seen first is not said
        (fifth, manifest_name(fifth), ""),
    )
    for (step, name, what), warning in zip(named, warnings, strict=True):
        assert re.search(pattern.format(step, name, what), warning), warning

    found = newest_valid(storage, warn=warnings.append)
    assert found is not None and left < found[0].step < left + 5
    with training(tmp_path, *saving, "--save-every", "5", script=staged) as run:
        digest = run.finish(DEADLINE_S)
    assert digest == alone(*staged[2:])
    assert [verify(storage, entry.step) for entry in list_checkpoints(storage)] == [[]] * 3
