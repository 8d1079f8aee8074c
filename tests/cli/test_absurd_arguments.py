"""Every command with what makes no sense: one sentence, one hint, exit code 2, and nothing is started or written."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
from past_runs import past_run

from holdfast.cli.main import main

RUN = "run --workers 1"
DRILL = "drill --kill-every 3s"
HUGE = "9" * 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over, and scripts of every kind."""
    root = tmp_path_factory.mktemp("absurd")
    past_run(root / "home", "first", saved=(5, 12))
    (root / "ok.py").write_text("print('ran')\n")
    (root / "bad.py").write_text("x = 1\ndef (:\n")
    (root / "nul.py").write_bytes(b"x = 1\0\n")
    (root / "prog").write_bytes(b"\x7fELF\0\0\xff")
    (root / "run.sh").write_text("echo hi there\n")
    (root / "plan.toml").write_text("frobnicate = 3\n")
    return root


CASES = [
    # the script
    (f"{RUN} ''", "the name of the script is empty"),
    (f"{RUN} .", ". is not a file"),
    (f"{RUN} nope.py", "there is no script nope.py"),
    (f"{RUN} {'x' * 5000}", "cannot be the name of a script"),
    (f"{RUN} bad.py", "bad.py is not valid Python: line 2: "),
    (f"{RUN} nul.py", "nul.py is not valid Python: "),
    (f"{RUN} prog", "prog is not a Python script"),
    (f"{RUN} run.sh", "run.sh is not a Python script"),
    (f"{RUN} -m", "there is nothing to run"),
    (f"{RUN} -m ''", "'' cannot be the name of a module"),
    (f"{RUN} -m ok.py/x", "'ok.py/x' cannot be the name of a module"),
    (f"{RUN} -m no_such_module.x", "there is no module no_such_module here"),
    # numbers
    (f"run --workers {HUGE} ok.py", f"--workers is {HUGE}, but must be from 0 to 1024"),
    ("run --workers -2 ok.py", "--workers is -2, but must be"),
    (f"{RUN} --spares -1 ok.py", "--spares is -1, but must be"),
    (f"{RUN} --restarts {HUGE} ok.py", "but must be from 0 to 1000000"),
    (f"{RUN} --threads 2 ok.py", "holdfast run has no option --threads"),
    (f"{RUN} --numerics shrug ok.py", "--numerics is 'shrug'"),
    (f"{RUN} --lease inf ok.py", "--lease is 'inf', which is not a time"),
    (f"{RUN} --lease -inf ok.py", "--lease needs a value"),
    (f"{RUN} --notice nan ok.py", "--notice is 'nan', which is not a time"),
    (f"{RUN} --replace-slow nan ok.py", "--replace-slow is nan"),
    (f"{RUN} --audit 2 ok.py", "--audit is 2"),
    (f"{RUN} --audit nan ok.py", "--audit is nan"),
    (f"{RUN} --audit-every -1 ok.py", "--audit-every is -1"),
    (f"{RUN} --strikes 0 ok.py", "--strikes is 0"),
    (f"{RUN} --keep 0 ok.py", "--keep is 0"),
    (f"{RUN} --keep-every -3 ok.py", "--keep-every is -3"),
    (f"{RUN} --keep-best loss ok.py", "'loss' does not say which checkpoint is the best"),
    # times
    (f"{RUN} --save-every 0 ok.py", "a checkpoint every '0' makes no sense"),
    (f"{RUN} --save-every -5 ok.py", "a checkpoint every '-5' makes no sense"),
    (f"{RUN} --stuck-after -1s ok.py", "--stuck-after is '-1s'"),
    (f"{RUN} --hang-after 1y ok.py", "--hang-after is '1y'"),
    (f"{RUN} --late-after 0 ok.py", "--late-after is 0 s"),
    # places and names
    (f"{RUN} --dir '' ok.py", "the value of --dir is empty"),
    (f"{RUN} --dir= ok.py", "the value of --dir is empty"),
    (f"{RUN} --dir /dev/null ok.py", "cannot write to the run directory"),
    (f"{RUN} --checkpoint '' ok.py", "the value of --checkpoint is empty"),
    (f"{RUN} --checkpoint s3//b ok.py", "s3//b is almost a URI"),
    (f"{RUN} --checkpoint ftp://b ok.py", "checkpoints cannot be kept at ftp://"),
    (f"{RUN} --run a/b ok.py", "'a/b' cannot be the name of a run"),
    (f"{RUN} --run ünïcode ok.py", "'ünïcode' cannot be the name of a run"),
    (f"{RUN} --run {'x' * 65} ok.py", "cannot be the name of a run"),
    (f"{RUN} --memory 0+0 ok.py", "--memory is '0+0'"),
    (f"{RUN} --memory x ok.py", "--memory is 'x'"),
    (f"{RUN} --listen '[::1' ok.py", "is not an address"),
    (f"{RUN} --metrics 99999 ok.py", "99999 is not a port"),
    (f"{RUN} --dashboard 99999 ok.py", "--dashboard is 99999, but must be from 0 to 65535"),
    (f"{RUN} --host h ok.py", "--host is for a run on several hosts"),
    (f"{RUN} --ledger etcd:/x --run r --keys k ok.py", "'etcd:/x' does not name a ledger"),
    (f"{RUN} --ledger etcd://h:2379 ok.py", "a run on several hosts needs a name"),
    # commands that name a run
    *[
        (f"{command} {name} {more}", sentence)
        for command, more in (
            ("status", ""),
            ("events", ""),
            ("logs", ""),
            ("top", ""),
            ("dashboard", ""),
            ("stop", ""),
            ("scale", "2"),
            ("rm", ""),
        )
        for name, sentence in (
            ("''", "is empty"),
            ("a/b", "'a/b' cannot be the name of a run"),
            ("../..", "'../..' cannot be the name of a run"),
            ("é", "'é' cannot be the name of a run"),
            ("nowhere", "there is no run nowhere in"),
            ("@x", "'' cannot be the name of a run"),
        )
    ],
    ("status first --dir /nowhere", "there is no run first in /nowhere"),
    ("events first --kind zzz", "there are no events of kind 'zzz'"),
    ("events first --kind progres", "there are no events of kind 'progres'"),
    ("events first --since -5", "--since is '-5', which is not a time"),
    (f"events first --since {HUGE}d", "which is not a time"),
    ("logs first zzz", "run first has no output of a worker 'zzz'"),
    ("logs first --tail -1", "--tail is -1"),
    (f"logs first --tail {HUGE}", "--tail is 999"),
    ("top first", "draws on a terminal, and this is none"),
    ("dashboard first --port -1", "-1 is not a port"),
    ("scale first 0", "the number of workers is 0"),
    ("scale first -1", "the number of workers is -1"),
    ("scale first x", "N is 'x', which is not a whole number"),
    ("scale first 2", "run first has no agent"),
    ("stop first", "run first does not run"),
    ("runs --dir /nowhere", "the directory /nowhere does not exist"),
    ("runs --dir /dev/null", "the directory /dev/null is a file"),
    ("runs x", "there is too much in the command: x"),
    ("rm", "RUN is missing"),
    ("rm first nowhere", "there is no run nowhere"),
    ("rm --older-than x", "--older-than is 'x', which is not a time"),
    ("rm --older-than -1d", "--older-than is '-1d', which is not a time"),
    # checkpoints
    ("checkpoint", "ACTION is missing"),
    ("checkpoint ls", "URI|RUN is missing"),
    ("checkpoint show first --step -1", "there is no checkpoint of step -1 in"),
    (f"checkpoint show first --step {HUGE}", f"there is no checkpoint of step {HUGE} in"),
    ("checkpoint verify first --all --step 3", "contradict each other"),
    ("checkpoint export first --to /nowhere/x.pt", "there is no directory /nowhere"),
    ("checkpoint export first --to ''", "the value of --to is empty"),
    ("checkpoint export first --to x.zip", "does not say in which format to write"),
    ("checkpoint export first --to ok.py --as torch", "ok.py is already there"),
    ("checkpoint import first --from /nowhere", "there is no /nowhere"),
    ("checkpoint import new --from ok.py", "the name of ok.py does not say what it is"),
    ("checkpoint prune first --keep-last 0", "the newest 0 checkpoints cannot be kept"),
    ("checkpoint prune first --keep-last 1 --keep-best x", "'x' does not say which checkpoint is the best"),
    # ledger and keys
    ("ledger start --members 0", "a cluster of 0 members is asked for"),
    ("ledger stop", "no ledger runs in"),
    ("ledger status", "it is not said which ledger"),
    ("ledger runs --ledger x", "'x' does not name a ledger"),
    ("keys create ''", "is empty"),
    ("keys create .", "is not an empty directory, and keys are never overwritten"),
    ("keys create /proc/x", "cannot write /proc/x"),
    ("keys show ok.py", "there are no keys in"),
    # drills
    ("drill", "the drill has no faults"),
    ("drill --kill-every 0 -- ok.py", "the drill has no faults"),
    ("drill --kill-every -1s -- ok.py", "--kill-every is '-1s'"),
    (f"{DRILL}", "there is nothing to drill"),
    (f"{DRILL} --", "there is nothing to drill"),
    (f"{DRILL} -- ''", "the name of the script is empty"),
    (f"{DRILL} -- .", ". is not a file"),
    (f"{DRILL} -- bad.py", "bad.py is not valid Python"),
    (f"{DRILL} -- -m", "there is nothing to drill"),
    (f"{DRILL} -- -m ''", "'' cannot be the name of a module"),
    ("drill ok.py --kill-every 3s", "ok.py is a script, and stands where a plan would"),
    ("drill /nowhere.toml -- ok.py", "cannot read the plan /nowhere.toml"),
    ("drill plan.toml -- ok.py", "asks for 'frobnicate'"),
    ("drill . -- ok.py", "cannot read the plan ."),
    ("drill --slow x -- ok.py", "--slow is 'x'"),
    ("drill --slow 9:5x -- ok.py", "--slow, the worker is 9"),
    ("drill --corrupt brain -- ok.py", "--corrupt is 'brain'"),
    (f"{DRILL} --hosts 99 -- ok.py", "--hosts is 99"),
    (f"{DRILL} --report /nowhere/x.html -- ok.py", "there is no directory for /nowhere/x.html"),
    (f"{DRILL} --report . -- ok.py", ". is a directory"),
    (f"{DRILL} --json /nowhere/x.json -- ok.py", "there is no directory for /nowhere/x.json"),
    (f"{DRILL} --save-every x -- ok.py", "a checkpoint every 'x' makes no sense"),
    (f"{DRILL} --goodput-min nan -- ok.py", "--goodput-min is nan"),
]


@pytest.mark.parametrize(("line", "sentence"), CASES, ids=[line[:60] for line, _ in CASES])
def test_it_is_one_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOLDFAST_DIR", str(place / "home"))
    monkeypatch.delenv("HOLDFAST_LEDGER", raising=False)
    monkeypatch.setattr("holdfast.agent.starting.run_agent", lambda *_: pytest.fail("it was started"))
    before = sorted(place.rglob("*"))
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 2, said.err
    assert lines[0].startswith("holdfast: ") and sentence in lines[0]
    assert lines[1].startswith("  hint: ") and len(lines[1]) > 12
    assert len(lines[0]) < 400
    assert said.out == ""
    left = [path for path in sorted(place.rglob("*")) if path not in before and "__pycache__" not in path.parts]
    assert [path for path in left if path.name not in ("etcd", "lock")] == []


def test_options_of_a_drill_behind_its_script_are_said(place: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(place)
    assert main(["drill", "--", "ok.py", "--kill-every", "3s"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("holdfast: --kill-every comes after ok.py, so ok.py gets it")
    assert first.endswith("holdfast drill … --kill-every 3s -- ok.py …")


def test_no_event_is_like_that(place: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HOLDFAST_DIR", str(place / "home"))
    assert main(["events", "first", "--worker", "w99"]) == 0
    assert capsys.readouterr().err == "holdfast: no event of run first is like that\n"


def test_scripts_that_are_not_plain_files_of_source_are_left_to_python(tmp_path: Path) -> None:
    import py_compile
    import zipfile

    from holdfast.agent.scripts import check_module, check_script

    (tmp_path / "s.py").write_text("# -*- coding: latin-1 -*-\nprint('\xe9')\n", encoding="latin-1")
    py_compile.compile(str(tmp_path / "s.py"), cfile=str(tmp_path / "s.pyc"))
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "print(1)")
    for name in ("s.py", "s.pyc", "app.pyz"):
        check_script(str(tmp_path / name))
    for name in ("json.tool", "sys", "tests.trainings.exactness_training"):
        check_module(name)


# -- surroundings


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "said"),
    [
        (["runs"], {"HOME": "/nonexistent"}, 0, "no runs in /nonexistent/.holdfast"),
        (
            ["run", "--workers", "1", "SCRIPT"],
            {"HOME": "/proc"},
            2,
            "cannot write to the run directory /proc/.holdfast",
        ),
        (["--help"], {"COLUMNS": "20"}, 0, "COMMAND"),
        (["run", "--help"], {"COLUMNS": "1"}, 0, "--workers"),
        (["runs"], {"COLUMNS": "x", "TERM": "dumb", "LANG": "C", "PYTHONIOENCODING": "ascii"}, 0, "no runs in"),
        (["status", "é"], {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}, 2, "cannot be the name of a run"),
        (["runs"], {"HOME": "~nobody-of-that-name"}, 2, "'~/.holdfast' cannot be found"),
    ],
)
def test_odd_surroundings(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], code: int, said: str
) -> None:
    (tmp_path / "s.py").write_text("")
    environment = {name: value for name, value in os.environ.items() if name not in ("HOLDFAST_DIR", "HOME")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "holdfast",
            *(str(tmp_path / "s.py") if word == "SCRIPT" else word for word in arguments),
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**environment, "HOME": str(tmp_path), **variables},
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def nobody() -> Iterator[None]:
    """This process may do what anybody may. What commands import on their way is imported before."""
    rooms = ("agent", "agent.hosts", "agent.output", "agent.workers", "placement")
    for package in ("checkpoint", "checkpoint.storage", "cli", "events", *rooms):
        above = import_module(f"holdfast.{package}")
        for module in iter_modules(above.__path__):
            import_module(f"holdfast.{package}.{module.name}")
    os.setegid(65534)
    os.seteuid(65534)
    yield
    os.seteuid(0)
    os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become nobody")
def test_without_permissions(place: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    """As a user who may read nothing of the run, nor its script."""
    secret, home = place / "secret.py", place / "home"
    secret.write_text("")
    secret.chmod(0o600)
    for path in (place, *place.parents[:-1]):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    request.getfixturevalue("nobody")
    for arguments, code, said in (
        (["run", "--workers", "1", str(secret)], 2, f"cannot read {secret}: Permission denied"),
        (["status", "first", "--dir", str(home)], 2, "run first in"),
        (["rm", "first", "--dir", str(home)], 2, "run first in"),
        (["checkpoint", "ls", f"{home}/runs/first/checkpoints"], 2, "cannot be looked into: Permission denied"),
        (["checkpoint", "ls", "first", "--dir", str(home)], 2, "run first in"),
        (["run", "--workers", "1", "--dir", str(home), str(place / "ok.py")], 2, "cannot write to the run directory"),
    ):
        assert main(arguments) == code, arguments
        assert said in capsys.readouterr().err, arguments
