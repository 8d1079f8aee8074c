"""`holdfast checkpoint …`: what it prints, what it does, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import load, save
from holdfast.checkpoint.format.manifest import manifest_name
from holdfast.cli import checkpoint as command
from holdfast.cli.main import main

HOLDFAST = [sys.executable, "-m", "holdfast", "checkpoint"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        state = {"model": {"fc.weight": torch.full((3, 4), float(step)), "fc.bias": torch.zeros(4)}, "step": step}
        save(str(path), state, step=step, run="first try", metrics={"loss": loss})
    (path / manifest_name(30)).rename(path / "kept-aside")
    return path


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    assert not (code == 0 and err), err
    return code, out + err


def damage(place: Path, step: int) -> str:
    (part,) = (place / f"checkpoint-{step:012d}").glob("part-*")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    return part.name


def test_ls(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ran(capsys, "ls", place)
    head, *lines = text.splitlines()
    assert code == 0 and head.split() == ["step", "size", "age", "run", "metrics"]
    assert [line.split()[0] for line in lines] == ["30", "20", "10"]
    assert lines[0].endswith("not committed") and "kB" in lines[0]
    assert "first try  loss=1  " in lines[1] and lines[1].endswith("  committed")
    assert len({line.index("committed") for line in lines[1:]}) == 1, "in columns"
    (place / manifest_name(20)).write_bytes(b"{}")
    assert "damaged manifest" in ran(capsys, "ls", place)[1].splitlines()[2]


def test_ls_for_programs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(str(place), {}, step=40, metrics={"loss": float("nan")})
    (place / manifest_name(20)).write_bytes(b"{}")
    code, text = ran(capsys, "ls", place, "--json")
    rows = json.loads(text, parse_constant=pytest.fail)
    assert code == 0 and [(row["step"], row["committed"]) for row in rows] == [
        (40, True),
        (30, False),
        (20, True),
        (10, True),
    ]
    assert rows[0]["metrics"] == {"loss": "nan"} and "manifest" in rows[2]["damage"]
    assert rows[3]["metrics"] == {"loss": 3.0} and abs(rows[3]["created_s"] - time.time()) < 600
    (place.parent / "none").mkdir()
    code, text = ran(capsys, "ls", place.parent / "none")
    assert (code, text) == (0, f"no checkpoints in {place.parent / 'none'}\n")
    assert json.loads(ran(capsys, "ls", place.parent / "none", "--json")[1]) == []


def test_show(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ran(capsys, "show", place)
    assert code == 0 and text.startswith("step 20 of run first try, ") and "in 1 part, 2 tensors" in text
    assert "metrics: loss=1\n" in text
    assert "  model/fc.weight  float32  3×4  48 B\n  model/fc.bias    float32  4    16 B\n" in text
    code, text = ran(capsys, "show", place, "--step", 10, "--json")
    about = json.loads(text)
    assert code == 0 and about["step"] == 10 and about["run"] == "first try" and len(about["parts"]) == 1
    assert about["tensors"][0] == {
        "name": "model/fc.weight",
        "dtype": "float32",
        "shape": [3, 4],
        "order": None,
        "bytes": 48,
    }


def test_verify(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "verify", place) == (0, "step 20: good\n")
    name = damage(place, 10)
    assert ran(capsys, "verify", place) == (0, "step 20: good\n")
    found = f"checkpoint-000000000010/{name}: the bytes of model/fc.bias are not those that were written"
    assert ran(capsys, "verify", place, "--step", 10) == (1, f"step 10: damaged\n  {found}\n")
    assert ran(capsys, "verify", place, "--all") == (1, f"step 20: good\nstep 10: damaged\n  {found}\n")


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x"])
def test_export_and_import(place: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    form = ["--as", "dcp"] if name == "x" else []
    code, text = ran(capsys, "export", place, "--to", tmp_path / name, *form)
    assert (code, text) == (0, f"wrote all of step 20 to {tmp_path / name}\n")
    code, text = ran(capsys, "import", place, "--from", tmp_path / name, "--run", "second")
    assert code == 2 and "already has a checkpoint of step 20" in text, "the step is that of what was exported"
    code, text = ran(capsys, "import", place, "--from", tmp_path / name, "--run", "second", "--step", 31)
    assert (code, text) == (0, f"made the checkpoint of step 31 from {tmp_path / name}\n")
    assert str(load(str(place), step=31)) == str(load(str(place), step=20))
    code, text = ran(
        capsys, "export", place, "--to", tmp_path / f"w{name}", *form, "--only", "parameters", "--step", 10
    )
    assert (code, text) == (0, f"wrote parameters of step 10 to {tmp_path / f'w{name}'}\n")
    assert ran(capsys, "import", tmp_path / "new", "--from", tmp_path / f"w{name}", "--step", 7)[0] == 0
    assert str(load(str(tmp_path / "new"), step=7)) == str(load(str(place), step=10)["model"])


def test_export_of_what_is_damaged(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(place, 20)
    code, text = ran(capsys, "export", place, "--to", tmp_path / "x.pt")
    assert code == 1 and "the bytes of model/fc.bias are not those that were written" in text
    assert not (tmp_path / "x.pt").exists()


def test_prune(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "kept-aside").rename(place / manifest_name(30))
    save(str(place), {}, step=5)
    (place / manifest_name(5)).unlink()
    words = ("prune", place, "--keep-last", 1, "--keep-best", "loss:min")
    assert ran(capsys, *words, "--dry-run") == (0, "would delete 5, 10\n")
    assert ran(capsys, *words) == (0, "deleted 5, 10\n")
    assert ran(capsys, *words) == (0, "deleted nothing\n")
    assert [row["step"] for row in json.loads(ran(capsys, "ls", place, "--json")[1])] == [30, 20]


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["ls", "nowhere://x"],
        ["show", "none"],
        ["show", "HERE", "--step", "11"],
        ["show", "HERE", "--step", "30"],
        ["show", "HERE", "--step", "x"],
        ["verify", "none"],
        ["verify", "HERE", "--all", "--step", "20"],
        ["export", "HERE"],
        ["export", "HERE", "--to", "x"],
        ["export", "HERE", "--to", "none/x.pt"],
        ["export", "HERE", "--to", "there.pt"],
        ["export", "HERE", "--to", "x.pt", "--as", "zip"],
        ["import", "HERE", "--from", "none.pt"],
        ["import", "HERE", "--from", "there.pt"],
        ["import", "HERE", "--from", "good.pt", "--step", "20"],
        ["import", "HERE", "--from", "good.pt", "--step", "-1"],
        ["prune", "HERE"],
        ["prune", "HERE", "--keep-last", "0"],
        ["prune", "HERE", "--keep-last", "1", "--keep-best", "loss"],
        ["prune", "none", "--keep-last", "1"],
    ],
    ids=" ".join,
)
def test_bad_input(
    place: Path,
    tmp_path: Path,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.pt").write_text("something")
    torch.save({"a": torch.ones(1)}, tmp_path / "good.pt")
    before = sorted(tmp_path.rglob("*"))
    code, text = ran(capsys, *(str(place) if word == "HERE" else word for word in words))
    first, second = text.splitlines()
    assert code == 2 and first.startswith("holdfast: ") and second.startswith("  hint: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_it_is_one_of_the_commands() -> None:
    done = subprocess.run([*HOLDFAST, "--help"], capture_output=True, text=True, timeout=60, check=True)
    for action in ("ls", "show", "verify", "export", "import", "prune"):
        assert f"\n    {action} " in done.stdout


# -- the bar


def test_a_bar_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    now = 100.0
    monkeypatch.setattr(command.time, "monotonic", lambda: now)
    with command._bar("reading", out) as progress:
        progress(1, 4 * 10**9)
        assert out.getvalue() == "", "what is quick needs no bar"
        now = 102.0
        progress(10**9, 4 * 10**9)
        now = 102.01
        progress(2 * 10**9, 4 * 10**9)
    assert out.getvalue() == ("\r\x1b[2Kreading [#######.......................] 1 GB of 4 GB, 500 MB/s\r\x1b[2K"), (
        "drawn once, and gone at the end"
    )
    plain = io.StringIO()
    with command._bar("reading", plain) as progress:
        now = 200.0
        progress(1, 2)
    assert plain.getvalue() == ""


def test_a_terminal_gets_the_same_words(place: Path) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        with os.fdopen(theirs, "wb") as end:
            done = subprocess.run(
                [*HOLDFAST, "verify", str(place)], stdout=subprocess.PIPE, stderr=end, timeout=60, check=True
            )
        assert done.stdout == b"step 20: good\n"
        drawn = b""
        with pytest.raises(OSError):  # all of it was read, and nobody is left who could write
            while True:
                drawn += terminal.read(4096)
        assert not drawn or drawn.endswith(b"\r\x1b[2K"), "what a slow machine drew is gone"
