"""Trainings on the simulated device in which something happens, by every path: each comes to the digest of one worker.

`run_with(fault, way, when)` returns that digest. What is in `FAULTS` happens in a run of three workers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.checkpoint.format.owner import release
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.core.errors import Evicted
from holdfast.engine.api.process_edge import newest_run
from tests.devices.trainings import train, wait_for, wait_until_registered
from tests.harness.forked import Outcome, agreed, forked

DEADLINE_S = 200.0
KILL, STOP, JOIN, REWIND, RESTORE = FAULTS = ("kill", "stop", "join", "rewind", "restore")
AT = 3  # the step in which it happens
NOT_FINITE = 5


@dataclass(frozen=True)
class Way:
    """How gradients travel: a path, whether there are two hosts, and whether a library takes the device's memory."""

    path: str = "auto"
    hosts: bool = False
    library: bool = False

    def members(self, count: int) -> list[str]:
        return [f"w{slot}.1{self.host(slot)}" for slot in range(count)]

    def host(self, slot: int) -> str:
        return f"@{'ab'[slot % 2]}" if self.hosts else ""


WAYS = {
    "shared memory": Way("shared-memory"),
    "network": Way("network"),
    "hosts": Way(hosts=True),
    "process group": Way("process-group"),
    "process group of the device": Way("process-group", library=True),
}


def digest_of(outcomes: Mapping[str, Outcome]) -> Any:
    for outcome in outcomes.values():
        if outcome.value:
            assert not any(outcome.value.pop("waits")), f"the thread of {outcome.worker}'s loop waited for the device"
            assert not outcome.value.pop("before_first"), f"{outcome.worker} waited for the state that it was given"
    return agreed(outcomes)


def quiet(way: Way, workers: int, shards: int, when: str) -> Any:
    body = partial(train, when, shards=shards, library=way.library)
    return digest_of(forked(dict.fromkeys(way.members(workers), body), path=way.path, deadline_s=DEADLINE_S))


def run_with(fault: str, way: Way, when: str, place: Path, *, workers: int = 3) -> Any:
    place.mkdir(parents=True, exist_ok=True)
    start = partial(train, when, library=way.library)
    return digest_of(_BODIES[fault](start, way, place, workers))


def _kill(start: Callable[..., Any], way: Way, place: Path, workers: int) -> Mapping[str, Outcome]:
    """In the middle of a shard, and nobody comes instead."""
    members = way.members(workers)
    body = partial(start, in_shard=_signal(members[1], signal.SIGKILL, place / "victim"))
    found = forked(dict.fromkeys(members, body), path=way.path, deadline_s=DEADLINE_S)
    assert found.pop(members[1]).signal == signal.SIGKILL
    return found


def _stop(start: Callable[..., Any], way: Way, place: Path, workers: int) -> Mapping[str, Outcome]:
    """It keeps its sockets, and its lease runs out."""
    members, victim = way.members(workers), place / "victim"

    def other() -> Any:
        found = start()
        with suppress(ProcessLookupError):
            os.kill(int(victim.read_text()), signal.SIGKILL)
        return found

    stopped = partial(start, in_shard=_signal(members[1], signal.SIGSTOP, victim))
    bodies: dict[str, Callable[[], Any]] = {**dict.fromkeys(members, other), members[1]: stopped}
    found = forked(bodies, path=way.path, lease_s=2.0, deadline_s=DEADLINE_S)
    assert found.pop(members[1]).signal == signal.SIGKILL
    return found


def _join(start: Callable[..., Any], way: Way, place: Path, workers: int) -> Mapping[str, Outcome]:
    """One is killed; another one takes its place when the others have gone on, and is given the state."""
    members, gone = way.members(workers), place / "victim"
    newcomer = f"w1.2{way.host(1)}"

    def hold(run: holdfast.Run, step: int) -> None:
        if step == AT + 2:
            wait_until_registered(newcomer)

    def comes() -> Any:
        wait_for(gone)
        found = start()
        assert len(found["waits"]) < 8, "it was there from the beginning"
        return found

    dies = partial(start, in_shard=_signal(members[1], signal.SIGKILL, gone))
    bodies: dict[str, Callable[[], Any]] = dict.fromkeys(members, partial(start, in_shard=hold))
    found = forked({**bodies, members[1]: dies, newcomer: comes}, size=workers, path=way.path, deadline_s=DEADLINE_S)
    assert found.pop(members[1]).signal == signal.SIGKILL
    return found


def _rewind(start: Callable[..., Any], way: Way, place: Path, workers: int) -> Mapping[str, Outcome]:
    """A step is not finite: all end, and begin again before it, as an agent has them do. That step is passed."""
    checkpoint = holdfast.Checkpoints(str(place), every="2")

    def spoil(run: holdfast.Run, step: int) -> None:
        if step == NOT_FINITE:
            run.optimizer.param_groups[0]["params"][0].grad.mul_(float("nan"))

    def body() -> Any:
        begin = partial(start, checkpoint=checkpoint, non_finite="rewind", in_shard=spoil)
        try:
            begin()
        except Evicted:
            run = newest_run()
            assert run is not None
            run.close()
            name, _, rest = os.environ["HOLDFAST_WORKER"].partition(".1")
            os.environ["HOLDFAST_WORKER"] = f"{name}.2{rest}"
            return begin()
        raise AssertionError("it did not go back")

    return forked(dict.fromkeys(way.members(workers), body), path=way.path, deadline_s=DEADLINE_S)


def _restore(start: Callable[..., Any], way: Way, place: Path, workers: int) -> Mapping[str, Outcome]:
    """All are killed when something is saved; as many, of another run, begin with that."""
    checkpoint = holdfast.Checkpoints(str(place), every="2")

    def look(run: holdfast.Run, step: int) -> None:
        if step >= AT:
            wait_for(place, "manifest*")
            os.kill(os.getpid(), signal.SIGKILL)

    members = way.members(workers)
    begin = partial(start, in_shard=look, checkpoint=checkpoint)
    for outcome in forked(dict.fromkeys(members, begin), path=way.path, deadline_s=DEADLINE_S).values():
        assert outcome.signal == signal.SIGKILL, outcome
    with closing(open_storage(str(place))) as storage:
        release(storage)  # the next run has another name
    found = forked(dict.fromkeys(members, partial(start, checkpoint=checkpoint)), path=way.path, deadline_s=DEADLINE_S)
    assert all(len(outcome.value["waits"]) < 8 for outcome in found.values() if outcome.value)
    return found


_BODIES = {KILL: _kill, STOP: _stop, JOIN: _join, REWIND: _rewind, RESTORE: _restore}


def _signal(worker: str, number: int, note: Path) -> Callable[[holdfast.Run, int], None]:
    def look(run: holdfast.Run, step: int) -> None:
        if run.id == worker and step == AT:
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), number)

    return look
