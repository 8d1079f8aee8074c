"""A worker of the conformance suite: calls every case, and writes down what came of it, a line for each.

holdfast run --workers 2 tests/horovod/runner.py cases OUTPUT_DIR [NAME...]
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from holdfast.horovod.common.exceptions import HorovodInternalError

cases = importlib.import_module(f"tests.horovod.{sys.argv[1]}")
hvd, CASES = cases.hvd, cases.CASES


def main(output: Path, names: list[str]) -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    with (output / f"{rank}.jsonl").open("w") as log:
        for name in names or CASES:
            why = ""
            try:
                CASES[name](rank, size)
            except BaseException as error:
                why = "".join(traceback.format_exception(error))
            log.write(json.dumps({"name": name, "why": why}) + "\n")
            log.flush()
            settle(name)


def settle(name: str) -> None:
    """All are at the end of a case, however it ended."""
    try:
        hvd.barrier()
    except HorovodInternalError:
        hvd.shutdown()
        hvd.init()


main(Path(sys.argv[2]), sys.argv[3:])
