"""A joiner that is offered states that differ: the members compare theirs at once, and nobody is replaced for it."""

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
from cases import CASES, Training, dataset
from test_workers import die, let_in, wait_for_file

import holdfast
from holdfast.events import read_events
from holdfast.placement.environment import RUN_DIR, WORKER, variable
from tests.harness.forked import Outcome, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
BATCH, SHARDS, STEPS = 24, 6, 12
ODD_FROM, DEATH, JOIN_FROM = 1, 3, 4  # steps
SELDOM = 1000  # steps between two comparisons: none comes before the end
Change = Callable[[Training], None]
Act = Callable[[Training, tuple[str, ...], int, int], None]


def train(every: int, at_step: Act) -> str:
    """The weights' digest. `at_step(training, workers, step, shard)` comes with each shard, and with -1 before them."""
    os.environ.update({variable("audit"): "0.0", variable("audit_every"): str(every)})
    case = CASES["mlp"]
    training = case.start()
    data = dataset()
    run = holdfast.join(training.model, training.optimizer, data, batch_size=BATCH, shards=SHARDS, seed=reference.SEED)
    for step in run.steps(STEPS):
        at_step(training, run.workers, step.number, -1)
        for number, batch in enumerate(step):
            step.record(loss=case.shard(training, batch, step.number))
            at_step(training, run.workers, step.number, number)
        case.apply(training, step.number)
    run.close()
    return run.digest()


def with_a_joiner(place: Path, members: int, change: Change, *, every: int = SELDOM) -> dict[str, Outcome]:
    """The worker of the last slot dies in step DEATH, and another takes its place. Before that, one of the two whom
    the other will ask has been changed: it is named in `place`, where each worker's events are afterwards.
    """
    last, joiner = f"w{members - 1}.1", f"w{members - 1}.2"
    gone, joined = place / "gone", place / "joined"

    def acts(me: str) -> Act:
        def act(training: Training, workers: tuple[str, ...], step: int, shard: int) -> None:
            if (step, shard) == (ODD_FROM, -1) and [worker for worker in workers if worker != last][1] == me:
                (place / "odd").write_text(me)
                change(training)
            if me == last and (step, shard) == (DEATH, 0):
                gone.touch()
                die()
            if me not in (last, joiner) and step >= JOIN_FROM and shard == -1:
                let_in(joiner, joined)
            if me == joiner:
                joined.touch()

        return act

    def body(me: str) -> Callable[[], Any]:
        def trained() -> Any:
            if me == joiner:
                wait_for_file(gone)
            try:
                return train(every, acts(me))
            finally:
                found = [event for event in read_events(Path(os.environ[RUN_DIR]) / "events") if event["who"] == me]
                (place / os.environ[WORKER]).write_text(json.dumps(found))

        return trained

    workers = [*(f"w{slot}.1" for slot in range(members)), joiner]
    outcomes = forked({worker: body(worker) for worker in workers}, size=members)
    assert outcomes.pop(last).signal == signal.SIGKILL
    return outcomes


def written(place: Path, worker: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads((place / worker).read_text()) if event["kind"] == kind]


def as_a_script_would(training: Training) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(1.01)


def flip_a_bit(training: Training) -> None:
    training.model[0].weight.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)  # type: ignore[index, operator]


def test_members_whom_their_script_has_made_differ_end_with_its_sentence(tmp_path: Path) -> None:
    outcomes = with_a_joiner(tmp_path, 3, as_a_script_would)
    for worker, outcome in outcomes.items():
        assert "ConfigError: the script's workers differ in the parameter" in outcome.error, outcomes
        assert "test the memory" not in outcome.error
        assert not written(tmp_path, worker, "evicted") and not written(tmp_path, worker, "corruption")
        assert written(tmp_path, worker, "script_mistake")
    (offered,) = written(tmp_path, "w2.2", "warning")
    assert offered["text"].startswith("peers do not hold the same state of step ")


def test_a_source_with_a_flipped_bit_is_named_by_the_others(tmp_path: Path) -> None:
    """Of three that have the state the joiner asks two, one of them the liar. Nobody starts workers again here."""
    outcomes = with_a_joiner(tmp_path, 4, flip_a_bit)
    assert [outcome.code for outcome in outcomes.values()] == [75, 75, 75, 75], outcomes
    found = [event for worker in outcomes for event in written(tmp_path, worker, "corruption")]
    assert found  # by whoever did not hear of the rewind before it had heard all others
    for event in found:
        assert (event["liars"], event["what"], event["good"]) == ([(tmp_path / "odd").read_text()], "state", 0)
        assert event["where"] == "the parameter 0.weight" and len(event["digests"]) == 3
    assert not written(tmp_path, "w3.2", "joined")  # it takes nothing from anybody before it is known who is right


def test_where_nobody_compares_states_a_joiner_takes_one_of_them(tmp_path: Path) -> None:
    outcomes = with_a_joiner(tmp_path, 3, flip_a_bit, every=0)
    digests = {worker: outcome.value for worker, outcome in outcomes.items()}
    assert [outcome.code for outcome in outcomes.values()] == [0, 0, 0], outcomes
    assert digests["w0.1"] != digests["w1.1"] and digests["w2.2"] in (digests["w0.1"], digests["w1.1"])
