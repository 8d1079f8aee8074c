"""Where the command begins and ends: what may go wrong before the first import and after the last line.

Imports nothing but what the interpreter has loaded, so that Ctrl-C finds a handler from the first moment on.
"""

import os
import sys

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143


class _Terminated(BaseException):
    """SIGTERM came. Not an Exception, nor a SystemExit, which a parser of options may raise and catch."""


def entry() -> None:
    code = EXIT_INTERRUPTED
    try:
        _open_streams()
        _end_in_order_on_sigterm()
        from holdfast.cli.main import main

        code = main(sys.argv[1:])
        code = flushed(code)
        _let_interrupts_end_it()
    except KeyboardInterrupt:
        _let_interrupts_end_it()
    except _Terminated:
        code = EXIT_TERMINATED
    sys.exit(code)


def _end_in_order_on_sigterm() -> None:
    """Also where SIGINT is ignored, as in the background of a shell's script: a terminal gets its settings back, and
    what a command has started ends with it. The agent has handlers of its own."""
    import signal

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        raise _Terminated

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)


def _open_streams() -> None:
    """A stream that was closed is replaced: the next file to be opened would get its number, and our output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: PTH123, SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be in no encoding


def flushed(code: int) -> int:
    """What waits in the streams goes out here, where a pipe that nobody reads and a full disk can still be told."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        drop_output()
        print(f"holdfast: the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return code or 1
    return code


def drop_output() -> None:
    """What waits in the buffer would raise once more when the interpreter ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nothing, stream.fileno())
    os.close(nothing)


def _let_interrupts_end_it() -> None:
    """From here on Ctrl-C has nothing left to tell: the interpreter would answer with a traceback."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
