"""One simulated worker process: its place in the run, the runtime that ships, and the user's script on top of it."""

from __future__ import annotations

import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.config import RunConfig
from holdfast.core.errors import CutShort, Evicted, HoldfastError, LedgerUnavailable, Stopped, Unsaved, WorkerEnded
from holdfast.core.rewinds import Rewinds
from holdfast.data.loader import ShardLoader
from holdfast.data.shards import ShardPlan
from holdfast.engine.api.joining import Training as Given
from holdfast.engine.api.joining import take_part
from holdfast.engine.api.run import Run
from holdfast.engine.place import WorkerPlace
from holdfast.engine.recovery.leaving import LeaveRequested
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.events import EventLog
from holdfast.membership.phases import Phase
from holdfast.modes.exact import Exact
from holdfast.net.listener import Purposes
from holdfast.placement.environment import WorkerEnvironment
from holdfast.reduce.arena import Arena
from holdfast.trust.keys import Keys
from tests.harness.runtime.kernel import VirtualKernel, VirtualMailbox
from tests.harness.runtime.ledger import LEASE_S, LedgerLine
from tests.harness.runtime.network import VirtualSocket, VirtualWires
from tests.harness.runtime.scripts import DATASET, SAMPLES, Script, Training
from tests.harness.runtime.storage import WorkerCheckpoints

if TYPE_CHECKING:
    from tests.harness.runtime.timeline import Task
    from tests.harness.runtime.world import World

KEYS = Keys.from_secret(bytes(32))
DIRECTORY = Path("/nowhere/simulated")


@cache
def plan_of(shards: int) -> ShardPlan:
    return ShardPlan(length=SAMPLES, batch_size=2 * shards, shards=shards, seed=3).validate()


class Events(EventLog):
    """What the worker would write to its event log."""

    def __init__(self, process: Process) -> None:
        super().__init__(None, process.id)
        self._process = process

    def write(self, kind: str, **fields: Any) -> None:
        super().write(kind, **fields)
        if kind not in ("spent", "progress"):
            self._process.world.told(self._process, kind, fields)


class SimulatedPlace(WorkerPlace):
    """Where a simulated worker belongs: every port is virtual, and what is built on them is what ships."""

    def __init__(self, process: Process) -> None:
        world = process.world
        self.environment = WorkerEnvironment(
            run_dir=DIRECTORY,
            worker=process.id,
            socket_dir=DIRECTORY,
            late_after_s=world.schedule.late_s,
            lease_s=LEASE_S,
        )
        self.mode = Exact()
        self.fingerprint = "simulated"
        self.rewinds = Rewinds()
        self.run_id = "simulated"
        self.mailbox = process.mailbox
        self.listener = None
        self.me = process.id
        self.keys = KEYS
        self.wires = VirtualWires(world.network, process.id, process.kernel)
        self.host = self.wires.host
        self.lease_s = LEASE_S
        self.ledger = LedgerLine(world, process)
        self.events = Events(process)
        self._process = process

    def listen(self, arena: Arena, desk: Any, means: Any) -> tuple[str, str]:
        self._process.listen(arena, self.purposes(desk, means))
        if "@" in self.me:
            return f"tcp:{self.me}", f"unix:{self.me}"
        return ("tcp:" if self._process.world.schedule.path == "network" else "unix:") + self.me, ""

    def memory_root(self) -> None:
        return None

    def checkpoints(self, config: Any, holder: Any, saving: Any, feed: Any, rewinding: Any) -> NoCheckpoints:
        every = self._process.world.schedule.save_every
        return WorkerCheckpoints(self._process, holder, every) if every else NoCheckpoints()


class Process:
    """Lives until its script ends, or somebody kills it."""

    def __init__(self, world: World, id: str, slot: int) -> None:
        self.world = world
        self.id = id
        self.slot = slot
        self.alive = True
        self.ended = ""  # how: finished, evicted, left, killed
        self.is_leaving = False  # it was asked to
        self.stopped_until = 0.0
        self.hangs_until = 0.0
        self.cut_from_ledger = 0
        self.watch_lags_until = 0.0
        self.kernel = VirtualKernel(world.timeline, self, world.network.descriptors)
        self.mailbox = VirtualMailbox(self.kernel)
        self.purposes: Purposes | None = None
        self.arena: Arena | None = None
        self.speed_s = world.timeline.rng.choice((0.01, 0.02, 0.05))
        self.run: Run | None = None
        self.next_step: int | None = None
        self.training: Training | None = None
        self.main = self.kernel.start("main", self._main)

    # ---- its life

    def _main(self) -> None:
        world, script = self.world, self.world.schedule.script
        training = self.training = Training(self)
        try:
            self.run = self._join(training, script)
        except (LedgerUnavailable, WorkerEnded) as error:
            self._end("evicted", repr(error))
            return
        try:
            how = self._script(training, self.run, script)
        except HoldfastError as error:
            self._end("failed", str(error))
            world.books.script_failed(self, error)
            return
        self._end(*how)

    def _join(self, training: Training, script: Script) -> Run:
        plan, place = plan_of(script.shards), SimulatedPlace(self)
        capture = place.mode.capture(training.model)
        config = RunConfig(
            batch_size=plan.batch_size,
            shards=plan.shards,
            seed=plan.seed,
            length=plan.length,
            parameters=3,
            path=self.world.schedule.path,
        )
        given = Given(
            training.model,
            training.optimizer,
            {},
            capture=capture,
            plan=plan,
            loader=ShardLoader(DATASET, plan),
            saving=CheckpointSettings(),
        )
        return take_part(place, given, config)

    def _script(self, training: Training, run: Run, script: Script) -> tuple[str, str]:
        """As bootstrap.py and process_edge.py have it: a worker's end becomes its process's."""
        try:
            training.run(run, script)
            run.close()
        except WorkerEnded as end:
            run.close(failed=True)
            kinds = {Evicted: "evicted", Stopped: "left", CutShort: "failed", Unsaved: "failed"}
            return kinds[type(end)], end.reason
        self.world.books.finished(self, run)
        return "finished", ""

    def _end(self, how: str, why: str) -> None:
        self.world.trace(self.id, how, why)
        self.ended = how
        self.world.agent.process_ended(self)

    def thread_failed(self, task: Task, error: BaseException) -> None:
        where = "".join(traceback.format_exception(error))
        self.world.books.violated(f"{self.id}: its thread {task.name!r} failed: {error!r}\n{where}")

    def kill(self) -> None:
        self.world.trace("kill", self.id)
        self.ended = "killed"
        self.world.agent.process_ended(self)

    def let_go(self) -> None:
        """What a process that is gone has no more, though its frames are still here."""
        if self.run is not None:
            self.run._worker.audits.calls.close()
        if self.arena is not None:
            self.arena.close()

    # ---- what others want of it

    def listen(self, arena: Arena, purposes: Purposes) -> None:
        self.arena, self.purposes = arena, purposes

    def serve(self, purpose: Any, number: int, sock: VirtualSocket) -> None:
        try:
            purpose.serve(number, sock)
        except (HoldfastError, OSError, ValueError) as error:
            self.world.trace(self.id, "serves no more:", error)
        finally:
            sock.close()

    def leave(self) -> None:
        """SIGTERM."""
        self.is_leaving = True
        self.mailbox.put(LeaveRequested())

    # ---- its script

    def works(self, seconds: float) -> None:
        """Lines of the script that take so long."""
        self.kernel.sleep(seconds)
        if self.hangs_until > self.kernel.now():
            self.kernel.sleep(self.hangs_until - self.kernel.now())

    def shard_s(self) -> float:
        return self.world.schedule.shards_take * self.speed_s * (0.5 + self.world.timeline.rng.random())

    def line_s(self, at_most_s: float) -> float:
        return at_most_s * self.world.timeline.rng.random()

    def applied(self, step: int, loss: float, weights: tuple[float, ...]) -> None:
        self.world.books.applied(self, step, loss, weights)

    def found(self, what: str, value: float) -> None:
        self.world.books.found(self, what, value)

    @property
    def is_spare(self) -> bool:
        """It may wait outside for as long as nobody needs it."""
        machine = self.run._worker.machine if self.run is not None else None
        return machine is not None and machine.phase is Phase.WAITING and len(machine.ledger.ids) > machine.ledger.size

    @property
    def phase(self) -> Phase | None:
        return self.run._worker.machine.phase if self.run is not None else None

    @property
    def place(self) -> object:
        """Where it is: whether it gets on is whether this changes."""
        if self.run is None:
            return None
        machine, outside = self.run._worker.machine, self.run._outside
        return (
            machine.phase,
            machine.next,
            self.run._loops.count.passed,
            outside._base,
            outside._calls,
            machine._number(),
        )

    @property
    def words(self) -> str:
        """What it waits for, as its heartbeat would say."""
        if self.run is None:
            return "joining"
        pulse, machine = self.run._pulse, self.run._worker.machine
        wait = pulse.wait.words if pulse.wait is not None else pulse.activity.words
        return f"{machine.phase.value} at step {machine.next} in view {machine._number()}, {wait}; {machine.reason}"
