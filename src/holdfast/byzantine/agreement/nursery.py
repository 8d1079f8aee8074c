"""A process that has everything imported and forks servers: a server is there in milliseconds, also after a kill.

It is told on its standard input, a line each: the directory of a server to start, and answers with the new process's
id. When its input ends, because whoever started it is done or dead, it ends its servers and itself.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def main() -> int:
    from holdfast.byzantine.agreement import server
    from holdfast.byzantine.rules.words import parse

    parse("mean")  # torch, and the rules
    alive: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda number, frame: _bury(alive))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this ends it
    _answer("ready")
    for line in sys.stdin:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it is buried only once it is known
        child = os.fork()
        if child == 0:
            _become(server.serve, Path(line.strip()))
        alive.add(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        _answer(str(child))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for left in alive:
        os.kill(left, signal.SIGKILL)
    return 0


def _answer(words: str) -> None:
    with suppress(BrokenPipeError):  # whoever started this is dead: the input ends, too
        os.write(sys.stdout.fileno(), f"{words}\n".encode())


def _bury(alive: set[int]) -> None:
    with suppress(ChildProcessError):
        while (dead := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            alive.discard(dead)


def _become(serve: Callable[[Path], None], directory: Path) -> None:
    """In the child, which never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        serve(directory)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
