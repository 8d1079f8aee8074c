"""Several workers in one run: joiners, deaths, loops that were over before, and who is not let in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import CASES, Case, Training, dataset, mlp, sgd
from torch.nn import functional as F
from wild import WILD

import holdfast
from holdfast.engine.api import joining
from holdfast.engine.numerics import check_fingerprint, fingerprint
from holdfast.placement.environment import RUN_DIR
from tests.harness.forked import agreed, forked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph"),
]
BATCH, SHARDS = 24, 6
JOINERS = (
    *("mlp", "batch norm", "spectral norm", "frozen and thawed midway", "partly used", "groups", "scheduler"),
    *("bfloat16", "averaged model", "gradient scaler", "step now and then", "complex and float64", "channels last"),
    *("buffers of all kinds", "assigned buffers", "signs and gaps", "growing cache"),
    *("two optimizers", "two optimizers in turn"),
    *WILD,
)


def wait_for_file(path: Path, deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} is not there after {deadline_s} s"
        time.sleep(0.005)


def wait_until_registered(worker: str) -> None:
    events = Path(os.environ[RUN_DIR]) / "events" / f"{worker}.jsonl"
    deadline = time.monotonic() + 30.0
    while not (events.exists() and "registered" in events.read_text()):
        assert time.monotonic() < deadline, f"{worker} has not registered after 30 s"
        time.sleep(0.005)


def let_in(worker: str, joined: Path) -> None:
    """Called by a survivor at each step: once the spare has registered, go on at a pace at which it can be let in."""
    wait_until_registered(worker)
    deadline = time.monotonic() + 0.3  # a view changes between steps: do not wait here for what comes after this one
    while not joined.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(case: Case, *, at_step: Callable[[int, int], None] | None = None) -> Any:
    """Train in a worker of a run; `at_step(step, shard)` is called with each shard, and with -1 before them."""
    training = case.start()
    run = holdfast.join(
        training.model,
        training.optimizer,
        dataset(),
        batch_size=BATCH,
        shards=SHARDS,
        seed=reference.SEED,
        extras=training.extras,
    )
    with case.around():
        for step in run.steps(case.steps):
            case.before(training, step.number)
            if at_step:
                at_step(step.number, -1)
            for number, batch in enumerate(step):
                step.record(loss=case.shard(training, batch, step.number))
                if at_step:
                    at_step(step.number, number)
            case.apply(training, step.number)
    run.close()
    return reference.state_of(training)


@pytest.mark.parametrize("name", JOINERS)
def test_a_death_and_a_joiner_change_no_bit(name: str, tmp_path: Path) -> None:
    """One of two workers dies in the middle of step 2, a spare takes its place and sees the rest."""
    case = (CASES | WILD)[name]
    expected, _ = reference.train(case, shards=SHARDS, batch=BATCH)
    gone = tmp_path / "gone"
    joined = tmp_path / "joined"

    def victim(step: int, shard: int) -> None:
        if (step, shard) == (2, 1):
            gone.touch()
            die()

    def survivor(step: int, shard: int) -> None:
        if step >= 3 and shard == -1:
            let_in("w0.2", joined)

    def spare() -> Any:
        wait_for_file(gone)
        return train(case, at_step=lambda step, shard: joined.touch())

    def other() -> Any:
        return train(case, at_step=survivor)

    outcomes = forked(
        {"w0.1": lambda: train(case, at_step=victim), "w1.1": other, "w0.2": spare}, size=2, path="shared-memory"
    )
    assert outcomes["w0.1"].signal == signal.SIGKILL
    assert agreed(outcomes) == reference.state_of(expected)
    assert joined.exists()


def two_loops(at_step: Callable[[int], None]) -> Any:
    """Between its loops the script changes things in a way that must happen once."""
    torch.manual_seed(0)
    training = sgd(mlp())
    run = holdfast.join(training.model, training.optimizer, dataset(), batch_size=BATCH, shards=SHARDS)

    def loop(until: int) -> None:
        for step in run.steps(until):
            at_step(step.number)
            for x, y in step:
                F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()

    loop(3)
    training.optimizer.param_groups[0]["lr"] *= 0.5
    training.model[0].requires_grad_(False)
    with torch.no_grad():
        training.model[2].weight.mul_(0.9)
    loop(5)
    training.model[0].requires_grad_(True)
    training.optimizer.state.clear()
    loop(10)
    run.close()
    return reference.state_of(training)


@pytest.mark.parametrize("spare_is_there", [False, True], ids=["replacement", "spare"])
@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6])
def test_a_joiner_does_not_repeat_what_is_done_between_loops(place: int, spare_is_there: bool, tmp_path: Path) -> None:
    """It comes in the first, the second or the third loop, and passes those that were over: at once or a step later."""
    quiet = agreed(forked(lambda: two_loops(lambda step: None), workers=1))
    begun, gone, joined = tmp_path / "begun", tmp_path / "gone", tmp_path / "joined"

    def victim(step: int) -> None:
        begun.touch()
        if step == place:
            if spare_is_there:
                wait_until_registered("w0.2")
            gone.touch()
            die()

    def survivor(step: int) -> None:
        if step > place:
            let_in("w0.2", joined)

    def spare() -> Any:
        wait_for_file(begun if spare_is_there else gone)
        return two_loops(lambda step: joined.touch())

    bodies = {"w0.1": lambda: two_loops(victim), "w1.1": lambda: two_loops(survivor), "w0.2": spare}
    assert agreed(forked(bodies, size=2)) == quiet
    assert joined.exists()


def test_buffers_that_change_between_loops_are_the_same_for_any_number_of_workers() -> None:
    """By an evaluation that forgot `.eval()`, before an ordinary loop and before an empty one."""

    def body() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(64, 4, generator=generator), torch.randint(0, 3, (64,), generator=generator)
        run = holdfast.join(model, optimizer, torch.utils.data.TensorDataset(x, y), batch_size=16, shards=8)
        for until in (0, 2, 2, 5):
            with torch.no_grad():
                model(x)
            for step in run.steps(until):
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        run.close()
        return run.digest()

    assert agreed(forked(body, workers=3)) == agreed(forked(body, workers=1))


def test_a_loop_that_is_left_early_is_over_for_a_joiner_too(tmp_path: Path) -> None:
    """Early stopping by what all workers know: step.metrics. The next loop goes on from there."""
    gone, joined = tmp_path / "gone", tmp_path / "joined"

    def body(at_step: Callable[[int], None]) -> Any:
        torch.manual_seed(0)
        training = sgd(mlp())
        run = holdfast.join(training.model, training.optimizer, dataset(), batch_size=BATCH, shards=SHARDS)
        for until in (100, 9):
            for step in run.steps(until):
                at_step(step.number)
                for x, y in step:
                    F.cross_entropy(training.model(x), y).backward()
                    step.record(number=step.number)
                training.optimizer.step()
                if until == 100 and step.metrics["number"] >= 3:
                    break
            training.optimizer.param_groups[0]["lr"] *= 0.5
        run.close()
        return [run.step, reference.state_of(training)]

    def victim(step: int) -> None:
        if step == 5:
            gone.touch()
            die()

    def survivor(step: int) -> None:
        if step > 5:
            let_in("w0.2", joined)

    def spare() -> Any:
        wait_for_file(gone)
        return body(lambda step: joined.touch())

    quiet = agreed(forked(lambda: body(lambda step: None), workers=1))
    assert quiet[0] == 9
    bodies = {"w0.1": lambda: body(victim), "w1.1": lambda: body(survivor), "w0.2": spare}
    assert agreed(forked(bodies, size=2)) == quiet
    assert joined.exists()


def test_all_workers_die_and_the_next_start_over(tmp_path: Path) -> None:
    """There is no checkpoint yet: new workers begin at step 0, and end with the same bits."""
    case = CASES["batch norm"]
    expected, _ = reference.train(case, shards=SHARDS, batch=BATCH)
    gone = [tmp_path / "gone-0", tmp_path / "gone-1"]

    def victim(number: int) -> Callable[[int, int], None]:
        def at_step(step: int, shard: int) -> None:
            if step == 3:
                gone[number].touch()
                die()

        return at_step

    def replacement() -> Any:
        for path in gone:
            wait_for_file(path)
        return train(case)

    bodies: dict[str, Callable[[], Any]] = {
        **{f"w{slot}.1": lambda slot=slot: train(case, at_step=victim(slot)) for slot in range(2)},
        **{f"w{slot}.2": replacement for slot in range(2)},
    }
    assert agreed(forked(bodies, size=2)) == reference.state_of(expected)


def test_other_settings_are_not_let_in() -> None:
    def body(batch: int) -> Any:
        training = sgd(mlp())
        run = holdfast.join(training.model, training.optimizer, dataset(), batch_size=batch, shards=SHARDS)
        run.close()
        return "in"

    outcomes = forked({"w0.1": lambda: body(24), "w1.1": lambda: body(48)})
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    assert len(errors) == 1
    assert "this worker has batch_size=" in errors[0] and "but the run has batch_size=" in errors[0]
    assert "hint: all workers of a run need the same script and settings" in errors[0]


@pytest.mark.parametrize("numerics", ["refuse", "warn"])
def test_other_arithmetic_is_not_let_in_unless_told_otherwise(numerics: str) -> None:
    def body(mark: str) -> Any:
        joining.fingerprint = lambda device: mark
        training = sgd(mlp())
        options: dict[str, Any] = {"batch_size": BATCH, "shards": SHARDS}
        if numerics == "refuse":
            run = holdfast.join(training.model, training.optimizer, dataset(), **options)
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = holdfast.join(training.model, training.optimizer, dataset(), **options)
            run.close()
            return [str(warning.message) for warning in caught]
        run.close()
        return []

    outcomes = forked({"w0.1": lambda: body("one"), "w1.1": lambda: body("other")}, numerics=numerics)
    if numerics == "refuse":
        told = [outcome.error for outcome in outcomes.values() if outcome.error]
    else:
        told = [text for outcome in outcomes.values() for text in outcome.value]
    assert len(told) == 1
    assert "this machine's arithmetic does not give the same bits as w" in told[0]
    assert "hint: use the same CPU type, torch version and threads" in told[0]


def test_a_fingerprint_sees_another_capability_and_not_another_moment() -> None:
    """ATEN_CPU_CAPABILITY is read when torch starts, so this needs a process of its own."""
    program = (
        "import torch; torch.set_num_threads(1); from holdfast.engine.numerics import fingerprint; print(fingerprint())"
    )
    variables = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=True, timeout=60
    )
    here = fingerprint()
    assert here == fingerprint()
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        with pytest.raises(holdfast.HoldfastError, match="does not give the same bits as w3's"):
            check_fingerprint(here, answer.stdout.strip(), "w3")


def test_a_second_join_in_one_worker_is_answered_by_a_sentence() -> None:
    def body() -> Any:
        training = sgd(mlp())
        run = holdfast.join(training.model, training.optimizer, dataset(), batch_size=BATCH, shards=SHARDS)
        try:
            holdfast.join(training.model, training.optimizer, dataset(), batch_size=BATCH, shards=SHARDS)
        except holdfast.ConfigError as error:
            run.close()
            return str(error)
        return "joined twice"

    assert agreed(forked(body, workers=1)).startswith("holdfast.join was called twice in one worker\n  hint: ")


def test_different_initial_weights_become_those_of_the_first(tmp_path: Path) -> None:
    """A script that forgets to seed still trains one model: the first member's."""

    def body() -> Any:
        torch.manual_seed(os.getpid())
        training: Training = sgd(mlp())
        run = holdfast.join(training.model, training.optimizer, dataset(), batch_size=BATCH, shards=SHARDS)
        for step in run.steps(3):
            for x, y in step:
                F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
        run.close()
        return reference.state_of(training)

    agreed(forked(body, workers=3))
    agreed(forked(body, workers=3, path="network"))
