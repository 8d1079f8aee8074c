"""Launches with real processes: from a script, which is killed and interrupted, and from the kernel of a notebook."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.placement.proc import find_workers, process_started
from holdfast.testing.observed_run import ObservedRun, send
from tests.launching.kernel import Kernel
from tests.launching.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
TRAINING = Path(__file__).with_name("training.py")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "notebooks.md"
HELD = (5, 12)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same function under `holdfast run`, undisturbed."""
    home = tmp_path_factory.mktemp("expected")
    script = home / "train.py"
    lines = ("import torch", "from tests.launching.training import train", "print(train(weights=torch.ones(1, 8)))")
    script.write_text("\n".join(lines))
    run = ObservedRun(home, "r", ["--workers", "1"], [str(script)])
    run.start()
    try:
        return run.finish(120.0)
    finally:
        run.end()


class Launching(ObservedRun):
    """A script that launches: its process stands where that of the agent stands otherwise."""

    def __init__(self, home: Path, *, held: bool = False) -> None:
        super().__init__(home, "r", [], [])
        self.hold = home / "hold"
        self.out = home / "out.json"
        self._options = [json.dumps({"hold": str(self.hold)} if held else {})]

    def start(self) -> None:
        with self.log_path.open("ab") as output:
            self.agent = subprocess.Popen(
                [sys.executable, str(TRAINING), str(self.home), str(self.out), *self._options],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def held_at(self, step: int, workers: int) -> bool:
        return sum((self.home / f"hold{step}.{worker}").exists() for worker in self.pids) >= workers

    def wait_held(self, step: int, workers: int = 3) -> None:
        self.wait(lambda: self.held_at(step, workers), f"{workers} workers at step {step}", 600.0)

    def let_go(self, *steps: int) -> None:
        for step in steps:
            (self.home / f"hold{step}").touch()

    def ended(self) -> int:
        assert self.agent is not None
        code = self.agent.wait(600)
        wait_until(lambda: not find_workers(self.directory.path) and self.directory.agent() is None, "nobody is left")
        return code

    def result(self) -> Any:
        return json.loads(self.out.read_text())

    def end(self) -> None:
        agent = self.directory.agent()
        super().end()
        if agent is not None and process_started(agent) is not None:
            send(agent, signal.SIGKILL)
        for found in find_workers(self.directory.path):
            send(found.pid, signal.SIGKILL)


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Launching]:
    run = Launching(tmp_path, held=True)
    run.start()
    try:
        yield run
    except BaseException:
        print(run.log()[-6000:])
        raise
    finally:
        run.end()


def test_a_killed_worker_and_a_killed_agent_change_nothing(launching: Launching, expected: str) -> None:
    launching.wait_held(5)
    send(launching.pids["w1.1"], signal.SIGKILL)
    launching.let_go(5)
    launching.wait_held(12, workers=2)  # who replaces it may come later
    agent = launching.directory.agent()
    assert agent is not None
    send(agent, signal.SIGKILL)
    wait_until(lambda: launching.directory.agent() not in (None, agent), "another agent")
    launching.let_go(12)
    assert launching.ended() == 0
    assert launching.result() == [expected, expected, "finished", True]
    assert "the agent was killed; another one takes the workers over" in launching.log()
    launching.look()
    assert [event["worker"] for event in launching.events if event["kind"] == "worker_exited"].count("w1.1") == 1


def test_ctrl_c_and_the_end_of_the_launcher_stop_in_order_and_the_run_goes_on(
    launching: Launching, expected: str
) -> None:
    launching.wait_held(5)
    assert launching.agent is not None
    launching.agent.send_signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C: " in launching.log(), "the agent has heard of it")
    launching.let_go(5)
    assert launching.ended() == -signal.SIGINT
    assert re.search(r"run r is stopped at step [67] \(Ctrl-C\)", launching.log())
    launching.start()
    launching.wait_held(12, workers=1)
    launching.agent.kill()  # as when a kernel dies
    launching.let_go(12)
    assert launching.ended() == -signal.SIGKILL
    launching.start()
    assert launching.ended() == 0
    assert launching.result() == [expected, expected, "finished", True]


def cells() -> list[str]:
    """What a reader of the page would type."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_a_notebook_trains_twice_fails_and_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with Kernel(tmp_path) as kernel:
        for cell in cells():
            assert kernel.run(cell) == "", kernel.printed
        assert kernel.shown[-1].startswith("'finished"), kernel.shown
        assert (
            kernel.run("loss_before = done.value['loss']\ndone = holdfast.launch(train, workers=2, args=(40,))") == ""
        )
        assert "dashboard: http://127.0.0.1:" in kernel.printed
        assert re.search(r"step 40/40 · loss", kernel.shown[-1]), kernel.shown
        assert kernel.run("print(done.value['loss'] == loss_before, done.digest)") == ""
        assert kernel.printed.startswith("True "), kernel.printed

        kernel.run("def broken(a):\n    return missing_name + a")
        assert kernel.run("holdfast.launch(broken, workers=2, args=(1,))") == "LaunchFailed"
        assert "NameError: name 'missing_name' is not defined" in kernel.printed

        assert kernel.run("model = torch.nn.Linear(2, 2)\ndef uses():\n    return model") == ""
        assert kernel.run("holdfast.launch(uses, workers=2)") == "ConfigError"
        assert "uses uses model, a Linear of this session" in kernel.printed

        training = tmp_path / "home" / "runs" / "long" / "events"

        def interrupt_once_it_trains() -> bool:
            trains = any(
                '"kind": "progress"' in file.read_text() or '"progress"' in file.read_text()
                for file in training.glob("w*.jsonl")
            )
            if trains:
                kernel.interrupt()
            return trains

        cell = "holdfast.launch(train, workers=2, args=(10**6,), run='long')"
        assert kernel.run(cell, interrupt_once_it_trains) == "KeyboardInterrupt"
        assert "run long is stopped at step" in kernel.printed
        wait_until(lambda: not find_workers(tmp_path / "home" / "runs" / "long"), "no worker is left")
        assert kernel.run("print('still here')") == "" and "still here" in kernel.printed
    assert os.environ["HOLDFAST_DIR"]
