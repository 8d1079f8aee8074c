"""`holdfast horovodrun`: a job script's horovodrun line, on top of `holdfast run --horovod`.

One host is started for real. Hosts elsewhere are not reached from here: each has a `holdfast run --ledger` of its own.
A discovery script is asked once a second, as Horovod does, and the run follows the slots that it gives this host.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.horovod.launch_words import WITH_A_VALUE, WITHOUT_ONE

ASK_S = 1.0
SCRIPT_S = 30.0  # as long as a discovery script may take
HERE = ("localhost", "127.0.0.1", "::1")
ELSEWHERE = "give `holdfast run --ledger etcd://HOST:2379 --keys DIR --run NAME --horovod --workers N` on each host"
WHO = ("-H", "--hostfile", "--host-discovery-script")  # say which hosts there are
UNTOLD = {"gloo", "mpi", "verbose", "stall-check", "timeline-mark-cycles"}  # it is so anyway, or has an effect
_PYTHON = re.compile(r"python[\d.]*")
_HOST_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "holdfast horovodrun -np N [options] [python] script.py [arguments]"
    parser.description = "Start a script that was written for horovodrun. `import horovod` finds holdfast.horovod."
    add = parser.add_argument
    add("-np", "--num-proc", dest="np", type=int, metavar="N", help="how many workers")
    add("--min-np", "--min-num-proc", dest="min_np", type=int, metavar="N", help="go on while so many are there")
    add("--max-np", "--max-num-proc", dest="max_np", type=int, metavar="N", help="never more than so many")
    add("-H", "--hosts", metavar="HOST:SLOTS", help="this host and its slots; other hosts are not started from here")
    add("--host-discovery-script", metavar="SCRIPT", help="prints HOST:SLOTS; the run follows it")
    add("--slots", "--slots-per-host", dest="slots", type=int, metavar="N", help="of a host without a number")
    add("--reset-limit", type=int, metavar="N", help="how often the world may form anew")
    add("--blacklist-cooldown-range", nargs=2, type=int, metavar="S", help="accepted; one host is not blacklisted")
    add("--timeline-filename", metavar="FILE", help="write a Chrome trace of rank 0's collectives")
    add(
        "--stall-check-warning-time-seconds",
        dest="stall_s",
        type=int,
        metavar="S",
        help="tell of a late rank after so long",
    )
    add("-hostfile", "--hostfile", metavar="FILE", help="lines HOST slots=N, in the place of -H")
    add("--dir", metavar="DIR", help="where runs are kept")
    add("--run", metavar="NAME", help="the run's name")
    for name in WITH_A_VALUE:
        add(f"--{name}", metavar="X", help=argparse.SUPPRESS)
    for name in WITHOUT_ONE:
        add(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    add("words", nargs=argparse.REMAINDER, metavar="command", help="the script and its arguments")


def start(options: argparse.Namespace) -> int:
    from holdfast.cli.main import main

    script = script_words(options.words)
    slots = _slots(options)
    workers = _workers(options, slots)
    may_change = bool(options.min_np or options.max_np or options.host_discovery_script)
    words = ["run", "--horovod", "--checkpoint", "none", "--workers", str(workers)]
    if not may_change:
        words += ["--restarts", "0"]  # as with horovodrun: who is lost ends the job
    name = options.run or f"horovod-{os.getpid()}-{int(time.time())}"
    words += ["--run", name, *(["--dir", options.dir] if options.dir else [])]
    _tell(options)
    if options.host_discovery_script:
        follower = threading.Thread(target=_follow, args=(options, name, workers), daemon=True)
        follower.start()
    return main([*words, *script])


def script_words(words: Sequence[str]) -> list[str]:
    """The script, or `-m module`, without the interpreter that horovodrun is given before it."""
    left = list(words)
    if left and left[0] == "--":
        del left[0]
    if left and _PYTHON.fullmatch(Path(left[0]).name):
        del left[0]
        while left and left[0] in ("-u", "-B"):
            del left[0]
    if not left:
        raise ConfigError("there is nothing to run", hint="name a script: holdfast horovodrun -np 2 python train.py")
    if not left[0].endswith(".py") and left[0] != "-m":
        raise ConfigError(
            f"{left[0]} is not a Python script",
            hint="horovodrun of other programs is not there: give a .py file or -m module",
        )
    return left


def _workers(options: argparse.Namespace, slots: int | None) -> int:
    low, high = options.min_np, options.max_np
    workers = options.np or (min(slots, high or slots) if slots else 0) or low or 0
    if workers < 1:
        raise ConfigError("-np is missing", hint="say how many workers: holdfast horovodrun -np 2 python train.py")
    for flag, value in (("--min-np", low), ("--max-np", high), ("--slots", options.slots)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}", hint="give a whole number from 1 on")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"--min-np {low} is more than --max-np {high}", hint="the other way round")
    if (low is not None and workers < low) or (high is not None and workers > high):
        raise ConfigError(
            f"-np {workers} is not from --min-np {low or 1} to --max-np {high or 'any'}", hint="choose it in between"
        )
    if slots is not None and not options.host_discovery_script and workers > slots:
        raise ConfigError(
            f"-np {workers} workers do not fit into {slots} slots", hint="give this host more slots with -H"
        )
    return workers


def _slots(options: argparse.Namespace) -> int | None:
    """Of this host, by -H or by the discovery script."""
    values = (options.hosts, options.hostfile, options.host_discovery_script)
    given = [flag for flag, value in zip(WHO, values, strict=True) if value]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} both say which hosts there are", hint="leave one out")
    if options.hosts:
        return slots_here(options.hosts.split(","), options.slots or 1)
    if options.hostfile:
        return slots_here(_lines_of(options.hostfile), options.slots or 1)
    if options.host_discovery_script:
        return max(1, discover(options.host_discovery_script, options.slots or 1))
    return None


def _lines_of(hostfile: str) -> list[str]:
    """A host file's lines, HOST slots=N, as -H has them."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(hostfile).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {hostfile} cannot be read: {error}", hint="give lines HOST slots=N") from error
    found = [(line, _HOST_LINE.fullmatch(line)) for line in lines if line]
    for line, match in found:
        if match is None and len(line.split()) > 1:
            raise ConfigError(f"--hostfile {hostfile} has the line {line!r:.80}", hint="give lines HOST slots=N")
    return [f"{match[1]}:{match[2]}" if match else line for line, match in found]


def slots_here(lines: Sequence[str], usual: int) -> int:
    """How many slots these lines, HOST or HOST:SLOTS, give to this host. ConfigError where they name others."""
    found, others = 0, []
    names = {*HERE, socket.gethostname(), socket.gethostname().partition(".")[0]}
    for line in filter(None, map(str.strip, lines)):
        host, colon, count = line.rpartition(":") if line.rpartition(":")[2].isdecimal() else (line, "", "")
        host = host if colon else line
        if host in names:
            found += int(count) if colon else usual
        else:
            others.append(host)
    if others:
        raise ConfigError(
            f"{', '.join(others)} cannot be started from here, which is {socket.gethostname()}", hint=ELSEWHERE
        )
    return found


def discover(script: str, usual: int) -> int:
    try:
        done = subprocess.run([script], capture_output=True, text=True, timeout=SCRIPT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"--host-discovery-script {script} cannot be run: {error}",
            hint="it must be executable and print HOST:SLOTS",
        ) from error
    if done.returncode:
        raise ConfigError(
            f"--host-discovery-script {script} ended with exit code {done.returncode}", hint="run it by hand"
        )
    return slots_here(done.stdout.splitlines(), usual)


def _tell(options: argparse.Namespace) -> None:
    """Settings that workers find in their environment, and what has no effect here."""
    if options.min_np:
        os.environ["HOLDFAST_HOROVOD_MIN_NP"] = str(options.min_np)
    if options.reset_limit is not None:
        os.environ["HOLDFAST_HOROVOD_RESET_LIMIT"] = str(options.reset_limit)
    if options.timeline_filename:
        os.environ["HOROVOD_TIMELINE"] = str(Path(options.timeline_filename).resolve())
    if options.timeline_mark_cycles:
        os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    if options.stall_s is not None:
        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(options.stall_s)
    if options.blacklist_cooldown_range:
        print(
            "holdfast: --blacklist-cooldown-range has no effect: a slot whose worker failed is started again after "
            "0.5 s, then 1 s, up to 30 s",
            file=sys.stderr,
        )
    named = [name for name in (*WITH_A_VALUE, *WITHOUT_ONE) if name not in UNTOLD]
    given = [f"--{name}" for name in named if getattr(options, name.replace("-", "_"))]
    if given:
        print(f"holdfast: without effect here: {', '.join(given)}", file=sys.stderr)


def _follow(options: argparse.Namespace, name: str, workers: int) -> None:
    """Keep asking the discovery script, and let the run have as many workers as it says."""
    from holdfast.cli.control import scale

    while True:
        time.sleep(ASK_S)
        try:
            slots = discover(options.host_discovery_script, options.slots or 1)
            wanted = max(1, options.min_np or 1, min(slots, options.max_np or slots))
            if wanted != workers:
                scale(argparse.Namespace(run=name, workers=wanted, dir=options.dir))
                workers = wanted
        except HoldfastError as error:
            print(f"holdfast: {error.message}", file=sys.stderr)
