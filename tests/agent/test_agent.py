"""The agent with real processes: what it does about deaths, hangs, signals, sizes and its own end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import FAKE_WORKER, Run, a_run, holdfast, wait_for

from holdfast.core.words import KEY_SIZE, KEY_STOP, KEY_WORKERS, decode_json
from holdfast.placement.proc import process_started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_run(tmp_path / "home") as run:
        yield run


def finish(run: Run, agent: subprocess.Popen[bytes]) -> int:
    (run.home / "end").touch()
    return agent.wait(timeout=20)


def until(run: Run) -> tuple[str, ...]:
    return (FAKE_WORKER, "--until", str(run.home / "end"))


def test_a_run_from_start_to_end(run: Run) -> None:
    agent = run.agent("--workers", "2", "--spares", "1", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1", "w2.1"), "three workers")
    with_ledger = run.ledger()
    size = with_ledger.get(KEY_SIZE)
    with_ledger.close()
    assert size is not None
    assert decode_json(size.value) == {"workers": 2}
    assert finish(run, agent) == 0
    assert "w0.1 | hello from w0.1" in run.output
    assert "run r is finished" in run.output
    assert "weights: abc123" in run.output
    assert run.events("run_finished")[0]["digest"] == "abc123"
    again = holdfast("run", "--run", "r", "--workers", "2", FAKE_WORKER, home=run.home)
    assert again.returncode == 2
    assert "run r is finished (step" in again.stderr
    assert "hint:" in again.stderr


def test_a_killed_worker_is_fenced_in_milliseconds_and_replaced(run: Run) -> None:
    agent = run.agent("--workers", "2", "--lease", "30", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    ledger = run.ledger()
    delays = []
    for incarnation in (1, 2, 3):
        worker = f"w1.{incarnation}"
        wait_for(lambda worker=worker: run.stepping(worker), worker)
        reading = ledger.read(KEY_WORKERS)
        watch = ledger.watch(KEY_WORKERS, revision=reading.revision)
        assert watch.next(0.0) == ()  # it is connected
        pid = run.living()[worker]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        changes = watch.next(5.0)
        delays.append(time.monotonic() - began)
        assert [(change.kind, change.key) for change in changes] == [("delete", KEY_WORKERS + worker)]
        watch.close()
    ledger.close()
    assert sorted(delays)[1] < 0.05, delays
    assert run.exit_of("w1.1")["signal"] == 9
    assert run.exit_of("w1.1")["reason"] == "killed"
    wait_for(lambda: run.stepping("w1.4"), "the replacement")
    assert finish(run, agent) == 0
    assert "3 failures survived" in run.output


def test_a_stopped_worker_is_found_hung_killed_and_replaced(run: Run) -> None:
    agent = run.agent("--workers", "2", "--lease", "0.5", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    os.kill(run.living()["w0.1"], signal.SIGSTOP)
    assert run.exit_of("w0.1")["reason"] == "hung"
    assert [(event["worker"], event["killed"]) for event in run.events("hung")] == [("w0.1", True)]
    wait_for(lambda: run.stepping("w0.2"), "the replacement")
    assert finish(run, agent) == 0


def test_an_evicted_worker_comes_back(run: Run) -> None:
    agent = run.agent("--workers", "1", "--restarts", "0", script=(*until(run), "--evict-at", "3"))
    wait_for(lambda: run.stepping("w0.2"), "the replacement")
    assert run.exit_of("w0.1")["reason"] == "evicted"
    assert finish(run, agent) == 0


def test_killing_the_agent_does_not_stop_training_and_the_same_command_takes_over(run: Run) -> None:
    first = run.agent("--workers", "3", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1", "w2.1"), "three workers")
    first.kill()
    first.wait()
    before = run.living()
    os.kill(before["w2.1"], signal.SIGKILL)
    wait_for(lambda: "w2.1" not in run.living(), "its death")
    status = holdfast("status", "r", home=run.home)
    assert "unattended" in status.stdout
    assert "take it over with: holdfast run --run r" in status.stdout
    assert holdfast("scale", "r", "2", home=run.home).returncode == 2

    second = run.agent("--workers", "3", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1", "w2.2"), "the missing one")
    assert {name: run.living()[name] for name in ("w0.1", "w1.1")} == {n: before[n] for n in ("w0.1", "w1.1")}
    assert run.exit_of("w2.1")["reason"] == "died while no agent ran"
    assert run.events("agent_started")[-1]["took_over"] is True
    os.kill(before["w0.1"], signal.SIGKILL)  # an adopted one is watched like any other
    assert run.exit_of("w0.1")["reason"] == "killed"
    wait_for(lambda: run.stepping("w0.2"), "its replacement")
    assert finish(run, second) == 0
    assert "2 failures survived" in run.output


def test_workers_that_are_still_starting_are_taken_over_too(run: Run) -> None:
    script = (*until(run), "--register-after", str(run.home / "go"))
    first = run.agent("--workers", "2", script=script)
    before = wait_for(lambda: len(run.living()) == 2 and run.living(), "two processes")
    first.kill()
    first.wait()
    second = run.agent("--workers", "2", script=script)
    wait_for(lambda: len(run.events("agent_started")) == 2, "the second agent")
    (run.home / "go").touch()
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    assert run.living() == before
    assert finish(run, second) == 0


def test_a_worker_that_hung_while_no_agent_ran_is_found(run: Run) -> None:
    first = run.agent("--workers", "2", "--lease", "0.5", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    first.kill()
    first.wait()
    os.kill(run.living()["w1.1"], signal.SIGSTOP)
    second = run.agent("--workers", "2", "--lease", "0.5", script=until(run))
    assert run.exit_of("w1.1")["reason"] == "hung"
    wait_for(lambda: run.stepping("w0.1", "w1.2"), "the replacement")
    assert finish(run, second) == 0


def test_another_number_of_workers_at_a_take_over_holds(run: Run) -> None:
    first = run.agent("--workers", "2", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    first.kill()
    first.wait()
    second = run.agent("--workers", "1", script=until(run))
    assert run.exit_of("w1.1")["reason"] == "left"
    assert run.living().keys() == {"w0.1"}
    assert finish(run, second) == 0


def test_the_children_of_a_killed_worker_do_not_outlive_it(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    agent = run.agent("--workers", "1", "--restarts", "0", script=(str(script),))
    child = int(wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "a child"))
    os.kill(run.living()["w0.1"], signal.SIGKILL)
    wait_for(lambda: process_started(child) is None, "the child's end")
    assert agent.wait(timeout=20) == 137


def test_a_training_that_finished_without_an_agent_is_told_once(run: Run) -> None:
    first = run.agent("--workers", "2", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    first.kill()
    first.wait()
    (run.home / "end").touch()
    wait_for(lambda: not run.living(), "the end of the training")
    assert run.agent("--workers", "2", script=until(run)).wait(timeout=20) == 0
    assert "finished while no agent was running" in run.output
    assert run.agent("--workers", "2", script=until(run)).wait(timeout=20) == 2


def test_a_second_agent_of_the_same_name_is_refused(run: Run) -> None:
    agent = run.agent("--workers", "1", script=until(run))
    wait_for(lambda: run.stepping("w0.1"), "a worker")
    second = holdfast("run", "--run", "r", "--workers", "1", FAKE_WORKER, home=run.home)
    assert second.returncode == 2
    assert second.stderr.startswith("holdfast: run r already has an agent (process ")
    assert finish(run, agent) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_stops_in_order(run: Run, number: signal.Signals, code: int) -> None:
    agent = run.agent("--workers", "2", script=until(run))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    agent.send_signal(number)
    assert agent.wait(timeout=20) == code
    assert {event["who"] for event in run.events("left")} == {"w0.1", "w1.1"}
    assert "run r is stopped at step" in run.output
    if number == signal.SIGINT:  # and the same name starts again: the word to stop is taken back
        again = run.agent("--workers", "1", script=until(run))
        wait_for(lambda: run.stepping("w0.2"), "a new worker")
        assert finish(run, again) == 0


def test_the_second_signal_ends_everything_at_once(run: Run) -> None:
    agent = run.agent("--workers", "2", script=(*until(run), "--ignore-stop"))
    wait_for(lambda: run.stepping("w0.1", "w1.1"), "two workers")
    agent.send_signal(signal.SIGINT)
    ledger = run.ledger()
    wait_for(lambda: ledger.get(KEY_STOP), "the word to stop")
    ledger.close()
    assert agent.poll() is None
    agent.send_signal(signal.SIGINT)
    assert agent.wait(timeout=5) == 130
    assert not run.living()


def test_scale_up_and_down_and_stop(run: Run) -> None:
    agent = run.agent("--workers", "1", script=until(run))
    wait_for(lambda: run.stepping("w0.1"), "a worker")
    assert holdfast("scale", "r", "3", home=run.home).returncode == 0
    wait_for(lambda: run.stepping("w0.1", "w1.1", "w2.1"), "three workers")
    assert holdfast("scale", "r", "2", home=run.home).returncode == 0
    assert run.exit_of("w2.1")["reason"] == "left"
    assert [(event["was"], event["workers"]) for event in run.events("scaled")] == [(1, 3), (3, 2)]
    assert run.living().keys() == {"w0.1", "w1.1"}
    assert holdfast("stop", "r", home=run.home).returncode == 0
    assert agent.wait(timeout=20) == 0
    assert "is stopped at step" in run.output


def test_a_script_that_fails_at_once_ends_the_run_with_one_traceback(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("print('about to fail')\nraise KeyError('no such thing')\n")
    agent = run.agent("--workers", "3", script=(str(script),))
    assert agent.wait(timeout=20) == 1
    assert run.output.count("Traceback (most recent call last)") == 1
    assert run.output.count("KeyError: 'no such thing'") == 1
    assert "the script failed in every worker before the first step" in run.output


def test_bad_input_is_answered_by_the_scripts_own_sentence(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(
        "import sys\nprint('holdfast: 3 shards do not divide\\n  hint: 4', file=sys.stderr)\nsys.exit(2)\n"
    )
    agent = run.agent("--workers", "2", script=(str(script),))
    assert agent.wait(timeout=20) == 2
    assert run.output.endswith("holdfast: 3 shards do not divide\n  hint: 4\n")
    assert run.output.count("do not divide") == 1


def test_a_script_that_fails_at_the_same_step_again_and_again_ends_the_run(run: Run) -> None:
    agent = run.agent("--workers", "2", script=(FAKE_WORKER, "--fail-at", "5"))
    assert agent.wait(timeout=20) == 1
    assert "without getting past step 5" in run.output
    assert "ValueError: cannot do step 5" in run.output
    assert len(run.events("worker_started")) <= 7


def test_workers_may_go_on_after_the_last_step(run: Run) -> None:
    agent = run.agent("--workers", "1", "--lease", "0.3", script=(*until(run), "--after", "2"))
    wait_for(lambda: run.stepping("w0.1"), "a worker")
    assert finish(run, agent) == 0  # its registration was gone for 2 s, but it is not hung
    assert run.exit_of("w0.1")["exit_code"] == 0
