"""A federation of real server processes on this host: its keys and directories, its processes, and rounds with clients.

    DIR/federation.json       who takes part
    DIR/clients/NAME.key      clients' private keys
    DIR/servers/NAME/         all that one server has: its key, settings, votes, chain and bytes (storing.py)

`run_rounds`: R rounds with any number of clients in this process and 3f+1 servers in processes of their own, some of
which may lie. `one_round` is what `holdfast federate --servers N` uses (federation/by_servers.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from holdfast.byzantine.agreement.aggregating import State, decode_state, encode_state
from holdfast.byzantine.agreement.canonical import digest_of
from holdfast.byzantine.agreement.client import Client
from holdfast.byzantine.agreement.federation import FILE as FEDERATION_FILE
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.machine import Timing
from holdfast.byzantine.agreement.misbehaving import KINDS
from holdfast.byzantine.agreement.server import KEY, MODEL, SECRET, ServerSettings
from holdfast.byzantine.agreement.signing import PrivateKey
from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import ConfigError, PeerError, RoundOver
from holdfast.trust.keys import SECRET_BYTES, Keys

UPDATE_BYTES = 1024 * 1024
END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """`liars`: server number -> the kind of its lies."""

    directory: Path
    rounds: int = 3
    servers: int = 4
    f: int = 1
    clients: int = 5
    rule: str = "trimmed-mean"
    hostile: int = 1  # of the clients
    absent: int = 0  # so many clients may stay away from a round
    liars: Mapping[int, str] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    round_timeout_s: float = 600.0

    def validate(self) -> None:
        unknown = [kind for kind in self.liars.values() if kind not in KINDS]
        if unknown:
            raise ConfigError(f"there is no lie {unknown[0]!r}", hint=f"there are {', '.join(KINDS)}")
        if len(self.liars) > self.f or any(not 0 <= number < self.servers for number in self.liars):
            raise ConfigError(
                f"{len(self.liars)} of {self.servers} servers lie, and f={self.f} are borne",
                hint="at most f servers may lie, by their numbers from 0 on",
            )
        least, sure = parse(self.rule).least(self.hostile), self.clients - self.absent
        if sure < least:
            raise ConfigError(
                f"{self.rule} with f={self.hostile} needs {least} updates, and only {sure} are sure",
                hint="have more clients, or ask for a smaller f",
            )


class Nursery:
    """Starts processes of servers: nursery.py. One will do for several groups."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # no threads before a fork
        # A Ctrl-C waits until there is a process to end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.byzantine.agreement.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is for whoever started this, and ends it by `close`
            )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._answer()
        except BaseException:
            self._process.kill()  # it has no servers yet
            self.close()
            raise

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, directory: Path) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{directory}\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError("the process that starts servers has ended", hint="what it printed says why")
        return line.strip()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class ServerGroup:
    """The servers of one federation. `routes(from, to, address)` may put something between two servers."""

    def __init__(
        self,
        settings: RoundSettings,
        first_model: State,
        nursery: Nursery,
        *,
        routes: Callable[[str, str, str], str] = lambda sender, to, address: address,
    ) -> None:
        settings.validate()
        self.settings = settings
        self._nursery = nursery
        self._sockets = tempfile.TemporaryDirectory(prefix="holdfast-")  # short: a socket's path has few characters
        names = [f"s{number}" for number in range(settings.servers)]
        members = [f"c{number}" for number in range(settings.clients)]
        private = {name: PrivateKey.create() for name in (*names, *members)}
        model = encode_state(first_model)
        self.federation = Federation(
            name=settings.directory.name,
            f=settings.f,
            servers={name: private[name].public for name in names},
            clients={name: private[name].public for name in members},
            rule=settings.rule,
            hostile=settings.hostile,
            updates_min=settings.clients - settings.absent,
            model=digest_of(model),
            update_bytes_max=max(UPDATE_BYTES, len(model)),  # an update is as long as the model
        )
        self.federation.validate()
        self.addresses = {name: f"unix:{self._sockets.name}/{name}" for name in names}
        self._secret = os.urandom(SECRET_BYTES)
        self._keys = Keys.from_secret(self._secret)
        self._private = private
        self._processes: dict[str, int] = {}
        self._write(model, routes)

    def _write(self, model: bytes, routes: Callable[[str, str, str], str]) -> None:
        top = self.settings.directory
        (top / "clients").mkdir(parents=True, exist_ok=True)
        self.federation.save(top / FEDERATION_FILE)
        for name in self.federation.clients:
            self._private[name].save(top / "clients" / f"{name}.key")
        for number, (name, address) in enumerate(self.addresses.items()):
            directory = self.directory_of(name)
            directory.mkdir(parents=True, mode=0o700)
            self.federation.save(directory / FEDERATION_FILE)
            self._private[name].save(directory / KEY)
            (directory / SECRET).touch(0o600)
            (directory / SECRET).write_text(self._secret.hex())
            (directory / MODEL).write_bytes(model)
            ServerSettings(
                name=name,
                listen=address,
                peers={one: routes(name, one, to) for one, to in self.addresses.items() if one != name},
                timing=self.settings.timing,
                misbehaves=self.settings.liars.get(number, ""),
                seed=number,
            ).save(directory)

    def directory_of(self, name: str) -> Path:
        return self.settings.directory / "servers" / name

    @property
    def honest(self) -> list[str]:
        return [name for number, name in enumerate(self.addresses) if number not in self.settings.liars]

    def __enter__(self) -> ServerGroup:
        try:
            for name in self.addresses:
                self.start(name)
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all()

    def _end_all(self) -> None:
        for name in list(self._processes):
            self.end(name, signal.SIGTERM)
        self._sockets.cleanup()

    def start(self, name: str) -> None:
        assert name not in self._processes, name
        self._processes[name] = self._nursery.start(self.directory_of(name))

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """And wait until the process is gone, by force if need be."""
        process, deadline = self._processes.pop(name), time.monotonic() + END_S
        with suppress(ProcessLookupError):
            os.kill(process, how)
            while True:
                os.kill(process, 0)
                if time.monotonic() > deadline:
                    os.kill(process, signal.SIGKILL)
                time.sleep(0.005)

    def client(self, name: str) -> Client:
        key = self._private[name]
        return Client(name, key, self.federation, self.addresses, self._keys, public=key.public)


Compute = Callable[[int, int, dict[str, torch.Tensor]], State]


def run_rounds(
    settings: RoundSettings,
    first_model: State,
    compute: Compute,
    *,
    on_round: Callable[[int, dict[str, torch.Tensor]], None] = lambda round, model: None,
    nursery: Nursery | None = None,
) -> dict[str, torch.Tensor]:
    """R rounds with real server processes. `compute(client, round, model)` gives a client's update: what it adds.

    Returns the last model, as clients accept it. `settings.directory` keeps the chain: `holdfast federate verify DIR`.
    """
    with ExitStack() as stack:
        nursery = nursery or stack.enter_context(Nursery())
        group = stack.enter_context(ServerGroup(settings, first_model, nursery))
        clients = [stack.enter_context(group.client(name)) for name in group.federation.clients]
        model = {name: tensor.clone() for name, tensor in first_model.items()}
        for round in range(1, settings.rounds + 1):
            model = one_round(clients, round, model, compute, settings.round_timeout_s)
            on_round(round, model)
        return model


def one_round(
    clients: Sequence[Client], round: int, model: dict[str, torch.Tensor], compute: Compute, timeout_s: float
) -> dict[str, torch.Tensor]:
    """Every client sends its update and accepts the model, which is the same for all. All of them at once.

    A client that is late for the round takes its model, too."""
    updates = [compute(number, round, model) for number in range(len(clients))]

    def take_part(client: Client, update: State) -> bytes:
        with suppress(RoundOver):
            client.submit(round, update, timeout_s=timeout_s)
        return client.await_model_bytes(round, timeout_s=timeout_s)

    with ThreadPoolExecutor(len(clients), thread_name_prefix="holdfast-client") as pool:
        try:
            models = list(pool.map(take_part, clients, updates))
        except BaseException:
            for client in clients:  # whoever still waits is woken: Ctrl-C ends this at once
                client.close()
            raise
    assert len(set(models)) == 1, "f+1 servers sign one model a round"
    return decode_state(models[0])
