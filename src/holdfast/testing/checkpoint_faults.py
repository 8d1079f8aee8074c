"""Real processes, killed at every stage of a save: is there always a whole checkpoint, and are the weights right?

    python -m holdfast.testing.checkpoint_faults --points 60 --seed 1
    python -m holdfast.testing.checkpoint_faults --points 20 --seed 1 --storage s3

Starts a run that saves every other step, and at moments drawn from the seed (a stage of a save or of a restore, and
some milliseconds) kills one worker, several, all, or all and the agent, or asks all to leave and kills them half a
second later. After every loss of all workers, and before any is back: the newest committed checkpoint is found, no
older than what was said to be committed, and none is damaged. Then the run goes on with another number of workers,
from that checkpoint; at the end the weights are those of a quiet run. Prints what was done at each point; the same
seed does the same things, as far as real time allows.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.reading import list_checkpoints, newest_valid, verify
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import HoldfastError
from holdfast.launch.proc import process_state
from holdfast.testing import hdfs_server, s3_server, staged_training
from holdfast.testing.exactness import SCRIPT as EXACTNESS_SCRIPT
from holdfast.testing.exactness import quiet_digest
from holdfast.testing.staged_training import COMMITTED, RESTORING, SAVING, Announced, cut_small
from holdfast.testing.watched import LOG_SHOWN, Failed, Watched, send

SCRIPT = staged_training.__file__
SAVE_EVERY, KEEP = 2, 2
STEPS_PER_POINT = SAVE_EVERY + 1  # enough for one more save
WORKERS_MAX = 4
WIDTH = 1024  # 4 MB of state in 10 parts
STAGE_S_MAX = 90.0  # until a stage comes: workers may first have to start
QUIET_S_MAX = 1.0  # at the gate, until it is opened a little further
NOTICE_S = 0.5  # from SIGTERM to SIGKILL
KINDS = (*["one"] * 4, *["several"] * 2, "all", "all and the agent", "notice")


@dataclass(frozen=True)
class Point:
    """What happens at one of the moments, as drawn. `stage` empty: at any time."""

    stage: str
    delay_s: float
    kind: str
    pick: float  # whom, where there is a choice
    workers: int  # how many there are after a loss of all


def plan(points: int, rng: random.Random) -> list[Point]:
    drawn: list[Point] = []
    for _ in range(points):
        lost_all = bool(drawn) and drawn[-1].kind not in ("one", "several")
        stages = (*SAVING, "", *(RESTORING for _ in SAVING)) if lost_all else (*SAVING, "")
        stage = rng.choice(stages)
        delay_s = rng.choice((0.0, rng.uniform(0.0, 0.01), rng.uniform(0.0, 0.05))) if stage else rng.uniform(0.0, 1.0)
        drawn.append(Point(stage, delay_s, rng.choice(KINDS), rng.random(), rng.randint(1, WORKERS_MAX)))
    return drawn


class Saved(Watched):
    """A run that keeps checkpoints, started again and again with as many workers as it is told."""

    def __init__(self, home: Path, uri: str, script: list[str], *, at_once: bool) -> None:
        super().__init__(home, "faulty", [], script)
        self._uri = uri
        self._at_once = at_once
        self._expected: int | None = None
        self.workers = 0
        self.committed = -1  # the newest that a worker said to have committed
        self.resumed_wrongly = ""

    def start_with(self, workers: int) -> None:
        self.workers = workers
        self.pids.clear()
        saving = ["--checkpoint", self._uri, "--save-every", str(SAVE_EVERY), "--keep", str(KEEP)]
        self._options = ["--workers", str(workers), "--restarts", "10000", *saving]
        self.start()

    def expect_to_resume_at(self, step: int) -> None:
        """Nobody has state, so whoever comes next must go on from there; -1: there is nothing to go on from."""
        self._expected = step

    def fold(self, event: dict[str, Any]) -> None:
        super().fold(event)
        if self._expected == -1 and event["kind"] in ("progress", "checkpoint"):
            self._expected = None  # it has begun anew, and what it goes on from later is its own
        if event["kind"] == "checkpoint":
            self.committed = max(self.committed, event["step"])
        elif event["kind"] == "resumed" and self._expected is not None:
            expected, self._expected = self._expected, None
            # A dead client's last request may still be in a server's hands.
            if event["step"] != expected and (self._at_once or event["step"] < expected):
                self.resumed_wrongly = f"step {expected} was the newest, and the run went on from {event['step']}"


class Killer:
    """Takes the run through its points. Owned by one thread."""

    def __init__(self, run: Saved, storage: Storage, ears: socket.socket, *, gate: Path) -> None:
        self._run = run
        self._storage = storage
        self._ears = ears
        self._gate = gate
        self._open_to = 0
        self.losses = 0  # of all workers
        self.done: dict[str, int] = {}

    def go_through(self, points: list[Point]) -> None:
        for number, point in enumerate(points, 1):
            self._open_gate()
            heard = self._wait_for(point)
            time.sleep(point.delay_s)
            where = f"step {heard.step} {point.stage}" if heard else "at any time"
            print(f"  point {number}: {where}, {1000 * point.delay_s:.1f} ms later: ", end="", flush=True)
            self._strike(point, heard)
            name = point.stage or "at any time"
            self.done[name] = self.done.get(name, 0) + 1
        self._gate.unlink()

    # ---- when

    def _open_gate(self) -> None:
        """Far enough for one more save. Training waits there, so that it does not end before the points do."""
        steps = [int(path.read_text() or "0") for path in self._gate.parent.glob("at-*")]
        self._open_gate_to(max(steps, default=0) + STEPS_PER_POINT)

    def _open_gate_to(self, step: int) -> None:
        self._open_to = step
        temporary = self._gate.with_suffix(".new")
        temporary.write_text(str(step))
        temporary.replace(self._gate)

    def _wait_for(self, point: Point) -> Announced | None:
        while (heard := self._hear(0.0)) is not None:
            if heard.stage == RESTORING == point.stage:
                return heard  # by those that were started while the losses were looked at; they do it only once
        self._look()
        if not point.stage:
            return None
        deadline = time.monotonic() + STAGE_S_MAX
        quiet_since = time.monotonic()
        while time.monotonic() < deadline:
            heard = self._hear(0.05)
            if heard is not None:
                quiet_since = time.monotonic()
                if heard.stage == point.stage:
                    return heard
            elif time.monotonic() > quiet_since + QUIET_S_MAX and self._is_at(self._open_to):
                # Saves are passed over while an earlier one is on its way, and then the gate may be too near.
                self._open_gate_to(self._open_to + SAVE_EVERY)
                quiet_since = time.monotonic()
            self._look()
        raise Failed(f"nothing was {point.stage} within {STAGE_S_MAX:.0f} s:\n{self._run.log()[-LOG_SHOWN:]}")

    def _is_at(self, step: int) -> bool:
        """Whether a living worker waits at this step."""
        places = [self._gate.with_name(f"at-{worker}") for worker in self._run.living_members()]
        return any(place.exists() and place.read_text() == str(step) for place in places)

    def _hear(self, timeout_s: float) -> Announced | None:
        if not select.select([self._ears], [], [], timeout_s)[0]:
            return None
        heard = Announced.decode(self._ears.recv(4096))
        if heard.stage == COMMITTED:
            self._run.committed = max(self._run.committed, heard.step)
        return heard

    def _look(self) -> None:
        run = self._run
        run.look()
        if run.resumed_wrongly:
            raise Failed(run.resumed_wrongly)
        if run.agent is None or run.agent.poll() is not None:
            raise Failed(f"the run is over too early:\n{run.log()[-LOG_SHOWN:]}")

    # ---- what

    def _strike(self, point: Point, heard: Announced | None) -> None:
        run = self._run
        run.look()
        agent = run.agent
        assert agent is not None
        living = {worker: pid for worker, pid in sorted(run.pids.items()) if process_state(pid)}
        victims = _chosen(point, heard, living)
        if point.kind == "notice":
            for pid in (*victims.values(), agent.pid):
                send(pid, signal.SIGTERM)
            time.sleep(NOTICE_S)
        while self._hear(0.0):  # what is said from here on, others say
            pass
        for pid in victims.values():
            send(pid, signal.SIGKILL)
        if point.kind in ("all and the agent", "notice"):
            agent.kill()
        ask = f"SIGTERM to all and the agent, {NOTICE_S:g} s, " if point.kind == "notice" else ""
        and_agent = " and the agent" if point.kind == "all and the agent" else ""
        print(f"{ask}kill -9 {' '.join(victims) or 'nobody'} of {len(living)}{and_agent}", flush=True)
        for worker, pid in victims.items():
            _wait(lambda pid=pid: not process_state(pid), f"the death of {worker}")  # type: ignore[misc]
        if len(victims) == len(living):
            self._lost_all(point)

    def _lost_all(self, point: Point) -> None:
        run, workers = self._run, _another(point.workers, self._run.workers)
        self.losses += 1
        if point.kind in ("all and the agent", "notice"):
            run.power_off()  # also those that the agent was just starting
            self.check()
            run.start_with(workers)
        else:
            self.check()
            run.scale(workers)
            run.workers = workers

    def check(self) -> list[int]:
        """No worker lives that has state. What is in storage must be whole, and as new as was said."""
        listed = list_checkpoints(self._storage)
        committed = [entry.step for entry in listed if entry.committed]
        damages = [f"step {step}: {sentence}" for step in committed for sentence in verify(self._storage, step)]
        if damages:
            raise Failed("a committed checkpoint is damaged: " + "; ".join(damages))
        warnings: list[str] = []
        found = newest_valid(self._storage, warn=warnings.append)
        newest = found[0].step if found is not None else -1
        if warnings or newest != max(committed, default=-1):
            raise Failed(f"found step {newest} of {committed}: {warnings}")
        while self._hear(0.0):
            pass
        self._run.look()
        if newest < self._run.committed:
            raise Failed(f"step {self._run.committed} was committed, and the newest in storage is {newest}")
        unfinished = [f"{entry.step} ({entry.parts} parts)" for entry in listed if not entry.committed]
        print(f"    committed and whole: {committed}; unfinished: {', '.join(unfinished) or 'none'}", flush=True)
        self._run.expect_to_resume_at(newest)
        return committed


def _chosen(point: Point, heard: Announced | None, living: dict[str, int]) -> dict[str, int]:
    """Mostly the one that was heard, where there is a choice."""
    if point.kind not in ("one", "several"):
        return living
    order = list(living)
    random.Random(point.pick).shuffle(order)
    if heard is not None and point.pick < 0.7:
        order.sort(key=lambda worker: worker != heard.worker)
    count = 1 if point.kind == "one" else max(1, len(order) - 1)
    return {worker: living[worker] for worker in order[:count]}


def _another(workers: int, than: int) -> int:
    return workers if workers != than else workers % WORKERS_MAX + 1


def _wait(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.001)


@contextmanager
def place(kind: str, home: Path) -> Iterator[str]:
    """A URI of a storage of that kind, and its server if it needs one."""
    if kind == "s3":
        with s3_server.S3Server(home / "s3") as server:
            server.make_bucket("checkpoints")
            os.environ.update(server.environment())  # the workers inherit it
            yield server.uri("checkpoints/faulty")
    elif kind == "hdfs":
        with hdfs_server.HdfsCluster(home / "hdfs") as cluster:
            yield f"{cluster.uri}/checkpoints"
    else:
        yield str(home / "checkpoints")


def training_of(points: int) -> list[str]:
    """The arguments of exactness_script with which nothing ends before so many points are done."""
    return ["--steps", str((STEPS_PER_POINT + 1) * (points + 5)), "--width", str(WIDTH)]


def go(args: argparse.Namespace, home: Path, stack: ExitStack) -> Killer:
    """All of it; raises Failed if anything is not as it should be."""
    training = training_of(args.points)
    steps = int(training[1])
    expected = args.digest or quiet_digest(home, 2, "auto", [str(EXACTNESS_SCRIPT), *training])
    print(f"seed {args.seed}: quiet run of {steps} steps {expected}", flush=True)
    uri = stack.enter_context(place(args.storage, home))
    storage = open_storage(uri)
    ears = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    address, gate = home / "stages", home / "gate"
    ears.bind(str(address))
    run = Saved(home, uri, [SCRIPT, str(address), *training, "--gate", str(gate)], at_once=args.storage == "local")
    stack.callback(run.end)
    rng = random.Random(args.seed)
    killer = Killer(run, storage, ears, gate=gate)
    gate.write_text(str(STEPS_PER_POINT))
    run.start_with(rng.randint(1, WORKERS_MAX))
    killer.go_through(plan(args.points, rng))
    found = run.finish(300)
    if found != expected:
        raise Failed(f"NOT EXACT: {found}, and the quiet run {expected}")
    committed = killer.check()
    if len(committed) != KEEP or committed[0] != steps:
        raise Failed(f"of {steps} steps the newest {KEEP} should be kept, and there are {committed}")
    return killer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", choices=("local", "s3", "hdfs"), default="local")
    parser.add_argument("--digest", help="of the quiet run, if it is known already")
    parser.add_argument("--keep", action="store_true", help="keep the run directory")
    args = parser.parse_args()
    if args.points < 1:
        parser.error("at least one point")
    reason = {"s3": s3_server.why_not, "hdfs": hdfs_server.why_not}.get(args.storage, str)()
    if reason:
        parser.error(f"--storage {args.storage} cannot be had here: {reason}")
    return args


def main() -> int:
    args = parse()
    cut_small()
    home = Path(tempfile.mkdtemp(prefix="holdfast-checkpoint-faults-"))
    started = time.monotonic()
    with ExitStack() as stack:
        try:
            killer = go(args, home, stack)
        except (Failed, HoldfastError) as error:
            print(f"seed {args.seed}: FAILED: {error}\nrun directory: {home}")
            return 1
    stages = ", ".join(f"{count} {stage}" for stage, count in sorted(killer.done.items()))
    print(f"seed {args.seed}: {args.points} points: {stages}")
    print(f"seed {args.seed}: all workers lost {killer.losses} times; exact; {time.monotonic() - started:.0f} s")
    if args.keep:
        print(f"run directory: {home}")
    else:
        shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
