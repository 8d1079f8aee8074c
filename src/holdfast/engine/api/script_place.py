"""Where a script entered or left a loop over steps, by `break` or with an exception on its way; whether it went on.

A generator hears of both only as that it is closed. What the script was at, by the frames that closed it, tells them
apart: `break` and `return` take the loop's iterator away by an instruction of their own.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType

from holdfast.placement import bootstrap

_TAKES_AWAY = ("POP_TOP", "POP_ITER", "END_FOR")  # what `break` and `return` do to the loop's iterator
_BETWEEN = ("YIELD_VALUE", "RESUME", "SEND")  # a generator around ours, such as a progress bar's, is closed first


class ScriptPlace:
    """Made in the generator's own frame, when it begins or is told that it is closed."""

    def __init__(self, told: FrameType) -> None:
        frame = told.f_back
        while frame is not None and frame.f_back is not None and _instruction(frame) in _BETWEEN:
            frame = frame.f_back
        self.by_choice = frame is not None and _instruction(frame) in _TAKES_AWAY
        while frame is not None and frame.f_back is not None and not _is_ours(frame.f_back):
            frame = frame.f_back
        self._frame = frame  # the script's outermost
        self._at = frame.f_lasti if frame is not None else -1
        self._loop_end = _end_of_loop(frame) if frame is not None else 0

    @property
    def is_known(self) -> bool:
        """A generator that outlives the script is closed by nobody's line."""
        return self._frame is not None

    def is_still_there(self) -> bool:
        """The script has ended. Whether what left the loop has ended it too: nobody has caught it.

        The outermost frame has then done nothing since, or nothing but to let it pass (`finally`, other `except`s); or,
        where this is the place at which it entered the loop, nothing outside of it.
        """
        frame = self._frame
        if frame is None:
            return False
        return self._at <= frame.f_lasti < max(self._loop_end, self._at + 1) or _instruction(frame) == "RERAISE"


def _instruction(frame: FrameType) -> str:
    code, at = frame.f_code.co_code, frame.f_lasti
    return dis.opname[code[at]] if 0 <= at < len(code) else ""


def _end_of_loop(frame: FrameType) -> int:
    """Behind the `for` that the frame is at, in its instructions; 0 if it is at none."""
    if _instruction(frame) != "FOR_ITER":
        return 0
    return next((int(one.argval) for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti), 0)


def _is_ours(frame: FrameType) -> bool:
    """A line that runs the script, rather than one of it."""
    name = frame.f_code.co_filename
    return name == bootstrap.__file__ or name.startswith("<frozen") or name == sys.modules["runpy"].__file__
