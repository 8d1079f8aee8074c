"""The workers of this host: started, taken over, registered, buried. Tells the policy, the log and the heartbeat watch.

Belongs to the agent's main thread, as the policy and the crew do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.agent.history import History
from holdfast.agent.ledgers import attempt
from holdfast.agent.policy import Action, Policy
from holdfast.agent.report import AgentReporter
from holdfast.agent.workers.crew import Adoption, Crew
from holdfast.agent.workers.heartbeat_watch import HeartbeatWatch
from holdfast.agent.workers.processes import WorkerProcess, fence_worker
from holdfast.agent.workers.standing_still import FoundHung
from holdfast.core.errors import ProtocolError
from holdfast.core.words import KEY_WORKERS, Registration, slot_of
from holdfast.ledger.port import Ledger

BACK_GRACE_S = 3.0  # beyond its lease, in which a worker comes back to the ledger of a new agent
IN_ORDER = ("finished", "left", "stopped", "evicted", "refused")  # ends whose step others tell, or that have none
LEASE_LOST = "its lease ran out, and the process lives"


@dataclass(frozen=True)
class Died:
    process: WorkerProcess
    code: int | None
    signal: int | None
    trouble: str


@dataclass(eq=False)
class Workforce:
    _policy: Policy
    _crew: Crew
    _heartbeat_watch: HeartbeatWatch
    _reporter: AgentReporter
    _ledger: Ledger
    _registered: set[str] = field(default_factory=set)
    _buried: set[str] = field(default_factory=set)
    _hung: set[str] = field(default_factory=set)  # of whom the log tells

    def take_over(self, adopted: Adoption, history: History, lease_s: float, now: float) -> None:
        """Go on with the workers of an earlier agent, and tell of those that have ended since."""
        for worker in adopted.living:
            self._policy.started(worker)
            self._follow(worker, from_end=True)
            if history.has_registered(worker):
                # Not in the ledger any more? Then it hangs, unless it is just coming back to the new server.
                self._policy.unregistered(worker, now, lease_s + BACK_GRACE_S)
        past = history.take_past()
        for worker, pid, reason in history.ended_unattended(adopted.living, adopted.dead):
            self._buried.add(worker)
            self._reporter.tell("worker_exited", worker=worker, pid=pid, reason=reason)
        if adopted.living:
            for event in past:
                self._policy.observed(event, now)

    def start(self, slot: int, now: float) -> None:
        try:
            worker = self._crew.start(slot)
        except OSError as error:
            self._reporter.warn(f"cannot start a worker: {error}")
            self._policy.start_failed(slot, now)
            return
        self._policy.started(worker)
        self._follow(worker, from_end=False)
        self._heartbeat_watch.expect(worker)
        self._reporter.tell("worker_started", worker=worker, pid=self._crew.pid(worker))

    def ask_to_leave(self, worker: str, reason: str) -> None:
        self._reporter.say(f"asking {worker} to leave: {reason}")
        self._crew.ask_to_leave(worker)

    def kill(self, worker: str, reason: str) -> None:
        self._reporter.say(f"ending {worker}: {reason}")
        if reason == "hung" and worker not in self._hung:  # the ledger missed it before the heartbeat watch did
            self._reporter.tell("hung", worker=worker, reason=LEASE_LOST, killed=True, stacks="")
        self._crew.kill(worker)

    def found_hung(self, found: FoundHung, now: float) -> list[Action]:
        self._hung.add(found.worker)
        self._reporter.tell(found.kind, worker=found.worker, **found.fields)
        return self._policy.hung(found.worker, now, kill=found.kill, hopeless=found.hopeless)

    def bury(self, died: Died, now: float) -> None:
        worker = died.process.worker
        if (step := self._heartbeat_watch.last_step(worker)) is not None:
            self._policy.got_to(step)
        reason = self._policy.exited(worker, died.code, died.signal, now)
        self._crew.forget(worker)
        self._registered.discard(worker)
        self._buried.add(worker)
        self._reporter.ended(worker, now, failed=reason in ("failed", "refused"))
        at = step or None if reason not in IN_ORDER else None
        fields = {"exit_code": died.code, "signal": died.signal, "step": at}
        known = {name: value for name, value in fields.items() if value is not None}
        self._reporter.tell("worker_exited", worker=worker, pid=died.process.pid, reason=reason, **known)
        if died.trouble and reason != "finished":
            self._reporter.warn(f"the ledger did not take {worker}'s death: {died.trouble}")

    def registered(self, worker: str, value: bytes) -> None:
        """The ledger has a registration of a worker of this host."""
        if worker in self._crew:
            self._registered.add(worker)
            self._policy.registered(worker)
            self._reporter.tails.settle(worker)
            return
        if worker in self._buried:  # its last message reached the ledger after its death
            attempt(lambda: fence_worker(self._ledger, worker), self._reporter.refused)
            return
        try:
            registration = Registration.decode(value)
            slot = self._policy.slots.get(slot_of(worker))
        except (ProtocolError, ValueError):
            self._reporter.warn(f"the ledger has a registration that is none: {worker!r}")
            return
        if slot is not None and slot.worker:
            self._crew.end_stranger(registration)
        elif self._crew.adopt_stranger(registration):
            self._policy.started(worker)
            self._follow(worker, from_end=True)
            self._registered.add(worker)

    def unregistered(self, worker: str, now: float) -> None:
        self._registered.discard(worker)
        self._policy.unregistered(worker, now)

    def missing_from(self, values: Mapping[str, bytes]) -> list[str]:
        """Who was registered, and is not in what the ledger has now."""
        return [worker for worker in self._registered if KEY_WORKERS + worker not in values]

    def _follow(self, worker: str, *, from_end: bool) -> None:
        self._reporter.tails.follow(worker, self._crew.log_path(worker), from_end=from_end)
