"""A process that has everything imported and forks servers: a server is there in milliseconds, also after a kill.

It is told on its standard input, a line each: the directory of a server to start, and answers with the new process's
id. When its input ends, it ends; servers live on until they are ended, by whoever has their ids.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path


def main() -> int:
    import holdfast.byzantine.rules.words
    from holdfast.byzantine.agreement import server

    assert holdfast.byzantine.rules.words.parse("mean")  # torch, and the rules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(server.serve, Path(line.strip()))
        print(child, flush=True)
    return 0


def _become(serve: object, directory: Path) -> None:
    """In the child, which never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        assert callable(serve)
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
