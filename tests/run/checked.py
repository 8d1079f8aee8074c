"""A check of a script that is a function: both processes are forked from this one, without an import of torch for each.

What a planted fault takes out of Holdfast is taken out before the fork, in both.
"""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.script_check.judging import CheckVerdict, Script, judge
from holdfast.script_check.notes import FIRST, JOINER, Task, read_notes
from holdfast.script_check.rig import check_joins

DEADLINE_S = 60.0


class Refused(Exception):
    """The script did not get through: the sentence."""


def checked(script: Callable[[], Any], *, steps: int = 4, join_at: int = 2) -> CheckVerdict:
    """What a check says of a function that joins and trains."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-checked-"))
    children = []
    try:
        tasks = [Task(directory, role, steps, join_at) for role in (FIRST, JOINER)]
        children = [_fork(task, script) for task in tasks]
        _wait(children[0])
        _say_if_it_failed(tasks[0])
        if tasks[0].snapshot.exists() and read_notes(tasks[0].notes).found is None:
            _wait(children[1])
        _say_if_it_failed(tasks[1])
        source = inspect.getsource(inspect.getmodule(script))  # type: ignore[arg-type]
        return judge(read_notes(tasks[0].notes), read_notes(tasks[1].notes), Script("script.py", source))
    finally:
        for child in children:
            _end(child)
        shutil.rmtree(directory)


def _fork(task: Task, script: Callable[[], Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    warnings.simplefilter("ignore")
    try:
        check_joins(task)
        script()
        code = 0
    except BaseException as error:
        text = str(error) if isinstance(error, HoldfastError) else traceback.format_exc()
        (task.directory / f"{task.role}.error").write_text(text)
    os._exit(code)


def _say_if_it_failed(task: Task) -> None:
    error = task.directory / f"{task.role}.error"
    if error.exists():
        raise Refused(f"{task.role}: {error.read_text()}")


def _wait(child: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while _is_alive(child):
        assert time.monotonic() < deadline, "a process of the check did not end"
        time.sleep(0.005)


def _is_alive(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _end(child: int) -> None:
    if _is_alive(child):
        os.kill(child, 9)
    os.waitpid(child, 0)
