"""Typos in commands and options: the sentence names the word, and the hint names the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.cli.parser import nearest

KNOWING = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--save-every')\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('ran')\n")
    (tmp_path / "knowing.py").write_text(KNOWING)
    (tmp_path / "train").write_text("print('ran')\n")
    return tmp_path / "home"


def refused(capsys: pytest.CaptureFixture[str], line: str) -> tuple[str, str]:
    """(sentence, hint) of a command that ends with exit code 2."""
    assert main(line.split()) == 2, line
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, said
    return said[0].removeprefix("holdfast: "), said[1].removeprefix("  hint: ")


@pytest.mark.parametrize(
    ("line", "sentence", "hint"),
    [
        ("run --worker 2 train.py", "holdfast run has no option --worker", "did you mean --workers?"),
        ("run --Workers 2 train.py", "holdfast run has no option --Workers", "did you mean --workers?"),
        ("run --workers 2 --save_every 3 train.py", "no option --save_every", "did you mean --save-every?"),
        ("run --workers 2 --chekpoint=x train.py", "no option --chekpoint", "did you mean --checkpoint?"),
        ("run --nproc_per_node 2 train.py", "no option --nproc_per_node", "did you mean --workers?"),
        ("run -n 2 train.py", "no option -n", "did you mean --workers?"),
        ("run --workers 2 --zzz train.py", "no option --zzz", "see `holdfast run --help`"),
        ("run --work 2 train.py", "no option --work", "did you mean --workers?"),  # abbreviations are none
        ("events r --folow", "holdfast events has no option --folow", "did you mean --follow?"),
        ("drill --kill-evry 3s -- train.py", "no option --kill-evry", "did you mean --kill-every?"),
        ("checkpoint ls x --jsno", "holdfast checkpoint ls has no option --jsno", "did you mean --json?"),
        ("train.py", "there is no command holdfast train.py", "holdfast run --workers 2 train.py"),
        ("help", "there is no command holdfast help", "see `holdfast --help`"),
        ("ps", "there is no command holdfast ps", "did you mean runs?"),
        ("delete r", "there is no command holdfast delete", "did you mean rm?"),
        ("checkpoint list r", "there is no command holdfast checkpoint list", "did you mean ls?"),
        ("--dir x runs", "holdfast has no option --dir", "it comes after the command: holdfast run --dir"),
        ("--verison", "holdfast has no option --verison", "did you mean --version?"),
        ("statsu r", "there is no command holdfast statsu", "did you mean status?"),
        ("checkpoint lst x", "there is no command holdfast checkpoint lst", "did you mean ls?"),
        ("keys crate x", "there is no command holdfast keys crate", "did you mean create?"),
        ("run --workers 2 --path shared_memory train.py", "--path is 'shared_memory'", "did you mean shared-memory?"),
        ("run --workers", "--workers needs a value", "see `holdfast run --help`"),
        ("run --workers 2.5 train.py", "--workers is '2.5', which is not a whole number", "--help"),
        ("run --workers 2 --lease long train.py", "--lease is 'long', which is not a time", "2 s suits most runs"),
        ("events r --json=yes", "--json takes no value", "--help"),
        ("scale", "RUN and N are missing", "see `holdfast scale --help`"),
        ("status", "RUN is missing", "see `holdfast status --help`"),
        ("status r s t", "there is too much in the command: s t", "--help"),
    ],
)
def test_a_wrong_word_is_named_with_the_right_one(
    capsys: pytest.CaptureFixture[str], line: str, sentence: str, hint: str
) -> None:
    said = refused(capsys, line)
    assert sentence in said[0]
    assert hint in said[1]


@pytest.mark.parametrize("option", ["--workers 3", "--workers=3", "--worker 3", "--nproc-per-node 3"])
def test_the_number_of_workers_behind_the_script(capsys: pytest.CaptureFixture[str], option: str) -> None:
    sentence, hint = refused(capsys, f"run train.py {option}")
    assert sentence.startswith(f"{option.split('=')[0].split()[0]} comes after train.py, so train.py gets it")
    assert hint == "options of holdfast come before the script: holdfast run --workers 3 train.py"


def test_no_number_of_workers_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    sentence, hint = refused(capsys, "run train.py")
    assert sentence == "--workers is missing"
    assert hint == "say how many workers train: holdfast run --workers 2 train.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train.py --save-every 10",
            ["--save-every comes after train.py, so train.py gets it; if it is meant for holdfast: "],
        ),
        ("train.py --save-evry=10", ["--save-evry comes after train.py"]),
        ("train.py --epochs 3 --lr 0.1 -x", []),  # the script's own
        ("train.py -- --save-every 10", []),
        ("knowing.py --save-every 10", []),  # it has an option of that name
        ("train --save-every 10", []),  # a script by another name: who knows
        ("-m json.tool --save-every 10", ["--save-every comes after json.tool"]),
        ("-m json.tool --save-evry 10", []),  # nobody knows what a module takes
    ],
)
def test_an_option_behind_the_script_is_passed_on_and_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, said: list[str]
) -> None:
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        "holdfast.agent.starting.run_agent", lambda settings, home: given.append(settings.arguments) or 0
    )
    assert main(["run", "--workers", "2", *words.split()]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))
    assert given == [tuple(words.removeprefix("-m ").split()[1:])]


def test_an_option_with_an_optional_value_leaves_the_script_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--metrics train.py --epochs 3` was refused: --epochs was taken for ours."""
    given: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(
        "holdfast.agent.starting.run_agent",
        lambda settings, home: given.append((settings.script, settings.arguments)) or 0,
    )
    monkeypatch.setattr("holdfast.cli.main._shown_beside", lambda *_: ())
    for option in (["--metrics"], ["--metrics", "127.0.0.1:9000"]):
        assert main(["run", "--workers", "2", *option, "train.py", "--epochs", "3"]) == 0
    assert given == [("train.py", ("--epochs", "3"))] * 2


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["run", "--help"]) == 0
    assert "--workers" in capsys.readouterr().out


def test_nothing_near_is_not_guessed() -> None:
    assert nearest("xyz", ["run", "status"]) == ""
    assert nearest("", ["run", "status"]) == ""
