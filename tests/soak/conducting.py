"""What every soak does around its plan: a directory for its runs, the quiet run, the verdicts, the exit code."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.drills.checking import Outcome, PromiseVerdict
from holdfast.drills.engine import Engine
from holdfast.drills.ground import Ground
from holdfast.drills.trace import TraceReader
from holdfast.testing.observed_run import Failed, ObservedRun
from tests.harness import let_children_find_tests


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digest", help="of the quiet run, if it is known already")
    parser.add_argument("--keep", action="store_true", help="keep the run directory")


def conduct(name: str, args: argparse.Namespace, drill: Callable[[argparse.Namespace, Path], None]) -> int:
    """The exit code: 0 unless `drill` raises. The directory of its runs is kept if it does."""
    let_children_find_tests()
    home = Path(tempfile.mkdtemp(prefix=f"holdfast-{name}-"))
    try:
        drill(args, home)
    except (Failed, HoldfastError) as error:
        print(f"seed {args.seed}: FAILED: {error}\nrun directory: {home}")
        return 1
    if args.keep:
        print(f"run directory: {home}")
    else:
        shutil.rmtree(home, ignore_errors=True)
    return 0


def quiet_run(ground: Ground, known_digest: str | None = None) -> Outcome:
    """The same script on one host, without spares and with nothing injected; not at all if its digest is known."""
    if known_digest:
        return Outcome(exit_code=0, digests={"quiet": known_digest})
    run = ground.run("quiet", alone=True)
    run.start()
    return Engine(run, TraceReader(ground.traces("quiet"))).finish()


def quiet_digest(home: Path, workers: int, script: Sequence[str]) -> str:
    """Of a run of `script` in which nothing happens."""
    run = ObservedRun(home, "quiet", ["--workers", str(workers)], list(script))
    run.start()
    try:
        return run.finish(600)
    finally:
        run.end()


def judge(seed: int, verdicts: Sequence[PromiseVerdict]) -> None:
    """Say what held; Failed if a promise did not."""
    held = [verdict.promise for verdict in verdicts if verdict.held]
    broken = [f"{verdict.promise}: {verdict.text}" for verdict in verdicts if verdict.held is False]
    print(f"seed {seed}: held: {', '.join(held)}")
    if broken:
        raise Failed("broken: " + "; ".join(broken))
