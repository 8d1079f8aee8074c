"""The exactness training as a user's script: `python train.py`, or under an agent. Prints the digest of its weights.

In slot 1 it can pretend to be a machine with another arithmetic, in slot 2 a script with other settings.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

WORKER = os.environ.get("HOLDFAST_WORKER", "")
FIRST = os.environ.get("TEST_FIRST", "")  # a file: strangers come after the first worker has joined
STRANGER = bool(FIRST) and not WORKER.startswith("w0.")

if STRANGER and WORKER.startswith("w1.") and os.environ.pop("ATEN_CPU_CAPABILITY", "") != "default":
    os.environ["ATEN_CPU_CAPABILITY"] = (
        "default"  # another than the others have, also where the whole suite runs with it
    )

import torch  # noqa: E402

import holdfast  # noqa: E402
from tests.trainings import exactness_training  # noqa: E402

join = holdfast.join
runs: list[holdfast.Run] = []


def joining(*arguments: Any, **options: Any) -> holdfast.Run:
    while STRANGER and not Path(FIRST).exists():
        time.sleep(0.01)
    if STRANGER and WORKER.startswith("w2."):
        options["batch_size"] *= 2
    runs.append(join(*arguments, **options))
    if FIRST:
        Path(FIRST).touch()
    return runs[0]


def main(arguments: list[str]) -> str:
    """Train; the digest."""
    sys.argv = [__file__, *arguments]
    holdfast.join = joining
    torch.manual_seed(0)
    exactness_training.main()
    digest = runs[0].digest()
    runs.pop().close()
    return digest


if __name__ == "__main__":
    print("digest", main(sys.argv[1:]))
