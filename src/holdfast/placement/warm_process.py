"""The process that workers are forked from: it has imported what they need, once for all of them.

It runs the command that a worker runs, and so does a worker that comes out of `serve`: in lists of processes, and to
the script, it looks as if it had been started by itself. It has one thread, opens nothing, computes nothing, and ends
when its agent does. Requests and answers are lines of JSON (warm_starts.py has the other side).

    {"start": {variables}, "log": "/…/w3.2.log"}   a worker with these variables      {"pid": 4711}
    {"bury": 4711}                                 its exit code, as Popen has it     {"code": -9}
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.placement import early_variables, horovod_names
from holdfast.placement.environment import WORKER
from holdfast.placement.proc import bury
from holdfast.placement.ranks import RANKS
from holdfast.placement.script_imports import Import, imports_of_command

DESCRIPTOR = "HOLDFAST_WARM"  # the descriptor of the socket to the agent
NAME_MAX = 128  # room for a worker's name in the variables that the kernel shows of this process
OWN = ("torch", "holdfast.engine.api.joining")  # what a script that trains needs
SHARDING = (
    "torch.distributed.fsdp",
    "holdfast.engine.ranks.group",
    "holdfast.engine.ranks.scatter",
)  # what groups need
_PREFIX = f"{WORKER}=".encode()
_ENV_START = 47  # in /proc/PID/stat, from the third field on


class Unfit(Exception):
    """Nothing that was imported may be forked; workers start one by one."""


def serve(arguments: list[str]) -> None:
    """Fork workers for the agent until it is gone. Returns in a worker, and only there."""
    control = socket.socket(fileno=int(os.environ.pop(DESCRIPTOR)))
    began = time.monotonic()
    try:
        _import_all(arguments)
        place = _name_place()
        _check()
    except Unfit as unfit:
        _answer(control, {"unfit": str(unfit)})
        os._exit(0)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared
    _answer(control, {"ready": round(time.monotonic() - began, 3)})
    with control.makefile("rb") as requests:
        for line in requests:
            request: dict[str, Any] = json.loads(line)
            if "bury" in request:
                _answer(control, {"code": bury(int(request["bury"]))})
                continue
            worker = _fork(request, control, place)
            if worker is None:
                return
            _answer(control, worker)
    os._exit(0)


def _import_all(arguments: list[str]) -> None:
    first = sys.path[0]
    sys.path[0] = str(Path.cwd() if arguments[0] == "-m" else Path(arguments[0]).resolve().parent)
    modules = imports_of_command(arguments)
    trains = any(module.module == "holdfast" or module.package == "torch" for module in modules)
    own: tuple[str, ...] = OWN if trains else ()
    if trains and os.environ.get(RANKS, "1") != "1":
        own = (*own, *SHARDING)
    if os.environ.get(horovod_names.SWITCH) and trains:  # the script's text says horovod, which may not be had early
        own = (*own, f"{horovod_names.OURS}.torch")
    for module in (*map(Import, own), *modules):
        try:
            imported = importlib.import_module(module.module)
            for name in module.names:
                if not hasattr(imported, name):
                    importlib.import_module(f"{module.module}.{name}")
        except Exception as error:  # the worker that needs it will say so itself
            print(f"holdfast: cannot import {module.module} beforehand: {error}", file=sys.stderr)
        except SystemExit as end:
            raise Unfit(f"importing {module.module} ends the process ({end.code})") from None
    sys.path[0] = first


_NOT_MISSED = {"jemalloc_bg_thd"}  # Arrow's allocator, which pandas brings: its own fork handlers do without it


def _check() -> None:
    names = [_name_of(task) for task in Path("/proc/self/task").iterdir()]
    threads = len([name for name in names if name and name not in _NOT_MISSED]) - 1
    if threads > 0:
        raise Unfit(f"what the script imports has started {threads} threads, which a fork would lose")
    torch: Any = sys.modules.get("torch")
    child = os.fork()
    if child == 0:
        asked = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
        os._exit(int(asked is not None and asked()))
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise Unfit("what the script imports has opened the GPU, which a fork would lose")


def _name_of(thread: Path) -> str:
    """Empty: it has just ended."""
    try:
        return thread.joinpath("comm").read_text().strip() or "nameless"
    except OSError:
        return ""


def _name_place() -> tuple[int, int]:
    """Where the kernel reads the worker's name: address and length. By it an agent finds the workers of its run."""
    text = Path("/proc/self/stat").read_text()
    start, end = map(int, text[text.rfind(")") + 2 :].split()[_ENV_START : _ENV_START + 2])
    block = ctypes.string_at(start, end - start) if 0 < start < end else b""
    at = block.find(b"\0" + _PREFIX + b" " * NAME_MAX)
    if at < 0:
        raise Unfit("the variables of this process are not where the kernel shows them")
    return start + at + 1 + len(_PREFIX), NAME_MAX


def _fork(request: dict[str, Any], control: socket.socket, place: tuple[int, int]) -> dict[str, Any] | None:
    """What to answer; None in the worker."""
    name = os.fsencode(request["start"][WORKER])
    address, length = place
    if len(name) > length:
        return {"error": f"a name of {len(name)} bytes"}
    living, alive = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(living)
        os.close(alive)
        return {"error": error.strerror or str(error)}
    if pid:
        os.close(alive)
        began = os.read(living, 1)
        os.close(living)
        if not began:
            return {"error": f"the new process ended at once ({bury(pid)})"}
        return {"pid": pid}
    control.close()
    os.close(living)
    _become(request["start"], name.ljust(length), address)
    _write_to(request["log"])
    os.write(alive, b"1")
    os.close(alive)
    return None


def _become(variables: dict[str, str], name: bytes, address: int) -> None:
    """This process is a worker from now on."""
    os.setsid()
    ctypes.memmove(address, name, len(name))
    os.environ.clear()
    os.environ.update(variables)
    early_variables.set_again()
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed()  # as if just imported: other numbers in each worker


def _write_to(log: str) -> None:
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError:  # a full disk costs the output, not the worker
        output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _answer(control: socket.socket, answer: dict[str, Any]) -> None:
    try:
        control.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:  # the agent is gone
        os._exit(0)
