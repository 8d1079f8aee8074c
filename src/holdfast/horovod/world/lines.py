"""A worker's lines to its run, for as long as its process lives: ledger, listener, heartbeat, events, shared memory.

Worlds come and go over them. `sort_mail` may be called by whichever thread drives the exchange, or looks for the next
world: a lock makes it one at a time.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from holdfast.core.config import PROCESS_GROUP
from holdfast.core.errors import ConfigError, LedgerError
from holdfast.core.words import KEY_SCRIPT_ENDED, KEY_WORKERS, Registration, View, encode_json
from holdfast.detection.beat import Activity
from holdfast.detection.heartbeat import Heartbeat, Pulse
from holdfast.engine.ledger_feed import LedgerFeed, LedgerNews
from holdfast.events import EventLog
from holdfast.horovod.exchange.arena import Arena, is_possible
from holdfast.horovod.exchange.carrier import Carrier
from holdfast.horovod.exchange.choosing import choose_carrier
from holdfast.horovod.exchange.records import decode_record
from holdfast.ledger.port import Ledger
from holdfast.membership.view_rules import LedgerState
from holdfast.net.groups import Group
from holdfast.net.listener import HandedOver, Listener
from holdfast.net.mailbox import Mailbox
from holdfast.net.meeting import GROUP, Connected, Meeting, Unreachable
from holdfast.net.wires import SocketWires
from holdfast.placement.environment import WorkerEnvironment
from holdfast.placement.ledger import open_ledger
from holdfast.placement.listening import open_sockets, socket_path
from holdfast.placement.proc import started_here
from holdfast.trust.keys import Keys, load_keys

LAST_S = 2.0  # for the ledger to take this worker's registration out


@dataclass
class _Unreached:
    view: int
    peer: str
    reason: str


class Lines:
    """Opened once; registers the worker in the ledger."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        if environment.path == PROCESS_GROUP:
            raise ConfigError(
                "--path process-group is for scripts that call holdfast.join, and this one calls Horovod's init",
                hint="leave --path out, or give --path network",
            )
        self.environment = environment
        self.me = environment.worker
        self.host = environment.host or socket.gethostname()
        self.keys = load_keys(environment.keys) if environment.keys else Keys.from_secret(environment.secret())
        self.events = EventLog(environment.run_dir / "events" / f"{self.me}.jsonl", self.me)
        self.pulse = Pulse()
        self.news: LedgerNews | None = None
        self.unreached: list[_Unreached] = []
        self.heard: Callable[[LedgerState], None] = lambda state: None  # is told of each change
        self._network = environment.path == "network" or bool(environment.listen and not environment.host)
        self._arena = Arena.create() if not self._network and is_possible() else None
        self._mailbox = Mailbox()
        self._lock = threading.Lock()
        self._wires = SocketWires(self.host, self.keys)
        self._meeting = Meeting(self.me, self._wires, self._mailbox, decode_record, self._arena)
        self._feed, self._listener = self._connect(environment)
        self._heart = self._beat(environment)

    def _connect(self, environment: WorkerEnvironment) -> tuple[LedgerFeed, Listener]:
        servers, address, local = open_sockets(environment, network=self._network)
        purposes = {GROUP: HandedOver(lambda view, connection: self._mailbox.put(Connected(view, connection)))}
        listener = Listener(servers, self.keys, self.me, purposes, memory=self._arena)
        registration = Registration(
            id=self.me,
            host=self.host,
            pid=os.getpid(),
            pid_started=started_here(),
            address=address,
            fingerprint="horovod",
            local=local,
        )
        feed = LedgerFeed(
            self.open_ledger(),
            registration,
            self._mailbox,
            self.events,
            lease_s=environment.lease_s,
            outage_s=environment.outage_s,
        )
        feed.start()
        feed.register()
        return feed, listener

    def _beat(self, environment: WorkerEnvironment) -> Heartbeat | None:
        try:
            return Heartbeat(self.pulse, environment.run_dir, self.me, started=started_here())
        except OSError as error:
            self.events.write("warning", text=f"no heartbeats, so a hang will not be noticed: {error}")
            return None

    def open_ledger(self) -> Ledger:
        environment = self.environment
        return open_ledger(environment.ledger, environment.run, environment.ledger_socket, self.keys.secret)

    # ---- mail

    def wake(self) -> None:
        self._mailbox.wake()

    def wait_for_mail(self, at_most_s: float) -> None:
        self._mailbox.wait(at_most_s)

    def sort_mail(self) -> None:
        with self._lock:
            for item in self._mailbox.take_all():
                if isinstance(item, LedgerNews):
                    self.news = item
                    self.heard(item.state)
                elif isinstance(item, Connected):
                    self._meeting.connected(item)
                elif isinstance(item, Unreachable):
                    self.unreached.append(_Unreached(item.view, item.peer, item.reason))

    @property
    def state(self) -> LedgerState:
        """As the ledger was last seen. A run is over for who comes when the first script has come to its end."""
        if self.news is None:
            return LedgerState()
        state = self.news.state
        return replace(state, done=True) if self._feed.entry(KEY_SCRIPT_ENDED) is not None else state

    # ---- worlds

    def register(self) -> None:
        self._feed.register()

    def propose(self, view: View) -> None:
        self._feed.propose(view, self.state.view_revision)

    def open_world(self, view: View) -> Group:
        assert self.news is not None
        with self._lock:
            self.unreached.clear()
            return self._meeting.open(view, self.news.registrations)

    def carrier(self, view: View, group: Group) -> Carrier:
        return choose_carrier(view, self.me, group, self._arena, wake=self.wake, sort_mail=self.sort_mail)

    def hosts(self, view: View) -> list[str]:
        """Of each rank."""
        known = self.news.registrations if self.news is not None else {}
        return [known[member].host if member in known else self.host for member in view.members]

    def enters(self, waits: bool, step: int) -> None:
        """What the script is in, for the agent's eye on hangs."""
        self.pulse.enter(Activity.WAITING if waits else Activity.SCRIPT, step)

    def script_ended(self) -> bool:
        """Write down that a script has come to its end, and leave the ledger. True: no other worker is left."""
        with suppress(LedgerError), closing(self.open_ledger()) as ledger:
            ledger.compare_and_set(KEY_SCRIPT_ENDED, encode_json({"worker": self.me}), expected=0)
            self._feed.deregister()
            until = time.monotonic() + LAST_S
            while time.monotonic() < until:
                left = [entry.key for entry in ledger.read(KEY_WORKERS).entries]
                if KEY_WORKERS + self.me not in left:
                    return not left
                time.sleep(0.005)
        return False

    def close(self) -> None:
        if self._heart is not None:
            self._heart.close()
        self._feed.deregister()
        self._feed.close()
        self._listener.close()
        socket_path(self.environment).unlink(missing_ok=True)
