"""A run's ledger and its servers, each a process of its own, which can be killed, stopped and started again."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.core.errors import LedgerError
from holdfast.core.words import KEY_DEAD_SERVERS, KEY_SERVERS, KEY_SLICE, KEY_TARGETS, decode_json, encode_json
from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer
from holdfast.log.configuration import Configuration
from holdfast.servers.client import ClientSettings, RemoteServers
from holdfast.servers.log_codec import decode_configuration
from holdfast.servers.placing import Target
from holdfast.trust.keys import Keys
from tests.harness.servers.gating import Gate

UP_S = 60.0


class Nursery:
    """The process that servers are forked from. Torch takes seconds to load; so one is used for all fleets."""

    _shared: Nursery | None = None

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.harness.servers.process"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        atexit.register(self.close)

    @classmethod
    def shared(cls) -> Nursery:
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def fork(self, words: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Fleet:
    """`over_tcp`: workers do not use the servers' unix sockets. `plant`: a fault that servers have, see planting.py.

    `ends_at_steps`: `end_at` may be called. `durable`: logs are on disk, in a directory of the fleet's or, if it is a
    path, there.
    """

    def __init__(
        self,
        servers: int,
        *,
        replicas: int = 1,
        over_tcp: bool = False,
        durable: bool | Path = False,
        plant: str = "",
        ends_at_steps: bool = False,
        **settings: Any,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hf"))
        self.secret = os.urandom(32)
        self.keys = Keys.from_secret(self.secret)
        self._replicas = replicas
        self._over_tcp = over_tcp
        self._settings = settings
        self.is_durable = bool(durable)
        self._disks = durable if isinstance(durable, Path) else self.directory
        self._plant = plant
        self._ends_at_steps = ends_at_steps
        self._starts: dict[str, int] = {}
        self._ledger_server = EmbeddedServer(self.directory / "ledger", self.directory / "l.sock", self.secret)
        self._ledger_server.start()
        self.ledger = self.open_ledger()
        self._incarnations = [0] * servers
        self.processes: dict[str, int] = {}  # the id of each server's process
        for slot in range(servers):
            self.start(slot)
        self.wait_for(lambda: len(self.registered()) >= servers, "all servers are registered")

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for path in sorted(self.directory.glob("*.log")):
                print(f"---- {path.name}\n{path.read_text()[-3000:]}", file=sys.stderr)
        self.close()

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        self.ledger.close()
        self._ledger_server.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def open_ledger(self) -> EmbeddedLedger:
        return EmbeddedLedger(self.directory / "l.sock", self.secret)

    # ---- servers

    def start(self, slot: int) -> str:
        """A server with no memory of another one; its name."""
        self._incarnations[slot] += 1
        return self.restart(f"s{slot}.{self._incarnations[slot]}")

    def restart(self, name: str) -> str:
        """A server that goes on with what is on its disk, if it has one."""
        self._starts[name] = self._starts.get(name, 0) + 1
        (self.directory / f"{name}.sock").unlink(missing_ok=True)
        words = {
            "id": name,
            "host": "h",
            "secret": self.secret.hex(),
            "ledger": str(self.directory / "l.sock"),
            "socket": str(self.directory / f"{name}.sock"),
            "log": str(self.directory / f"{name}.log"),
            "start": self._starts[name],
            "directory": str(self.disk_of(name)) if self.is_durable else "",
            "settings": self._settings,
            "gate": str(self.directory / f"{name}.gate"),
            "plant": self._plant,
            "ends_at": str(self._order(name)) if self._ends_at_steps else "",
        }
        self.processes[name] = Nursery.shared().fork(words)
        return name

    def disk_of(self, name: str) -> Path:
        return self._disks / f"{name}.slices"

    def kill(self, name: str, *, announce: bool = False) -> None:
        """kill -9. With `announce` the ledger is told, as an agent does that sees its child end."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        if announce:
            self.ledger.put(KEY_DEAD_SERVERS + name, encode_json({"start": self._starts[name]}))

    def _order(self, name: str) -> Path:
        return self.directory / f"{name}.end"

    def end_at(self, name: str, effect: str) -> None:
        """This server ends, as by kill -9, before it performs the next effect of this kind."""
        new = self._order(name).with_suffix(".new")
        new.write_text(effect)
        new.rename(self._order(name))

    def is_living(self, name: str) -> bool:
        return _lives(self.processes[name])

    def wait_for_end(self, name: str) -> None:
        """It has been told to end at some step, and has."""
        self.wait_for(lambda: not self.is_living(name), f"{name} has ended")
        self.processes.pop(name)

    def replace(self, name: str) -> str:
        """Start another server in the dead one's slot, and have it take the dead one's place in every slice."""
        new = self.start(int(name[1:].partition(".")[0]))
        self.wait_for(lambda: new in self.registered(), f"{new} is registered")
        for slice_name, configuration in self.configurations().items():
            if name in configuration.replicas:
                replicas = tuple(new if one == name else one for one in configuration.replicas)
                self.ledger.put(KEY_TARGETS + slice_name, Target(replicas).encode())
        return new

    def cut(self, name: str, others: set[str]) -> None:
        """From these servers, both ways, and from the ledger if it is among them; from nobody else any more."""
        for one in self.processes:
            if one != name:
                Gate(self.directory / f"{one}.gate").cut({name} if one in others else set())
        Gate(self.directory / f"{name}.gate").cut(others)

    # ---- what the ledger says

    def registered(self) -> list[str]:
        with suppress(LedgerError):
            return [entry.key[len(KEY_SERVERS) :] for entry in self.ledger.read(KEY_SERVERS).entries]
        return []

    def configurations(self) -> dict[str, Configuration]:
        return {
            entry.key[len(KEY_SLICE) :]: decode_configuration(decode_json(entry.value))
            for entry in self.ledger.read(KEY_SLICE).entries
        }

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = UP_S) -> None:
        give_up = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < give_up, f"after {timeout_s} s it is not so that {what}"
            time.sleep(0.02)

    # ---- workers

    def client(self, worker: str, *, slices: int | None = None, updates_max: int = 2) -> RemoteServers:
        settings = ClientSettings(
            servers=len(self._incarnations), replicas=self._replicas, slices=slices, updates_max=updates_max
        )
        host = "elsewhere" if self._over_tcp else "h"
        return RemoteServers(worker, 1, host, self.keys, self.open_ledger, settings)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
