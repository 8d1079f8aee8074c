"""The edges of a command: Ctrl-C before anything is imported, streams that are closed, full, or read by nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "holdfast"]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "HOLDFAST_DIR": str(tmp_path / "home"), **more}


def test_an_early_interrupt_has_no_traceback(tmp_path: Path) -> None:
    """The signal comes while the command imports what it needs: sent by the first module that it looks for."""
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == os.environ['INTERRUPTED_AT']: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from holdfast.cli.entering import entry\n"
        "entry()\n"
    )
    for module in ("holdfast.cli.main", "argparse", "holdfast.cli.parser", "holdfast.core.errors"):
        done = subprocess.run(
            [sys.executable, "-c", code, "runs"],
            capture_output=True,
            text=True,
            env=environment(tmp_path, INTERRUPTED_AT=module),
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (130, ""), module


def test_an_interrupt_in_a_command_has_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.cli.main import main

    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.runs._runs", interrupted)
    assert main(["runs", "--dir", str(tmp_path)]) == 130


@pytest.mark.parametrize("arguments", [["--help"], ["runs"], ["run", "--help"]])
def test_a_pipe_that_nobody_reads(tmp_path: Path, arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(tmp_path),
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # argparse passes over it


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_on_a_full_disk(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "runs"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(tmp_path), timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.startswith("holdfast: ") and done.stderr.endswith(": No space left on device\n")


def test_streams_that_are_closed(tmp_path: Path) -> None:
    for closed in ((1,), (2,), (0, 1, 2)):

        def close(numbers: tuple[int, ...] = closed) -> None:
            for number in numbers:
                os.close(number)

        streams = {"stdout": None, "stderr": None} if len(closed) > 1 else {"stdout": -1, "stderr": -1}
        done = subprocess.run(
            [*COMMAND, "status", "nowhere"],
            **streams,
            text=True,
            env=environment(tmp_path),
            preexec_fn=close,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert "Traceback" not in (done.stderr or "")


def test_words_that_no_encoding_has(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).mkdir()
    done = subprocess.run(
        [*COMMAND, "runs", "--dir", str(tmp_path / name)],
        capture_output=True,
        env=environment(tmp_path, PYTHONIOENCODING="ascii"),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"no runs in" in done.stdout
