"""One digest on the simulated device: for any number of workers, by every path, whatever happens, late and early.

    python -m tests.soak.devices                  # all of it, on 2 cores in a quarter of an hour
    python -m tests.soak.devices --only rewind    # or quiet, kill, stop, join, restore

Prints a line for each run, and ends with exit code 0 only if all runs with the same shards had one digest, and none had
waited for the device in the loop's thread. Runs that go back pass a step, and are compared with each other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests.devices.faults import FAULTS, REWIND, WAYS, Way, quiet, run_with
from tests.devices.trainings import EARLY, LATE
from tests.harness import device as simulated

QUIET = "quiet"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(QUIET, *FAULTS), help="runs in which only this happens")
    parser.add_argument("--way", choices=tuple(WAYS), help="by one path only")
    options = parser.parse_args()
    if not simulated.is_built():
        print("the simulated device is not compiled: make install does it, where g++ is")
        return 2
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # imports torch._dynamo: once, not in every fork
    torch.set_num_threads(1)
    simulated.load()
    ways = {name: way for name, way in WAYS.items() if options.way in (None, name)}
    right: dict[str, Any] = {}
    bad = count = 0
    for what, shards, about, begin in _runs(options.only, ways):
        key = f"{shards} shards, {'a step passed' if what == REWIND else 'all steps'}"
        began = time.monotonic()
        try:
            found: Any = begin()
        except AssertionError as error:
            found = str(error).strip().splitlines()[-1][:200]
        count += 1
        same = found == right.setdefault(key, found) and isinstance(found, dict)
        bad += not same
        said = found["digest"] if isinstance(found, dict) else found
        print(f"{'ok ' if same else 'BAD'} {what:8} {about}: {said} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{count} runs, {bad} bad; digests: {', '.join(f'{key}: {one}' for key, one in _digests(right).items())}")
    return 1 if bad or not count else 0


def _runs(only: str | None, ways: dict[str, Way]) -> Iterator[tuple[str, int, str, Callable[[], Any]]]:
    """What happens, in how many shards, in words, and the function that does it."""
    if only in (None, QUIET):
        for workers, shards, (name, way), when in product((1, 2, 3, 5), (6, 8), ways.items(), (LATE, EARLY)):
            begin = partial(quiet, way, workers, shards, when)
            yield QUIET, shards, f"{workers} workers, {shards} shards, {name}, {when}", begin
    with tempfile.TemporaryDirectory(prefix="holdfast-devices-") as home:
        for number, (fault, (name, way), when) in enumerate(product(FAULTS, ways.items(), (LATE, EARLY))):
            if only in (None, fault):
                place = Path(home) / str(number)
                begin = partial(run_with, fault, way, when, place)
                yield fault, 6, f"3 workers, 6 shards, {name}, {when}", begin


def _digests(right: dict[str, Any]) -> dict[str, str]:
    return {key: str(one["digest"])[:8] if isinstance(one, dict) else "none" for key, one in right.items()}


if __name__ == "__main__":
    sys.exit(main())
