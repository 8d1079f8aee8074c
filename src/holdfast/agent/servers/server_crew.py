"""The parameter servers of this host: started, watched, replaced, and ended with the run.

Belongs to the agent's main thread, but for the watch of deaths, which says in the ledger at once who is gone: the other
replicas of a slice need not wait for a lease then. A server that kept what it stored on disk comes back under its name,
as another start of it; one that had it in memory, or whose disk is gone, has nothing left, and another name. One whose
registration has run out while its process lives hangs, and is ended.
"""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.agent.ledgers import attempt
from holdfast.agent.report import AgentReporter
from holdfast.agent.servers.server_hearts import HungServer
from holdfast.agent.settings import RunSettings
from holdfast.agent.workers.processes import DeathWatch, WorkerProcess
from holdfast.core.errors import LedgerError, LedgerUnavailable, ProtocolError
from holdfast.core.options.run import DISK
from holdfast.core.words import (
    EVERY_START,
    KEY_DEAD_SERVERS,
    KEY_INCARNATIONS,
    KEY_LEAVING,
    KEY_SERVERS,
    KEY_SLICE,
    Registration,
    decode_json,
    decode_whole,
    encode_json,
)
from holdfast.ledger.port import Ledger
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import process_variables
from holdfast.placement.server_disks import ServerDisks
from holdfast.placement.server_environment import ALWAYS_EMPTY, ServerEnvironment
from holdfast.servers.log_codec import decode_configuration

BACK_OFF_FIRST_S = 0.1
BACK_OFF_MAX_S = 10.0
SETTLED_S = 10.0  # one that has lived for so long has not failed at its start
UNREGISTERED_S = 10.0  # beyond its lease: a busy host is no dead one, and slices have leases of their own
END_S = 5.0
DEAD_MAX = 128  # servers that are remembered as ended


@dataclass(frozen=True)
class ServerDied:
    process: WorkerProcess
    code: int | None
    signal: int | None
    trouble: str


@dataclass
class _Slot:
    number: int
    server: str = ""
    count: int = 0  # of its processes
    process: WorkerProcess | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    setbacks: int = 0
    missing_since: float = math.inf  # its registration is not in the ledger
    killed: str = ""


@dataclass(eq=False)
class ServerCrew:
    _settings: RunSettings
    _directory: RunDirectory
    _socket_dir: Path
    _ledger: Ledger
    _deaths: DeathWatch
    _reporter: AgentReporter
    _listen: str
    _starts: dict[str, int]  # of a server, which of its processes it is: the watch of deaths reads it
    started_over: int = 0  # how often slices had been lost: what is on disks of before is nobody's
    _slots: list[_Slot] = field(default_factory=list)
    _ending: bool = False

    def __post_init__(self) -> None:
        self._slots = [_Slot(number) for number in range(self._settings.servers)]
        self._disks = ServerDisks(self._directory.path, self._settings.host)

    @property
    def is_wanted(self) -> bool:
        return bool(self._slots) and not self._ending

    @property
    def living(self) -> list[str]:
        return [slot.server for slot in self._slots if slot.process is not None]

    def adopt(self, registration: Registration, now: float) -> None:
        """A server of this host that lives already, when an agent takes over."""
        number = registration.id[1:].partition("@")[0].partition(".")[0]
        slot = next((slot for slot in self._slots if str(slot.number) == number), None)
        if slot is None or slot.process is not None:
            return
        slot.process = WorkerProcess.adopt(registration.id, registration.pid, registration.pid_started)
        if slot.process is not None:
            slot.server, slot.started_at = registration.id, now
            slot.count = max(slot.count, self._counted(slot) or 0)
            self._starts[slot.server] = slot.count if self._settings.durable == DISK else 1
            self._deaths.add(slot.process)

    def look(self, now: float) -> None:
        """Start who is due, and end who hangs."""
        for slot in self._slots:
            if self._ending:
                return
            if slot.process is None and now >= slot.start_at:
                self._start(slot, now)
            elif slot.process is not None and now - slot.missing_since > self._settings.lease_s + UNREGISTERED_S:
                slot.killed, slot.missing_since = "hung", math.inf
                self._reporter.say(f"ending {slot.server}: its lease ran out, and the process lives")
                slot.process.kill()

    def _slot(self, server: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.server == server), None)

    def registered(self, server: str) -> None:
        if (slot := self._slot(server)) is not None:
            slot.missing_since = math.inf

    def unregistered(self, server: str, now: float) -> None:
        slot = self._slot(server)
        if slot is not None and slot.process is not None and math.isinf(slot.missing_since):
            slot.missing_since = now

    def died(self, died: ServerDied, now: float) -> None:
        slot = self._slot(died.process.worker)
        if slot is None or slot.process is not died.process:
            return
        lived_s, slot.process, slot.missing_since = now - slot.started_at, None, math.inf
        reason = slot.killed or ("killed" if died.signal is not None else "failed" if died.code else "ended")
        slot.killed = ""
        slot.setbacks = 0 if lived_s > SETTLED_S or died.signal is not None else slot.setbacks + 1
        pause_s = min(BACK_OFF_MAX_S, BACK_OFF_FIRST_S * 2**slot.setbacks) if slot.setbacks else 0.0
        slot.start_at = now + pause_s
        known = {"exit_code": died.code, "signal": died.signal}
        about = {name: value for name, value in known.items() if value is not None}
        self._reporter.tell("server_exited", server=slot.server, pid=died.process.pid, reason=reason, **about)
        if died.trouble:
            self._reporter.warn(f"the ledger did not take {slot.server}'s death: {died.trouble}")
        self.look(now)

    def end_hung(self, hung: HungServer) -> None:
        """It is fenced as it ends, and another takes its place."""
        slot = self._slot(hung.server)
        if slot is None or slot.process is None or slot.killed:
            return
        slot.killed = "hung"
        self._reporter.tell(
            "server_hung", server=hung.server, reason=hung.reason, seconds=hung.seconds, stacks=hung.stacks
        )
        slot.process.kill()

    def start_over(self, number: int) -> None:
        """All of them, empty: slices were lost so often."""
        self.started_over = number
        for slot in self._slots:
            if slot.process is not None:
                slot.killed = "started over"
                slot.process.kill()

    def close(self) -> None:
        """The run is over, or this host leaves it: no server is needed here any more."""
        self._ending = True
        processes = [slot.process for slot in self._slots if slot.process is not None]
        for process in processes:
            process.send(signal.SIGTERM)
        for process in processes:
            if not process.ended_within(END_S):
                process.kill()

    def _start(self, slot: _Slot, now: float) -> None:
        try:
            slot.server = self._name(slot)
        except (OSError, LedgerError) as error:
            self._put_off(slot, now, error)
            return
        start = self._starts[slot.server] = slot.count if self._keeps else 1
        environment = ServerEnvironment(
            run_dir=self._directory.path,
            server=slot.server,
            start=start,
            socket_dir=self._socket_dir,
            ledger=self._settings.ledger,
            keys=self._settings.keys,
            host=self._settings.host,
            listen=self._listen,
            advertise=self._settings.advertise,
            lease_s=self._settings.lease_s,
            started_over=self.started_over if self._keeps else ALWAYS_EMPTY,
            table_rows=self._settings.table_rows,
        )
        variables = {**os.environ, **environment.to_variables(), **process_variables()}
        log = self._directory.logs / f"{slot.server}.log"
        try:
            slot.process = WorkerProcess.start(slot.server, self._settings.server_command(), variables, log)
        except OSError as error:
            self._put_off(slot, now, error)
            return
        slot.started_at = now
        attempt(lambda: self._ledger.delete(KEY_LEAVING + slot.server), self._reporter.refused)
        self._deaths.add(slot.process)
        self._reporter.tell("server_started", server=slot.server, pid=slot.process.pid)

    def _put_off(self, slot: _Slot, now: float, error: OSError | LedgerError) -> None:
        slot.setbacks += 1
        slot.start_at = now + min(BACK_OFF_MAX_S, BACK_OFF_FIRST_S * 2**slot.setbacks)
        self._reporter.warn(f"cannot start the parameter server of slot {slot.number}: {error}")

    @property
    def _keeps(self) -> bool:
        return self._settings.durable == DISK

    def _name(self, slot: _Slot) -> str:
        """Of the process that is started now. LedgerError if nobody knows which names there were."""
        counted = self._counted(slot)
        slot.count = max(slot.count, counted or 0) + 1
        value = encode_json({"count": slot.count})
        kept = self._disks.kept(slot.number, self.started_over) if self._keeps else ""
        if kept and self._is_given_up(kept):
            kept = ""
        if kept or not self._keeps:
            attempt(lambda: self._ledger.put(self._count_key(slot), value), self._reporter.refused)
            return kept or f"s{slot.number}.{slot.count}{self._suffix}"
        if counted is None:
            raise LedgerUnavailable("the ledger does not answer, and a server without its disk needs a new name")
        self._ledger.put(self._count_key(slot), value)
        return self._disks.begin(slot.number, slot.count, self.started_over)

    def _is_given_up(self, server: str) -> bool:
        """Somebody has said that it is gone for good: no lease of that name binds anybody any more."""
        try:
            entry = self._ledger.get(KEY_DEAD_SERVERS + server)
            return entry is not None and decode_whole(entry.value, "start") >= EVERY_START
        except (LedgerError, ProtocolError) as error:
            self._reporter.refused(error)
            return False

    @property
    def _suffix(self) -> str:
        return f"@{self._settings.host}" if self._settings.host else ""

    def _count_key(self, slot: _Slot) -> str:
        return f"{KEY_INCARNATIONS}s{slot.number}{self._suffix}"

    def _counted(self, slot: _Slot) -> int | None:
        """How many processes this slot has had, by the ledger. None: it does not say."""
        try:
            entry = self._ledger.get(self._count_key(slot))
            return decode_whole(entry.value, "count") if entry is not None else 0
        except (LedgerError, ProtocolError) as error:
            self._reporter.refused(error)
            return None


def fence_server(ledger: Ledger, server: str, start: int) -> None:
    """Say in the ledger that this process of a server has ended, and take its registration out."""
    ledger.put(KEY_DEAD_SERVERS + server, encode_json({"start": start}))
    entry = ledger.get(KEY_SERVERS + server)
    if entry is not None:
        ledger.revoke(entry.lease) if entry.lease else ledger.delete(entry.key)


def forget_dead_servers(ledger: Ledger) -> None:
    """Keep the ledger small: only of servers that slices are on it matters that they have ended."""
    dead = ledger.read(KEY_DEAD_SERVERS).entries
    if len(dead) <= DEAD_MAX:
        return
    named: set[str] = set()
    for entry in ledger.read(KEY_SLICE).entries:
        named |= set(decode_configuration(decode_json(entry.value)).replicas)
    for entry in sorted(dead, key=lambda one: one.revision)[: -DEAD_MAX // 2]:
        if entry.key[len(KEY_DEAD_SERVERS) :] not in named:
            ledger.delete(entry.key)
