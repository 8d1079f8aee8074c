"""The command line: what it says to wrong invocations, and that it starts without torch."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import main

SCRIPT = "print('ran')\n"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "home"))
    return tmp_path / "home"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Expects exit code 2, one sentence and one hint; gives the sentence."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 2, said.err
    assert lines[0].startswith("holdfast: ")
    assert lines[1].startswith("  hint: ")
    assert "ran" not in said.out
    return lines[0].removeprefix("holdfast: ")


def test_no_such_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "run", "--workers", "2", "nowhere.py") == "there is no script nowhere.py"


def test_a_script_that_is_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refusal(capsys, "run", "--workers", "2", str(tmp_path)).endswith("is not a file")


def test_nothing_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "run", "--workers", "2") == "there is nothing to run"


@pytest.mark.parametrize("workers", ["-1", "100000", "1025"])
def test_a_number_of_workers_that_cannot_be(capsys: pytest.CaptureFixture[str], script: str, workers: str) -> None:
    sentence = refusal(capsys, "run", f"--workers={workers}", script)
    assert sentence == f"--workers is {workers}, but must be from 0 to 1024"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "0"], "--workers 0 is for a host that only serves, and --servers is 0"),
        (["--workers", "0", "--servers", "1"], "a host that only serves is part of a run on several hosts"),
        (["--workers", "0", "--servers", "1", "--spares", "2"], "--spares 2 would wait to replace workers"),
        (["--servers", "1"], "--workers is missing"),
    ],
)
def test_a_host_without_workers_has_to_serve(
    capsys: pytest.CaptureFixture[str], script: str, options: list[str], said: str
) -> None:
    assert refusal(capsys, "run", *options, script).startswith(said)


def test_servers_alone_need_no_script_and_a_run_on_several_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    said = "a host that only serves is part of a run on several hosts, and this one has no --ledger"
    assert refusal(capsys, "run", "--servers", "1") == said
    assert refusal(capsys, "run", "--servers", "1", "--workers", "0") == said
    assert refusal(capsys, "run", "--servers", "1", "--workers", "2") == "there is nothing to run"
    url = "etcd://127.0.0.1:1"
    assert refusal(capsys, "run", "--servers", "1", "--ledger", url).startswith("a run on several hosts needs a name")
    assert refusal(capsys, "run", "--servers", "1", "--ledger", url, "--run", "r").startswith(
        "a run on several hosts needs keys"
    )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--workers", "two"], "--workers is 'two', which is not a whole number"),
        (["--workers", "2", "--frobnicate"], "holdfast run has no option --frobnicate"),
        ([], "--workers is missing"),
        (["--workers", "2", "--spares", "-1"], "--spares is -1"),
        (["--workers", "2", "--spares", "2000"], "--spares is 2000"),
        (["--workers", "2", "--restarts", "-1"], "--restarts is -1"),
        (["--workers", "2", "--numerics", "shrug"], "--numerics is 'shrug'"),
        (["--workers", "2", "--lease", "0"], "--lease is 0 s"),
        (["--workers", "2", "--lease", "nan"], "--lease is 'nan', which is not a time"),
        (["--workers", "2", "--path", "pigeon"], "--path is 'pigeon'"),
        (["--workers", "2", "--run", "../up"], "'../up' cannot be the name of a run"),
        (["--workers", "2", "--run", ""], "the value of --run is empty"),
        (["--workers", "2", "--listen", "127.0.0.1:x"], "neither HOST nor HOST:FIRST-LAST"),
        (["--workers", "2", "--listen", "127.0.0.1:9-3"], "is not a range of ports"),
        (["--workers", "2", "--listen", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--workers", "2", "--dir", "/proc/nowhere"], "cannot write to the run directory"),
    ],
)
def test_options_that_cannot_be(capsys: pytest.CaptureFixture[str], script: str, options: list[str], part: str) -> None:
    assert part in refusal(capsys, "run", *options, script)


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], script: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = refusal(capsys, "run", "--workers", "1", "--listen", f"127.0.0.1:{port}", script)
    assert "0 of 1 ports can be used and the run needs 1 (Address already in use)" in sentence


def test_a_range_with_too_few_ports(capsys: pytest.CaptureFixture[str], script: str) -> None:
    sentence = refusal(capsys, "run", "--workers", "3", "--listen", "127.0.0.1:48211-48212", script)
    assert "the run needs 3" in sentence


def test_a_disk_without_room(script: str, home: Path) -> None:
    """A limit on the size of files stands in for a full disk: writing fails half-way, for root too."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))

    command = [sys.executable, "-m", "holdfast", "run", "--workers", "1", script]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=small_files, timeout=60, check=False)
    assert done.returncode == 2
    assert "cannot write to the run directory" in done.stderr
    assert "hint:" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_called_so(capsys: pytest.CaptureFixture[str], script: str, home: Path) -> None:
    folder = home / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / f".probe-{os.getpid()}").symlink_to("/dev/full")
    sentence = refusal(capsys, "run", "--run", "r", "--workers", "1", script)
    assert sentence.startswith("the disk under ")
    assert sentence.endswith(" is full")


@pytest.mark.parametrize("arguments", [("status", "x"), ("scale", "x", "2"), ("stop", "x")])
def test_no_such_run(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert refusal(capsys, *arguments).startswith("there is no run x in ")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no command holdfast fly" in refusal(capsys, "fly")


def test_no_runs_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.startswith("no runs in ")


def test_help_and_version_start_without_torch() -> None:
    code = (
        "import sys, holdfast.cli.main as m\n"
        "try: m.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    for arguments in (["--help"], ["run", "--help"], ["--version"], ["runs"], ["status", "x"]):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, timeout=60)


@pytest.mark.processes
def test_the_scripts_own_options_stay_its_own(tmp_path: Path, home: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    command = [sys.executable, "-m", "holdfast", "run", "--workers", "1", str(script), "--workers", "9", "-m", "--x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "w0.1 | ['--workers', '9', '-m', '--x']" in done.stdout


@pytest.mark.processes
def test_a_module_can_be_run_and_its_failure_is_its_own(home: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "run", "--workers", "2", "-m", "json.tool", "/nowhere.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2  # argparse in json.tool
    assert "nowhere.json" in done.stderr
