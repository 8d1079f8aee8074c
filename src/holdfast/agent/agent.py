"""The agent of a run on this host: serves its ledger, unless that is etcd, starts and watches the workers, and says
how it goes.

Threads, and what each alone may touch:
- main: the policy, the record of the run, the tails, the table of processes. It takes messages from one inbox.
- holdfast-deaths (processes.DeathWatch): waits for deaths and fences the dead in the ledger.
- holdfast-ledger-watch: reads the ledger's changes. holdfast-warm (warm_starts.py): waits for the imports.
- holdfast-heartbeat-watch (heartbeat_watch.HeartbeatWatch): reads the workers' heartbeats and says who hangs.
- holdfast-presence (presence.HostPresence): keeps this host's name in a run on several.
- holdfast-ring (ring_watch.RingWatch): beats to the agents of other hosts, hears them, and says who is silent.
- holdfast-screen (terminal.Screen): writes to the terminal.
- the threads of the embedded ledger's server.

The loop here only hands on what it hears, and does what the policy decides: workforce.py attends to the workers,
ledger_news.py to the ledger's changes, ending.py to the end. starting.py puts them together.

The agent is not on the path of a step, and training survives it: workers lead their own sessions, write to their
own files, and need the ledger only to change the membership. The same command again takes a run over.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from dataclasses import dataclass

from holdfast.agent.ending import AgentEnding
from holdfast.agent.history import History
from holdfast.agent.hosts.among_hosts import AmongHosts, give_up
from holdfast.agent.hosts.presence import clear_stop
from holdfast.agent.hosts.ring_watch import RingNews
from holdfast.agent.ledger_news import LedgerListener
from holdfast.agent.ledger_watch import LedgerWatch, News
from holdfast.agent.ledgers import AgentLedgers, StartPatience, attempt
from holdfast.agent.policy import Action, AnnounceStop, AskToLeave, Kill, Policy, RunEnd, Start
from holdfast.agent.report import AgentReporter
from holdfast.agent.servers.server_crew import ServerDied
from holdfast.agent.servers.serving import Serving
from holdfast.agent.settings import RunSettings
from holdfast.agent.signals import Interrupted, Signals
from holdfast.agent.workers.crew import Adoption, Crew
from holdfast.agent.workers.heartbeat_watch import HeartbeatWatch
from holdfast.agent.workers.standing_still import FoundHung
from holdfast.agent.workers.warm_starts import WarmedUp
from holdfast.agent.workforce import Died, Workforce
from holdfast.core.errors import LedgerError, ProtocolError
from holdfast.core.words import KEY_CHECKPOINT, KEY_STOP, decode_whole, encode_json
from holdfast.events.telling import count
from holdfast.placement.directory import RunDirectory

LOOK_PERIOD_S = 0.2
CLOSE_GRACE_S = 5.0
SERVE_S = 60.0  # for the other hosts, at the end

Message = Died | ServerDied | WarmedUp | FoundHung | RingNews | Interrupted | News


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an agent consists of. All of it belongs to the main thread; `inbox` takes messages from any."""

    directory: RunDirectory
    inbox: queue.SimpleQueue[Message]
    signals: Signals
    history: History
    reporter: AgentReporter
    policy: Policy
    crew: Crew
    workforce: Workforce
    heartbeat_watch: HeartbeatWatch
    ledgers: AgentLedgers
    news: LedgerListener
    among: AmongHosts | None  # of a run on several hosts
    serving: Serving
    patience: StartPatience
    ending: AgentEnding


class Agent:
    """See the module's docstring for who owns what. Everything here belongs to the main thread."""

    def __init__(self, settings: RunSettings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._policy = parts.policy
        self._reporter = parts.reporter
        self._ledger = parts.ledgers.main
        self._watch: LedgerWatch | None = None
        self._interrupts = 0
        self._next_look = 0.0

    def run(self) -> int:
        parts = self._parts
        adopted = parts.crew.adopt_living(parts.history.pids())
        parts.history.poll()  # those that are not there may have finished a moment ago
        finished = not adopted.living and parts.ending.was_before(parts.patience)
        parts.signals.catch()
        if finished:
            return parts.ending.report_unattended()
        self._begin(adopted)
        self._policy.held = parts.crew.warm_up(parts.inbox.put) and not adopted.living
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
        self._serve_the_others(end)
        return self._conclude(end)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _begin(self, adopted: Adoption) -> None:
        settings, parts, living = self._settings, self._parts, adopted.living
        attempt(lambda: clear_stop(self._ledger, settings.host), self._reporter.refused)
        parts.news.say_size()
        self._reporter.tell(
            "agent_started",
            pid=os.getpid(),
            took_over=bool(living),
            workers=settings.workers,
            spares=settings.spares,
            script=settings.script,
        )
        parts.workforce.take_over(adopted, parts.history, settings.lease_s, time.monotonic())
        if living:
            step = self._reporter.record.step
            self._reporter.say(f"took over run {settings.name} at step {step}; alive: {', '.join(living)}")
        else:
            at = f" on host {settings.host}" if settings.host else ""
            only = f", which only serves ({count(settings.servers, 'server')})" if settings.only_serves else ""
            self._reporter.say(f"run {settings.name}{at}{only}, in {parts.directory.path}")
        post = parts.inbox.put if parts.among is None else parts.among.ring.listening(parts.inbox.put)
        self._watch = LedgerWatch(parts.ledgers.watch, parts.heartbeat_watch.listening(post))

    def _next_message(self) -> Message | None:
        wait_s = min(self._next_look, self._policy.deadline()) - time.monotonic()
        try:
            return self._parts.inbox.get(timeout=max(wait_s, 0.0))
        except queue.Empty:
            return None

    def _handle(self, message: Message, now: float) -> None:
        match message:
            case Died():
                self._bury(message, now)
            case ServerDied():
                self._parts.serving.died(message, now)
            case WarmedUp():
                self._policy.held = False
                if message.trouble:
                    self._reporter.say(f"workers start one by one: {message.trouble}")
            case FoundHung():
                self._act(self._parts.workforce.found_hung(message, now), now)
            case RingNews(kind, fields, workers):
                attempt(lambda: give_up(self._ledger, workers), self._reporter.refused)
                self._reporter.tell(kind, **fields)
            case Interrupted(number):
                self._interrupt(number, now)
            case _:
                self._parts.serving.heard(message, now)
                self._parts.news.heard(message, now)

    def _bury(self, died: Died, now: float) -> None:
        self._look_at_events(now)  # it may have said why
        self._parts.workforce.bury(died, now)

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
            self._reporter.say(f"{name}: {self._leaving_words()}")
            self._policy.stop(name, code, now)

    def _leaving_words(self) -> str:
        if self._settings.only_serves and not self._policy.alive:
            return "this host's slices move to other servers, and it leaves; once more ends it at once"
        who = "this host's workers" if self._settings.host else "workers"
        return f"{who} finish the step and leave; once more ends them at once"

    def _look(self, now: float) -> None:
        parts = self._parts
        self._look_at_events(now)
        if (error := parts.ledgers.serve_again()) is not None:
            self._reporter.refused(error)
        if self._policy.done:
            parts.ending.write_early()
        self._reporter.look(now, workers=len(parts.crew))
        parts.serving.look(now)
        if not self._policy.done and not self._policy.stopping:
            self._look_for_lost_slices(now)
        if parts.among is not None:
            parts.among.look(now)

    def _look_for_lost_slices(self, now: float) -> None:
        serving = self._parts.serving
        if serving.begins_anew():
            for worker in list(self._policy.alive):
                self._parts.workforce.kill(worker, "the servers' state is lost, and all begin anew from the checkpoint")
        elif lost := serving.lost(now):
            self._lose_slices(lost)

    def _lose_slices(self, lost: list[str]) -> None:
        """Too few replicas are left. With a checkpoint all begin anew from there; without one, nobody has the state."""
        try:
            entry = self._ledger.get(KEY_CHECKPOINT)
            saved = decode_whole(entry.value, "step") if entry is not None else None
        except (LedgerError, ProtocolError):
            return  # whether there is one is not known now
        self._reporter.tell("slices_lost", slices=lost, **({"step": saved} if saved is not None else {}))
        if saved is None:
            self._policy.stop_at_once(f"too few replicas of {', '.join(lost)} are left, and there is no checkpoint", 1)
        else:
            self._parts.serving.start_over(saved)

    def _look_at_events(self, now: float) -> None:
        for event in self._parts.history.reader.poll():
            if event["who"] != "agent":  # ours were taken when they happened
                self._reporter.take(event)
                self._policy.observed(event, now)
                self._parts.serving.observed(event, now)
        if self._policy.step:
            self._reporter.tails.failures_matter = False

    def _act(self, actions: list[Action], now: float) -> RunEnd | None:
        end = None
        for action in actions:
            match action:
                case Start(slot):
                    self._parts.workforce.start(slot, now)
                case AskToLeave(worker, reason):
                    self._parts.workforce.ask_to_leave(worker, reason)
                case Kill(worker, reason):
                    self._parts.workforce.kill(worker, reason)
                case AnnounceStop(reason):
                    self._announce_stop(reason)
                case RunEnd():
                    end = action
        return end

    def _announce_stop(self, reason: str) -> None:
        parts = self._parts
        if self._settings.host and self._interrupts:
            # Of several hosts, this one leaves; `holdfast stop` ends the run on all.
            attempt(lambda: self._ledger.delete(parts.news.size_key), self._reporter.refused)
            parts.crew.ask_all_to_leave()
            return
        try:
            self._ledger.put(KEY_STOP, encode_json({"reason": reason}))
        except LedgerError as error:
            self._reporter.refused(error)
            parts.crew.ask_all_to_leave()

    def _serve_the_others(self, end: RunEnd) -> None:
        """This host's servers are needed until the workers of other hosts have left, if the run is over; else until
        others have their slices. At most for a while, or until the next signal."""
        serving, before = self._parts.serving, self._interrupts
        given_up = end.outcome == "stopped" and end.exit_code and not before
        if not self._settings.host or before > 1 or given_up:
            return
        over = end.outcome in ("finished", "stopped") and not before
        if not over:
            serving.leave()
        needed, told, deadline = serving.others_train if over else serving.is_leaving, False, time.monotonic() + SERVE_S
        while needed() and time.monotonic() < deadline and self._interrupts == before:
            if not told:
                told = True
                what = "the workers of other hosts have left" if over else "other servers have this host's slices"
                self._reporter.say(f"serving on until {what}, {SERVE_S:g} s at most; Ctrl-C ends it at once")
            now = time.monotonic()
            self._next_look = now + LOOK_PERIOD_S
            try:
                message = self._parts.inbox.get(timeout=LOOK_PERIOD_S)
            except queue.Empty:
                message = None
            if isinstance(message, Interrupted):
                self._interrupts += 1
            elif isinstance(message, ServerDied):
                serving.died(message, now)
            elif isinstance(message, News):
                serving.heard(message, now)
            serving.look(now)

    def _conclude(self, end: RunEnd) -> int:
        crew, deadline = self._parts.crew, time.monotonic() + CLOSE_GRACE_S
        while len(crew) and time.monotonic() < deadline:
            self._next_look = deadline
            message = self._next_message()
            if isinstance(message, Died):
                self._bury(message, time.monotonic())
        self._look_at_events(time.monotonic())
        return self._parts.ending.conclude(end, workers_left=len(crew))
