"""Static stability of a simulated run: while the ledger is away, steps go on.

If all members of the ledger's view train together when it goes away, and nothing else had happened just before, steps
must be applied in the time that follows, until something else happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.words import KEY_VIEW, View
from holdfast.membership.phases import STEP_PHASES, Phase
from tests.harness.runtime.process import Process

if TYPE_CHECKING:
    from tests.harness.runtime.world import World

SETTLES_S = 1.0  # until what has been disturbed shows
STEADY_S = 8.0  # within that a step is applied: the script's lines between loops, and a slow network, take their time
TRAINING = STEP_PHASES | {Phase.TURNING}


class Steadiness:
    def __init__(self, world: World) -> None:
        self._world = world
        self._disturbed_at = -SETTLES_S  # by something else than the ledger
        self._watch = 0  # its number: what was begun under an earlier one is void

    def disturbed(self) -> None:
        """Something else happens, or is over."""
        self._watch += 1
        self._disturbed_at = self._world.timeline.now

    def ledger_goes_away(self) -> None:
        self._watch += 1
        if self._world.timeline.now - self._disturbed_at > SETTLES_S:
            self._begin(self._watch)

    def _begin(self, watch: int) -> None:
        world = self._world
        if not world.is_done and self._all_train():
            applied = world.books.steps_applied
            world.timeline.after(STEADY_S, lambda: self._check(watch, applied))

    def _check(self, watch: int, applied: int) -> None:
        world = self._world
        if watch != self._watch or world.ledger.up or world.is_done or self._at_the_end():
            return
        if world.books.steps_applied == applied:
            world.books.violated(f"no step in {STEADY_S} s without the ledger; {world.books.waiting()}")
        else:
            self._begin(watch)

    def _members(self) -> tuple[View | None, list[Process]]:
        entry = self._world.ledger.machine.get(KEY_VIEW)
        view = View.decode(entry.value) if entry is not None else None
        return view, [self._world.processes[member] for member in view.members] if view is not None else []

    def _all_train(self) -> bool:
        view, members = self._members()
        return bool(members) and not self._at_the_end() and all(self._trains(one, view, members) for one in members)

    def _trains(self, process: Process, view: View | None, members: list[Process]) -> bool:
        now, run = self._world.timeline.now, process.run
        if run is None or not process.alive or max(process.stopped_until, process.hangs_until) > now:
            return False
        machine = run._worker.machine
        return (
            machine.phase in TRAINING
            and machine.view == view
            and not machine._lost
            and not process.is_leaving
            and all(self._world.network.reaches(process.id, other.id) for other in members)
        )

    def _at_the_end(self) -> bool:
        """Somebody has been through its last loop: there are no further steps."""
        loops = len(self._world.schedule.script.loops)
        runs = [process.run for process in self._members()[1] if process.run is not None]
        return any(run.stopped or run._loops.count.passed >= loops or run.is_closed for run in runs)
