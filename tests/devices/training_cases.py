"""Training on the simulated device: the same bits whenever it computes, however many workers there are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.format.owner import release
from holdfast.checkpoint.storage.opening import open_storage
from tests.devices.trainings import (
    EARLY,
    LATE,
    STEPS,
    Net,
    groups_of,
    kill_at,
    train,
    wait_for,
    wait_until_registered,
)
from tests.harness.forked import Outcome, agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]
DEADLINE_S = 200.0


def digest_of(outcomes: dict[str, Outcome]) -> Any:
    for outcome in outcomes.values():
        if outcome.value:
            assert not any(outcome.value.pop("waits")), "the loop's thread waited for the device"
            assert not outcome.value.pop("before_first"), "it waited for the state that it was given"
    return agreed(outcomes)


@pytest.fixture(scope="module")
def alone() -> dict[int, Any]:
    """By the number of shards: what one worker that computes late comes to."""
    return {}


def right(alone: dict[int, Any], shards: int) -> Any:
    if shards not in alone:
        alone[shards] = digest_of(forked(partial(train, shards=shards), workers=1, deadline_s=DEADLINE_S))
    return alone[shards]


@pytest.mark.parametrize(
    ("workers", "shards", "path", "when"),
    [
        (1, 6, "auto", EARLY),
        (2, 6, "shared-memory", EARLY),
        (3, 6, "network", LATE),
        (5, 6, "shared-memory", LATE),
        (3, 8, "shared-memory", LATE),
        (2, 8, "network", EARLY),
    ],
)
def test_any_number_of_workers_has_the_same_bits(
    device: torch.device, alone: dict[int, Any], workers: int, shards: int, path: str, when: str
) -> None:
    expected = right(alone, shards)
    found = forked(partial(train, when, shards=shards), workers=workers, path=path, deadline_s=DEADLINE_S)
    assert digest_of(found) == expected


@pytest.mark.parametrize(
    ("workers", "shards", "when", "library"),
    [(2, 8, LATE, ""), (5, 6, EARLY, ""), (3, 6, LATE, "cable"), (2, 6, EARLY, "cable")],
)
def test_a_process_group_has_the_same_bits(
    device: torch.device, alone: dict[int, Any], workers: int, shards: int, when: str, library: str
) -> None:
    """By way of this process's memory, and with a library that takes memory of the device and no other."""

    def body() -> Any:
        found = train(when, shards=shards, library=bool(library), after=lambda run: groups_of(run.id))
        assert found.pop("more") == [library or "gloo"]
        return {**found, "more": None}

    found = forked(body, workers=workers, path="process-group", deadline_s=DEADLINE_S)
    assert digest_of(found) == right(alone, shards)


@pytest.mark.parametrize(("when", "library"), [(LATE, True), (EARLY, False)])
def test_a_process_group_is_built_again_when_somebody_is_killed(
    device: torch.device, alone: dict[int, Any], when: str, library: bool
) -> None:
    body = partial(train, when, in_shard=kill_at("w1.1", 3), library=library)
    found = forked(body, workers=3, path="process-group", deadline_s=DEADLINE_S)
    assert found["w1.1"].signal == 9
    assert digest_of(found) == right(alone, 6)


def test_workers_of_two_hosts_have_the_same_bits(device: torch.device, alone: dict[int, Any]) -> None:
    members = ("w0.1@a", "w1.1@a", "w2.1@b")
    found = forked({member: partial(train, LATE, shards=6) for member in members}, deadline_s=DEADLINE_S)
    assert digest_of(found) == right(alone, 6)


@pytest.mark.parametrize("when", [LATE, EARLY])
def test_a_killed_worker_changes_nothing(device: torch.device, alone: dict[int, Any], when: str) -> None:
    body = partial(train, when, shards=6, in_shard=kill_at("w1.1", 3))
    found = forked(body, workers=3, deadline_s=DEADLINE_S)
    assert found["w1.1"].signal == 9
    assert digest_of(found) == right(alone, 6)


@pytest.mark.parametrize("when", [LATE, EARLY])
def test_a_joiner_is_given_the_state(device: torch.device, alone: dict[int, Any], when: str, tmp_path: Path) -> None:
    """It comes when the others have begun, and they wait in a shard until it has registered."""
    begun = tmp_path / "begun"

    def members() -> Any:
        return train(when, in_shard=lambda run, step: hold(run, step, begun))

    def newcomer() -> Any:
        wait_for(begun)
        found = train(when)
        assert len(found["waits"]) < STEPS, "it was there from the beginning"
        return found

    bodies: dict[str, Callable[[], Any]] = {"w0.1": members, "w1.1": members, "w2.1": newcomer}
    assert digest_of(forked(bodies, size=3, deadline_s=DEADLINE_S)) == right(alone, 6)


def hold(run: holdfast.Run, step: int, begun: Path) -> None:
    if step == 2:
        begun.touch()
        wait_until_registered("w2.1")


@pytest.mark.parametrize(("first", "then"), [(LATE, EARLY), (EARLY, LATE)])
def test_training_goes_on_from_a_checkpoint(
    device: torch.device, alone: dict[int, Any], first: str, then: str, tmp_path: Path
) -> None:
    """All are killed in a step; the checkpoint before it is loaded by another number of workers."""
    checkpoint = holdfast.Checkpoints(str(tmp_path), every="2")

    def begin() -> Any:
        return train(first, in_shard=kill_when_saved(tmp_path), checkpoint=checkpoint)

    for outcome in forked(begin, workers=2, deadline_s=DEADLINE_S).values():
        assert outcome.signal == 9, outcome
    with closing(open_storage(str(tmp_path))) as storage:
        release(storage)  # the next run has another name
    found = forked(partial(train, then, checkpoint=checkpoint), workers=3, deadline_s=DEADLINE_S)
    for outcome in found.values():
        assert len(outcome.value["waits"]) < STEPS
    assert digest_of(found) == right(alone, 6)


def kill_when_saved(place: Path) -> Callable[[holdfast.Run, int], None]:
    def look(run: holdfast.Run, step: int) -> None:
        if step >= 3:
            deadline = time.monotonic() + 150.0
            while not list(place.rglob("manifest*")):
                assert time.monotonic() < deadline, "nothing is saved"
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)

    return look


def test_the_loop_never_waits_however_much_there_is(device: torch.device, tmp_path: Path) -> None:
    """Of shards, of parameters and of buffers; and while checkpoints are saved and states are compared."""
    checkpoint = holdfast.Checkpoints(str(tmp_path), every="1")
    for number, (shards, layers) in enumerate([(2, 1), (8, 1), (4, 6)]):
        body = partial(train, shards=shards, steps=5, build=partial(Net, layers=layers), non_finite="skip")
        options: dict[str, Any] = {"audit": 0.5, "audit_every": 1} if number == 1 else {}
        found = forked(
            partial(body, checkpoint=checkpoint) if not number else body, workers=2, deadline_s=DEADLINE_S, **options
        )
        if (
            options
        ):  # one member, the first of the view, computes a shard of one early step again, and waits for its digests
            waits = [sorted(outcome.value["waits"]) for outcome in found.values()]
            assert sum(any(counts) for counts in waits) <= 1
            assert all(most <= 6 and not any(others) for *others, most in waits)  # two for each digest
            for outcome in found.values():
                outcome.value["waits"] = []
        digest_of(found)
