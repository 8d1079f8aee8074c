"""A worker of the conformance suite: calls every case, and writes down what came of it, a line for each.

holdfast run --workers 2 tests/horovod/runner.py OUTPUT_DIR [NAME...]
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import holdfast.horovod.torch as hvd
from holdfast.horovod.common.exceptions import HorovodInternalError
from tests.horovod.cases import CASES


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


main(Path(sys.argv[1]), sys.argv[2:])
