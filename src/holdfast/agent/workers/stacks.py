"""What a worker that hangs was doing: the Python stacks of all its threads, as text.

A process that can still take a signal is asked to write them itself (faulthandler, which needs no lock and no
interpreter). Of one that is stopped, or does not answer, py-spy reads them from outside, if it is installed and the
kernel allows it. Else we say so, with what /proc knows. Everything has a deadline: others wait for the verdict.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.detection.pages import Note
from holdfast.placement.proc import catches, children, process_started, process_state

ANSWER_S = 1.0
LOOK_S = 0.02
PY_SPY_S = 1.5
STACKS_BYTES_MAX = 16 * 1024
ANSWER_BYTES_MAX = 1024 * 1024
CHILDREN_MAX = 16
STOPPED = ("T", "t")


def collect(note: Note, *, thread: int) -> str:
    """`thread` is the one that trains; it comes first. Its loader processes come last."""
    deadline = time.monotonic() + ANSWER_S
    if process_state(note.pid) not in STOPPED:
        answer = _ask(note, note.pid, deadline)
        if answer:
            texts = [_first(answer, f"0x{thread:016x}")]
            for child in children(note.pid)[:CHILDREN_MAX]:
                told = _ask(note, child, deadline)
                texts += [f"its process {child}:\n{told}"] if told else []
            return _bounded("\n".join(texts))
    answer = _py_spy(note)
    if answer:
        return _bounded(_first(answer, "MainThread"))
    return _silent(note.pid)


def _ask(note: Note, pid: int, deadline: float) -> str:
    """Send the signal that the worker reserved, and read what it writes. What it forked does the same, there too."""
    if not note.signal:
        return ""
    try:
        file = os.open(f"/proc/{note.pid}/fd/{note.stacks}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        before = os.fstat(file).st_size
        if not _signal(note, pid):
            return ""
        size = before
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            last, size = size, os.fstat(file).st_size
            if size == last > before:
                break
        return os.pread(file, ANSWER_BYTES_MAX, before).decode(errors="replace").strip("\n")
    except OSError:
        return ""
    finally:
        os.close(file)


def _signal(note: Note, pid: int) -> bool:
    """Only to the worker, or a child of its, and only if it has a handler: else the signal would end it."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Looked at with the descriptor open: whoever had this number before is not meant.
        ours = process_started(note.pid) == note.started and (pid == note.pid or pid in children(note.pid))
        if not ours or not catches(pid, note.signal):
            return False
        signal.pidfd_send_signal(process, note.signal)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _py_spy(note: Note) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None or process_started(note.pid) != note.started:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(note.pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PY_SPY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _silent(pid: int) -> str:
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        place = ""
    where = f", in the kernel's {place}" if place.strip("0") else ""
    return (
        f"the process does not answer (state {process_state(pid) or 'gone'}{where}); py-spy, if installed, could tell"
    )


def _first(text: str, mark: str) -> str:
    """The thread that has `mark` in its first line before the others."""
    threads = [thread.strip("\n") for thread in re.split(r"\n(?=\S)", text) if thread.strip()]
    threads.sort(key=lambda thread: mark not in thread.partition("\n")[0])
    return "\n".join(threads)


def _bounded(text: str) -> str:
    if len(text) <= STACKS_BYTES_MAX:
        return text
    return text[:STACKS_BYTES_MAX] + "\n… and more"
