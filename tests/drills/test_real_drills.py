"""`holdfast drill` on real processes: exact under a kill; a script that looks at the clock; Ctrl-C in the middle.

The longer ones are part of `make soak`: HOLDFAST_DRILLS=all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from holdfast.drills.checking import Outcome, check, first_difference
from holdfast.drills.trace import TRACE, TraceReader
from holdfast.placement.proc import process_state

SCRIPT = Path(__file__).with_name("drilled.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINERS = {  # what each needs, and enough steps for some kills
    "lightning_digits.py": ("lightning", ["--epochs", "40"]),
    "huggingface_lm.py": ("transformers", ["--steps", "400"]),
    "accelerate_digits.py": ("accelerate", ["--epochs", "40"]),
}

long = pytest.mark.skipif(os.environ.get("HOLDFAST_DRILLS") != "all", reason="a long drill: HOLDFAST_DRILLS=all")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:  # shorter than pytest's, for the sockets in it
        yield Path(directory)


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", "drill", "--workers", "2", "--spares", "0", *words],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    )


def drill(directory: Path, *words: str) -> tuple[int, str]:
    with start(directory, *words) as process:
        output, _ = process.communicate(timeout=280)
    return process.returncode, output


def test_a_kill_changes_nothing_and_the_report_says_so(short: Path) -> None:
    code, output = drill(short, "--kill-every", "1s", "--for", "1s", "--json", "out.json", "--", str(SCRIPT))
    assert code == 0, output
    found = json.loads((short / "out.json").read_text())
    assert found["held"] and not found["broken"] and found["faults"] == 1 and found["steps"] == 40, output
    assert found["digest"] == found["quiet_digest"] != ""
    assert found["check"].startswith("exact in ") and f"in other ways: {found['check']}\n" in output
    (fault,) = found["fault_list"]
    assert fault["kind"] == "kill" and fault["victims"] and 0 < fault["recovery_s"] < 60
    assert found["goodput"] is None or 0 < found["goodput"] < 2
    held = {promise["promise"]: promise["held"] for promise in found["promises"]}
    assert held["exact"] and held["every step once"] and held["every sample once"] and held["whole checkpoints"]
    report = (short / "drill.html").read_text()
    assert "Every promise held under 1 fault<" in report and report.count("<svg") == 3
    assert not list(short.glob("holdfast-drill-*")), "nothing is left behind"


def test_a_trace_shows_the_first_step_and_tensor_that_look_at_the_clock(short: Path) -> None:
    """The same without agents: two runs of one, at once, through the starter of a drill."""
    directories = [short / name for name in ("quiet", "faulty")]
    runs = []
    for directory in directories:
        directory.mkdir()
        command = [sys.executable, "-m", "holdfast.drills.rig", str(SCRIPT), "--steps", "6", "--clock", "4"]
        runs.append(subprocess.Popen([*command, "--pause", "0"], env={**os.environ, TRACE: str(directory)}))
    assert [run.wait(120) for run in runs] == [0, 0]
    outcomes = []
    for directory in directories:
        reader = TraceReader(directory)
        assert [entry.step for entry in reader.look()] == list(range(6))
        outcomes.append(Outcome(reader.trace, [], 0, {"w0.1": directory.name}))
    difference = first_difference(*outcomes)
    assert difference is not None and difference.step == 4 and difference.tensors[0] == "0.weight"
    held = {one.promise: one.held for one in check(outcomes[0], outcomes[1], [], None)}
    assert held["exact"] is False and held["every step once"] and held["every sample once"]


@long
def test_a_script_that_looks_at_the_clock_is_found_out(short: Path) -> None:
    words = ("--stop", "1", "--for", "1s", "--json", "out.json", "--", str(SCRIPT), "--clock", "30")
    code, output = drill(short, *words)
    assert code == 1, output
    found = json.loads((short / "out.json").read_text())
    assert found["broken"] == ["exact"], output
    (said,) = [promise["text"] for promise in found["promises"] if promise["promise"] == "exact"]
    assert re.search(r"first different after step 30, in 0\.weight and \d+ other tensors", said), said
    assert "Broken: exact" in (short / "drill.html").read_text()


def test_a_joiner_that_lacks_a_factor_is_found_out_with_the_line(short: Path) -> None:
    faults = ("--spares", "1", "--kill-every", "1s", "--for", "1s", "--json", "out.json")
    code, output = drill(short, *faults, "--", str(SCRIPT), "--forgets")
    assert code == 1, output
    found = json.loads((short / "out.json").read_text())
    assert found["broken"] == ["exact"]
    (text,) = [one["text"] for one in found["promises"] if one["promise"] == "exact"]
    line = SCRIPT.read_text().splitlines().index("        factor *= 0.9") + 1
    assert "not exact: " in output and "the global variable factor" in output
    assert "state that changes during training did not travel" in text and f"drilled.py:{line} (factor *= 0.9)" in text


@long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tokens", "tar", "stateful", "plain"])
def test_every_sample_of_streams_and_iterables_comes_once(kind: str, short: Path) -> None:
    """A worker is killed every 5 s, the reader of an iterable too; and one worker alone comes to the same weights."""
    streams = kind in ("tokens", "tar")
    script = SCRIPT.parents[1] / "end_to_end" / ("streaming.py" if streams else "iterating.py")
    if streams:
        sys.path.insert(0, str(script.parent))
        from streaming import write

        write(kind, short / "data")
    words = [str(script), *(["--data", str(short / "data")] if streams else ["--kind", kind]), "--epochs", "20"]
    found = killed_every_5_s(short, *words, "--pause", "0.05")
    once = next(promise for promise in found["promises"] if promise["promise"] == "every sample once")
    assert once["held"] and ("none is missing" if streams else "that it has in the quiet run") in once["text"]
    assert digest_alone(short, *words) == found["digest"]


@long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_that_own_their_loop(name: str, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Lightning module, a causal language model of a Hugging Face Trainer's, an Accelerate loop: the same."""
    if find_spec(TRAINERS[name][0]) is None:
        pytest.skip(f"there is no {TRAINERS[name][0]} here")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = [str(EXAMPLES / name), *TRAINERS[name][1]]
    found = killed_every_5_s(short, *words)
    held = {promise["promise"]: promise for promise in found["promises"]}
    assert held["every sample once"]["held"] and held["every step once"]["held"]
    assert "no sample is twice in an epoch, and none is left out" in held["every sample once"]["text"]
    assert digest_alone(short, *words) == found["digest"]


@long
@pytest.mark.timeout(1500)
def test_groups_of_ranks_that_shard_a_model(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills hit the ranks of groups one after the other; and one process with all of the model comes to the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [str(EXAMPLES / "sharded_gpt.py"), "--steps", "60", "--layers", "2", "--width", "64", "--slow", "0.2"]
    found = killed_every_5_s(short, *words, options=("--workers", "3", "--ranks", "2", "--spares", "0"))
    held = {promise["promise"]: promise for promise in found["promises"]}
    assert held["exact"]["held"] and held["every sample once"]["held"] and held["every step once"]["held"]
    assert digest_alone(short, *words) == found["digest"]


def killed_every_5_s(
    directory: Path, *words: str, options: tuple[str, ...] = ("--workers", "3", "--spares", "1")
) -> dict[str, Any]:
    """What a drill finds, usually of three workers and a spare, of which the workers are killed; it holds."""
    faults = ("--kill-every", "5s", "--for", "15s", "--json", "out.json")
    done = _holdfast(directory, "drill", *options, *faults, "--", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((directory / "out.json").read_text())
    assert found["held"] and found["faults"] >= 2, done.stdout
    print(done.stdout)
    return found


def digest_alone(directory: Path, *words: str) -> str:
    """Of the weights that one worker comes to."""
    done = _holdfast(directory, "run", "--workers", "1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    digest: str = re.findall(r"weights: ([0-9a-f]+)", done.stdout + done.stderr)[-1]
    print("one worker:", digest)
    return digest


def _holdfast(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "TMPDIR": str(directory)},
    )


@long
def test_ctrl_c_ends_everything_and_still_reports(short: Path) -> None:
    with start(short, "--kill-every", "500ms", "--for", "60s", "--", str(SCRIPT), "--steps", "60") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "kill -9" in line:
                break
        agents = [int(pid) for pid in _pids_in(short)]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    output = "".join(lines) + rest
    assert process.returncode == 130, output
    assert "Interrupted" in (short / "drill.html").read_text() and "kill -9" in (short / "drill.html").read_text()
    assert len(agents) >= 2, output
    deadline = time.monotonic() + 10  # a killed process takes a moment to go
    while any(map(process_state, agents)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(process_state, agents))


def _pids_in(directory: Path) -> list[str]:
    """Of the agent and the workers of the run with faults, by its event log."""
    pids = []
    for path in directory.glob("holdfast-drill-*/runs/faulty/events/agent.jsonl"):
        pids += re.findall(r'"kind":"(?:agent|worker)_started".*?"pid":(\d+)', path.read_text())
    return pids


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kill-every", "10s", "--"], "there is nothing to drill"),
        (["--kill-every", "10s", "--", "no-such.py"], "there is no script no-such.py"),
        (["--", str(SCRIPT)], "the drill has no faults"),
        (["--kill-every", "soon", "--", str(SCRIPT)], "--kill-every is 'soon'"),
        (["none.toml", "--", str(SCRIPT)], "cannot read the plan none.toml"),
        (["--kill-every", "1s", "--goodput-min", "90", "--", str(SCRIPT)], "--goodput-min is 90"),
        (["--kill-every", "1s", "--report", "no/such.html", "--", str(SCRIPT)], "no directory for no/such.html"),
    ],
    ids=["no script", "no such script", "no faults", "no time", "no plan", "no fraction", "no directory"],
)
def test_bad_input_is_one_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from holdfast.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["drill", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and "hint:" in error and "Traceback" not in error


def test_what_the_machine_cannot_do_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from holdfast.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for words, says in ((["--disk-full"], "needs root"), (["--partition", "5s"], "need root")):
        assert main(["drill", *words, "--", str(SCRIPT)]) == 2
        assert says in capsys.readouterr().err
    assert main(["drill", "--list"]) == 0
    assert "Not on this machine" in capsys.readouterr().out


def test_the_schedule_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from holdfast.cli.main import main

    assert main(["drill", "--kill-every", "10s", "--for", "30s", "--show"]) == 0
    assert len(re.findall(r"^ +[\d.]+ s  kill of worker \d$", capsys.readouterr().out, re.MULTILINE)) == 3
