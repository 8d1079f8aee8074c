"""An aggregation server's process: the machine's events and effects on real sockets and a real disk.

One loop owns the machine, the store and all that comes in; each other server has a link with a thread that sends
(links.py), and aggregating has a thread of its own, so that votes do not wait for it. Effects are performed one after
the other. A disk that fails ends the process: what was not kept must not be said.
"""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.byzantine.agreement import messages as m
from holdfast.byzantine.agreement.aggregating import Aggregation
from holdfast.byzantine.agreement.checking import Checker
from holdfast.byzantine.agreement.federation import FILE as FEDERATION_FILE
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.links import CLIENTS, MESSAGE_EXTRA_BYTES, SERVERS, IncomingLink, OutgoingLink
from holdfast.byzantine.agreement.machine import ServerMachine, Timing
from holdfast.byzantine.agreement.misbehaving import Misbehaving
from holdfast.byzantine.agreement.signing import PrivateKey, verify
from holdfast.byzantine.agreement.storing import Store
from holdfast.core.errors import EXIT_BAD_INPUT, ConfigError, HoldfastError, PeerError
from holdfast.net.acceptor import AcceptLimits, Acceptor
from holdfast.net.greeting import Greeting
from holdfast.net.mailbox import Mailbox
from holdfast.net.sockets import open_tcp, open_unix, prepare
from holdfast.trust.keys import Keys, load_keys

TICK_S = 0.05
RECORDS_MAX = 8  # in one message
SETTINGS, KEY, MODEL, FIGURES = "server.json", "key", "first.model", "figures.json"
SECRET, KEYS = "secret", "keys"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What is in a server's directory as server.json. `misbehaves`: a kind of lie, for drills."""

    name: str
    listen: str  # unix:PATH or tcp:HOST:PORT
    peers: Mapping[str, str]  # every other server's address, as this one dials it
    timing: Timing = field(default_factory=Timing)
    misbehaves: str = ""
    seed: int = 0

    def save(self, directory: Path) -> None:
        (directory / SETTINGS).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path) -> ServerSettings:
        try:
            fields = json.loads((directory / SETTINGS).read_text())
            return cls(**{**fields, "timing": Timing(**fields["timing"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{directory / SETTINGS} does not say how to start a server: {error}",
                hint="make the directory with holdfast.byzantine.agreement.processes.ServerGroup",
            ) from error


class Server:
    """Everything that it needs is in its directory. `run` returns after a SIGTERM, or when `stop` is called."""

    def __init__(self, directory: Path) -> None:
        self.settings = ServerSettings.load(directory)
        self.federation = Federation.load(directory / FEDERATION_FILE)
        key = PrivateKey.load(directory / KEY)
        me = self.settings.name
        if self.federation.servers.get(me) != key.public:
            raise ConfigError(
                f"the key of server {me!r} is not the one that is registered in the federation",
                hint="give it the private key that belongs to the public key in federation.json",
            )
        self._directory = directory
        self._keys = keys_in(directory)
        self._store = Store(directory, self.federation)
        form = (directory / MODEL).read_bytes()
        if self._store.keep_blob(form) != self.federation.model:
            raise ConfigError(
                f"{directory / MODEL} is not the model that the federation begins with",
                hint="copy it from another server",
            )
        self._aggregation = Aggregation(self.federation.rule, self.federation.hostile, form)
        checker = Checker(self.federation, verify)
        machine = ServerMachine(
            me,
            checker,
            key,
            self.settings.timing,
            now=time.monotonic(),
            stored=self._store.found(),
            fits=self._aggregation.fits,
        )
        self.machine = machine
        liar = self.settings.misbehaves
        chance = random.Random(f"{me} {self.settings.seed}").random
        self._actor = Misbehaving(machine, liar, chance) if liar else machine
        self._bytes_max = self.federation.update_bytes_max + MESSAGE_EXTRA_BYTES
        self._links: dict[str, OutgoingLink] = {}
        self._incoming: dict[str, IncomingLink] = {}
        self._counted = 0
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._mailbox = Mailbox()
        self._perform: dict[type, Callable[[Any], object]] = {
            m.Persist: lambda effect: self._store.persist(effect.ballot),
            m.KeepUpdate: lambda effect: self._store.keep_update(effect.claim, effect.content),
            m.KeepBlob: lambda effect: self._store.keep_blob(effect.content),
            m.AppendRecord: self._append,
            m.Forget: lambda effect: self._store.forget(effect.digests),
            m.Send: lambda effect: self._send(effect.peer, effect.message),
            m.Broadcast: self._broadcast,
            m.SendRecords: self._send_records,
            m.SendBlob: self._send_blob,
            m.Aggregate: self._aggregate,
            m.Tell: self._tell,
        }

    # ---- the loop

    def run(self) -> None:
        kind, _, rest = self.settings.listen.partition(":")
        if kind == "unix":
            Path(rest).unlink(missing_ok=True)  # the lock on the votes says that no other process of this server runs
            listening, _ = open_unix(Path(rest))
        else:
            listening, _ = open_tcp(rest)
        acceptor = Acceptor(
            self._selector,
            [listening],
            greet=lambda sock, deadline: Greeting(sock, self._keys, deadline, purposes=(SERVERS, CLIENTS)),
            welcome=self._welcome,
            limits=AcceptLimits(
                connections_max=4 * len(self.federation.servers) + 4 * len(self.federation.clients) + 32
            ),
            owned=lambda: len(self._incoming),
        )
        self._selector.register(self._mailbox.fd, selectors.EVENT_READ, None)
        self._links = {
            name: OutgoingLink(address, self._keys, self.settings.name, 2 * self._bytes_max)
            for name, address in self.settings.peers.items()
        }
        try:
            self._turn(acceptor)
        finally:
            acceptor.close()
            for incoming in self._incoming.values():
                incoming.close()
            for link in self._links.values():
                link.close()
            self._store.close()

    def _turn(self, acceptor: Acceptor[Greeting]) -> None:
        tick_at = time.monotonic()
        while not self._stopping:
            wait_s = max(0.0, min(tick_at - time.monotonic(), acceptor.patience_s or TICK_S))
            for key, events in self._selector.select(wait_s):
                if not acceptor.handle(key) and isinstance(key.data, IncomingLink):
                    self._attend(key.data, events)
            for combined in self._mailbox.take_all():
                self._take_model(combined)
            acceptor.tend()
            if time.monotonic() >= tick_at:
                self._handle(m.Tick())
                tick_at = time.monotonic() + TICK_S

    def stop(self) -> None:
        self._stopping = True
        self._mailbox.wake()

    def _welcome(self, greeting: Greeting) -> None:
        prepare(greeting.sock)
        is_server = greeting.hello.purpose == SERVERS and greeting.hello.sender in self.federation.servers
        self._counted += 1
        peer = greeting.hello.sender if is_server else f"client connection {self._counted}"
        link = IncomingLink(greeting.sock, self._selector, peer, self._bytes_max)
        self._incoming[f"{peer}/{self._counted}" if is_server else peer] = link

    def _attend(self, link: IncomingLink, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                link.write()
            if events & selectors.EVENT_READ:
                link.read(lambda peer, message: self._handle(m.Heard(peer, message)))
        except (PeerError, OSError):
            self._hang_up(link)

    def _hang_up(self, link: IncomingLink) -> None:
        link.close()
        self._incoming = {name: one for name, one in self._incoming.items() if one is not link}

    def _handle(self, event: m.Event) -> None:
        for effect in self._actor.handle(event, time.monotonic()):
            self._perform[type(effect)](effect)

    # ---- effects

    def _send(self, peer: str, message: m.Message) -> None:
        if peer in self._links:
            self._links[peer].send(message)
        elif (link := self._incoming.get(peer)) is not None:
            try:
                link.send(message)
            except (PeerError, OSError):
                self._hang_up(link)

    def _broadcast(self, effect: m.Broadcast) -> None:
        for link in self._links.values():
            link.send(effect.message)

    def _send_records(self, effect: m.SendRecords) -> None:
        records = self._store.chain.read(effect.first, RECORDS_MAX)
        if records or effect.peer not in self._links:  # a client gets an answer to every question
            self._send(effect.peer, m.Records(records))

    def _send_blob(self, effect: m.SendBlob) -> None:
        content = self._store.read_blob(effect.digest)
        if content is not None:
            self._send(effect.peer, m.Blob(content))
        elif effect.peer not in self._links:
            self._send(effect.peer, m.Refused(0, "these bytes are not here", 1))

    def _append(self, effect: m.AppendRecord) -> None:
        self._store.append(effect.record)
        figures = {
            "rounds": effect.record.header.round,
            "messages": sum(link.sent_messages for link in self._links.values()),
            "bytes": sum(link.sent_bytes for link in self._links.values()),
        }
        (self._directory / FIGURES).write_text(json.dumps(figures))

    def _aggregate(self, effect: m.Aggregate) -> None:
        parent = self._store.read_blob(effect.parent_model)
        updates = [self._store.read_blob(claim.digest) for claim in effect.entries]
        assert parent is not None and None not in updates, "the machine has said that they are here"
        given = [one for one in updates if one is not None]

        def combine() -> None:
            model, why = self._aggregation.combine(parent, given)
            self._mailbox.put(_Combined(effect.round, model, why))

        threading.Thread(target=combine, name="holdfast-aggregating", daemon=True).start()

    def _take_model(self, combined: _Combined) -> None:
        """From the thread that aggregated: into the store, then to the machine."""
        if combined.why:
            self._tell(m.Tell(f"round {combined.round} leaves the model as it is", combined.why))
        self._handle(m.Aggregated(combined.round, self._store.keep_blob(combined.model)))

    def _tell(self, effect: m.Tell) -> None:
        print(f"{self.settings.name} | {effect.what}: {effect.reason}", flush=True)


def keys_in(directory: Path) -> Keys:
    """What connections prove themselves with: a set of keys with certificates, for several hosts, or a secret alone."""
    if (directory / KEYS).is_dir():
        return load_keys(directory / KEYS)
    try:
        return Keys.from_secret(bytes.fromhex((directory / SECRET).read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} has neither {KEYS} nor a {SECRET} that can be read",
            hint="make a set with `holdfast keys create DIR/keys`, the same for all servers and clients",
        ) from error


@dataclass(frozen=True)
class _Combined:
    round: int
    model: bytes
    why: str


def serve(directory: Path) -> None:
    """Run the server of this directory until SIGTERM."""
    server = Server(directory)
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda number, frame: server.stop())
    server.run()


def main(arguments: list[str]) -> int:
    """python -m holdfast.byzantine.agreement.server DIR"""
    try:
        if len(arguments) != 1:
            raise ConfigError("name the directory of one server", hint=str(main.__doc__))
        serve(Path(arguments[0]))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
