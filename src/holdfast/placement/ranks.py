"""The processes of a group: a worker that shards its model forks the other ranks before the script begins.

Rank 0 is the worker: the agent has started it, and knows no other. All ranks run the script from its first line. They
live and die together: the kernel ends those whose rank 0 is gone, and rank 0 ends as a lost rank has ended, so that to
the agent and to the other groups a worker is lost. What ranks tell each other goes over sockets between rank 0 and each
of the others, which nobody else can open; what is pickled there comes from a process that this one has forked, or that
has forked this one.

Owns the sockets, and in rank 0 the thread that watches over the others.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
from dataclasses import dataclass, field

from holdfast.placement.environment import variable

RANKS = variable("ranks")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
FAIL_TOGETHER_S = 2.0  # a mistake in the script ends all ranks, each by itself, and rank 0 says so best
END_TOGETHER_S = 30.0  # the last lines of a script may take the other ranks a little longer


@dataclass
class Ranks:
    """Of the group that this process is in."""

    rank: int = 0
    count: int = 1
    links: list[socket.socket] = field(default_factory=list)  # in rank 0 to each other rank, in these to rank 0
    pids: list[int] = field(default_factory=list)  # in rank 0, of the other ranks
    pidfds: list[int] = field(default_factory=list)
    failing: bool = False  # this rank has an error of its own to tell of
    ending: bool = False


_here = Ranks()


def ranks_here() -> Ranks:
    return _here


def fork() -> None:
    """Become a group, if the agent has asked for one. This process has one thread."""
    global _here
    count = int(os.environ.get(RANKS, "1"))
    if count == 1:
        return
    group, parent = Ranks(0, count), os.getpid()
    for rank in range(1, count):
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pid = os.fork()
        if pid == 0:
            for link in (near, *group.links):
                link.close()
            for pidfd in group.pidfds:
                os.close(pidfd)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            _here = Ranks(rank, count, [far])
            return
        far.close()
        group.links.append(near)
        group.pids.append(pid)
        group.pidfds.append(os.pidfd_open(pid))
    _here = group
    threading.Thread(target=_watch, args=(group,), name="holdfast-ranks", daemon=True).start()


def end_with_the_lost() -> None:
    """An error of this rank is none of its own if another has been killed: then this one ends as that one did."""
    if _here.rank or not _here.pids:
        return
    _here.failing = True
    if (lost := _first_lost(_here, FAIL_TOGETHER_S)) is not None:
        _end_as(*lost)


def let_the_others_end(code: int) -> int:
    """Rank 0 is through. Where all is well the others may come to their ends; else they are ended. The worker's exit
    code: what a rank does in the last lines of its script, such as writing a file, may fail there only."""
    _here.ending = True
    for link in _here.links:
        link.close()
    if code == 0:
        code = _come_to_their_ends(_here)
    for pidfd in _here.pidfds:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return code


def _come_to_their_ends(group: Ranks) -> int:
    """0 if all of them do, and well."""
    poll, living, code = select.poll(), set(group.pidfds), 0
    for pidfd in living:
        poll.register(pidfd, select.POLLIN)
    while living:
        ready = poll.poll(END_TOGETHER_S * 1000)
        if not ready:
            late = min(group.pidfds.index(pidfd) for pidfd in living) + 1
            _say(f"rank {late} of this group has not come to its end {END_TOGETHER_S:.0f} s after the others")
            return code or 1
        for pidfd, _ in ready:
            poll.unregister(pidfd)
            living.discard(pidfd)
            rank, ended = _how(group, pidfd)
            if ended:
                _say(f"rank {rank} of this group {_in_words(ended)}, and the group has failed with it")
                code = code or (ended if ended > 0 else 1)
    return code


def _watch(group: Ranks) -> None:
    """A group that has lost a rank is lost."""
    poll = select.poll()
    for pidfd in group.pidfds:
        poll.register(pidfd, select.POLLIN)
    for _ in group.pidfds:
        gone = [pidfd for pidfd, _ in poll.poll()]
        for pidfd in gone:
            poll.unregister(pidfd)
        if group.ending:
            return
        for pidfd in gone:
            rank, code = _how(group, pidfd)
            if code < 0:
                _end_as(rank, code)
            if code > 0:  # its script failed: perhaps for want of another rank, else it fails here too
                lost = _first_lost(group, FAIL_TOGETHER_S)
                if lost is None and (group.failing or group.ending):
                    return  # and this rank says so itself
                _end_as(*(lost or (rank, code)))


def _first_lost(group: Ranks, within_s: float) -> tuple[int, int] | None:
    """A rank that was killed, or is within that time. None as soon as no other rank lives."""
    poll, living = select.poll(), set(group.pidfds)
    for pidfd in living:
        poll.register(pidfd, select.POLLIN)
    while living and (ready := poll.poll(within_s * 1000)):
        for pidfd, _ in ready:
            rank, code = _how(group, pidfd)
            if code < 0:
                return rank, code
            poll.unregister(pidfd)
            living.discard(pidfd)
    return None


def _how(group: Ranks, pidfd: int) -> tuple[int, int]:
    """Which rank has ended, and how, as Popen has it. It is left to be asked for again."""
    number = group.pidfds.index(pidfd)
    found = os.waitid(os.P_PID, group.pids[number], os.WEXITED | os.WNOWAIT)
    if found is None:
        return number + 1, 0
    return number + 1, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _in_words(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _say(text: str) -> None:
    os.write(2, f"holdfast: {text}\n".encode())


def _end_as(rank: int, code: int) -> None:
    _say(f"rank {rank} of this group {_in_words(code)}, and the group ends with it")
    if code < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)
