"""Hardware that lies: one worker flips one bit, once. Is it found in time, named rightly, and undone?

    python -m holdfast.testing.corruption --kind parameter --workers 4 --steps 60 --seed 1

Real processes, started with `holdfast run`. Which worker, at which step and which bit are drawn from the seed. Exit
code 0 only if the others found it within the audit interval, named that worker and nobody else, and the weights at
the end are those of a run in which nothing was flipped. A gradient is compared where its shard is audited, so there
every shard is; parameters and the optimizer's state are found by the digests of the state alone.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.testing.corruption_script import FLIP, KINDS
from holdfast.testing.watched import Failed, Watched

SCRIPT = Path(__file__).with_name("corruption_script.py")
SAVE_EVERY = 8  # steps


class Drilled(Watched):
    """Also remembers what the workers found."""

    def __init__(self, home: Path, name: str, options: list[str], script: list[str]) -> None:
        super().__init__(home, name, options, script)
        self.found: list[Mapping[str, Any]] = []
        self.rewound = 0

    def fold(self, event: dict[str, Any]) -> None:
        super().fold(event)
        if event["kind"] == "corruption":
            self.found.append(event)
        elif event["kind"] == "rewound":
            self.rewound += 1


def train(home: Path, name: str, args: argparse.Namespace, variables: Mapping[str, str]) -> tuple[str, Drilled]:
    """A run to its end: the digest of its weights, and what was seen."""
    fraction = "1" if args.kind == "gradient" else "0"
    options = ["--workers", str(args.workers), "--audit", fraction, "--audit-every", str(args.audit_every)]
    options += ["--save-every", f"{SAVE_EVERY}steps", "--keep", "100", "--path", args.path]
    run = Drilled(home, name, options, [str(SCRIPT), "--steps", str(args.steps), "--note", str(home / "note")])
    os.environ.update(variables)
    try:
        run.start()
        return run.finish(300), run
    finally:
        run.end()
        for variable in variables:
            del os.environ[variable]


def judge(run: Drilled, liar: str, flipped_at: int, args: argparse.Namespace) -> str:
    """What is wrong with what they found; empty: nothing."""
    named = {worker for event in run.found for worker in event["liars"]}
    if not run.found:
        return "nobody noticed"
    if named != {liar}:
        return f"{', '.join(sorted(named)) or 'nobody'} was named"
    first = min(event["step"] for event in run.found if event["liars"])
    late = first - flipped_at
    bound = 0 if args.kind == "gradient" else args.audit_every
    return f"found {late} steps later, and not within {bound}" if not 0 <= late <= bound else ""


def drill(args: argparse.Namespace, home: Path) -> int:
    expected, quiet = (args.digest, None) if args.digest else train(home, "quiet", args, {})
    if quiet is not None and quiet.found:
        print(f"seed {args.seed}: FAILED: the quiet run found {quiet.found[0]}")
        return 1
    rng = random.Random(f"{args.kind} {args.seed}")
    liar = f"w{rng.randrange(args.workers)}.1"
    # Late enough that the optimizer has state, early enough that the state is compared once more before the end.
    at = rng.randrange(2, args.steps - args.audit_every - 1)
    began = time.monotonic()
    order = f"{liar} {args.kind} {at} {rng.randrange(1 << 30)} {args.bit}"
    found, run = train(home, "faulty", args, {FLIP: order})
    note = home / "note"
    if not note.exists():
        print(f"seed {args.seed}: FAILED: nothing was flipped")
        return 1
    print(f"seed {args.seed}: {args.kind}, {liar}, step {note.read_text()}", flush=True)
    wrong = judge(run, liar, at, args)
    steps = sorted({event["step"] for event in run.found if event["liars"]})
    named = "named at step " + ", ".join(map(str, steps)) if steps else "not found"
    back = "gone back" if run.rewound else "nothing undone"
    print(f"seed {args.seed}: {named}, {back}, {run.view} views, {time.monotonic() - began:.0f} s")
    if found != expected:
        wrong = wrong or "the weights are not those of the quiet run"
    print(f"seed {args.seed}: {'FAILED: ' + wrong if wrong else 'exact'}: {found} (quiet {expected})")
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="parameter", help="where the bit is")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--audit-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bit", type=int, default=-1, choices=range(-1, 32), metavar="0..31", help="default: any")
    parser.add_argument("--path", choices=("auto", "shared-memory", "network"), default="auto")
    parser.add_argument("--digest", help="of the quiet run, if it is known already")
    parser.add_argument("--keep", action="store_true", help="keep the run directory")
    args = parser.parse_args()
    if args.workers < 3:
        parser.error("at least 3 workers: of two that disagree nobody knows who is wrong")
    if args.audit_every < 1 or args.steps < args.audit_every + 4:
        parser.error("more steps than the audit interval, by 4 at least")
    return args


def main() -> int:
    args = parse()
    home = Path(tempfile.mkdtemp(prefix="holdfast-corruption-"))
    try:
        code = drill(args, home)
    except (Failed, HoldfastError) as error:
        print(f"seed {args.seed}: FAILED: {error}")
        code = 1
    if code == 0 and not args.keep:
        shutil.rmtree(home, ignore_errors=True)
    else:
        print(f"run directory: {home}")
    return code


if __name__ == "__main__":
    sys.exit(main())
