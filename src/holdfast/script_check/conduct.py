"""Runs a check: starts both processes, waits for them, and says what came of it. See the package."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from holdfast.core.errors import EXIT_BAD_INPUT, ConfigError
from holdfast.placement.environment import process_variables
from holdfast.placement.launched import without_launch
from holdfast.script_check.judging import CheckVerdict, Script, judge
from holdfast.script_check.notes import FIRST, JOIN, JOINER, PLACE, Found, Task, read_notes

STEPS = 4
STEPS_MAX = 1000
LIMIT_S = 300.0
LOOK_S = 0.02
LINES_SHOWN = 20
DIFFERS = 1


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What `holdfast check` was asked for."""

    words: tuple[str, ...]  # a script, or -m and a module, and its arguments
    steps: int = STEPS
    limit_s: float = LIMIT_S
    json: Path | None = None

    def validate(self) -> CheckRequest:
        if not self.words or self.words == ("-m",):
            raise ConfigError("there is nothing to check", hint="name a script: holdfast check train.py")
        if self.words[0] != "-m" and not Path(self.words[0]).is_file():
            raise ConfigError(f"there is no script {self.words[0]}", hint="name a Python file, or -m and a module")
        if not 2 <= self.steps <= STEPS_MAX:
            hint = f"give 2 to {STEPS_MAX}: a second process joins halfway"
            raise ConfigError(f"--steps is {self.steps}", hint=hint)
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise ConfigError(f"there is no directory for {self.json}", hint="make it first, or name another place")
        return self


def check_script(request: CheckRequest) -> int:
    """The exit code: 0 exact, 1 something differs, 2 the script cannot be checked."""
    request.validate()
    directory = Path(tempfile.mkdtemp(prefix="holdfast-check-"))
    try:
        verdict = _checked(request, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if isinstance(verdict, str):
        print(verdict, file=sys.stderr)
        return EXIT_BAD_INPUT
    if request.json is not None:
        request.json.write_text(json.dumps({"exact": verdict.found is None, **asdict(verdict)}, indent=1) + "\n")
    if verdict.found is None:
        print(verdict.text())
        return 0
    print(f"holdfast: {verdict.text()}", file=sys.stderr)
    return DIFFERS


def first_look(words: Sequence[str], limit_s: float) -> str:
    """What a check says of a script that is about to be drilled. It judges nothing there: the drill does."""
    request = CheckRequest(words=tuple(words), limit_s=limit_s)
    with tempfile.TemporaryDirectory(prefix="holdfast-check-") as directory:
        verdict = _checked(request, Path(directory))
    if isinstance(verdict, CheckVerdict):
        return verdict.text()
    return f"not checked: {verdict.removeprefix('holdfast: ').splitlines()[0]}" if verdict else "not checked"


class CheckProcess:
    """One of the two. Its output is kept in a file."""

    def __init__(self, task: Task, request: CheckRequest) -> None:
        self.task = task
        self.log = task.directory / f"{task.role}.log"
        variables = without_launch(os.environ)
        variables |= {**process_variables(), PLACE: task.encode()}
        command = [
            sys.executable,
            "-m",
            "holdfast.placement.bootstrap",
            "-m",
            "holdfast.script_check.rig",
            *request.words,
        ]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        """With its loader processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_words(self) -> str:
        """Holdfast's own sentence if there is one, else the last lines of what was printed."""
        lines = self.log.read_text(errors="replace").splitlines()
        for number in reversed(range(len(lines))):
            if lines[number].startswith("holdfast: "):
                return "\n".join(lines[number:])
        return "\n".join(lines[-LINES_SHOWN:])


def _checked(request: CheckRequest, directory: Path) -> CheckVerdict | str:
    """What came of it; text: why there is nothing to say."""
    join_at = request.steps // 2
    deadline = time.monotonic() + request.limit_s
    first = CheckProcess(Task(directory, FIRST, request.steps, join_at, os.getpid()), request)
    try:
        joiner = CheckProcess(Task(directory, JOINER, request.steps, join_at, os.getpid()), request)
        try:
            _wait_for(first, deadline)
            trouble = _trouble_of(first, request)
            if trouble:
                return trouble
            hands_over = first.task.snapshot.exists() and read_notes(first.task.notes).found is None
            if hands_over:
                _wait_for(joiner, deadline)
            return _judged(first, joiner, request, joined=hands_over)
        finally:
            joiner.end()
    finally:
        first.end()


def _judged(first: CheckProcess, joiner: CheckProcess, request: CheckRequest, *, joined: bool) -> CheckVerdict:
    mine, theirs = read_notes(first.task.notes), read_notes(joiner.task.notes)
    verdict = judge(mine, theirs, _script(request.words))
    if verdict.found is not None:
        return verdict
    at = first.task.join_at
    if not joined:
        return replace(verdict, left_out=f"no process joined: the script ended before step {at + 1}")
    if joiner.code is None or joiner.code or not theirs.shards:
        how = "did not get through its steps" if joiner.code is None else f"ended with exit code {joiner.code}"
        if joiner.code == 0:
            how = "ended without a step"
        words = joiner.last_words().removeprefix("holdfast: ")
        return replace(
            verdict,
            found=Found(JOIN, "a process that joined", at),
            sentence=f"a process that joined before step {at} {how}, and the one that began did not",
            hint=f"its last words: {words}" if words else "it said nothing",
        )
    return verdict


def _trouble_of(first: CheckProcess, request: CheckRequest) -> str:
    """Why the script itself does not get through its first steps; empty: it does."""
    noted = read_notes(first.task.notes)
    if noted.found is not None or noted.over:
        return ""
    if first.code is None:
        late = f"the script did not get through {request.steps} steps in {request.limit_s:g} s"
        return f"holdfast: {late}\n  hint: give the script a smaller model or batch, or --limit with more seconds"
    words = first.last_words()
    if first.code:
        return (
            words
            if words.startswith("holdfast: ")
            else f"{words}\nholdfast: the script itself fails (exit code {first.code})"
        )
    if not noted.joined:
        return "holdfast: the script did not call holdfast.join\n  hint: see docs/how-to/convert-a-script.md"
    if not noted.shards:
        return "holdfast: the script ended without a step\n  hint: let it train at least one: for step in run.steps(…):"
    return ""


def _wait_for(process: CheckProcess, deadline: float) -> None:
    while process.code is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _script(words: Sequence[str]) -> Script:
    if words[0] == "-m":
        return Script()
    path = Path(words[0])
    return Script(path.name, path.read_text(errors="replace"))
