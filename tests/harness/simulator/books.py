"""The books of a simulated run: what really happened, compared with what the machines decide.

They know which shards each worker really computed, which steps it really applied, which views the ledger really had,
who was cut off from whom and when; and raise Violation when a decision breaks a promise, or when nothing goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.words import KEY_VIEW, KEY_WORKERS, View
from holdfast.membership import messages as m
from holdfast.membership.auditing import Finding
from holdfast.membership.phases import STEP_PHASES, Phase
from tests.harness.simulator.ledger import LEASE_S
from tests.harness.simulator.schedule import Violation

if TYPE_CHECKING:
    from tests.harness.simulator.worker import Worker
    from tests.harness.simulator.world import World

EXCUSE_S = 30.0  # after a fault, a worker that lives and is registered may still be left out
QUIET_S = 5.0  # after this long an earlier fault has no consequences that are still under way
STATIC_S = 10.0  # without the ledger, and with nobody lost, a step takes no longer than this
PROGRESS_S = 100.0  # after the last fault, or its end, something must go on: 60 of them a silent worker is waited for
VIEWS_MAX = 20  # since the last fault, or its end


class Books:
    def __init__(self, world: World) -> None:
        self._world = world
        self.steps_committed = 0
        self.closed = 0  # steps that a stand-in closed for a late worker
        self._progress_at = 0.0
        self._disturbed_at = -1000.0
        self._quiet_s = 0.0  # between the last two disturbances
        self._calm = False  # in this outage of the ledger: nothing else has happened
        self._views_since = 0
        self._unregistered_at: dict[str, float] = {}
        self._left_out: set[str] = set()
        self._places: dict[str, tuple[object, float]] = {}  # where a worker is, and since when
        self.left_behind = 0
        self.caught_up = 0

    # ---- what goes on

    def disturbed(self) -> None:
        """A fault begins or ends."""
        self._quiet_s = self._world.now - self._disturbed_at
        self._disturbed_at = self._world.now
        self._calm = False
        self._views_since = 0

    def unregistered(self, worker: str) -> None:
        self._unregistered_at[worker] = self._world.now

    def applied(self, worker: Worker, step: int) -> None:
        self._world.trace(worker.id, "applied step", step)
        self._world.pacing.applied(worker)
        self.steps_committed = max(self.steps_committed, step + 1)
        self._progress_at = self._world.now

    def watch_outage(self) -> None:
        """The ledger goes away while all members of its view train together: they must go on doing so."""
        world = self._world
        entry = world.ledger.entries.get(KEY_VIEW)
        members = [world.workers[member] for member in entry.value.members] if entry else []
        training = STEP_PHASES | {Phase.TURNING}
        self._calm = (
            bool(members)
            and self._quiet_s > QUIET_S
            and all(
                worker.alive
                and not worker.stopped
                and not world.hanging.hangs(worker)
                and not worker.machine.leave_asked
                and not worker.machine._lost
                and worker.machine.phase in training
                and worker.machine.view == entry.value  # type: ignore[union-attr]
                and world.network.view_of(worker.id) == entry.value.number  # type: ignore[union-attr]
                and all(world.network.reaches(worker.id, other.id) for other in members)
                for worker in members
            )
        )
        self._watch_outage(world.now)

    def _watch_outage(self, since: float) -> None:
        world = self._world
        if world.ledger.up or not self._calm or world.done:
            return
        if world.now - max(since, self._progress_at) > STATIC_S:
            raise Violation(f"no step for {STATIC_S:.0f} s while the ledger is away, though nobody is lost")
        world.after(1.0, lambda: self._watch_outage(since))

    def check_progress(self) -> None:
        quiet_s = self._world.now - max(self._disturbed_at, self._progress_at)
        if quiet_s > PROGRESS_S and not self._world.done and self._world.ledger.up:
            raise Violation(f"no step for {quiet_s:.0f} s; {self.waiting()}")

        self._check_everybody_gets_on()

    def _check_everybody_gets_on(self) -> None:
        """Nobody waits for ever: once faults have ceased, every member comes to another place, or to an end."""
        world, entry = self._world, self._world.ledger.entries.get(KEY_VIEW)
        members = entry.value.members if entry is not None else ()
        for worker in world.living():
            machine, script = worker.machine, worker.script
            place = (machine.phase, machine.next, script.count.passed if script is not None else 0)
            known, since = self._places.get(worker.id, (None, 0.0))
            if place != known or worker.id not in members or world.hanging.hangs(worker) or not world.ledger.up:
                self._places[worker.id] = (place, world.now)
            elif world.now - max(since, self._disturbed_at) > PROGRESS_S:
                raise Violation(f"{worker.id} has not got on for {PROGRESS_S:.0f} s; {self.waiting()}")

    def waiting(self) -> dict[str, str]:
        return {w.id: f"{w.machine.phase.value}: {w.machine.reason}" for w in self._world.living()}

    # ---- views

    def check_view(self, old: View | None, new: View) -> None:
        world = self._world
        expected = old.number + 1 if old else 1
        if new.number != expected or len(set(new.members)) != len(new.members) or not new.members:
            raise Violation(f"view {new} does not follow {old}")
        if new.number in world.views and world.views[new.number] != new:
            raise Violation(f"two views of number {new.number}: {world.views[new.number]} and {new}")
        world.views[new.number] = new
        world.trace("view", new)
        for member in old.members if old else ():
            if member not in new.members:
                self._check_left_out(member, new)
        for member in set(new.members) - set(old.members if old else ()):
            self._check_back(member, new)
        back = {member for member in self._left_out.intersection(new.members) if not world.rewinds.overtook(member)}
        if back:
            raise Violation(f"view {new} takes in {sorted(back)} again, which an earlier one left out")
        self._views_since += 1
        if self._views_since > VIEWS_MAX:
            raise Violation(f"{VIEWS_MAX} views since the last fault, and no end; {self.waiting()}")

    def _check_left_out(self, member: str, view: View) -> None:
        """Somebody who lives and holds a lease is left out only if something has happened to it."""
        world = self._world
        worker = world.workers[member]
        if member in dict(view.late):
            self._check_late(member, view)
            return
        if worker.state is not None and worker.machine.phase is not Phase.WAITING:
            self._left_out.add(member)
        if not worker.alive or KEY_WORKERS + member not in world.ledger.entries:
            return
        excused = worker.stopped or worker.cut or worker.machine.leave_asked
        excused |= any(not world.network.reaches(member, other.id) for other in world.living())
        excused |= world.now - self._disturbed_at < EXCUSE_S
        if not excused:
            raise Violation(f"view {view} leaves out {member}, which lives, is registered and can be reached")

    def _check_late(self, member: str, view: View) -> None:
        """Who is left behind is expected back; and those who go on are as many at least."""
        newly = [worker for worker, number in view.late if number == view.number]
        if member in newly and len(newly) > len(view.members):
            raise Violation(f"view {view} leaves behind more than it has")

    def _check_back(self, member: str, view: View) -> None:
        """Who was left behind is taken in only when it has given up its state: its loop is at the end of a step."""
        worker = self._world.workers[member]
        inside = worker.machine.phase not in (Phase.WAITING, Phase.ENDED)
        if worker.alive and worker.state is not None and inside and not self._world.rewinds.overtook(member):
            raise Violation(f"view {view} takes in {member}, which is {worker.machine.phase.value}")

    def check_open(self, worker: Worker, view: View) -> None:
        if self._world.views.get(view.number) != view:
            raise Violation(f"{worker.id} enters {view}, which was never agreed on")

    def check_lapse(self, keys: list[str]) -> None:
        """A lease runs out. That of a worker that lives and reaches the ledger must not."""
        world = self._world
        for key in keys:
            worker = world.workers.get(key[len(KEY_WORKERS) :]) if key.startswith(KEY_WORKERS) else None
            if worker is None or not worker.alive or worker.finished or worker.stopped or worker.cut:
                continue
            if world.now - max(worker.hampered_at, world.ledger.changed_at) > LEASE_S + 1.0:
                raise Violation(f"{worker.id} lives, reaches the ledger, and lets its lease run out")

    # ---- steps

    def check_origin(self, worker: Worker, step: int) -> None:
        """Starting over is right only when nobody of the view before is left with state."""
        world = self._world
        view = worker.machine.view
        assert view is not None
        entry = world.ledger.entries.get(KEY_VIEW)
        if entry is None or view != entry.value:
            return  # it was stopped and does not know yet that the others went on
        newest = world.rewinds.newest(worker)
        if step != (newest or 0):
            raise Violation(f"{worker.id} starts at step {step} without state; the newest checkpoint is of {newest}")
        before = world.views.get(view.number - 1)
        for member in (*view.members, *(before.members if before else ())):
            other = world.workers.get(member)
            if other is not None and other.rewinding.known.number < worker.rewinding.known.number:
                continue  # the run has gone back from what it has
            if other is not None and other.alive and not other.finished and (other.state or 0) > 0:
                raise Violation(f"{worker.id} starts over while {member} is at step {other.state}")

    def number_of(self, worker: Worker) -> int:
        return worker.machine.view.number if worker.machine.view else 0

    def moved_on(self, number: int, effect: m.Reduce) -> str:
        """A member whose sums are no longer those of this view and step, seen as the runtime sees it: by its stamp."""
        schedule = self._world.schedule
        for member, _ in effect.shards:
            stamp = self._world.workers[member].stamp
            next_step = not schedule.two_rounds and stamp[1] == effect.step + 1
            if stamp != (number, effect.step) and not next_step:
                return member
        return ""

    def broke_off(self, worker: Worker, number: int, effect: m.Reduce) -> str:
        """Over a network the sums must still be sent: a member that died or left the group before it had done so."""
        if not self._world.schedule.network:
            return ""
        for member, _ in effect.shards:
            peer = self._world.workers[member]
            gone = not peer.alive or self._world.network.view_of(member) != number
            if member != worker.id and gone and not peer.vanished and peer.reduced < (number, effect.step):
                return member
        return ""

    def stuck_on(self, worker: Worker, effect: m.Reduce) -> str:
        """A member whose sums cannot come now: its host is gone, or the network is cut."""
        if not self._world.schedule.network:
            return ""
        for member, _ in effect.shards:
            peer = self._world.workers[member]
            away = peer.vanished or not self._world.network.reaches(worker.id, member)
            if member != worker.id and away:
                return member
        return ""

    def check_reduction(self, effect: m.Reduce) -> None:
        real: list[int] = []
        for member, shards in effect.shards:
            missing = set(shards) - self._world.workers[member].computed.get(effect.step, set())
            if missing:
                raise Violation(f"step {effect.step}: {member} did not compute {sorted(missing)}")
            real += shards
            self._check_audited(member, effect)
            self._check_lines(member, effect)
        if not self._world.schedule.step_rules.whole:
            self._check_what_counts(effect, real)
        elif sorted(real) != list(range(self._world.schedule.shards)):
            raise Violation(f"step {effect.step} would be committed with shards {sorted(real)}")

    def _check_lines(self, member: str, effect: m.Reduce) -> None:
        """What the scripts do between their loops is done once by everybody, before the step."""
        said = {one: self._world.workers[one].lines_at.get(effect.step) for one, shards in effect.shards if shards}
        mine = said.get(member)
        if mine is not None and (len(set(mine)) != len(mine) or any(mine != other for other in said.values())):
            raise Violation(f"step {effect.step}: the scripts' lines before it were not the same: {said}")

    def _check_what_counts(self, effect: m.Reduce, real: list[int]) -> None:
        """The mean is over what is there, each shard once, and there is something."""
        if not real or len(set(real)) != len(real):
            raise Violation(f"step {effect.step} would be committed with shards {sorted(real)}")
        for member, shards in effect.shards:
            there = self._world.workers[member].computed.get(effect.step, set())
            if set(shards) != there:
                raise Violation(f"step {effect.step}: {member} holds {sorted(there)}, and {shards} would count")

    def check_same(self, worker: Worker) -> None:
        """Members of one view that have applied the same steps have the same weights."""
        view = worker.machine.view
        for member in view.members if view is not None else ():
            other = self._world.workers[member]
            if other.machine.view == view and other.state == worker.state and other.weights != worker.weights:
                raise Violation(f"{worker.id} has {worker.weights} after step {worker.state}, {member} {other.weights}")

    def _check_audited(self, member: str, effect: m.Reduce) -> None:
        """What was computed to be compared does not count, and what others would have found wrong is not there."""
        worker = self._world.workers[member]
        brought = dict(effect.shards)[member]
        extra = worker.hardware.counted(effect.step) - set(brought)
        if extra and self._world.schedule.audit:
            raise Violation(f"step {effect.step}: {member} counts {sorted(extra)}, which others bring")
        wrong = worker.hardware.wrong(effect.step) & set(brought)
        others = [self._world.workers[other].hardware for other, _ in effect.shards if other != member]
        compared = {shard for other in others for shard in other.audited(effect.step)}
        if wrong & compared:
            raise Violation(f"step {effect.step}: shards {sorted(wrong)} of {member} are wrong, and would be committed")

    def check_accused(self, finding: Finding) -> None:
        for liar in finding.liars:
            if not self._world.workers[liar].hardware.has_lied:
                raise Violation(f"{liar} is accused, and has told nothing but the truth: {finding}")
        self.disturbed()

    def check_commit(self, worker: Worker, step: int) -> None:
        """In two rounds the mean is whole when every member has written its slice."""
        view = worker.machine.view
        assert view is not None
        two_rounds = self._world.schedule.two_rounds
        wrote = [self._world.workers[member].reduced for member in view.members] if two_rounds else []
        if any(number < view.number or (number, at) < (view.number, step) for number, at in wrote):
            raise Violation(f"{worker.id} commits step {step} before all slices are there")

    def check_level(self) -> None:
        """Whoever ended in order has all steps, unless it was asked to leave."""
        steps = self._world.schedule.steps
        if self._world.given_up:
            return
        for worker in self._world.workers.values():
            behind = worker.machine._left_at > 0  # the others came to the end without it
            if worker.finished and worker.state not in (None, steps) and not worker.machine.leave_asked and not behind:
                raise Violation(f"{worker.id} ended at step {worker.state} of {steps}")
