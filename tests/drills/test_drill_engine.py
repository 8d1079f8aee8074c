"""The engine with a run that is made up: a plan gets its turns, what is broken is mended, an end gets its name."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.drills import engine as engine_module
from holdfast.drills.engine import TIMED_OUT, Engine
from holdfast.drills.ground import Ground, Setting
from holdfast.drills.nemesis import Nemesis
from holdfast.drills.schedule import Planned
from holdfast.drills.trace import TraceReader
from holdfast.testing.observed_run import Failed, ObservedRun


class Agent:
    """A process that ends with `code` after so many looks."""

    def __init__(self, code: int, looks: int) -> None:
        self._code, self._looks = code, looks
        self.returncode: int | None = None
        self.pid = 0

    def poll(self) -> int | None:
        self._looks -= 1
        if self._looks < 0:
            self.returncode = self._code
        return self.returncode

    def kill(self) -> None:
        self._looks = 0

    def wait(self, timeout: float | None = None) -> None:
        self.poll()


class MadeUp(ObservedRun):
    def __init__(self, home: Path, code: int = 0, looks: int = 5, digests: dict[str, str] | None = None) -> None:
        super().__init__(home, "r", [], [])
        self.starts: list[int] = []
        self.finished = digests if digests is not None else {"w0.1": "d1"}
        self._looks, self._code = looks, code
        self.start()

    def start(self) -> None:
        self.starts.append(len(self.starts))
        agent: Any = Agent(self._code, self._looks)
        self.agent: subprocess.Popen[bytes] | None = agent


def plan_of(turns: int, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    for _ in range(turns):
        yield
    then()


def no_rest(seconds: float) -> None:
    pass


def made(run: MadeUp, tmp_path: Path, faults: Iterator[None] | None = None, **more: Any) -> Engine:
    return Engine(run, TraceReader(tmp_path), faults=faults or iter(()), rest=no_rest, **more)


def test_a_plan_has_its_turns_until_the_run_is_over(tmp_path: Path) -> None:
    done: list[str] = []
    engine = made(MadeUp(tmp_path), tmp_path, plan_of(3, lambda: done.append("all")))
    assert engine.finish().digest == "d1" and done == ["all"] and engine.plan_is_done


@pytest.mark.parametrize(
    ("run", "turns", "says"),
    [
        ({"code": 3}, 0, "exit code 3"),
        ({"code": -9}, 0, "exit code 9"),
        ({"looks": 2}, 10, "before all faults were done"),
        ({"digests": {"w0.1": "d1", "w1.1": "d2"}}, 0, "different weights"),
    ],
)
def test_ends_that_are_none(run: dict[str, Any], turns: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(Failed, match=says):
        made(MadeUp(tmp_path, **run), tmp_path, plan_of(turns)).finish()


def test_a_run_in_which_nothing_moves_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "HANGS_S", 0.0)
    assert made(MadeUp(tmp_path, looks=10**9), tmp_path).go() == TIMED_OUT


def test_an_agent_that_is_away_is_not_the_end_and_comes_back(tmp_path: Path) -> None:
    run = MadeUp(tmp_path, looks=20)
    said: list[str] = []
    with Ground(Setting(workers=2), tmp_path, []) as ground:
        nemesis = Nemesis(ground, run, "faulty", said.append, lambda: 7)
        away = Planned(0.0, "agent", duration_s=0.05)
        plan = plan_of(2, lambda: nemesis.agent_down(away, run, "kill -9 the agent"))
        engine = made(run, tmp_path, plan, nemesis=nemesis)
        engine.rest = lambda seconds: None if not nemesis.busy else engine_module.time.sleep(0.01)
        assert engine.go() == 0
    assert run.starts == [0, 1] and not nemesis.busy and not nemesis.agent_is_away
    assert said == ["kill -9 the agent", "agent is over"]
    (done,) = nemesis.done
    assert done.step == 7 and done.ended_at is not None and done.ended_at - done.at >= 0.04


def test_what_is_in_force_is_undone_at_the_end_but_for_what_nobody_needs(tmp_path: Path) -> None:
    run = MadeUp(tmp_path)
    with Ground(Setting(workers=2, checkpoints=True), tmp_path, []) as ground:
        (ground.storage("faulty")).mkdir()
        nemesis = Nemesis(ground, run, "faulty", lambda text: None, lambda: 0)
        nemesis.storage_down(Planned(0.0, "storage-down", duration_s=3600.0))
        nemesis.ledger_down(Planned(0.0, "ledger-down", duration_s=3600.0))
        assert ground.storage("faulty").is_file() and nemesis.busy
        nemesis.end()
        assert ground.storage("faulty").is_dir() and not nemesis.busy
    assert run.starts == [0] and all(done.ended_at for done in nemesis.done)
