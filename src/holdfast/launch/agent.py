"""The agent of a run on this host: serves its ledger, unless that is etcd, starts and watches the workers, and says
how it goes.

Threads, and what each alone may touch:
- main: the policy, the record of the run, the tails, the table of processes. It takes messages from one inbox.
- holdfast-deaths (processes.DeathWatch): waits for deaths and fences the dead in the ledger.
- holdfast-ledger-watch: reads the ledger's changes. holdfast-warm (warm_starts.py): waits for the imports.
- holdfast-watchman (watchman.Watchman): reads the workers' heartbeats and says who hangs.
- holdfast-presence (presence.HostPresence): keeps this host's name in a run on several.
- holdfast-ring (ring_watch.RingWatch): beats to the agents of other hosts, hears them, and says who is silent.
- holdfast-screen (terminal.Screen): writes to the terminal.
- the threads of the embedded ledger's server.

The agent is not on the path of a step, and training survives it: workers lead their own sessions, write to their
own files, and need the ledger only to change the membership. The same command again takes a run over.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from holdfast.checkpoint.memory_place import memory_directory, remove_memory
from holdfast.core.errors import ConfigError, LedgerError, ProtocolError
from holdfast.core.words import (
    KEY_DONE,
    KEY_HOSTS,
    KEY_SIZE,
    KEY_STOP,
    KEY_VIEW,
    KEY_WORKERS,
    Registration,
    View,
    decode_json,
    decode_whole,
    encode_json,
    host_of,
    slot_of,
)
from holdfast.launch.addresses import address_towards, check_listen
from holdfast.launch.among_hosts import AmongHosts, give_up
from holdfast.launch.crew import Adoption, Crew
from holdfast.launch.directory import RunDirectory
from holdfast.launch.history import History
from holdfast.launch.ledger_watch import LedgerAway, LedgerBack, LedgerChange, LedgerState, LedgerWatch
from holdfast.launch.ledgers import AgentLedgers
from holdfast.launch.leftovers import forget_memory
from holdfast.launch.policy import STOP_GRACE_S, Action, AnnounceStop, AskToLeave, End, Kill, Policy, Start
from holdfast.launch.presence import other_hosts
from holdfast.launch.proc import find_workers
from holdfast.launch.processes import DeathWatch, WorkerProcess, allow_open_files, fence
from holdfast.launch.report import Reporter
from holdfast.launch.ring_watch import RingNews
from holdfast.launch.settings import WORKERS_MAX, RunSettings, describe
from holdfast.launch.signals import Interrupted, Signals
from holdfast.launch.terminal import Screen
from holdfast.launch.warm_starts import WarmedUp
from holdfast.launch.watchman import FoundHung, Watchman, limits_of
from holdfast.trust.keys import Keys, load_keys

LOOK_PERIOD_S = 0.2
CLOSE_GRACE_S = 5.0
LEASE_LOST = "its lease ran out, and the process lives"


@dataclass(frozen=True)
class Died:
    process: WorkerProcess
    code: int | None
    signal: int | None
    trouble: str


Message = Died | WarmedUp | FoundHung | RingNews | Interrupted | LedgerState | LedgerChange | LedgerAway | LedgerBack


def run_agent(settings: RunSettings, home: Path, *, out: TextIO | None = None) -> int:
    """Run until the training is finished, stopped or hopeless. Returns the exit code."""
    settings.validate()
    allow_open_files(settings.workers + settings.spares)
    keys = load_keys(settings.keys) if settings.keys else None
    directory = RunDirectory(home, settings.name, settings.host)
    directory.create()
    with directory.locked():
        history = History(directory.events)
        record = history.record
        living = find_workers(directory.path)
        if record.reported and not living:
            raise _finished_already(settings.name, record.step)
        listen = settings.listen or (address_towards(settings.ledger) if settings.ledger else "")
        if listen:
            own = bool(settings.ledger)  # the agent needs a port itself
            check_listen(listen, own + max(1, settings.workers + settings.spares - len(living)))
        agent = Agent(settings, directory, history, Screen(out or sys.stdout), listen=listen, keys=keys)
        try:
            return agent.run()
        finally:
            agent.close()


def _finished_already(name: str, step: int) -> ConfigError:
    return ConfigError(f"run {name} is finished (step {step})", hint="choose another name with --run NAME")


class Agent:
    """See the module's docstring for who owns what. Everything here belongs to the main thread."""

    def __init__(
        self,
        settings: RunSettings,
        directory: RunDirectory,
        history: History,
        screen: Screen,
        *,
        listen: str,
        keys: Keys | None,
    ) -> None:
        self._settings = settings
        self._host = settings.host
        self._size_key = KEY_SIZE + settings.host
        self._directory = directory
        self._history = history
        self._reporter = Reporter(settings, directory, history.record, screen)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Whoever is asked to leave may save first, which takes as long as the notice at most.
        grace_s = max(STOP_GRACE_S, settings.checkpoint.notice_s + 5.0)
        limits = settings.restarts, grace_s, settings.replace_slow, settings.strikes
        self._policy = Policy(settings.workers, settings.spares, *limits)
        self._registered: set[str] = set()
        self._buried: set[str] = set()
        self._hung: set[str] = set()  # of whom the log tells
        self._interrupts = 0
        self._done_noted = False
        self._next_look = 0.0
        self._signals = Signals(self._inbox.put)

        secret = directory.secret() if keys is None else keys.secret
        self._memory = memory_directory(directory.path, secret)
        self._socket_dir = directory.socket_dir()
        directory.write(describe(settings, directory.home, self._socket_dir))
        self._ledgers = AgentLedgers(directory, settings.ledger, self._socket_dir, secret)
        self._ledger = self._ledgers.main
        self._watch: LedgerWatch | None = None
        self._deaths = DeathWatch(
            self._ledgers.deaths, lambda process, code, number, why: self._inbox.put(Died(process, code, number, why))
        )
        self._crew = Crew(
            settings, directory, self._socket_dir, self._ledger, self._deaths, self._reporter.refused, listen=listen
        )
        self._watchman = Watchman(directory.path, limits_of(settings), self._inbox.put)
        self._among: AmongHosts | None = None
        if keys is not None and settings.ledger:
            seen = self._watchman.glances
            self._among = AmongHosts(settings, directory, self._ledgers, keys, listen, seen, self._inbox.put)

    # -- the life of an agent ------------------------------------------------------------------------------

    def run(self) -> int:
        self._signals.catch()
        adopted = self._crew.adopt_living(self._history.pids())
        self._history.poll()  # those that are not there may have finished a moment ago
        if not adopted.living:
            done = self._done_value()
            if done is not None or self._reporter.record.finished:
                return self._report_finished_unattended(done)
        self._begin(adopted)
        self._policy.held = self._crew.warm_up(self._inbox.put) and not adopted.living
        end = None
        while end is None:
            message = self._next_message()
            now = time.monotonic()
            if message is not None:
                self._handle(message, now)
            if now >= self._next_look:
                self._next_look = now + LOOK_PERIOD_S
                self._look(now)
            end = self._act(self._policy.tick(now), now)
        return self._conclude(end)

    def _begin(self, adopted: Adoption) -> None:
        settings, now, living = self._settings, time.monotonic(), adopted.living
        self._attempt(self._clear_stop)
        self._attempt(lambda: self._ledger.put(self._size_key, encode_json({"workers": settings.workers})))
        self._reporter.tell(
            "agent_started",
            pid=os.getpid(),
            took_over=bool(living),
            workers=settings.workers,
            spares=settings.spares,
            script=settings.script,
        )
        for worker in living:
            self._policy.started(worker)
            self._reporter.tails.follow(worker, self._crew.log_path(worker), from_end=True)
            if self._history.has_registered(worker):
                # Not in the ledger any more? Then it hangs, unless it is just coming back to the new server.
                self._policy.unregistered(worker, now, settings.lease_s + 3.0)
        past = self._history.take_past()
        for worker, pid, reason in self._history.ended_unattended(living, adopted.dead):
            self._buried.add(worker)
            self._reporter.tell("worker_exited", worker=worker, pid=pid, reason=reason)
        if living:
            for event in past:
                self._policy.observed(event, now)
            step = self._reporter.record.step
            self._reporter.say(f"took over run {settings.name} at step {step}; alive: {', '.join(living)}")
        else:
            at = f" on host {self._host}" if self._host else ""
            self._reporter.say(f"run {settings.name}{at}, in {self._directory.path}")
        post = self._inbox.put if self._among is None else self._among.ring.listening(self._inbox.put)
        self._watch = LedgerWatch(self._ledgers.watch, post)

    def _clear_stop(self) -> None:
        """A run that was stopped and is started again goes on; one that other hosts are just stopping does not."""
        values = {entry.key: entry.value for entry in self._ledger.read(KEY_HOSTS).entries}
        if not other_hosts(values, self._host):
            self._ledger.delete(KEY_STOP)

    def _report_finished_unattended(self, done: Mapping[str, Any] | None) -> int:
        """The training ended while no agent was there to say so."""
        if self._reporter.record.reported or (done is not None and self._reporter.record.finished is None):
            raise _finished_already(self._settings.name, int((done or {}).get("step", self._reporter.record.step)))
        finished = self._reporter.record.finished
        assert finished is not None
        if done is None:
            self._attempt(lambda: self._ledger.put(KEY_DONE, _done(finished)))
        self._reporter.say("the training finished while no agent was running")
        remove_memory(self._memory)
        self._reporter.finished(exit_code=0)
        self._directory.remove_sockets(self._socket_dir)
        return 0

    def _next_message(self) -> Message | None:
        wait_s = min(self._next_look, self._policy.deadline()) - time.monotonic()
        try:
            return self._inbox.get(timeout=max(wait_s, 0.0))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let go of everything but the workers."""
        if self._watch is not None:
            self._watch.close()
        self._deaths.close()
        self._crew.close()
        self._watchman.close()
        if self._among is not None:
            self._among.close()
        self._ledgers.close()
        self._reporter.close()
        self._signals.restore()

    # -- what happens --------------------------------------------------------------------------------------

    def _handle(self, message: Message, now: float) -> None:
        match message:
            case Died():
                self._bury(message, now)
            case WarmedUp():
                self._policy.held = False
                if message.trouble:
                    self._reporter.say(f"workers start one by one: {message.trouble}")
            case FoundHung(worker, fields):
                self._hung.add(worker)
                self._reporter.tell("hung", worker=worker, **fields)
                self._act(self._policy.hung(worker) if message.kill else [], now)
            case RingNews(kind, fields, workers):
                self._attempt(lambda: give_up(self._ledger, workers))
                self._reporter.tell(kind, **fields)
            case Interrupted(number):
                self._interrupt(number, now)
            case LedgerAway(reason):
                self._reporter.tell("ledger_down", reason=reason)
            case LedgerBack(down_s):
                self._reporter.tell("ledger_up", down_s=round(down_s, 3))
            case LedgerChange(change):
                self._change(change.key, change.value if change.kind == "put" else None, now)
            case LedgerState(values):
                for worker in tuple(self._registered):
                    if KEY_WORKERS + worker not in values:
                        self._change(KEY_WORKERS + worker, None, now)
                for key, value in values.items():
                    self._change(key, value, now)

    def _bury(self, died: Died, now: float) -> None:
        worker = died.process.worker
        self._look_at_events(now)  # it may have said why
        reason = self._policy.exited(worker, died.code, died.signal, now)
        self._crew.forget(worker)
        self._registered.discard(worker)
        self._buried.add(worker)
        self._reporter.tails.end(worker, failed=reason == "failed")
        fields = {"exit_code": died.code, "signal": died.signal}
        known = {name: value for name, value in fields.items() if value is not None}
        self._reporter.tell("worker_exited", worker=worker, pid=died.process.pid, reason=reason, **known)
        if died.trouble:
            self._reporter.warn(f"the ledger did not take {worker}'s death: {died.trouble}")

    def _interrupt(self, number: int, now: float) -> None:
        self._interrupts += 1
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        code = 128 + number
        if self._interrupts > 1:
            self._policy.stop_at_once(f"{name}, twice", code)
        elif self._policy.done:
            self._reporter.say(
                f"{name}: the last step is made, the workers end their scripts; once more ends them at once"
            )
        else:
            who = "this host's workers" if self._host else "workers"
            self._reporter.say(f"{name}: {who} finish the step and leave; once more ends them at once")
            self._policy.stop(name, code, now)

    def _change(self, key: str, value: bytes | None, now: float) -> None:
        if key.startswith(KEY_WORKERS):
            worker = key[len(KEY_WORKERS) :]
            if host_of(worker) != self._host:
                return  # another agent's
            if value is None:
                self._registered.discard(worker)
                self._policy.unregistered(worker, now)
            else:
                self._register(worker, value)
        elif value is None:
            return
        elif key == self._size_key:
            self._resize(value)
        elif key == KEY_VIEW:
            with suppress(ProtocolError):
                view = View.decode(value)
                members, late = view.members, [worker for worker, _ in view.late]
                self._watchman.viewed(members, late)
                here = (member for member in members if host_of(member) == self._host)
                self._policy.viewed(here, late)
        elif key == KEY_STOP and not self._policy.stopping and not self._policy.done:
            self._reporter.say("asked to stop: workers finish the step and leave")
            self._policy.stop("asked to stop", 0, now)
        elif key == KEY_DONE:
            self._policy.finished(now)

    def _register(self, worker: str, value: bytes) -> None:
        if worker in self._crew:
            self._registered.add(worker)
            self._policy.registered(worker)
            self._reporter.tails.settle(worker)
            return
        if worker in self._buried:  # its last message reached the ledger after its death
            self._attempt(lambda: fence(self._ledger, worker))
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
            self._reporter.tails.follow(worker, self._crew.log_path(worker), from_end=True)
            self._registered.add(worker)

    def _resize(self, value: bytes) -> None:
        was = self._policy.workers
        try:
            workers = decode_whole(value, "workers")
        except ProtocolError:
            return
        if workers != was and 1 <= workers <= WORKERS_MAX:
            self._policy.resized(workers)
            self._reporter.tell("scaled", workers=workers, was=was)

    # -- what is seen --------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        self._look_at_events(now)
        if (error := self._ledgers.serve_again()) is not None:
            self._reporter.refused(error)
        if self._policy.done and not self._done_noted and self._reporter.record.finished is not None:
            self._done_noted = True
            self._attempt(self._note_done)
        self._reporter.look(now, workers=len(self._crew))
        if self._among is not None:
            self._among.look(now)

    def _look_at_events(self, now: float) -> None:
        for event in self._history.reader.poll():
            if event["who"] != "agent":  # ours were taken when they happened
                self._reporter.take(event)
                self._policy.observed(event, now)
        if self._policy.step:
            self._reporter.tails.failures_matter = False

    def _note_done(self) -> None:
        """A worker that could not reach the ledger has said in its log that it finished."""
        if self._ledger.get(KEY_DONE) is None and self._reporter.record.finished is not None:
            self._ledger.put(KEY_DONE, _done(self._reporter.record.finished))

    def _done_value(self) -> dict[str, Any] | None:
        entry = self._ledger.get(KEY_DONE)
        return None if entry is None else decode_json(entry.value)

    # -- what is done --------------------------------------------------------------------------------------

    def _act(self, actions: list[Action], now: float) -> End | None:
        end = None
        for action in actions:
            match action:
                case Start(slot):
                    self._start(slot, now)
                case AskToLeave(worker, reason):
                    self._reporter.say(f"asking {worker} to leave: {reason}")
                    self._crew.ask_to_leave(worker)
                case Kill(worker, reason):
                    self._reporter.say(f"ending {worker}: {reason}")
                    if reason == "hung" and worker not in self._hung:  # the ledger missed it before the watchman did
                        self._reporter.tell("hung", worker=worker, reason=LEASE_LOST, killed=True, stacks="")
                    self._crew.kill(worker)
                case AnnounceStop(reason):
                    self._announce_stop(reason)
                case End():
                    end = action
        return end

    def _start(self, slot: int, now: float) -> None:
        try:
            worker = self._crew.start(slot)
        except OSError as error:
            self._reporter.warn(f"cannot start a worker: {error}")
            self._policy.start_failed(slot, now)
            return
        self._policy.started(worker)
        self._reporter.tails.follow(worker, self._crew.log_path(worker), from_end=False)
        self._reporter.tell("worker_started", worker=worker, pid=self._crew.pid(worker))

    def _announce_stop(self, reason: str) -> None:
        if self._host and self._interrupts:
            # Of several hosts, this one leaves; `holdfast stop` ends the run on all.
            self._attempt(lambda: self._ledger.delete(self._size_key))
            self._crew.ask_all_to_leave()
            return
        try:
            self._ledger.put(KEY_STOP, encode_json({"reason": reason}))
        except LedgerError as error:
            self._reporter.refused(error)
            self._crew.ask_all_to_leave()

    def _conclude(self, end: End) -> int:
        deadline = time.monotonic() + CLOSE_GRACE_S
        while len(self._crew) and time.monotonic() < deadline:
            self._next_look = deadline
            message = self._next_message()
            if isinstance(message, Died):
                self._bury(message, time.monotonic())
        self._look_at_events(time.monotonic())
        forget_memory(self._memory, self._ledger, finished=end.outcome == "finished")
        self._reporter.conclude(end)
        if not len(self._crew):
            self._directory.remove_sockets(self._socket_dir)
        return end.exit_code

    # -- small things --------------------------------------------------------------------------------------

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except LedgerError as error:
            self._reporter.refused(error)


def _done(finished: Mapping[str, Any]) -> bytes:
    return encode_json({"step": finished.get("step"), "digest": finished.get("digest")})
