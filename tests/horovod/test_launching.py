"""`holdfast horovodrun` and `import horovod`: what they take, what they refuse, and that they start the script."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.cli.horovodrun import script_words, slots_here
from holdfast.cli.main import main
from holdfast.core.errors import ConfigError

PRINTS = "import sys, horovod.torch as hvd; hvd.init(); print('rank', hvd.rank(), 'of', hvd.size(), sys.argv[1:])"


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["python", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["/usr/bin/python3.11", "-u", "train.py"], ["train.py"]),
        (["train.py"], ["train.py"]),
        (["--", "python3", "-m", "pack.train"], ["-m", "pack.train"]),
    ],
)
def test_the_interpreter_before_the_script_is_left_out(given: list[str], wanted: list[str]) -> None:
    assert script_words(given) == wanted


def test_slots_of_this_host_and_of_no_other() -> None:
    assert slots_here(["localhost:3", f"{socket.gethostname()}", ""], 2) == 5
    with pytest.raises(ConfigError, match="far, further cannot be started from here") as refused:
        slots_here(["localhost:1", "far:2", "further"], 1)
    assert "holdfast run --ledger" in refused.value.hint


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "there is nothing to run"),
        (["train.py"], "-np is missing"),
        (["-np", "2", "ls"], "ls is not a Python script"),
        (["-np", "3", "-H", "localhost:2", "train.py"], "-np 3 workers do not fit into 2 slots"),
        (["-np", "2", "--min-np", "3", "train.py"], "-np 2 is not from --min-np 3"),
        (["-np", "2", "--min-np", "3", "--max-np", "2", "train.py"], "--min-np 3 is more than --max-np 2"),
        (["-np", "2", "--max-np", "0", "train.py"], "--max-np is 0"),
        (["-np", "2", "-H", "localhost:2", "--host-discovery-script", "x", "train.py"], "both say which hosts"),
        (["-np", "2", "--host-discovery-script", "/nowhere/x", "train.py"], "cannot be run"),
        (["-np", "2", "--hostfile", "/nowhere/x", "train.py"], "--hostfile /nowhere/x cannot be read"),
        (["-np", "2", "--hostfile", "x", "-H", "localhost:2", "train.py"], "-H and --hostfile both say which hosts"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["horovodrun", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_host_file_has_slots_of_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nlocalhost slots=2\n127.0.0.1 slots = 1\n")
    line = ["horovodrun", "-np", "4", "--hostfile", str(hosts), "train.py"]
    assert main(line) == 2
    assert "-np 4 workers do not fit into 3 slots" in capsys.readouterr().err
    hosts.write_text("localhost slots=many\n")
    assert main(line) == 2
    assert "has the line 'localhost slots=many'" in capsys.readouterr().err


def test_a_script_runs_by_itself_after_install(tmp_path: Path) -> None:
    code = f"import holdfast.horovod; holdfast.horovod.install(); {PRINTS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "rank 0 of 1 []\n", done.stderr
    both = (
        "import holdfast.horovod as h; h.install(); h.install(); import horovod.torch, holdfast.horovod.torch as ours; "
    )
    both += "import horovod.torch.elastic; from horovod.common.exceptions import HorovodInternalError; "
    both += "assert horovod.torch is ours and ours.__name__ == 'holdfast.horovod.torch'; import horovod.nothing"
    done = subprocess.run([sys.executable, "-c", both], capture_output=True, text=True, timeout=60, check=False)
    assert "No module named 'horovod.nothing'" in done.stderr, done.stderr


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
def test_a_job_line_of_horovodrun_starts_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    line = ["-np", "2", "-H", "localhost:2", "--blacklist-cooldown-range", "1", "2", "--dir", str(tmp_path)]
    line += ["--gloo", "--network-interface", "lo", "--cycle-time-ms", "5", "--disable-cache", "--stall-check"]
    done = run("horovodrun", *line, "python", "train.py", "-x", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2 ['-x']" in done.stdout and "rank 1 of 2 ['-x']" in done.stdout
    assert "--blacklist-cooldown-range has no effect" in done.stderr
    assert "without effect here: --network-interface, --cycle-time-ms, --disable-cache\n" in done.stderr


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
@pytest.mark.parametrize(
    ("rank_1", "sentence"),
    [
        ("raise ValueError('a bad sample')", "rank 1 has shut down: ValueError: a bad sample"),
        ("sys.exit()", "rank 1 has shut down: its script came to its end"),
    ],
    ids=["fails", "leaves"],
)
def test_a_rank_that_does_not_go_on_says_why_and_the_job_fails(rank_1: str, sentence: str, tmp_path: Path) -> None:
    lines = ["import sys, torch, horovod.torch as hvd", "hvd.init()", "hvd.barrier()"]
    lines += ["if hvd.rank() == 1:", f"    {rank_1}", "hvd.allreduce(torch.ones(3), name='gradient')"]
    (tmp_path / "train.py").write_text("\n".join(lines))
    done = run("horovodrun", "-np", "2", "--dir", str(tmp_path), "train.py", cwd=tmp_path)
    assert done.returncode == 1 and sentence in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
def test_the_run_follows_the_discovery_script(tmp_path: Path) -> None:
    """Two slots, then three: the third worker comes in at a commit, and the world has three ranks."""
    slots, output = tmp_path / "slots", tmp_path / "output"
    slots.write_text("localhost:2\n")
    output.mkdir()
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {slots}\n")
    script.chmod(0o700)
    training = Path(__file__).with_name("elastic_training.py")
    words = ["-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(script)]
    command = [sys.executable, "-m", "holdfast", "horovodrun", *words, "--dir", str(tmp_path), "--run", "found"]
    log = (tmp_path / "log").open("wb")
    job = subprocess.Popen([*command, str(training), str(output), "100000", "0.01"], stdout=log, stderr=log)
    try:
        wait_for_size(output, 2, job)
        slots.write_text("localhost:3\n")
        wait_for_size(output, 3, job)
    finally:
        subprocess.run([*command[:3], "stop", "--dir", str(tmp_path), "found"], capture_output=True, check=False)
        try:
            job.wait(60)
        finally:
            job.kill()
            job.wait()
            log.close()
    assert job.returncode == 0, (tmp_path / "log").read_text()[-3000:]


def wait_for_size(output: Path, size: int, job: subprocess.Popen[bytes]) -> None:
    import time

    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert job.poll() is None, (output.parent / "log").read_text()[-3000:]
        lines = [path.read_text().splitlines() for path in output.glob("*.log")]
        if sum(bool(one) and len(one[-1].split()) == 6 and int(one[-1].split()[2]) == size for one in lines) == size:
            return
        time.sleep(0.05)
    raise AssertionError(f"no world of {size}: {os.listdir(output)}")  # noqa: PTH208


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is an extra")
def test_frameworks_are_imported_when_the_script_asks_for_them(tmp_path: Path) -> None:
    code = "import sys, holdfast.horovod as h; h.install(); import horovod, horovod.torch; "
    code += "assert not {'tensorflow', 'keras'} & sys.modules.keys(); import horovod.tensorflow, horovod.keras as k; "
    code += "import horovod.tensorflow.keras as t, horovod.tensorflow.keras.callbacks, horovod.keras.elastic; "
    code += "assert t.DistributedOptimizer is k.DistributedOptimizer and t.elastic.KerasState is k.elastic.KerasState; "
    code += "missing = [name for one in (t, k) for name in one.__all__ if not hasattr(one, name)]; "
    code += "assert not missing, missing; "
    code += "k.init(); print(k.rank(), k.size())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0 1\n", done.stderr[-2000:]


def test_a_framework_that_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.horovod import extras

    with pytest.raises(ConfigError, match=r"holdfast\.horovod\.keras needs no_such_package") as refused:
        extras.need("no_such_package", "holdfast.horovod.keras")
    assert refused.value.hint == "pip install 'holdfast[tensorflow]'"


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
def test_the_torch_example_learns_and_its_shards_make_it_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SHARDS", "4")
    example = Path(__file__).parents[2] / "examples" / "horovod_torch.py"
    digests = set()
    for workers in ("1", "2"):
        words = ["--workers", workers, "--horovod", "--dir", str(tmp_path), str(example), "--batches", "120"]
        done = run("run", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        said = re.search(rf"(\d+\.\d)% of the 297 digits .* with {workers} workers", done.stdout)
        assert said is not None and float(said[1]) > 60.0, done.stdout[-2000:]
        digests |= set(re.findall(r"digest (\w+)", done.stdout))
    assert len(digests) == 1


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is an extra")
def test_the_keras_example_learns_with_two_workers(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "horovod_keras.py"
    done = run(
        *[
            "run",
            "--workers",
            "2",
            "--horovod",
            "--lease",
            "30s",
            "--dir",
            str(tmp_path),
            str(example),
            "--epochs",
            "2",
        ],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = re.search(r"(\d+\.\d)% of the 297 digits .* with 2 workers", done.stdout)
    assert said is not None and float(said[1]) > 50.0, done.stdout[-2000:]
