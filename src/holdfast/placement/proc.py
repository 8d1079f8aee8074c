"""Processes: whether one lives, since when, which are workers of a run, and how one ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.placement.environment import RUN_DIR, WORKER
from holdfast.placement.server_environment import SERVER

_DEAD = ("Z", "X", "x")
FAMILY_MAX = 256
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class FoundProcess:
    worker: str  # or server
    pid: int
    started: int  # clock ticks since boot: with the pid it names a process for good


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; [] if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()  # the second field, the name, may contain anything


def process_started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (field 22), or None if it does not live."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in _DEAD else None


def started_here() -> int:
    """When this process started; 0 if the system does not say."""
    return process_started(os.getpid()) or 0


def process_state(pid: int) -> str:
    """The kernel's letter for the process: R running, S sleeping, T stopped; empty if it does not live."""
    fields = _stat(pid)
    return fields[0] if fields and fields[0] not in _DEAD else ""


def process_of_rank(pid: int, rank: int) -> int:
    """Of a worker that is a group: its other ranks are what it has forked first. Where there is none, the worker's."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return int(children[rank - 1]) if 0 < rank <= len(children) else pid


def find_workers(run_dir: Path) -> list[FoundProcess]:
    """The living workers of a run on this host, whoever started them.

    A worker leads its session and carries the agent's variables. Its own children carry them too, but lead no
    session; should one of them be made a leader, the oldest process of that name is the worker. A process that
    workers are forked from (warm_process.py) has room for a name in its place, and none there.
    """
    return _of_run(run_dir, WORKER)


def find_servers(run_dir: Path) -> list[FoundProcess]:
    """The living parameter servers of a run on this host, whoever started them."""
    return _of_run(run_dir, SERVER)


def _of_run(run_dir: Path, variable: str) -> list[FoundProcess]:
    found: dict[str, FoundProcess] = {}
    for directory, process in _all_leaders(variable):
        name = process.worker
        if directory == os.fsencode(run_dir) and (name not in found or process.started < found[name].started):
            found[name] = process
    return sorted(found.values(), key=lambda process: process.worker)


def living_runs() -> set[Path]:
    """The directories of all runs that have a living worker on this host: one look at all processes."""
    return {Path(os.fsdecode(directory)) for directory, _ in _all_leaders(WORKER)}


def _all_leaders(variable: str) -> Iterator[tuple[bytes, FoundProcess]]:
    """Every process that leads a session and carries this variable of an agent's, with the directory of its run."""
    run, name = f"{RUN_DIR}=".encode(), f"{variable}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        fields = _stat(pid)
        if not fields or fields[0] in _DEAD or int(fields[3]) != pid:
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        directory = next((v[len(run) :] for v in variables if v.startswith(run)), b"")
        worker = next((os.fsdecode(v[len(name) :]).rstrip() for v in variables if v.startswith(name)), "")
        if directory and worker:
            yield directory, FoundProcess(worker, pid, int(fields[19]))


def busiest_state(pid: int) -> str:
    """Like `process_state`, but R if any thread runs or waits for a processor."""
    state = process_state(pid)
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir() if state and state not in "Tt" else ():
            if (thread / "stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"R"]:
                return "R"
    except OSError:
        pass  # a thread that has just ended
    return state


def children(pid: int) -> list[int]:
    """The processes that it has started and that live; [] where the kernel does not tell."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    except OSError:
        pass
    return found


def family_cpu_s(pid: int) -> float:
    """Processor time of a process and of the children that it has now."""
    total, waiting, seen = 0, [pid], 0
    while waiting and seen < FAMILY_MAX:
        member = waiting.pop()
        seen += 1
        fields = _stat(member)
        if not fields:
            continue
        total += int(fields[11]) + int(fields[12])
        waiting += children(member)
    return total / TICKS_PER_S


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        pass
    return False


def bury(pid: int) -> int:
    """Collect the exit code of a child that is gone, and end those that it leaves behind unless it ended well."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if status is None or status.si_code != os.CLD_EXITED or status.si_status != 0:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # before it is reaped: until then the number is its own
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
