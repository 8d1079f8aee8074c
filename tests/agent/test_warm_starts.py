"""Workers that are forked from a process with their imports: like any other to the script, the agent and the system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import FAKE_WORKER, Run, a_run, wait_for

from holdfast.agent.workers import warm_starts
from holdfast.agent.workers.warm_starts import ANSWER_S, WarmedUp, WarmStarts
from holdfast.placement.proc import process_state
from holdfast.placement.warm_process import NAME_MAX

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_run(tmp_path / "home") as run:
        yield run


def until(run: Run) -> tuple[str, ...]:
    return (FAKE_WORKER, "--until", str(run.home / "end"))


def finish(run: Run, agent: subprocess.Popen[bytes]) -> int:
    (run.home / "end").touch()
    return agent.wait(timeout=20)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def written(run: Run, name: str, text: str) -> str:
    run.home.mkdir(exist_ok=True)
    path = run.home / name
    path.write_text(text)
    return str(path)


def log_of(run: Run, worker: str) -> str:
    path = run.directory.logs / f"{worker}.log"
    return path.read_text() if path.exists() else ""


def test_all_workers_come_from_one_process_and_look_as_if_they_did_not(run: Run) -> None:
    agent = run.agent("--workers", "2", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    pids = run.living()
    assert set(pids) == {"w0.1", "w1.1"}, "the process that they come from is no worker"
    (parent,) = {parent_of(pid) for pid in pids.values()}
    assert parent_of(parent) == agent.pid
    os.kill(pids["w1.1"], signal.SIGKILL)
    wait_for(lambda: run.stepping("w1.2"), "the replacement")
    assert run.exit_of("w1.1")["signal"] == 9
    assert parent_of(run.living()["w1.2"]) == parent
    warm = {command_of(pid) for pid in run.living().values()}
    assert finish(run, agent) == 0
    wait_for(lambda: not process_state(parent), "the end of the process that they came from")
    with a_run(run.home, "cold") as cold:
        other = cold.agent("--workers", "1", "--start", "cold", script=until(run))
        (run.home / "end").unlink()
        wait_for(lambda: cold.stepping("w0.1"), "a worker")
        assert parent_of(cold.living()["w0.1"]) == other.pid
        assert {command_of(cold.living()["w0.1"])} == warm
        assert finish(cold, other) == 0


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_how_a_worker_ends_is_known(run: Run, start: str) -> None:
    script = written(run, "ends.py", "import sys\nprint('last words')\nsys.exit(3)\n")
    agent = run.agent("--workers", "1", "--restarts", "0", "--start", start, script=(script,))
    assert agent.wait(timeout=30) == 3
    assert run.exit_of("w0.1")["exit_code"] == 3
    assert "last words" in run.output


def test_a_worker_of_a_killed_agent_is_found_and_taken_over(run: Run) -> None:
    first = run.agent("--workers", "2", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    before = run.living()
    parent = parent_of(before["w0.1"])
    first.kill()
    first.wait()
    wait_for(lambda: not process_state(parent), "the end of the process that they came from")
    assert run.living() == before
    second = run.agent("--workers", "2", script=until(run))
    wait_for(lambda: "took over" in run.output, "the second agent")
    os.kill(before["w0.1"], signal.SIGKILL)
    wait_for(lambda: run.stepping("w0.2", "w1.1"), "a replacement")
    assert finish(run, second) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_process_that_they_come_from_workers_are_replaced_all_the_same(
    run: Run, number: signal.Signals
) -> None:
    agent = run.agent("--workers", "2", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    pids = run.living()
    os.kill(parent_of(pids["w0.1"]), number)
    os.kill(pids["w0.1"], signal.SIGKILL)
    wait_for(lambda: any(run.stepping(name) for name in ("w0.2", "w0.3")), "a replacement")
    assert run.exit_of("w0.1")["reason"] == "killed"
    assert run.stepping("w1.1")
    assert finish(run, agent) == 0


STARTS_A_THREAD = """
import pathlib, threading, time
one = threading.Thread(target=time.sleep, args=(60,), daemon=True)
one.start()
pathlib.Path(f"/proc/self/task/{one.native_id}/comm").write_text(NAME)
"""


@pytest.mark.parametrize(("name", "misses"), [("worker", True), ("jemalloc_bg_thd", False)])
def test_a_package_that_starts_threads_has_workers_started_one_by_one(run: Run, name: str, misses: bool) -> None:
    """But for a thread that a fork does not miss."""
    place = Path(sysconfig.get_path("purelib")) / f"holdfast_test_threads_{os.getpid()}.py"
    place.write_text(STARTS_A_THREAD.replace("NAME", repr(name)))
    try:
        script = written(run, "threads.py", f"import {place.stem}\nprint('I run')\n")
        agent = run.agent("--workers", "1", script=(script,))
        assert agent.wait(timeout=30) == 0
    finally:
        place.unlink()
    assert ("workers start one by one: what the script imports has started 1 threads" in run.output) is misses
    assert "I run" in run.output


def test_the_script_and_its_modules_are_read_anew_for_each_worker(run: Run) -> None:
    written(run, "helper.py", "print('the first')\n")
    script = written(
        run,
        "train.py",
        "import helper, runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n",
    )
    agent = run.agent("--workers", "1", script=(script, *until(run)))
    wait_for(lambda: run.stepping("w0.1"), "a worker")
    written(run, "helper.py", "print('the second')\n")
    os.kill(run.living()["w0.1"], signal.SIGKILL)
    wait_for(lambda: run.stepping("w0.2"), "its replacement")
    assert log_of(run, "w0.1").startswith("the first\n")
    assert log_of(run, "w0.2").startswith("the second\n")
    assert finish(run, agent) == 0


def test_each_worker_has_its_own_variables_and_random_numbers(run: Run) -> None:
    text = (
        "import numpy, os, random, sys, torch\n"
        "print(os.environ['HOLDFAST_WORKER'], sys.argv[1:], sys.path[0], __name__, os.getsid(0) == os.getpid())\n"
        "print('numbers', numpy.random.random(), random.random())\nprint('torch', torch.rand(1).item())\n"
    )
    script = written(run, "variables.py", text)
    agent = run.agent("--workers", "2", script=(script, "--an", "argument"))
    assert agent.wait(timeout=60) == 0
    logs = {worker: log_of(run, worker).splitlines() for worker in ("w0.1", "w1.1")}
    for worker, lines in logs.items():
        assert lines[0] == f"{worker} ['--an', 'argument'] {run.home} __main__ True"
    assert logs["w0.1"][1] != logs["w1.1"][1]
    assert logs["w0.1"][2] == logs["w1.1"][2], "torch's numbers are the same in all processes that do not seed it"


def saying(answer: str, then: str = "") -> list[str]:
    """The command of a process that says this to the agent."""
    say = f"import os; os.write(int(os.environ['HOLDFAST_WARM']), {answer + chr(10)!r}.encode())"
    return [sys.executable, "-c", f"{say}; {then}"]


def test_a_process_that_does_not_answer_is_given_up_and_asked_no_more(tmp_path: Path) -> None:
    news: list[WarmedUp] = []
    done = threading.Event()

    def post(message: WarmedUp) -> None:
        news.append(message)
        done.set()

    starts = WarmStarts(saying('{"ready": 1}', "import time; time.sleep(60)"), tmp_path / "log", post)
    assert starts.prepare(dict(os.environ))
    assert done.wait(10.0)
    assert news == [WarmedUp(1.0)]
    assert starts.ready
    began = time.monotonic()
    assert starts.start({"HOLDFAST_WORKER": "w0.1"}, tmp_path / "w.log") is None
    assert ANSWER_S * 0.9 < time.monotonic() - began < ANSWER_S + 5.0
    assert not starts.ready
    assert not starts.prepare(dict(os.environ)), "not again at once"
    starts.close()


def test_imports_that_take_too_long_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_starts, "READY_S", 0.3)
    news: list[WarmedUp] = []
    done = threading.Event()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    starts = WarmStarts(command, tmp_path / "log", lambda message: (news.append(message), done.set())[0])
    assert starts.prepare(dict(os.environ))
    assert done.wait(10.0)
    assert news == [WarmedUp(0.0, "the imports are not done after 0.3 s")]
    assert not starts.ready and not starts.prepare(dict(os.environ))
    starts.close()


@pytest.mark.parametrize("answer", ["", "nonsense", "[]", "{}", '{"unfit": "threads"}'])
def test_a_process_that_says_nothing_sensible_is_not_used(tmp_path: Path, answer: str) -> None:
    done = threading.Event()
    starts = WarmStarts(["/bin/sh", "-c", f"echo '{answer}' >&$HOLDFAST_WARM"], tmp_path / "log", lambda _: done.set())
    assert starts.prepare(dict(os.environ))
    assert done.wait(10.0)
    assert not starts.ready
    assert starts.start({"HOLDFAST_WORKER": "w0.1"}, tmp_path / "w.log") is None
    starts.close()


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    starts = WarmStarts([str(tmp_path / "none")], tmp_path / "log", lambda _: None)
    assert not starts.prepare(dict(os.environ))
    assert not starts.ready
    starts.close()


def test_a_worker_has_room_for_its_name() -> None:
    longest = "w1023.1000000@" + "h" * 64
    assert len(longest) <= NAME_MAX
