"""The elastic mode with real workers: a step takes what is there, all have the same bits, no sample counts twice."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.placement.environment import RUN_DIR
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
SAMPLES, BATCH, SHARDS = 96, 24, 8  # 3 samples in a shard, 4 full steps in an epoch
EACH = BATCH // SHARDS
AtStep = Callable[[int, int], None]


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """What torch imports with its first optimizer takes seconds: once here, rather than in every forked worker."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = torch.randint(0, 4, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


class Seen:
    """Which samples a worker has brought to committed steps, written down where the others and the test can read it."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._file = directory / f"{worker}.seen"

    def write(self, step: int, indices: list[int]) -> None:
        with self._file.open("a") as file:
            file.write("".join(f"{step} {index}\n" for index in indices))


def train(
    seen: Path,
    worker: str,
    *,
    epochs: int = 2,
    width: int = 8,
    at_step: AtStep | None = None,
    quorum: Any = None,
    **options: Any,
) -> Any:
    """The digest, and the samples of each step, as this worker was told. `at_step(step, shard)`; -1: before them."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"mode": holdfast.Elastic(quorum=quorum), **options}
    run = holdfast.join(model, optimizer, Numbered(), batch_size=BATCH, shards=SHARDS, seed=3, **options)
    told = []
    for step in run.epochs(epochs):
        mine: list[int] = []
        if at_step:
            at_step(step.number, -1)
        for number, (x, y, index) in enumerate(step):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.record(loss=loss, one=1.0, samples=len(index))
            mine += index.tolist()
            if at_step:
                at_step(step.number, number)
        optimizer.step()
        Seen(seen, worker).write(step.number, mine)
        told.append([step.number, step.epoch, step.ends_epoch, step.samples, step.metrics["one"]])
    run.close()
    return {"digest": run.digest(), "last": told[-1], "told": told}


def same_end(outcomes: Any) -> Any:
    """What all who lived say of the end. A joiner has not been told of all steps."""
    for outcome in outcomes.values():
        if outcome.value is not None:
            outcome.value["all"] = outcome.value.pop("told")
    errors = "\n".join(one.error for one in outcomes.values() if one.error)
    assert not errors, errors
    whole = max((one.value["all"] for one in outcomes.values() if one.value), key=len)
    for outcome in outcomes.values():
        if outcome.value is not None:
            told = outcome.value.pop("all")
            assert told == whole[len(whole) - len(told) :], outcome.worker
    return agreed(outcomes), whole


def count_samples(seen: Path) -> Counter[int]:
    lines = [line.split() for file in seen.glob("*.seen") for line in file.read_text().splitlines()]
    return Counter(int(index) for _, index in lines)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def registered(worker: str) -> bool:
    events = Path(os.environ[RUN_DIR]) / "events" / f"{worker}.jsonl"
    return events.exists() and "registered" in events.read_text()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_while_all_are_there_the_bits_are_those_of_the_exact_mode(tmp_path: Path) -> None:
    digests = {
        agreed(forked(lambda mode=mode: train(tmp_path, "any", mode=mode)["digest"], workers=2))  # type: ignore[misc]
        for mode in (holdfast.Exact(), holdfast.Elastic())
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("path", "width"), [("shared-memory", 8), ("shared-memory", 20_000), ("network", 8)])
def test_a_death_makes_the_batch_smaller_and_all_who_live_agree(path: str, width: int, tmp_path: Path) -> None:
    """One of three dies in step 1, after its first shard. What it had is used later: all samples once an epoch."""

    def victim(step: int, shard: int) -> None:
        if (step, shard) == (1, 0):
            die()

    bodies = {f"w{slot}.1": (lambda w=slot: train(tmp_path, f"w{w}.1", width=width)) for slot in range(2)}
    bodies["w2.1"] = lambda: train(tmp_path, "w2.1", width=width, at_step=victim)
    outcomes = forked(bodies, path=path)  # type: ignore[arg-type]
    assert outcomes["w2.1"].signal == signal.SIGKILL
    _, told = same_end(outcomes)
    sizes = [samples for _, _, _, samples, _ in told]
    assert sizes[0] == BATCH and sizes[1] in (5 * EACH, 6 * EACH) and max(sizes[2:]) == 6 * EACH
    assert sum(sizes) == 2 * SAMPLES and all(one == 1.0 for *_, one in told)
    last = {epoch: number for number, epoch, *_ in told}
    assert [number for number, _, ends, _, _ in told if ends] == list(last.values())
    found = count_samples(tmp_path)
    assert set(found.values()) == {2} and len(found) == SAMPLES


def test_a_joiner_makes_the_batch_larger_again(tmp_path: Path) -> None:
    gone, joined = tmp_path / "gone", tmp_path / "joined"

    def victim(step: int, shard: int) -> None:
        if (step, shard) == (1, 0):
            gone.touch()
            die()

    def survivor(step: int, shard: int) -> None:
        if step == 4 and shard == -1:
            wait_until(lambda: registered("w1.2"), "the spare registers")
        if step >= 4 and shard == -1 and not joined.exists():
            time.sleep(0.05)  # a view changes between steps: room for it, whoever is fast

    def spare() -> Any:
        wait_until(gone.exists, "the other dies")
        return train(tmp_path, "w1.2", epochs=8, at_step=lambda step, shard: joined.touch())

    bodies = {
        "w0.1": lambda: train(tmp_path, "w0.1", epochs=8, at_step=survivor),
        "w1.1": lambda: train(tmp_path, "w1.1", epochs=8, at_step=victim),
        "w1.2": spare,
    }
    outcomes = forked(bodies, size=2)
    _, told = same_end(outcomes)
    sizes = [samples for _, _, _, samples, _ in told]
    assert sizes[0] == BATCH and sizes[1:4] == [12, 12, 12] and BATCH in sizes[4:]
    assert set(count_samples(tmp_path).values()) == {8}


def test_a_run_goes_on_in_the_middle_of_its_data(tmp_path: Path) -> None:
    """All die after a checkpoint that was made while one was missing; others begin where it was in the data."""
    store, dead = str(tmp_path / "store"), tmp_path / "dead"

    def body(worker: str) -> Callable[[], Any]:
        def at_step(step: int, shard: int) -> None:
            if worker == "w1.1" and (step, shard) == (1, 0):
                die()
            if worker == "w0.1" and (step, shard) == (5, 0):
                wait_until(lambda: any((tmp_path / "store").rglob("*manifest*")), "the checkpoint")
                dead.touch()
                die()

        def start() -> Any:
            if worker.endswith(".2"):
                wait_until(dead.exists, "the others die")
            return train(tmp_path, worker, epochs=3, at_step=at_step, checkpoint=holdfast.Checkpoints(store, every=5))

        return start

    outcomes = forked({worker: body(worker) for worker in ("w0.1", "w1.1", "w0.2", "w1.2")}, size=2)
    _, told = same_end(outcomes)
    assert told[0][0] == 5  # they have not begun anew
    assert set(count_samples(tmp_path).values()) == {3}


def test_loader_processes_fetch_what_will_be_needed(tmp_path: Path) -> None:
    def victim(step: int, shard: int) -> None:
        if (step, shard) == (1, 0):
            die()

    bodies = {
        "w0.1": lambda: train(tmp_path, "w0.1", num_workers=1),
        "w1.1": lambda: train(tmp_path, "w1.1", num_workers=1, at_step=victim),
    }
    same_end(forked(bodies))
    assert set(count_samples(tmp_path).values()) == {2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "stretchy"}, "mode is 'stretchy'"),
        ({"non_finite": "rewind"}, "non_finite='rewind' passes steps"),
        ({"quorum": 0}, "quorum is 0"),
        ({"quorum": 1.5}, "quorum is 1.5"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, "alone", **options)


@pytest.mark.parametrize(("path", "width"), [("shared-memory", 8), ("shared-memory", 20_000), ("network", 8)])
def test_a_quorum_does_not_wait_for_who_is_late(path: str, width: int, tmp_path: Path) -> None:
    """One of three does not come out of its first shard of step 1 before the others have begun step 5."""
    there = tmp_path / "there"

    def late(step: int, shard: int) -> None:
        if (step, shard) == (1, 0):
            wait_until(there.exists, "the others go on")

    def other(step: int, shard: int) -> None:
        if step == 5:
            there.touch()

    bodies = {
        f"w{slot}.1": (
            lambda w=slot, at=late if slot == 2 else other: train(
                tmp_path, f"w{w}.1", epochs=3, width=width, at_step=at, quorum=2
            )
        )
        for slot in range(3)
    }
    _, told = same_end(forked(bodies, path=path))  # type: ignore[arg-type]
    sizes = [samples for _, _, _, samples, _ in told]
    assert (
        sum(sizes) == 3 * SAMPLES
        and max(sizes[1:5]) < BATCH
        and [number for number, *_ in told] == list(range(len(told)))
    )


def test_a_death_and_a_checkpoint_while_one_is_late(tmp_path: Path) -> None:
    """One is late from step 1 to step 3, another dies in step 4, and at step 6 the state itself is needed."""
    there = tmp_path / "there"

    def at_step(worker: str) -> AtStep:
        def act(step: int, shard: int) -> None:
            if worker == "w2.1" and (step, shard) == (1, 0):
                wait_until(there.exists, "the others go on")
            elif worker != "w2.1" and step == 3:
                there.touch()
            elif worker == "w1.1" and step >= 4:  # it may be late, too
                die()

        return act

    def body(worker: str) -> Callable[[], Any]:
        options = {"checkpoint": holdfast.Checkpoints(tmp_path / "store", every=6), "quorum": 2}
        return lambda: train(tmp_path, worker, epochs=3, at_step=at_step(worker), **options)

    outcomes = forked({worker: body(worker) for worker in ("w0.1", "w1.1", "w2.1")})
    assert outcomes["w1.1"].signal == signal.SIGKILL
    _, told = same_end(outcomes)
    assert sum(samples for _, _, _, samples, _ in told) == 3 * SAMPLES
    assert any((tmp_path / "store").rglob("*manifest*"))


def test_a_quorum_of_more_than_there_are_is_refused(tmp_path: Path) -> None:
    outcomes = forked(lambda: train(tmp_path, "any", quorum=3), workers=2)
    assert all("quorum=3 waits for more workers than the 2" in outcome.error for outcome in outcomes.values())
