"""Simulated workers that hang: alive, connections open, the lease kept, and the script's lines do not come to an end.

The judge that ships judges them, by beats made up of what each worker really does; the host's agent ends whom it
names. A hang that nobody may end (there is no other state) is over by itself after a while, as a data set that
answers at last.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from holdfast.core.words import KEY_VIEW
from holdfast.detection.beat import Activity, Beat
from holdfast.detection.hang_judge import GAP_S_MAX, MOVES_S, HangJudge, Process
from holdfast.detection.phi import IntervalHistory
from holdfast.detection.progress import Limits
from holdfast.membership.phases import Phase
from tests.harness.simulator.schedule import Violation

if TYPE_CHECKING:
    from tests.harness.simulator.hosts import Host
    from tests.harness.simulator.worker import Worker
    from tests.harness.simulator.world import World

LIMITS = Limits(stuck_s=4.0, hang_s=10.0)
LATEST_S = 18.0  # after this, one that could be ended has been
USUAL = IntervalHistory(20, 0.1, 0.05, 0.5)


class Hanging:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"hangs of {world.schedule.seed}")  # of its own: what else happens stays the same
        self._until: dict[str, float] = {}  # who hangs, or will when its script next has the word
        self._since: dict[str, float] = {}
        self._unexcused_s: dict[str, float] = {}
        self._stopped: set[str] = set()  # who was, at the last look
        self._hang_judges: dict[str, HangJudge] = {}
        self._beats: dict[str, Beat] = {}
        self._members: dict[str, frozenset[str]] = {}  # of the view, as each host's agent last saw it
        self.ended = 0  # because they hung

    def start(self) -> None:
        schedule = self._world.schedule
        for _ in range(schedule.hangs):
            self._world.after(self._rng.uniform(1.0, 3.0 + schedule.steps * 0.4), self._strike)

    def _strike(self) -> None:
        living = [worker for worker in self._world.living() if worker.id not in self._until]
        if living and not self._world.done:
            worker = self._rng.choice(living)
            self._world.trace("hang:", worker.id)
            self._until[worker.id] = self._world.now + self._rng.choice((2.0, 6.0, 28.0, 28.0))

    def holds(self, worker: Worker) -> bool:
        """Whether its script's lines, which would be through now, are not."""
        until = self._until.get(worker.id)
        if until is None:
            return False
        if self._world.now >= until:
            del self._until[worker.id]
            self._since.pop(worker.id, None)
            self._world.books.disturbed()
            return False
        if worker.id not in self._since:
            self._world.books.disturbed()
            self._world.trace(worker.id, "hangs")
            self._since[worker.id] = self._world.now
            if worker.host not in self._hang_judges:
                self._hang_judges[worker.host] = HangJudge(LIMITS)
                self._look(worker.agent)
        return True

    def hangs(self, worker: Worker) -> bool:
        return worker.id in self._until

    # ---- the agent's eye

    def _look(self, host: Host) -> None:
        world = self._world
        mine = [worker for worker in world.living() if worker.agent is host]
        held = [worker for worker in mine if worker.id in self._since]
        if not held or world.done:
            del self._hang_judges[host.name]
            return
        if not host.has_agent:
            self._hang_judges[host.name] = HangJudge(LIMITS)  # the next agent begins anew
        else:
            self._judge(host, mine)
        for worker in held:
            self._check_dealt_with(worker)
        world.after(GAP_S_MAX, lambda: self._look(host))

    def _judge(self, host: Host, mine: list[Worker]) -> None:
        hang_judge, entry = self._hang_judges[host.name], self._world.ledger.entries.get(KEY_VIEW)
        if entry is not None and self._world.ledger.up and not host.cuts:
            self._members[host.name] = frozenset(entry.value.members)
        members = self._members.get(host.name, frozenset())
        workers = {worker.id: worker for worker in mine}
        asked = hang_judge.observe({worker.id: self._beat(worker) for worker in mine}, self._world.now)
        processes = {id: Process("T" if workers[id].stopped else "S") for id in asked}
        for verdict in hang_judge.judge(processes, members):
            if verdict.kill:
                self._check_kill(workers[verdict.worker])
                self.ended += 1
                host.crash(workers[verdict.worker])

    def _beat(self, worker: Worker) -> Beat:
        """What its heart would say. One that gets on has come to something else at every look."""
        before = self._beats.get(worker.id)
        if before is not None and worker.stopped:
            return before
        since = self._since.get(worker.id)
        number = before.number + 1 if before else 2
        script = Activity.SHARD if worker.machine.phase is Phase.COMPUTING else Activity.SCRIPT
        beat = self._beats[worker.id] = Beat(
            number=number,
            at=self._world.now,
            activity=script if worker.busy and not worker.blocked else Activity.WAITING,
            entered=0 if worker.state is None else 2 if since is not None else number,
            moved_at=self._world.now if since is None else since,
            usual=USUAL,
            pace=IntervalHistory(20, 0.1, 0.01, 0.2),
        )
        return beat

    # ---- the promises

    def _others_well(self, worker: Worker, *, hang_s: float = 0.0) -> bool:
        """Whether another member of its view lives, has the state, and gets on or did `hang_s` ago."""
        entry = self._world.ledger.entries.get(KEY_VIEW)
        members = entry.value.members if entry is not None else ()
        others = [self._world.workers[id] for id in members if id != worker.id]
        now = self._world.now
        awake = [other for other in others if other.alive and not other.stopped and other.state is not None]
        return any(now - self._since.get(other.id, now) <= hang_s for other in awake)

    def _check_kill(self, worker: Worker) -> None:
        since = self._since.get(worker.id)
        if worker.stopped:
            return
        if since is None:
            raise Violation(f"{worker.id} is ended for hanging, and does not hang")
        assert LIMITS.hang_s is not None
        seen_s = MOVES_S + GAP_S_MAX  # before that nobody can tell that another one hangs as well
        if self._world.now - since < LIMITS.hang_s - 1.0 and not self._others_well(worker, hang_s=seen_s):
            raise Violation(f"{worker.id} is ended for hanging, with the only state that is left")

    def _check_dealt_with(self, worker: Worker) -> None:
        ledger = self._world.ledger
        excused = not (worker.alive and worker.agent.has_agent and ledger.up) or worker.agent.cuts > 0
        entry = self._world.ledger.entries.get(KEY_VIEW)
        excused |= entry is None or worker.id not in entry.value.members
        excused |= worker.id in self._stopped and not worker.stopped  # of what it did meanwhile nothing is known
        (self._stopped.add if worker.stopped else self._stopped.discard)(worker.id)
        if excused or not self._others_well(worker):
            self._unexcused_s[worker.id] = 0.0
        else:
            self._unexcused_s[worker.id] = self._unexcused_s.get(worker.id, 0.0) + GAP_S_MAX
        if self._unexcused_s[worker.id] > LATEST_S:
            raise Violation(f"{worker.id} has hung for {LATEST_S:.0f} s, others wait for it, and nobody ends it")
