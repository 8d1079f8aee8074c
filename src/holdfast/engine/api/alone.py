"""A run of one, `python train.py`: what an agent would say and do for it. Its events are sentences on stderr. Ctrl-C
or SIGTERM in a loop over steps finishes the step, saves it, and ends the loop. A mistake in how the script uses us
is one sentence and exit code 2.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from holdfast.core.errors import EXIT_BAD_INPUT, HoldfastError
from holdfast.engine.recovery.leaving import LeaveRequested
from holdfast.engine.reporting import line_of_script
from holdfast.events import EventLog
from holdfast.events.telling import sentence
from holdfast.net.mailbox import Mailbox

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

NAME = "this run"
SAID = ("resumed", "storage_down", "storage_up", "waiting", "warning", "skipped", "left", "cut_short", "unsaved")


class SpokenEvents(EventLog):
    """An event log that is not kept: what a person should know is said."""

    def __init__(self) -> None:
        super().__init__(None, NAME)

    def write(self, kind: str, **fields: Any) -> None:
        super().write(kind, **fields)
        if kind in SAID:
            event = {"t": time.time(), "who": NAME, "kind": kind, **fields}
            print(f"holdfast: {sentence(event)}", file=sys.stderr, flush=True)


def answers_mistakes_in_a_sentence(join: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The same function. From its first call on a mistake that nobody catches ends the process as under `holdfast run`.

    An interactive session, or a script that has a hook of its own, keeps its tracebacks.
    """

    @wraps(join)
    def answering(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        if sys.excepthook is sys.__excepthook__ and not sys.flags.interactive and not hasattr(sys, "ps1"):
            sys.excepthook = _last_words
        return join(*arguments, **options)

    return answering


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, HoldfastError):
        sys.__excepthook__(kind, error, trace)
        return
    place = line_of_script(trace)
    print(f"holdfast: {error}" + (f"\n  at {place}" if place else ""), file=sys.stderr)
    raise SystemExit(EXIT_BAD_INPUT)  # which Python takes from a hook as the process's own


class LoopSignals:
    """What SIGINT and SIGTERM do while the script is in a loop over steps. A script's own handlers stay."""

    def __init__(self, mailbox: Mailbox | None) -> None:
        """Without a mailbox they do what they do anyway."""
        self._mailbox = mailbox
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        if self._mailbox is None or threading.current_thread() is not threading.main_thread():
            return
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is usual:
                self._before[number] = usual
                signal.signal(number, self._asked)

    def restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._before:
                number, usual = self._before.popitem()
                if signal.getsignal(number) == self._asked:
                    signal.signal(number, usual)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.restore()  # once more does what it always did
        if os.getpid() != self._process:  # a child that the script forked
            os.kill(os.getpid(), number)
            return
        assert self._mailbox is not None
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        os.write(2, f"holdfast: {name}: the step is finished and saved first; once more ends it at once\n".encode())
        self._mailbox.put(LeaveRequested(number))
