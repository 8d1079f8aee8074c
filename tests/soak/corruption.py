"""Hardware that lies: one worker flips one bit, once. Is it found in time, named rightly, and undone?

    python -m tests.soak.corruption --kind parameter --workers 4 --steps 60 --seed 1

Real processes, started with `holdfast run`. Which worker, at which step and which bit are drawn from the seed. Exit
code 0 only if the others found it within the audit interval, named that worker and nobody else, and every other promise
held as well. A gradient is compared where its shard is audited, so there every shard is; parameters and the optimizer's
state are found by the digests of the state alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.drills.checking import Outcome, check
from holdfast.drills.engine import Engine
from holdfast.drills.ground import RIG, Ground, Setting
from holdfast.drills.plan import CORRUPTIBLE
from holdfast.drills.schedule import DoneFault, Planned
from holdfast.drills.trace import TraceReader
from holdfast.testing.observed_run import Failed
from tests.soak.conducting import add_common, conduct, judge, quiet_run

SCRIPT = Path(__file__).parents[1] / "trainings" / "corrupted_training.py"
SAVE_EVERY = 8  # steps


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=CORRUPTIBLE, default="parameter", help="where the bit is")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--audit-every", type=int, default=10)
    parser.add_argument("--bit", type=int, default=-1, choices=range(-1, 32), metavar="0..31", help="default: any")
    parser.add_argument("--path", choices=("auto", "shared-memory", "network"), default="auto")
    add_common(parser)
    args = parser.parse_args()
    if args.workers < 3:
        parser.error("at least 3 workers: of two that disagree nobody knows who is wrong")
    if args.audit_every < 1 or args.steps < args.audit_every + 4:
        parser.error("more steps than the audit interval, by 4 at least")
    return args


def drill(args: argparse.Namespace, home: Path) -> None:
    fraction = "1" if args.kind == "gradient" else "0"
    options = ("--audit", fraction, "--audit-every", str(args.audit_every), "--path", args.path)
    saving = ("--save-every", f"{SAVE_EVERY}steps", "--keep", "100")
    order = home / "order"
    script = [*RIG, str(SCRIPT), "--steps", str(args.steps), "--order", str(order)]
    with Ground(Setting(workers=args.workers, options=(*options, *saving)), home, script) as ground:
        quiet = quiet_run(ground, args.digest)
        if quiet.of_kind("corruption"):
            raise Failed(f"the quiet run found {quiet.of_kind('corruption')[0]}")
        asked = draw(args)
        order.write_text(json.dumps(asked))
        run = ground.run("faulty")
        began, began_at = time.monotonic(), time.time()
        run.start()
        faulty = Engine(run, TraceReader(ground.traces("faulty"))).finish()
    flipped = json.loads(order.read_text()).get("done")
    if flipped is None:
        raise Failed("nothing was flipped")
    print(f"seed {args.seed}: {args.kind}, {asked['worker']}, step {asked['step']} {flipped}", flush=True)
    steps = sorted({event["step"] for event in faulty.of_kind("corruption") if event["liars"]})
    named = "named at step " + ", ".join(map(str, steps)) if steps else "not found"
    back = "gone back" if faulty.of_kind("rewound") else "nothing undone"
    print(f"seed {args.seed}: {named}, {back}, {run.view} views, {time.monotonic() - began:.0f} s")
    fault = DoneFault(Planned(0.0, "corrupt"), began_at, "flip", asked["step"], 1, (asked["worker"],), note=flipped)
    judge(args.seed, check(quiet, faulty, [fault], None))
    found_in_time(faulty, asked["step"], 0 if args.kind == "gradient" else args.audit_every)
    print(f"seed {args.seed}: exact: {faulty.digest} (quiet {quiet.digest})")


def draw(args: argparse.Namespace) -> dict[str, Any]:
    """Who flips which bit when: late enough that the optimizer has state, early enough that the state is compared
    once more before the end."""
    rng = random.Random(f"{args.kind} {args.seed}")
    worker = f"w{rng.randrange(args.workers)}.1"
    step = rng.randrange(2, args.steps - args.audit_every - 1)
    return {"worker": worker, "kind": args.kind, "step": step, "seed": rng.randrange(1 << 30), "bit": args.bit}


def found_in_time(faulty: Outcome, flipped_at: int, bound: int) -> None:
    late = min(event["step"] for event in faulty.of_kind("corruption") if event["liars"]) - flipped_at
    if not 0 <= late <= bound:
        raise Failed(f"found {late} steps later, and not within {bound}")


if __name__ == "__main__":
    sys.exit(conduct("corruption", parse(), drill))
