"""The agent of a launch: `holdfast run` in a process of its own, which is asked to stop when the launching one is gone.

    python -m holdfast.cli.tied_agent PID run --workers 4 …

A notebook's kernel that is restarted or killed leaves no training behind that nobody sees: its workers finish their
step, save, and leave, as at Ctrl-C.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def stop_with(launcher: int) -> None:
    """Get a SIGTERM when it ends; it may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    stop_with(int(sys.argv.pop(1)))
    from holdfast.cli.entering import entry

    entry()
