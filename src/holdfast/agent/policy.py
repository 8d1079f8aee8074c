"""What the agent decides: whom to start, replace, ask to leave or end, and when the run is over. Pure.

The agent tells the policy what happened and carries out what `tick` returns; nothing here starts, reads or waits
for anything, and the time is passed in. Invariants:
- a slot has at most one living worker;
- a worker that ended in order is not replaced; one that was evicted is, and that costs no restart;
- no worker is started once the run is stopping, finished or over.

How an exit is read:
    0                        done, or left in order
    it said `unsaved`        its last state is not in storage: another would not help, and the run is not finished
    it said `cut_short`      its script ended in the middle of the training, and would again
    EXIT_EVICTED             the others went on without it
    EXIT_BAD_INPUT           of one that was no member yet: refused, its settings are wrong or not the run's
    another code, a crash    the script's own failure: may repeat for ever, so it is counted (see `_hopeless`)
    any other signal         done to it from outside: always worth a replacement
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.agent.actions import Action, AnnounceStop, AskToLeave, Kill, RunEnd, Start
from holdfast.agent.repeats import Repeats
from holdfast.core.errors import EXIT_BAD_INPUT, EXIT_CUT_SHORT, EXIT_EVICTED, EXIT_UNSAVED
from holdfast.core.words import host_of, slot_of

__all__ = ["Action", "AnnounceStop", "AskToLeave", "Kill", "Policy", "RunEnd", "Start"]

HUNG_GRACE_S = 1.0
STOP_GRACE_S = 30.0
LEAVE_GRACE_S = 60.0
STRAGGLER_GRACE_S = 60.0
OUTSIDER_GRACE_S = 15.0  # for one that is not in the last view: it leaves at once, unless it is stopped or hangs
LATE_GRACE_S = 5.0  # for one that was left behind, and may come back though its lease ran out
SPARE_GRACE_S = 5.0
REPLACE_AFTER_S = 30.0  # of being slow
BACK_OFF_FIRST_S = 0.5
BACK_OFF_MAX_S = 30.0
REPEATS_MAX = 3
CRASH_SIGNALS = frozenset({4, 6, 7, 8, 11})  # ILL, ABRT, BUS, FPE, SEGV: the process did it to itself


@dataclass
class _Slot:
    worker: str = ""  # the one that lives
    started: bool = False  # has ever had a worker
    left: bool = False  # its worker ended in order: stay empty
    setbacks: int = 0  # exits in a row before becoming a member
    restart_at: float = 0.0
    counted: bool = False  # the next start is a restart
    own_failures: int = 0  # since the run's step last advanced
    lies: int = 0  # how often the others found its worker's bits wrong


@dataclass
class _Worker:
    slot: int
    member: bool = False
    in_order: bool = False  # it said that it leaves or has finished
    finished: bool = False
    reached: bool = False  # the end of a loop: its script may take its time now, to evaluate or to save
    evicted: bool = False
    lied: bool = False
    failed: bool = False
    unsaved: bool = False
    cut_short: bool = False
    registered: bool = False
    slow_times: float = 1.0  # as long as is usual for a shard
    replace_at: float = math.inf  # then it is replaced if it is still slow and a spare waits
    unregistered_by: float = math.inf  # then a process without registration counts as hung
    leave_by: float = math.inf
    asked_to_leave: bool = False
    kill_reason: str = ""


@dataclass
class Policy:
    workers: int
    spares: int
    restarts_max: int
    stop_grace_s: float = STOP_GRACE_S
    replace_below: float = 0.0  # of the usual speed; 0: slow workers are not replaced
    strikes: int = 3  # so often a slot's worker may be found wrong; then the slot stays empty
    serves: bool = False  # this host stays without workers too, until the run is over: it has parameter servers
    held: bool = False  # nobody is started until what workers need is there
    step: int = 0  # the highest that was ever seen
    restarts: int = 0
    stopping: str = ""
    done: bool = False
    members: frozenset[str] = frozenset()  # of the current view
    late: frozenset[str] = frozenset()  # whom it left behind: the others go on, so there is time to see it come back
    repeats: Repeats = field(default_factory=Repeats)
    slots: dict[int, _Slot] = field(default_factory=dict)
    alive: dict[str, _Worker] = field(default_factory=dict)
    _stop_by: float = math.inf
    _stop_code: int = 0
    _spares_stop_at: float = math.inf
    _stragglers_by: float = math.inf
    _outsiders_by: float = math.inf
    _end: RunEnd | None = None
    _over: bool = False
    _last_failure: tuple[str, int] = ("", 1)
    _late_failure: tuple[str, int] | None = None
    _finished_at: int = 0  # the step at which a worker said that it has finished
    _unfinished: str = ""  # how the last worker came to an end that is not the training's
    _done_by_guess: bool = False  # nobody has said so: all are at the end of a loop, and one has failed there
    _announce: str = ""
    _refused: set[str] = field(default_factory=set)  # workers whose script ended with a sentence about its input

    # -- what happened -------------------------------------------------------------------------------------

    def started(self, worker: str) -> None:
        """A worker runs in its slot, started or adopted."""
        slot = self._slot(slot_of(worker))
        assert not slot.worker, (slot, worker)
        slot.worker, slot.started, slot.left, slot.counted = worker, True, False, False
        self.alive[worker] = _Worker(slot_of(worker))

    def start_failed(self, slot: int, now: float) -> None:
        """The operating system refused to start a process."""
        self._back_off(self._slot(slot), now, counted=True)
        self._last_failure = ("", 1)

    def registered(self, worker: str) -> None:
        if worker in self.alive:
            self.alive[worker].unregistered_by = math.inf
            self.alive[worker].registered = True

    def unregistered(self, worker: str, now: float, grace_s: float = HUNG_GRACE_S) -> None:
        """Its registration is gone: it left, or its lease ran out."""
        if worker in self.alive:
            self.alive[worker].unregistered_by = now + grace_s
            self.alive[worker].registered = False

    def hung(self, worker: str, now: float = 0.0, *, kill: bool = True, hopeless: str = "") -> list[Action]:
        """By the heartbeats it does not get on. `kill`: others have the state; `hopeless`: why nobody ever will."""
        found = self.alive.get(worker)
        if hopeless:
            self.stop(hopeless, 1, now)
        if not kill or found is None or found.kill_reason or found.finished or self.done:
            return []
        found.kill_reason = "hung"
        return [Kill(worker, "hung")]

    def viewed(self, members: Iterable[str], late: Iterable[str] = ()) -> None:
        """A view holds. Who is in it is not given up by us, whatever its lease: it may have the only state."""
        self.members = frozenset(members)
        self.late = frozenset(late)

    def observed(self, event: Mapping[str, Any], now: float) -> None:
        """An event that a worker wrote."""
        kind, step = event["kind"], event.get("step")
        if isinstance(step, int):
            self.got_to(step)
        if kind == "finished":
            self._finished_at = max(self._finished_at, step if isinstance(step, int) else 0)
            self.finished(now)
        if kind in ("slow", "no_longer_slow"):
            self._paced(str(event.get("worker")), float(event.get("times", 1.0)), float(event.get("since_s", 0.0)), now)
        liars = event.get("liars") or () if kind == "corruption" else [event.get("worker")] * (kind == "distrusted")
        for liar in liars:
            if liar in self.alive:
                self.alive[liar].lied = True
        worker = self.alive.get(str(event["who"]))
        if worker is None:
            return
        if kind in ("joined", "progress") or (kind == "view" and event["who"] in (event.get("members") or ())):
            worker.member = True
            self._slot(worker.slot).setbacks = 0
        worker.in_order |= kind in ("left", "finished")
        worker.finished |= kind == "finished"
        worker.reached = kind == "reached" or (worker.reached and kind != "view")
        worker.evicted |= kind == "evicted"
        if kind == "failed":
            worker.failed = True
            self.repeats.take(event)
        worker.unsaved |= kind == "unsaved"
        worker.cut_short |= kind == "cut_short"

    def got_to(self, step: int) -> None:
        """The training is at this step, or was."""
        if step > self.step:
            self.step = step
            self._goes_on()
            for slot in self.slots.values():
                slot.own_failures = 0

    def _goes_on(self) -> None:
        """The training has got further: whoever failed at the end of a loop did not fail after the last step, whoever
        finished has left its loop before the others, and nobody is at the end of a loop any more."""
        self._late_failure = None
        for worker in self.alive.values():
            worker.reached = False
        if self._done_by_guess or 0 < self._finished_at < self.step:
            self.done = self._done_by_guess = False
            self._spares_stop_at = self._outsiders_by = self._stragglers_by = math.inf

    def _paced(self, worker: str, times: float, since_s: float, now: float) -> None:
        """It takes so many times as long as the others."""
        if worker in self.alive:
            slow = times * self.replace_below > 1
            self.alive[worker].slow_times = times
            self.alive[worker].replace_at = now + max(0.0, REPLACE_AFTER_S - since_s) if slow else math.inf

    def finished(self, now: float) -> None:
        """The last step is committed: nobody is needed any more, but those who finish may take their time."""
        self._done_by_guess = False
        if not self.done:
            self.done = True
            self._spares_stop_at = now + SPARE_GRACE_S
            self._outsiders_by = now + OUTSIDER_GRACE_S
            self._stragglers_by = now + STRAGGLER_GRACE_S

    def exited(self, worker: str, code: int | None, signal: int | None, now: float) -> str:
        """A worker is gone; `code` and `signal` are None if only its events can tell how. Why, in a word."""
        gone = self.alive.pop(worker, None)
        if gone is None:
            return "unknown"
        slot = self._slot(gone.slot)
        slot.worker = ""
        if gone.unsaved or gone.cut_short:
            slot.left = True
            self._unfinished = "unsaved" if gone.unsaved else "cut short"
            if not self.done and not any(other.member for other in self.alive.values()):
                self._end = self._end or self._outcome()  # spares would begin again where the last checkpoint is
            return gone.kill_reason or self._unfinished
        if code is None and signal is None:
            code = 0 if gone.in_order else EXIT_EVICTED if gone.evicted else 1 if gone.failed else None
        if code == 0 or gone.asked_to_leave:
            # Asked to leave, then wanted again: the slot gets a new worker.
            slot.left = not (gone.asked_to_leave and gone.slot < self.size)
            return gone.kill_reason or ("finished" if gone.finished else "stopped" if self.stopping else "left")
        if gone.lied:
            slot.lies += 1
            slot.left = slot.lies >= self.strikes
        if code == EXIT_EVICTED:
            self._back_off(slot, now, counted=False)
            return "evicted"
        exit_code = code if code is not None else 128 + (signal or 9)
        self._last_failure = (worker, exit_code)
        if code is not None and (gone.finished or gone.reached):
            self._late_failure = (worker, exit_code)
            if all(other.reached or other.finished for other in self.alive.values() if other.member):
                guess = not self.done
                self.finished(now)  # the training is over, it seems; what failed is the script's last part
                self._done_by_guess = guess
        own = (code is not None or signal in CRASH_SIGNALS) and not gone.kill_reason
        if own and (self.step == 0 or code == EXIT_BAD_INPUT):
            # Not at once: the other workers are probably about to fail in the same way.
            slot.setbacks = max(slot.setbacks, 1)
        self._back_off(slot, now, counted=True)
        if code == EXIT_BAD_INPUT:
            self._refused.add(worker)
        if own:
            slot.own_failures += 1
            if not self.stopping and not self.done:
                self._end = self._end or self._hopeless(worker, exit_code)
            return "refused" if code == EXIT_BAD_INPUT and not gone.member else "failed"
        return gone.kill_reason or "killed"

    def resized(self, workers: int) -> None:
        grown = workers > self.workers
        self.workers = workers
        if grown:
            for slot in self.slots.values():
                slot.left = slot.lies >= self.strikes

    def stop(self, reason: str, exit_code: int, now: float) -> None:
        """Finish the step and leave in order."""
        if not self.stopping and not self.done:
            self.stopping, self._announce = reason, reason
            self._stop_by, self._stop_code = now + self.stop_grace_s, exit_code

    def stop_at_once(self, reason: str, exit_code: int) -> None:
        self._end = self._end or RunEnd("stopped", exit_code, reason)

    # -- what to do ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """What is due. Calling again gives nothing new until something happens or time passes."""
        if self._over:
            return []
        actions: list[Action] = []
        if self._announce:
            actions.append(AnnounceStop(self._announce))
            self._announce = ""
        if self._end is not None:
            return [*actions, *self._finish(self._end, "the run is over")]
        actions += self._overdue(now)
        if not self.stopping and not self.done:
            actions += self._surplus(now)
            actions += self._too_slow(now)
            actions += self._missing(now) if not self.held else []
        idle = not self.alive and not self._waiting() and not any(isinstance(a, Start) for a in actions)
        if idle and (self.stopping or self.done or not self.serves):
            actions += self._finish(self._outcome(), "")
        return actions

    def deadline(self) -> float:
        """When `tick` will have something to do if nothing happens before."""
        times = [self._stop_by, self._spares_stop_at, self._outsiders_by, self._stragglers_by]
        for name, worker in self.alive.items():
            times.append(worker.leave_by)
            if worker.replace_at < math.inf and self._waiting_spares():
                times.append(worker.replace_at)
            if name not in self.members:
                times.append(self._given_up_at(name))
        if not self.held:
            times += [self.slots[slot].restart_at for slot in self._waiting()]
        return min(times)

    def _overdue(self, now: float) -> list[Action]:
        """Those whose time is up. Each is killed once."""
        actions: list[Action] = []
        if self.done and now >= self._spares_stop_at:
            self._spares_stop_at = math.inf
            if self.alive:
                actions.append(AnnounceStop("the run is finished"))
        for name, worker in self.alive.items():
            if worker.kill_reason or worker.finished or (worker.reached and not self.stopping):
                continue
            silent = now >= self._given_up_at(name) and name not in self.members
            if silent and not (worker.in_order or self.stopping or self.done):
                worker.kill_reason = "hung"
            elif now >= worker.leave_by or now >= self._stop_by:
                worker.kill_reason = "did not leave in time"
            elif now >= (self._outsiders_by if self.members and name not in self.members else self._stragglers_by):
                worker.kill_reason = "did not finish in time"
            if worker.kill_reason:
                actions.append(Kill(name, worker.kill_reason))
            if silent:
                worker.unregistered_by = math.inf
        for worker in self.alive.values():
            if now >= worker.leave_by:
                worker.leave_by = math.inf
        if now >= self._stop_by:
            self._stop_by = math.inf
        if now >= self._outsiders_by:
            self._outsiders_by = math.inf
        if now >= self._stragglers_by:
            self._stragglers_by = math.inf
        return actions

    def _given_up_at(self, worker: str) -> float:
        return self.alive[worker].unregistered_by + (LATE_GRACE_S if worker in self.late else 0.0)

    def _surplus(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name, worker in self.alive.items():
            if worker.slot >= self.size and not worker.asked_to_leave:
                worker.asked_to_leave = True
                worker.leave_by = now + LEAVE_GRACE_S
                actions.append(AskToLeave(name, f"the run has {self.workers} workers now"))
        return actions

    def _too_slow(self, now: float) -> list[Action]:
        """One at a time, and only where a spare can take its place at once. Its slot then has the next spare."""
        for name, worker in self.alive.items():
            if now < worker.replace_at or worker.asked_to_leave or name not in self.members:
                continue
            if not self._waiting_spares():
                break
            worker.replace_at = math.inf
            worker.asked_to_leave = True
            worker.leave_by = now + LEAVE_GRACE_S
            return [AskToLeave(name, f"it takes {worker.slow_times:.1f} times as long as others, and a spare waits")]
        return []

    def _waiting_spares(self) -> list[str]:
        if any(worker.asked_to_leave for worker in self.alive.values()):
            return []  # who leaves needs one first
        away = self.members | self.late  # who was left behind takes its own place
        return [name for name, worker in self.alive.items() if worker.registered and name not in away]

    def _missing(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for number in self._waiting():
            slot = self.slots[number]
            if slot.restart_at > now:
                continue
            if slot.counted:
                self.restarts += 1
            actions.append(Start(number, "replacement" if slot.started else "new"))
        return actions

    def _waiting(self) -> list[int]:
        """Slots that should have a worker and have none."""
        if self.stopping or self.done:
            return []
        budget = self.restarts_max - self.restarts
        waiting = []
        for number in range(self.size):
            slot = self._slot(number)
            if slot.worker or slot.left:
                continue
            if slot.counted:
                budget -= 1
                if budget < 0:
                    continue
            waiting.append(number)
        return waiting

    @property
    def size(self) -> int:
        return self.workers + self.spares

    def _slot(self, number: int) -> _Slot:
        return self.slots.setdefault(number, _Slot())

    def _back_off(self, slot: _Slot, now: float, *, counted: bool) -> None:
        slot.counted = counted
        slot.setbacks += 1
        exponent = min(slot.setbacks - 2, 16)
        slot.restart_at = now if exponent < 0 else now + min(BACK_OFF_FIRST_S * 2**exponent, BACK_OFF_MAX_S)

    def _hopeless(self, worker: str, exit_code: int) -> RunEnd | None:
        """Every slot's script failed by itself and the run's step does not advance: starting again will not help.

        Before the first step once is enough; later a slot must have failed REPEATS_MAX times at this step.
        """
        slots = [self._slot(number) for number in range(self.size)]
        failures = [slot.own_failures for slot in slots if not slot.left]
        here = {member for member in self.members if host_of(member) == host_of(worker)}
        if here and here <= self._refused:
            # All said the same at the same step, a metric that is not finite for one: they would say it again.
            return RunEnd("failed", exit_code, "every worker ended with the same sentence", worker)
        if self.step and self.repeats.are(max(REPEATS_MAX, self.workers)):
            return RunEnd("failed", exit_code, self.repeats.sentence(), worker)
        if min(failures, default=0) == 0:
            return None
        if self.step == 0:
            return RunEnd("failed", exit_code, "the script failed in every worker before the first step", worker)
        if max(failures) >= REPEATS_MAX:
            what = f"the script failed {max(failures)} times without getting past step {self.step}"
            return RunEnd("failed", exit_code, "; ".join(filter(None, (what, self.repeats.sentence()))), worker)
        return None

    def _outcome(self) -> RunEnd:
        """Nobody lives and nobody will be started."""
        if self.done:
            if self._late_failure is not None:
                worker, code = self._late_failure
                return RunEnd("finished", code, f"{worker} failed after the last step", worker)
            return RunEnd("finished", 0, "")
        if self._unfinished == "unsaved":
            return RunEnd(self._unfinished, self._stop_code or EXIT_UNSAVED, "the last state is not saved")
        if self._unfinished and not self.stopping:
            return RunEnd(self._unfinished, EXIT_CUT_SHORT, "the script ended in the middle of the training")
        if self.stopping:
            return RunEnd("stopped", self._stop_code, self.stopping)
        if not all(self._slot(number).left for number in range(self.size)):
            worker, code = self._last_failure
            return RunEnd("failed", code, f"no worker is left and all {self.restarts_max} restarts are used up", worker)
        return RunEnd("left", 0, "every worker left")

    def _finish(self, end: RunEnd, reason: str) -> list[Action]:
        self._over = True
        for worker in self.alive.values():
            worker.kill_reason = worker.kill_reason or reason
        return [*(Kill(worker, reason) for worker in self.alive), end]
