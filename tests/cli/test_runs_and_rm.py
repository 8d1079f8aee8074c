"""`holdfast runs`, `rm`, `logs` and `checkpoint RUN` on runs that are over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
from past_runs import past_run

from holdfast.checkpoint.format.owner import Owner, create_owner, newest_owner
from holdfast.checkpoint.host_memory import place as memory_place
from holdfast.checkpoint.host_memory.place import OWNER, place_mark
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.cli import remove
from holdfast.cli.main import main
from holdfast.core.errors import LedgerUnavailable
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import RUN_DIR, WORKER


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs a command; gives (exit code, what it printed, what it complained of)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        got = capsys.readouterr()
        return code, got.out, got.err

    return call


# -- runs


def test_every_way_a_run_can_be(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    for age, how in enumerate(("finished", "stopped", "failed", "abandoned", "nothing")):
        past_run(home, how, how=how, age_s=3600.0 * (10 - age), saved=(5,) if how == "stopped" else ())
    code, out, _ = said("runs")
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split() == ["run", "state", "step", "started", "last", "change", "size"]
    cells = [re.split(r" {2,}", row) for row in rows]
    states = {"nothing": "abandoned"}
    assert [(row[0], row[1]) for row in cells] == [
        (how, states.get(how, how)) for how in ("finished", "stopped", "failed", "abandoned", "nothing")
    ]
    assert cells[0][2] == "10/10" and cells[1][2] == "7/10"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", cells[0][3]) and cells[0][4] == "10 h ago"
    assert cells[4][3] == "-"

    rows = json.loads(said("runs", "--json")[1])
    stopped = next(row for row in rows if row["run"] == "stopped")
    assert stopped["state"] == "stopped" and stopped["bytes"] > 0 and stopped["memory_bytes"] == 0
    assert stopped["checkpoint_uri"].endswith("/stopped/checkpoints")
    assert stopped["started_s"] < stopped["changed_s"]
    assert json.loads(said("status", "--json", "failed")[1])["state"] == "failed"
    assert "abandoned" in said("status", "abandoned")[1]


def test_no_runs_and_a_name_that_is_nearly_right(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    assert said("runs", "--json")[1] == "[]\n"
    past_run(home, "digits")
    code, _, err = said("status", "digit")
    assert (code, err.splitlines()[1]) == (2, "  hint: did you mean digits?")


# -- rm


def test_a_run_goes_and_its_checkpoints_stay_until_asked_for(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    run = past_run(home, "r", saved=(5, 10))
    code, out, _ = said("rm", "r")
    assert code == 0 and out.startswith("deleted run r, ") and "its checkpoints stay in" in out
    assert [path.name for path in run.path.iterdir()] == ["checkpoints"]
    assert said("runs")[1].startswith("no runs in")
    assert "committed" in said("checkpoint", "ls", "r")[1]  # by the name still
    code, _, err = said("rm", "r", "--checkpoints")
    assert code == 2 and "nobody is there to be asked" in err and "add --yes" in err
    assert said("rm", "r", "--checkpoints", "--yes")[0] == 0
    assert not run.path.exists() and not list((home / "runs").iterdir())
    assert said("rm", "r")[0] == 2


def test_checkpoints_elsewhere_go_only_if_they_are_the_runs_own(home: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    place = str(tmp_path / "shared")
    past_run(home, "a", saved=(1, 2), checkpoint=place)
    past_run(home, "b", saved=(3,), checkpoint=place)
    assert said("rm", "a")[0] == 0
    assert len(list(Path(place).iterdir())) == 3  # without being asked, nothing
    past_run(home, "a", checkpoint=place)
    code, out, _ = said("rm", "a", "--checkpoints", "--yes")
    assert code == 0 and f"2 checkpoints deleted in {place}, 1 checkpoint of others stay there" in out
    assert [row["run"] for row in json.loads(said("checkpoint", "ls", place, "--json")[1])] == ["b"]


def test_a_place_is_given_back(home: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    """Else the next run that comes to the place would be told that it belongs to one that nobody has any more."""
    place = tmp_path / "place"
    past_run(home, "a", saved=(1,), checkpoint=str(place))
    with closing(open_storage(str(place))) as storage:
        assert create_owner(storage, 1, Owner(run="a", id="1"))
    assert said("rm", "a", "--checkpoints", "--yes")[0] == 0
    assert not place.exists()
    for name in ("a", "b"):
        past_run(home, name, saved=(1 + (name == "b"),), checkpoint=str(place))
    with closing(open_storage(str(place))) as storage:
        assert create_owner(storage, 1, Owner(run="a", id="1"))
        assert said("rm", "a", "--checkpoints", "--yes")[0] == 0
        _, owner = newest_owner(storage)
        assert owner is not None and owner.released
        assert said("rm", "b", "--checkpoints", "--yes")[0] == 0  # the place is not this one's
        assert newest_owner(storage)[1] is not None


def test_old_ones_only_and_only_said(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    past_run(home, "old", age_s=8 * 86400.0)
    past_run(home, "older", age_s=30 * 86400.0)
    past_run(home, "new")
    assert said("rm", "--older-than", "7d", "--dry-run")[1].splitlines() == [
        "would delete run old",
        "would delete run older",
    ]
    assert said("rm", "new", "--older-than", "7d")[1].startswith("no run in ")
    assert said("rm", "--older-than", "7d")[0] == 0
    assert [path.name for path in (home / "runs").iterdir()] == ["new"]
    assert said("rm", "--older-than", "7d")[1].startswith("no run in ")


def test_a_run_that_lives_is_refused_and_others_with_it(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    other, run = past_run(home, "other"), past_run(home, "r", how="abandoned")
    with run.locked():
        code, _, err = said("rm", "other", "r")
        assert code == 2
        assert err.splitlines() == [
            f"holdfast: run r is running, and is not deleted: its agent is process {os.getpid()}",
            "  hint: `holdfast stop r` first",
        ]
        assert said("rm", "--older-than", "0s")[0] == 0  # takes what is over, and passes over what is not
    assert run.exists() and not other.exists()
    variables = {**os.environ, RUN_DIR: str(run.path), WORKER: "w0.1"}
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, env=variables, start_new_session=True)
    try:
        assert "its workers train without an agent" in said("rm", "r")[2]
        assert said("runs")[1].splitlines()[1].split()[1] == "unattended"
    finally:
        worker.kill()
        worker.communicate()


def test_memory_goes_too_and_counts_as_a_checkpoint(
    home: Path,
    tmp_path: Path,
    said,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shm = tmp_path / "shm"
    monkeypatch.setattr(memory_place.memory_of, "__kwdefaults__", {"parent": shm})
    run = past_run(home, "r", how="stopped")
    root = shm / f"holdfast-{os.getuid()}-0123"
    (root / "checkpoint-000000000042").mkdir(parents=True)
    (root / OWNER).write_text(json.dumps({"place": place_mark(), "run_directory": str(run.path)}))
    (root / "checkpoint-000000000042" / "manifest.json").write_text("{}")
    assert "in memory" in said("runs")[1]
    code, _, err = said("rm", "r")
    assert code == 2 and "its snapshot of step 42 in this host's memory" in err
    assert root.exists() and run.exists()
    assert said("rm", "r", "--yes")[0] == 0
    assert not root.exists() and not run.exists()


@pytest.mark.parametrize("answer", ["n", "", "y"])
def test_on_a_terminal_it_asks(home: Path, said, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:  # type: ignore[no-untyped-def]
    run = past_run(home, "r", saved=(5,))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    code, out, err = said("rm", "r", "--checkpoints")
    assert "Nothing brings them back." in out
    assert (code, run.exists()) == ((0, False) if answer == "y" else (2, True))
    assert answer == "y" or "nothing was deleted" in err


def test_what_a_killed_rm_has_left_is_cleared_up(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    past_run(home, "r")
    left = home / "runs" / f"{remove.DELETING}999999999-x"
    left.mkdir()
    mine = home / "runs" / f"{remove.DELETING}{os.getppid()}-y"
    mine.mkdir()
    assert said("rm", "r")[0] == 0
    assert not left.exists() and mine.exists()


def test_other_hosts_of_a_run_may_still_train(
    home: Path,
    tmp_path: Path,
    said,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody answers at that ledger: the checkpoints, which are those of all hosts, are not touched."""

    def away(run: RunDirectory) -> NoReturn:
        raise LedgerUnavailable("nobody answers at 127.0.0.1:1")

    monkeypatch.setattr(remove, "ledger_of", away)
    place = tmp_path / "shared"
    past_run(home, "r", host="a", saved=(1,), checkpoint=str(place), ledger="etcd://127.0.0.1:1", socket_dir="/nowhere")
    code, _, err = said("rm", "r", "--checkpoints", "--yes")
    assert code == 2 and "whether other hosts still train run r cannot be known" in err
    assert place.exists()
    code, out, _ = said("rm", "r@a")
    assert code == 0 and "`holdfast ledger forget r`" in out


# -- checkpoint RUN


def test_checkpoints_by_the_name_of_their_run(home: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    past_run(home, "r", saved=(5, 10))
    past_run(home, "elsewhere", saved=(3,), checkpoint=f"file://{tmp_path}/e")
    past_run(home, "none", checkpoint="none")
    past_run(home, "hosts", host="h", ledger="etcd://a:1")
    past_run(home, "empty")
    assert [row["step"] for row in json.loads(said("checkpoint", "ls", "r", "--json")[1])] == [10, 5]
    assert said("checkpoint", "verify", "r", "--all")[1] == "step 10: good\nstep 5: good\n"
    assert said("checkpoint", "show", "r", "--step", "5")[1].startswith("step 5 of run r")
    assert said("checkpoint", "show", "elsewhere")[1].startswith("step 3 of run elsewhere")
    assert said("checkpoint", "export", "r", "--to", str(tmp_path / "w.safetensors"))[0] == 0
    assert said("checkpoint", "prune", "r", "--keep-last", "1")[1] == "deleted 5\n"
    for name in ("none", "hosts"):
        code, _, err = said("checkpoint", "ls", name)
        assert code == 2 and f"run {name} keeps no checkpoints" in err


def test_a_name_that_is_both_is_the_runs(home: Path, tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    past_run(home, "both", saved=(5,))
    (tmp_path / "both").mkdir()
    assert [row["step"] for row in json.loads(said("checkpoint", "ls", "both", "--json")[1])] == [5]
    assert said("checkpoint", "ls", "./both")[1] == "no checkpoints in ./both\n"
    assert said("checkpoint", "ls", str(tmp_path / "both"))[0] == 0


@pytest.mark.parametrize(
    ("place", "sentence", "hint"),
    [
        ("nowhere", "there is neither a run nowhere in", "holdfast runs"),
        ("./nowhere", "there is no directory nowhere", "check the path"),
        ("/nowhere/at/all", "there is no directory /nowhere/at/all", "check the path"),
        ("file:///nowhere", "there is no directory /nowhere", "check the path"),
        ("s3//bucket", "s3//bucket is almost a URI", "write s3://bucket"),
        ("file.txt", "file.txt is a file", "name the directory"),
        ("", "is empty", "does a shell variable have no value?"),
    ],
)
def test_a_place_that_is_not_there(tmp_path: Path, said, place: str, sentence: str, hint: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file.txt").write_text("")
    for action in (["ls"], ["show"], ["verify"], ["prune", "--keep-last", "1"], ["export", "--to", "x.pt"]):
        code, out, err = said("checkpoint", action[0], place, *action[1:])
        assert (code, out) == (2, "")
        assert sentence in err.splitlines()[0] and hint in err.splitlines()[1]


# -- logs


def test_logs(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    run = past_run(home, "r")
    (run.logs / "w1.1.log").write_text("one\ntwo")
    (run.logs / "w1.2.log").write_text("three\n")
    (run.logs / "imports.log").write_text("")
    assert said("logs", "r", "w1.1")[1] == "one\ntwo\n"
    assert said("logs", "r", "w1")[1] == "w1.1 | one\nw1.1 | two\nw1.2 | three\n"
    assert len(said("logs", "r")[1].splitlines()) == 5
    assert said("logs", "r", "--tail", "1")[1].count("\n") == 1
    assert said("logs", "r", "--tail", "0")[:2] == (0, "")
    assert said("logs", "r", "--follow", "w1.2")[1] == "three\n"  # it is over
    for arguments, sentence, hint in (
        (("r", "w7"), "run r has no output of a worker 'w7'", "there are w0.1, w1.1, w1.2"),
        (("r", "agent"), "run r has no output of a worker 'agent'", "`holdfast events r`"),
        (("r", "--tail", "-1"), "--tail is -1", "from 0 to"),
        (("nowhere",), "there is no run nowhere", "holdfast runs"),
    ):
        code, _, err = said("logs", *arguments)
        assert code == 2 and sentence in err and hint in err


def test_a_run_that_printed_nothing(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    (past_run(home, "r").logs / "w0.1.log").unlink()
    assert said("logs", "r") == (0, "", "holdfast: the workers of run r have printed nothing\n")


def test_following_sees_new_workers_and_ends_with_the_run(home: Path) -> None:
    run = past_run(home, "r", how="abandoned")
    command = [sys.executable, "-m", "holdfast", "logs", "r", "--follow", "--tail", "1"]
    with run.locked():
        follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert follower.stdout is not None
            assert follower.stdout.readline() == "w0.1 | world\n"
            (run.logs / "w1.1.log").write_text("new\nunfinished")
            assert follower.stdout.readline() == "w1.1 | new\n"
        except BaseException:
            follower.send_signal(signal.SIGKILL)
            raise
    out, _ = follower.communicate(timeout=60)
    assert out == "w1.1 | unfinished\n"
    assert follower.returncode == 0


def test_names_of_parts_on_several_hosts(home: Path, said) -> None:  # type: ignore[no-untyped-def]
    for host in ("a", "b"):
        past_run(home, "r", host=host)
    assert "name one of them" in said("logs", "r")[2]
    assert said("logs", "r@a", "w0.1")[0] == 0
    assert "there is no run r of host c" in said("logs", "r@c")[2]
    assert said("rm", "r@a")[0] == 0
    assert not RunDirectory(home, "r", "a").exists() and RunDirectory(home, "r", "b").exists()
