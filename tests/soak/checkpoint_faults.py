"""Real processes, killed at every stage of a save: is there always a whole checkpoint, and are the weights right?

    python -m tests.soak.checkpoint_faults --points 60 --seed 1
    python -m tests.soak.checkpoint_faults --points 20 --seed 1 --storage s3

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
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid, verify
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.drills.engine import Engine
from holdfast.drills.ground import Ground, Setting
from holdfast.drills.nemesis import Nemesis
from holdfast.drills.schedule import Planned
from holdfast.drills.trace import TraceReader
from holdfast.placement.proc import process_state
from holdfast.testing.observed_run import Failed, ObservedRun, send
from tests.harness import hdfs_server, s3_server
from tests.harness.gate import Gate
from tests.soak.conducting import add_common, conduct, quiet_run
from tests.trainings import exactness_training, staged_training
from tests.trainings.staged_training import COMMITTED, RESTORING, SAVING, Announced, cut_small

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


def plan_points(points: int, rng: random.Random) -> list[Point]:
    drawn: list[Point] = []
    for _ in range(points):
        lost_all = bool(drawn) and drawn[-1].kind not in ("one", "several")
        stages = (*SAVING, "", *(RESTORING for _ in SAVING)) if lost_all else (*SAVING, "")
        stage = rng.choice(stages)
        delay_s = rng.choice((0.0, rng.uniform(0.0, 0.01), rng.uniform(0.0, 0.05))) if stage else rng.uniform(0.0, 1.0)
        drawn.append(Point(stage, delay_s, rng.choice(KINDS), rng.random(), rng.randint(1, WORKERS_MAX)))
    return drawn


class Saved(ObservedRun):
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
        self.started.clear()
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


class KillsAtStages:
    """Takes the run through its points. Owned by one thread."""

    def __init__(self, ground: Ground, run: Saved, storage: Storage, ears: socket.socket, gate: Gate) -> None:
        self.nemesis = Nemesis(ground, run, "faulty", self._say, lambda: run.step)
        self._run = run
        self._storage = storage
        self._ears = ears
        self._gate = gate
        self._where = ""
        self.losses = 0  # of all workers
        self.count: Counter[str] = Counter()

    def faults(self, points: list[Point]) -> Iterator[None]:
        for number, point in enumerate(points, 1):
            # Far enough for one more save. Training waits there, so that it does not end before the points do.
            self._gate.open_to(self._gate.newest() + STEPS_PER_POINT)
            heard = yield from self._wait_for(point)
            time.sleep(point.delay_s)
            where = f"step {heard.step} {point.stage}" if heard else "at any time"
            self._where = f"point {number}: {where}, {1000 * point.delay_s:.1f} ms later"
            self._strike(point, heard)
            self.count[point.stage or "at any time"] += 1
        self._gate.path.unlink()

    def rest(self, seconds: float) -> None:
        """Until somebody says where it is."""
        select.select([self._ears], [], [], seconds)

    def _say(self, text: str) -> None:
        print(f"  {self._where}: {text}", flush=True)

    # ---- when

    def _wait_for(self, point: Point) -> Generator[None, None, Announced | None]:
        while (heard := self._hear()) is not None:
            if heard.stage == RESTORING == point.stage:
                return heard  # by those that were started while the losses were looked at; they do it only once
        deadline = time.monotonic() + STAGE_S_MAX
        quiet_since = time.monotonic()
        while point.stage:
            heard = self._hear()
            if heard is not None:
                quiet_since = time.monotonic()
                if heard.stage == point.stage:
                    return heard
                continue
            if time.monotonic() > quiet_since + QUIET_S_MAX and self._is_at(self._gate.open_below):
                # Saves are passed over while an earlier one is on its way, and then the gate may be too near.
                self._gate.open_to(self._gate.open_below + SAVE_EVERY)
                quiet_since = time.monotonic()
            if self._run.resumed_wrongly:
                raise Failed(self._run.resumed_wrongly)
            if time.monotonic() > deadline:
                raise Failed(f"nothing was {point.stage} within {STAGE_S_MAX:.0f} s:\n{self._run.last_words()}")
            yield
        return None

    def _is_at(self, step: int) -> bool:
        """Whether a living worker waits at this step."""
        return bool(self._gate.at(step, self._run.living_members()))

    def _hear(self) -> Announced | None:
        if not select.select([self._ears], [], [], 0.0)[0]:
            return None
        heard = Announced.decode(self._ears.recv(4096))
        if heard.stage == COMMITTED:
            self._run.committed = max(self._run.committed, heard.step)
        return heard

    # ---- what

    def _strike(self, point: Point, heard: Announced | None) -> None:
        run = self._run
        run.look()
        agent = run.agent
        assert agent is not None
        living = {worker: pid for worker, pid in sorted(run.pids.items()) if process_state(pid)}
        victims = _chosen(point, heard, list(living))
        if point.kind == "notice":
            self._say(f"SIGTERM to all and the agent, {NOTICE_S:g} s")
            for pid in (*living.values(), agent.pid):
                send(pid, signal.SIGTERM)
            time.sleep(NOTICE_S)
        while self._hear():  # what is said from here on, others say
            pass
        self.nemesis.kill(Planned(0.0, "kill", detail=f"of {len(living)}"), *victims)
        if point.kind in ("all and the agent", "notice"):
            agent.kill()
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
        while self._hear():
            pass
        self._run.look()
        if newest < self._run.committed:
            raise Failed(f"step {self._run.committed} was committed, and the newest in storage is {newest}")
        unfinished = [f"{entry.step} ({entry.parts} parts)" for entry in listed if not entry.committed]
        print(f"    committed and whole: {committed}; unfinished: {', '.join(unfinished) or 'none'}", flush=True)
        self._run.expect_to_resume_at(newest)
        return committed


def _chosen(point: Point, heard: Announced | None, living: list[str]) -> list[str]:
    """Mostly the one that was heard, where there is a choice."""
    if point.kind not in ("one", "several"):
        return living
    order = list(living)
    random.Random(point.pick).shuffle(order)
    if heard is not None and point.pick < 0.7:
        order.sort(key=lambda worker: worker != heard.worker)
    return order[: 1 if point.kind == "one" else max(1, len(order) - 1)]


def _another(workers: int, than: int) -> int:
    return workers if workers != than else workers % WORKERS_MAX + 1


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
    """The arguments of exactness_training with which nothing ends before so many points are done."""
    return ["--steps", str((STEPS_PER_POINT + 1) * (points + 5)), "--width", str(WIDTH)]


def drill(args: argparse.Namespace, home: Path) -> None:
    """All of it; raises Failed if anything is not as it should be."""
    began = time.monotonic()
    cut_small()
    training = training_of(args.points)
    steps = int(training[1])
    with ExitStack() as stack:
        ground = stack.enter_context(Ground(Setting(workers=2), home, [exactness_training.__file__, *training]))
        expected = quiet_run(ground, args.digest).digest
        print(f"seed {args.seed}: quiet run of {steps} steps {expected}", flush=True)
        uri = stack.enter_context(place(args.storage, home))
        storage = open_storage(uri)
        ears = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        address, gate = home / "stages", Gate(home / "gate")
        ears.bind(str(address))
        script = [staged_training.__file__, str(address), *training, "--gate", str(gate.path)]
        run = Saved(home, uri, script, at_once=args.storage == "local")
        stack.callback(run.end)
        rng = random.Random(args.seed)
        plan = KillsAtStages(ground, run, storage, ears, gate)
        gate.open_to(STEPS_PER_POINT)
        run.start_with(rng.randint(1, WORKERS_MAX))
        points = plan_points(args.points, rng)
        traces = TraceReader(home)  # there are none: the rig would be one more thing between a stage and its kill
        found = Engine(run, traces, plan.nemesis, plan.faults(points), plan.rest).finish().digest
        if found != expected:
            raise Failed(f"NOT EXACT: {found}, and the quiet run {expected}")
        committed = plan.check()
    if len(committed) != KEEP or committed[0] != steps:
        raise Failed(f"of {steps} steps the newest {KEEP} should be kept, and there are {committed}")
    stages = ", ".join(f"{count} {stage}" for stage, count in sorted(plan.count.items()))
    print(f"seed {args.seed}: {args.points} points: {stages}")
    print(f"seed {args.seed}: all workers lost {plan.losses} times; exact; {time.monotonic() - began:.0f} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--storage", choices=("local", "s3", "hdfs"), default="local")
    add_common(parser)
    args = parser.parse_args()
    if args.points < 1:
        parser.error("at least one point")
    reason = {"s3": s3_server.why_not, "hdfs": hdfs_server.why_not}.get(args.storage, str)()
    if reason:
        parser.error(f"--storage {args.storage} cannot be had here: {reason}")
    return args


if __name__ == "__main__":
    sys.exit(conduct("checkpoint-faults", parse(), drill))
