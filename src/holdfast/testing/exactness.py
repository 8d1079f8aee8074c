"""Real processes, real faults, one question: are the weights those of a run in which nothing failed?

    python -m holdfast.testing.exactness --workers 4 --steps 300 --faults 40 --seed 1

Starts a run with `holdfast run`, then kills and stops workers, kills the agent and takes over, adds and removes
workers, at moments drawn from the seed; at the end it compares the weights with those of a quiet run. Exit code 0
only if all faults were done and the digests are equal. What was done and when is printed as it happens.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast.testing.watched import Failed, Watched, send

SCRIPT = Path(__file__).with_name("exactness_script.py")
KINDS = ("kill", "kill", "kill", "stop", "pause", "agent", "join", "leave")


class Nemesis:
    """Does the faults, in the order and at the steps that the seed says."""

    def __init__(self, run: Watched, gate: Path, *, steps: int, faults: int, seed: int, workers: int) -> None:
        self._run = run
        self._gate = gate
        self._rng = random.Random(seed)
        self._size = workers
        self._most = workers + 2
        self._open_to = 0
        self._eased_at = 0.0
        places = sorted(self._rng.randrange(2, max(3, steps * 4 // 5)) for _ in range(faults))
        self._plan = [(place, self._rng.choice(KINDS)) for place in places]
        self._steps = steps
        self.done: dict[str, int] = {}

    def open_gate_to(self, step: int) -> None:
        self._open_to = step
        temporary = self._gate.with_suffix(".new")
        temporary.write_text(str(step))
        temporary.replace(self._gate)

    def run(self) -> None:
        self.open_gate_to(self._plan[0][0] + 3 if self._plan else self._steps)
        for index, (step, kind) in enumerate(self._plan):
            following = self._plan[index + 1][0] + 3 if index + 1 < len(self._plan) else self._steps
            self._run.wait(lambda step=step: self._at() >= step, f"step {step}")  # type: ignore[misc]
            time.sleep(self._rng.uniform(0.0, 0.05))  # anywhere within a step
            self._do(kind)
            self.open_gate_to(max(following, self._open_to))

    def _at(self) -> int:
        """The newest step that a worker has begun; progress events come too rarely for this."""
        steps = [int(path.read_text() or "0") for path in self._gate.parent.glob("at-*")]
        self._run.step = max([self._run.step, *steps])
        return self._run.step

    def _do(self, kind: str) -> None:
        if kind == "leave" and self._size <= 2:
            kind = "join"
        if kind == "join" and self._size >= self._most:
            kind = "leave"
        getattr(self, f"_{kind}")()
        self.done[kind] = self.done.get(kind, 0) + 1

    def _say(self, text: str) -> None:
        print(f"  step {self._run.step:4d}, view {self._run.view:3d}: {text}", flush=True)

    def _victim(self) -> str:
        """A member, when at least one other with state would be left."""
        self._run.wait(lambda: self._enough() or self._ease(), "two living members")
        return self._rng.choice(self._run.living_members())

    def _enough(self) -> bool:
        """Two members that have begun a step, and so have the state: a joiner that still loads cannot go on alone."""
        begun = [member for member in self._run.living_members() if self._gate.with_name(f"at-{member}").exists()]
        return len(begun) >= 2

    def _ease(self) -> bool:
        """A view changes between steps: while a joiner waits to be taken in, let a step pass now and then."""
        waits = any(worker not in self._run.members for worker in self._run.living_registered())
        if waits and time.monotonic() > self._eased_at + 0.25:
            self._let_pass(1)
        return False

    def _let_pass(self, steps: int) -> None:
        self._eased_at = time.monotonic()
        self.open_gate_to(min(self._steps, max(self._open_to, self._at()) + steps))

    def _kill(self) -> None:
        victim = self._victim()
        self._say(f"kill -9 {victim}")
        send(self._run.pids[victim], signal.SIGKILL)

    def _stop(self) -> None:
        """For longer than its lease: the others go on without it."""
        victim = self._victim()
        self._say(f"stop {victim} for good")
        send(self._run.pids[victim], signal.SIGSTOP)
        self._let_pass(2)  # the others must come to where they miss it
        self._run.wait(lambda: victim not in self._run.members, f"a view without {victim}")

    def _pause(self) -> None:
        """For a while, shorter or longer than its lease; then it wakes by itself."""
        victim = self._victim()
        pid = self._run.pids[victim]
        duration_s = self._rng.choice((0.05, 0.5, 1.5, 2.5))
        self._say(f"stop {victim} for {duration_s} s")
        send(pid, signal.SIGSTOP)
        time.sleep(duration_s)
        send(pid, signal.SIGCONT)

    def _agent(self) -> None:
        assert self._run.agent is not None
        self._say("kill -9 the agent, and take over")
        self._run.agent.kill()
        self._run.agent.wait()
        time.sleep(self._rng.choice((0.0, 0.3, 1.0)))
        self._run.start()

    def _join(self) -> None:
        self._scale(self._size + 1)

    def _leave(self) -> None:
        self._scale(self._size - 1)

    def _scale(self, size: int) -> None:
        self._size = size
        self._say(f"scale to {size} workers")
        self._run.scale(size)


def quiet_digest(home: Path, workers: int, path: str, script: list[str]) -> str:
    run = Watched(home, "quiet", ["--workers", str(workers), "--path", path], script)
    run.start()
    try:
        return run.finish(600)
    finally:
        run.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", choices=("auto", "shared-memory", "network"), default="auto")
    parser.add_argument("--width", type=int, default=64, help="of the model; 2048 gives 1 M parameters")
    parser.add_argument("--digest", help="of the quiet run, if it is known already")
    parser.add_argument("--keep", action="store_true", help="keep the run directory")
    args = parser.parse_args()
    if args.workers < 2 or args.steps < 6 or args.faults < 0 or args.spares < 0:
        parser.error("at least 2 workers and 6 steps, and not less than 0 faults and spares")

    home = Path(tempfile.mkdtemp(prefix="holdfast-exactness-"))
    script = [str(SCRIPT), "--steps", str(args.steps), "--width", str(args.width)]
    gate = home / "gate"
    options = ["--workers", str(args.workers), "--spares", str(args.spares), "--path", args.path]
    run = Watched(home, "faulty", [*options, "--restarts", "10000"], [*script, "--gate", str(gate)])
    nemesis = Nemesis(run, gate, steps=args.steps, faults=args.faults, seed=args.seed, workers=args.workers)
    started = time.monotonic()
    try:
        expected = args.digest or quiet_digest(home, args.workers, args.path, script)
        print(f"seed {args.seed}: quiet run {expected}", flush=True)
        run.start()
        nemesis.run()
        found = run.finish(300)
    except Failed as error:
        print(f"seed {args.seed}: FAILED: {error}\nrun directory: {home}")
        return 1
    finally:
        run.end()
    equal = found == expected
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(nemesis.done.items()))
    print(f"seed {args.seed}: {faults}; {run.view} views, {run.evicted} evictions, {time.monotonic() - started:.0f} s")
    print(f"seed {args.seed}: {'exact' if equal else 'NOT EXACT'}: {found} (quiet {expected})")
    if equal and not args.keep:
        subprocess.run(["rm", "-rf", str(home)], check=False)
    else:
        print(f"run directory: {home}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
