"""What a launch on Ray does with its actors, on a cluster that is played here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.integrations.ray import launching
from holdfast.integrations.ray.launching import Driver
from holdfast.integrations.ray.supervising import ROOM_S, STRAGGLE_S, Supervision
from holdfast.integrations.ray.worker_actor import ActorPlace, Ended
from holdfast.placement.directory import RunDirectory
from holdfast.state.objects import pack_object


class Cluster:
    """As much of Ray as the driver calls. A reference is (actor, method), and is ready when there is an answer.

    `wait` is where time passes: half a second each time, and then what is planned for that moment happens.
    """

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

    def __init__(self, room: int) -> None:
        self.now, self.room = 0.0, room
        self.actors: list[Actor] = []
        self.killed: list[int] = []
        self.answers: dict[tuple[int, str], Any] = {}
        self.plan: dict[float, Any] = {}

    def remote(self, _kind: type) -> Cluster:
        return self

    def options(self, **_options: Any) -> Maker:
        return Maker(self)

    def put(self, value: Any) -> Any:
        return value

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.number)

    def wait(self, references: list[Any], *, timeout: float, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
        if timeout:
            self.sleep(timeout)
        ready = [one for one in references if one in self.answers]
        return ready[: num_returns or 1], []

    def sleep(self, time_s: float) -> None:
        self.now += time_s
        for moment in [one for one in self.plan if one <= self.now]:
            self.plan.pop(moment)()
        assert self.now < 4000, "the launch does not come to its end"

    def get(self, reference: Any) -> Any:
        return self.answers[reference]


class Maker:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def remote(self) -> Actor:
        actor = Actor(self.cluster, len(self.cluster.actors))
        self.cluster.actors.append(actor)
        if actor.number < self.cluster.room:
            self.cluster.answers[actor.number, "where"] = {"node": "a" * 32, "address": "127.0.0.1", "pid": 1}
        return actor


class Method:
    def __init__(self, reference: tuple[int, str]) -> None:
        self.reference = reference

    def remote(self, *_args: Any) -> tuple[int, str]:
        return self.reference


class Actor:
    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number

    def __getattr__(self, name: str) -> Method:
        return Method((self.number, name))


class Ledger:
    keys: dict[str, str] = {}  # noqa: RUF012

    def next_worker(self, slot: int, host: str) -> str:
        return f"w{slot}.1@{host}"

    def fence(self, worker: str) -> None:
        pass

    def stop(self, reason: str) -> None:
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(room=2)
    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=lambda: cluster.now, sleep=cluster.sleep))
    monkeypatch.setattr(launching, "nodes_that_go", set)
    return cluster


def launched(cluster: Cluster, tmp_path: Path) -> Any:
    place = ActorPlace(run="r", home="", host="", worker="", variables={}, keys={})
    driver = Driver(cluster, Ledger(), Supervision(2), place, {"num_cpus": 1, "num_gpus": 2})  # type: ignore[arg-type]
    return driver.run(print, "", RunDirectory(tmp_path, "r"))


def ended(value: str, *, leader: bool) -> str:
    said = pack_object(value, path="it", bytes_max=1000)
    return json.dumps(asdict(Ended(kind="returned", said=said, leader=leader, step=40, digest="d")))


def test_a_leader_that_works_long_behind_its_loop_is_not_ended(cluster: Cluster, tmp_path: Path) -> None:
    cluster.answers[1, "work"] = ended("of another", leader=False)
    cluster.answers[0, "progress"] = (40, True)
    late = 20 * STRAGGLE_S
    cluster.plan[late] = lambda: cluster.answers.update({(0, "work"): ended("of the leader", leader=True)})
    done = launched(cluster, tmp_path)
    assert (done.value, done.outcome) == ("of the leader", "finished") and cluster.now >= late


def test_who_does_not_answer_when_another_is_through_is_ended(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answers[1, "work"] = ended("it", leader=True)
    assert launched(cluster, tmp_path).value == "it"
    assert 0 in cluster.killed and STRAGGLE_S <= cluster.now < STRAGGLE_S + 10
    assert "ending w0.1@naaaaaaaa: another worker is through" in capsys.readouterr().out


def test_it_is_said_that_there_is_no_room(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.room = 1
    cluster.plan[ROOM_S + 5] = lambda: cluster.answers.update({(0, "work"): ended("it", leader=True)})
    assert launched(cluster, tmp_path).value == "it"
    said = capsys.readouterr().out
    assert said.count("1 of 2 workers wait for a place: Ray has no room for an actor with num_cpus=1, num_gpus=2") == 1
    assert "ray status" in said


def test_ctrl_c_ends_a_launch_that_waits_for_room(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.room = 0

    def interrupt() -> None:
        raise KeyboardInterrupt

    cluster.plan[5.0] = interrupt
    with pytest.raises(KeyboardInterrupt):
        launched(cluster, tmp_path)
    assert cluster.now < 10 and {0, 1} <= set(cluster.killed)
