"""Workers that compare what they compute: audits change no bit, raise no false alarm, and name who is wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import CASES, Training, dataset, mlp, sgd
from torch.nn import functional as F

import holdfast
from holdfast.engine.recovery import auditing
from holdfast.events import read_events
from holdfast.placement.environment import RUN_DIR, WORKER, variable
from tests.harness.forked import Outcome, agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
BATCH, SHARDS = 24, 6
COMPARED = ("batch norm", "partly used", "averaged model")
Act = Callable[[Training, int, int], None]


def nothing(training: Training, step: int, shard: int) -> None:
    pass


def train(name: str, audit: float, every: int, act: Act = nothing) -> Any:
    """`act(training, step, shard)` is called after each shard's backward, and with -1 before the first."""
    os.environ.update({variable("audit"): repr(audit), variable("audit_every"): str(every)})
    case = CASES[name]
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
    for step in run.steps(case.steps):
        case.before(training, step.number)
        act(training, step.number, -1)
        for number, batch in enumerate(step):
            step.record(loss=case.shard(training, batch, step.number))
            act(training, step.number, number)
        case.apply(training, step.number)
    run.close()
    return reference.state_of(training)


def expected(name: str) -> Any:
    return reference.state_of(reference.train(CASES[name], shards=SHARDS, batch=BATCH)[0])


def flipped(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def noting(into: Path, body: Callable[[], Any]) -> Callable[[], Any]:
    """The body, and a copy of what its run has found by then: the run's directory goes away with it."""

    def noted() -> Any:
        try:
            return body()
        finally:
            found = [
                event
                for event in read_events(Path(os.environ[RUN_DIR]) / "events")
                if event["kind"] == "corruption" and event["who"] == os.environ[WORKER]
            ]
            (into / os.environ[WORKER]).write_text(json.dumps(found))

    return noted


def found_by(worker: str, place: Path) -> list[dict[str, Any]]:
    return list(json.loads((place / worker).read_text()))


@pytest.mark.parametrize("name", COMPARED)
def test_audits_change_no_bit_and_raise_no_alarm(name: str, tmp_path: Path) -> None:
    outcomes = forked(noting(tmp_path, lambda: train(name, 1.0, 2)), workers=3, path="shared-memory")
    assert agreed(outcomes) == expected(name)
    assert not any(found_by(worker, tmp_path) for worker in outcomes)


@pytest.mark.parametrize("path", ["shared-memory", "network"])
def test_a_wrong_gradient_is_found_before_it_counts(path: str, tmp_path: Path) -> None:
    def lie(training: Training, step: int, shard: int) -> None:
        if (step, shard) == (3, 0):
            flipped(training.model[0].weight.grad)  # type: ignore[index, arg-type]

    def honest() -> Any:
        return train("mlp", 1.0, 0)

    bodies = {"w0.1": honest, "w1.1": lambda: train("mlp", 1.0, 0, lie), "w2.1": honest}
    outcomes = forked({worker: noting(tmp_path, body) for worker, body in bodies.items()}, path=path)
    assert outcomes["w1.1"].code == 75 and "w1.1 was wrong about shard" in outcomes["w1.1"].value
    assert agreed({worker: outcomes[worker] for worker in ("w0.1", "w2.1")}) == expected("mlp")
    for worker in outcomes:
        last = found_by(worker, tmp_path)[-1]
        assert last["liars"] == ["w1.1"] and last["what"] == "gradient" and last["good"] is None


def corrupt_state(training: Training, step: int, shard: int) -> None:
    if (step, shard) == (2, -1):
        flipped(training.model[0].weight)  # type: ignore[index, arg-type]


def test_a_wrong_parameter_is_found_and_the_run_goes_back(tmp_path: Path) -> None:
    """Nobody starts workers again here, so all of them end."""

    def honest() -> Any:
        return train("mlp", 0.0, 6)

    bodies = {"w0.1": honest, "w1.1": honest, "w2.1": lambda: train("mlp", 0.0, 6, corrupt_state)}
    outcomes = forked({worker: noting(tmp_path, body) for worker, body in bodies.items()})
    assert [outcome.code for outcome in outcomes.values()] == [75, 75, 75]
    assert all("goes back to step 0" in outcomes[worker].value for worker in ("w0.1", "w1.1"))
    found = [event for worker in outcomes for event in found_by(worker, tmp_path)]
    assert found  # by whoever did not hear of the rewind before it had heard all others
    for event in found:
        assert (event["step"], event["liars"], event["what"], event["good"]) == (2, ["w2.1"], "state", 0)
        assert event["where"] == "the parameter 0.weight"


@pytest.mark.parametrize("audit", [0.0, 1.0], ids=["states", "shards"])
def test_two_that_disagree_stop(audit: float, tmp_path: Path) -> None:
    bodies = {
        "w0.1": lambda: train("mlp", audit, 4),
        "w1.1": lambda: train("mlp", audit, 4, corrupt_state),
    }
    outcomes = forked({worker: noting(tmp_path, body) for worker, body in bodies.items()})
    for worker, outcome in outcomes.items():
        assert "CorruptionError" in outcome.error and "w0.1 and w1.1 disagree" in _in_any_order(outcome)
        assert found_by(worker, tmp_path)[-1]["decided"] == "not decidable"


def _in_any_order(outcome: Outcome) -> str:
    return outcome.error.replace("w1.1 and w0.1", "w0.1 and w1.1")


def not_a_number() -> Any:
    """Every worker that computes the shard gets the same: it is the data."""
    os.environ.update({variable("audit"): "0.0", variable("audit_every"): "100"})
    torch.manual_seed(0)
    training = sgd(mlp())
    data = dataset()
    data.tensors[0][11] = float("nan")
    run = holdfast.join(training.model, training.optimizer, data, batch_size=BATCH, shards=SHARDS)
    for step in run.steps(4):
        for x, y in step:
            loss = F.cross_entropy(training.model(x), y)
            loss.backward()
            step.record(loss=loss)
        training.optimizer.step()
    raise AssertionError("it went on")


def test_a_shard_that_is_not_finite_is_looked_at_by_another_and_nobody_is_blamed(tmp_path: Path) -> None:
    outcomes = forked(noting(tmp_path, not_a_number), workers=3)
    for worker, outcome in outcomes.items():
        assert "DivergedError" in outcome.error
        found = found_by(worker, tmp_path)
        assert found and not any(event["liars"] for event in found)


def test_a_worker_that_dies_while_all_say_more_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the others say is enough: the learning rate differs, which no flipped bit does."""

    def on_one_only(training: Training, step: int, shard: int) -> None:
        if (step, shard) == (1, -1):
            training.optimizer.param_groups[0]["lr"] *= 2

    def dies() -> Any:
        monkeypatch.setattr(auditing, "entries_of", lambda snapshot: os.kill(os.getpid(), signal.SIGKILL))
        return train("mlp", 0.0, 6)

    bodies = {
        "w0.1": lambda: train("mlp", 0.0, 6, on_one_only),
        "w1.1": dies,
        "w2.1": lambda: train("mlp", 0.0, 6),
    }
    outcomes = forked(bodies)
    for worker in ("w0.1", "w2.1"):
        error = outcomes[worker].error
        assert "ConfigError" in error and "differ in the optimizer's lr (parameter group 0) (" in error, outcomes
