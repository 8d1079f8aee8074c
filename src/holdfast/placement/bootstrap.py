"""How a worker's process runs the user's script: as `python script.py` would, with clearer last words.

    python -m holdfast.placement.bootstrap script.py args…
    python -m holdfast.placement.bootstrap -m module args…

An error that Holdfast raised about the script's input ends the process with one sentence, its hint, and exit code 2.
Any other exception is shown from the script's own first line on.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from holdfast.core.errors import EXIT_BAD_INPUT, HoldfastError, WorkerEnded
from holdfast.placement import exit_status, horovod_names, late_dynamo, ranks, warm_process


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The last words of a worker."""
    if isinstance(error, HoldfastError):
        print(f"holdfast: {error}", file=sys.stderr)
        return
    starters = Path(__file__).parents[1].glob("*/rig.py")  # of drills and checks
    ours = {__file__, runpy.__file__, *map(str, starters)}
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in ours or trace.tb_frame.f_code.co_filename.startswith("<frozen")
    ):
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def run_script(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def exit_code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return 1


def main() -> None:
    sys.excepthook = show
    late_dynamo.install()
    exit_status.obey()
    if os.environ.get(horovod_names.SWITCH):
        horovod_names.install()
    if warm_process.DESCRIPTOR in os.environ:
        warm_process.serve(sys.argv[1:])  # comes back in each worker that is forked from here
    ranks.fork()  # comes back in each rank of a group
    code = 0
    try:
        run_script(sys.argv[1:])
    except SystemExit as end:
        code = exit_code_of(end)
    except WorkerEnded as end:  # it has said why in the event log
        code = end.code
    except BaseException as error:
        ranks.end_with_the_lost()  # what failed may be a word to a rank that is gone
        code = EXIT_BAD_INPUT if isinstance(error, HoldfastError) else 1
        sys.excepthook(type(error), error, error.__traceback__)  # whoever joined wants to know too
    # What the interpreter does when a script ends, but for taking torch apart piece by piece: that takes a second in
    # which the others, and a traceback, wait for nothing.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ranks.let_the_others_end(exit_status.code_of(code)))


if __name__ == "__main__":
    main()
