"""The ledger of a run whose workers Ray has placed, and what an agent would write into it.

The process that launches serves the embedded ledger on TCP, to whoever has the run's keys; or it names an etcd.
Training goes on while it is away. Owned by one thread.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from holdfast.agent.workers.processes import fence_worker
from holdfast.core.errors import ConfigError
from holdfast.core.words import (
    KEY_DEAD,
    KEY_DONE,
    KEY_INCARNATIONS,
    KEY_SIZE,
    KEY_STOP,
    KEY_VIEW,
    KEY_WORKERS,
    View,
    decode_json,
    decode_whole,
    encode_json,
    worker_id,
)
from holdfast.ledger.embedded import EmbeddedServer
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import LEDGER_SOCKET
from holdfast.placement.ledger import SERVED, open_ledger
from holdfast.trust.keys import FILES, create_keys, load_keys

PLACED_BY = "ray"  # in the names of keys, where an agent has its host's


class RunLedger:
    def __init__(self, directory: RunDirectory, address: str, *, url: str = "", keys: str = "") -> None:
        """`address`: of this node. With `url` and `keys` it is an etcd's client, and nothing is served here."""
        self._parts = ExitStack()
        directory.create()
        try:
            self._parts.enter_context(directory.locked())
            own = Path(keys).expanduser().resolve() if keys else directory.path / "keys"
            held = create_keys(own) if not keys and not own.exists() else load_keys(own)
            self.keys = {name: (own / name).read_text() for name in FILES}
            socket = directory.socket_dir() / LEDGER_SOCKET
            self._parts.callback(directory.remove_sockets, socket.parent)
            if not url:
                server = EmbeddedServer(directory.ledger, socket, held.secret, listen=address, keys=held)
                server.start()
                self._parts.callback(server.stop)
                url = SERVED + server.tcp_address.removeprefix("tcp:")
            self.url = url
            self.ledger = open_ledger(url, directory.name, socket, held.secret, held)
            self._parts.callback(self.ledger.close)
            about = {"name": directory.name, "host": "", "script": "launched on Ray", "workers": 0, "spares": 0}
            places = {"ledger": url, "keys": str(own), "socket_dir": str(socket.parent)}
            directory.write({**about, **places, "cwd": str(Path.cwd()), "command": "launched on Ray"})
        except BaseException:
            self._parts.close()
            raise

    def begin(self, name: str) -> None:
        """Nobody of an earlier launch lives; the run goes on from its newest checkpoint."""
        if self.ledger.get(KEY_DONE) is not None:
            raise ConfigError(f"run {name} is finished", hint="give this one another name with run=…")
        self.clear()

    def clear(self) -> None:
        """Whoever is in the ledger of an earlier launch is dead, and nobody asks the workers to stop."""
        self.ledger.delete(KEY_STOP)
        for entry in self.ledger.read(KEY_WORKERS).entries:
            fence_worker(self.ledger, entry.key[len(KEY_WORKERS) :])
        view = self.ledger.get(KEY_VIEW)
        for member in View.decode(view.value).members if view is not None else ():
            self.ledger.put(KEY_DEAD + member, b"{}")

    def resize(self, workers: int) -> None:
        self.ledger.put(KEY_SIZE + PLACED_BY, encode_json({"workers": workers}))

    def next_worker(self, slot: int, host: str) -> str:
        """A name that no worker of the run had."""
        key = f"{KEY_INCARNATIONS}{slot}@{PLACED_BY}"
        entry = self.ledger.get(key)
        count = (decode_whole(entry.value, "count") if entry is not None else 0) + 1
        self.ledger.put(key, encode_json({"count": count}))
        return worker_id(slot, count, host)

    def fence(self, worker: str) -> None:
        fence_worker(self.ledger, worker)

    def stop(self, reason: str) -> None:
        """All workers finish their step and leave."""
        self.ledger.put(KEY_STOP, encode_json({"reason": reason}))

    def stopped_by(self) -> str:
        """Why the run was told to stop; empty: it was not."""
        entry = self.ledger.get(KEY_STOP)
        return str(decode_json(entry.value).get("reason", "stopped")) if entry is not None else ""

    def close(self) -> None:
        self._parts.close()
