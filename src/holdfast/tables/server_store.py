"""A table's rows on parameter servers: stores.TableStore over servers/asking.py.

The table is cut into shards, each a replicated log of its own (table_slice.py), spread over the servers by the hash of
ids. How many there are, the first worker to open the table writes into the ledger, with its settings.

An update is acknowledged when a majority of each shard's replicas has it; it is sent again until it is, and applied
once: a worker numbers its updates for each shard. Some may be under way while the worker goes on, so its own next
look-up may lack them; `flush` waits. Used by one thread; `done` and `failed` are called in the thread that asks.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.core.errors import ConfigError, DivergedError, LedgerError, PeerError, ProtocolError
from holdfast.core.words import KEY_SLICE, KEY_TABLES, decode_json, encode_json
from holdfast.ledger.port import Ledger
from holdfast.servers.asking import Ask, Asking
from holdfast.servers.gathering import Wanted, gather
from holdfast.servers.log_codec import encode_configuration
from holdfast.servers.placing import first_placement
from holdfast.servers.replicated import Answer, Head
from holdfast.tables.rows.choosing import kernels
from holdfast.tables.rows.port import Counts, Ids, Layout, Values
from holdfast.tables.serving import TABLE
from holdfast.tables.settings import TableSettings
from holdfast.tables.shard import Changes
from holdfast.tables.stores import check_finite, spread, time_of_update
from holdfast.tables.table_slice import (
    LOOKED_UP_MAX,
    changes_query,
    create_head,
    decode_changes,
    fill_of,
    look_up_query,
    update_of,
)
from holdfast.trust.keys import Keys

READ_WAIT_S = 1.0  # a read waits so long on a server until it is asked again
LOOK_S = 0.02
PLACED_S = 1.0  # after so long without an answer it is looked whether shards are still placed
SHARDS = 8
FILL_BYTES = 8 << 20  # of rows in one entry of a shard's log
NAME_CHARACTERS_MAX = 80
SKIP: Head = {"kind": "skip"}


@dataclass(frozen=True, kw_only=True)
class TableServersSettings:
    servers: int = 1  # that are waited for before a table is created; 0: those that the run's hosts have
    replicas: int = 1  # of each shard; 0: the usual number
    shards: int = SHARDS  # of a new table. The same for any number of servers, so that a log fits any
    updates_max: int = 2  # under way at once; 0: each one is waited for
    patience_s: float = 120.0

    @property
    def wanted(self) -> Wanted:
        return Wanted(servers=self.servers, replicas=self.replicas)


class _Waiting:
    """Requests that are under way together. The thread that asks tells of each; another one waits for all."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def answered(self, error: Exception | None = None) -> None:
        with self._changed:
            self._left -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._left, timeout_s):
                raise TimeoutError(f"{self._left} shards of a table have not answered within {timeout_s:g} s")
            if self._error is not None:
                raise self._error

    def finish(self, timeout_s: float) -> None:
        """PeerError if it takes longer: nobody knows then what came of it."""
        try:
            self.wait(timeout_s)
        except TimeoutError as error:
            raise PeerError(str(error)) from error


class TableServers:
    """A worker's way to all its tables. `worker` has no incarnation in it, as `run_facts.author_of` gives it."""

    def __init__(
        self,
        worker: str,
        incarnation: int,
        host: str,
        keys: Keys,
        open_ledger: Callable[[], Ledger],
        settings: TableServersSettings | None = None,
    ) -> None:
        self.author = worker, incarnation
        self.settings = settings or TableServersSettings()
        self._open_ledger = open_ledger
        self.asking = Asking(f"{worker}.{incarnation}", host, keys, open_ledger, patience_s=self.settings.patience_s)

    def open(self, name: str, settings: TableSettings, *, timeout_s: float = 60.0) -> ServerStore:
        """The table of this name, created if there is none. ConfigError if there is one with other settings."""
        if not name or len(name) > NAME_CHARACTERS_MAX or not name.replace(".", "").replace("_", "").isalnum():
            raise ConfigError(f"{name!r:.100} is no name for a table", hint="use letters, digits, _ and dots")
        give_up = time.monotonic() + timeout_s
        ledger = self._open_ledger()
        try:
            store = ServerStore(self, name, settings, self._agree(ledger, name, settings, give_up))
            creating = store.create()
            while True:  # whoever held a shard may be gone for good, and is forgotten after a while
                self._place(ledger, name, store.shards)
                try:
                    creating.wait(PLACED_S)
                    return store
                except TimeoutError as error:
                    if time.monotonic() > give_up:
                        raise PeerError(f"the servers that hold the table {name} do not answer: {error}") from error
        finally:
            ledger.close()

    def close(self) -> None:
        self.asking.close()

    def _agree(self, ledger: Ledger, name: str, settings: TableSettings, give_up: float) -> int:
        """How many shards it has: what the ledger says, or what this worker has put there."""
        wanted, began = self.settings.wanted, time.monotonic()
        while True:
            try:
                entry = ledger.get(KEY_TABLES + name)
                if entry is not None:
                    told = decode_json(entry.value)
                    if TableSettings.decode(told.get("settings")) != settings:
                        raise ConfigError(
                            f"the run has a table {name} with other settings than this worker",
                            hint="every worker of a run must build the same tables",
                        )
                    return int(told["shards"])
                present = gather(ledger)
                if wanted.are_enough(present):
                    shards = self.settings.shards
                    told = {"shards": shards, "settings": settings.encode()}
                    if ledger.compare_and_set(KEY_TABLES + name, encode_json(told), expected=0) is not None:
                        return shards
                    continue
            except LedgerError:
                present = None
            if time.monotonic() > give_up:
                raise wanted.too_few(present, time.monotonic() - began)
            time.sleep(LOOK_S)

    def _place(self, ledger: Ledger, name: str, shards: int) -> None:
        """Where no one has placed a shard yet, place it."""
        placed = {entry.key for entry in ledger.read(KEY_SLICE).entries}
        if all(KEY_SLICE + slice_name(name, shard) in placed for shard in range(shards)):
            return
        present, wanted = gather(ledger), self.settings.wanted
        if not wanted.are_enough(present):
            return  # they come, and it is tried again
        for shard, configuration in enumerate(first_placement(present.hosts, shards, wanted.replicas_of(present))):
            key = KEY_SLICE + slice_name(name, shard)
            if key not in placed:
                ledger.compare_and_set(key, encode_json(encode_configuration(configuration)), expected=0)


class ServerStore:
    def __init__(self, servers: TableServers, name: str, settings: TableSettings, shards: int) -> None:
        self.settings = settings
        self.shards = shards
        self._servers = servers
        self._name = name
        self._kernels = kernels()
        self._sequences = [0] * shards
        self._under_way: list[_Waiting] = []

    def create(self) -> _Waiting:
        """Tell every shard what it is: the first one to do so counts."""
        waiting = _Waiting(self.shards)
        head = Answer(create_head(self.settings))
        self._servers.asking.submit([self._update(shard, head, waiting) for shard in range(self.shards)])
        return waiting

    @property
    def history(self) -> str:
        found: list[str] = []
        self._ask([(0, {"kind": "moment"}, lambda head, body: found.append(str(head.get("history", ""))))])
        return f"servers/{self._name}/{found[0]}" if found[0] else f"servers/{self._name}"

    # ---- reading

    def look_up(self, ids: Ids) -> Values:
        united = self._kernels.unite(np.ascontiguousarray(ids), None)
        rows = np.empty((len(united.ids), self.settings.dim), dtype=np.float32)
        pieces = [
            (shard, some[start : start + LOOKED_UP_MAX])
            for shard, some in spread(united.ids, self.shards)
            for start in range(0, len(some), LOOKED_UP_MAX)
        ]

        def take(some: Any) -> Callable[[Head, memoryview], None]:
            def taken(head: Head, body: memoryview) -> None:
                rows[some] = np.frombuffer(body, dtype=np.float32).reshape(len(some), self.settings.dim)

            return taken

        self._ask([(shard, look_up_query(united.ids[some]), take(some)) for shard, some in pieces])
        return rows[united.which]

    def updates(self, shard: int) -> int:
        found: list[int] = []
        self._ask([(shard, {"kind": "moment"}, lambda head, body: found.append(int(head["moment"]["updates"])))])
        return found[0]

    def changes(self, shard: int, since: int = 0) -> Changes:
        found: list[Changes] = []

        def taken(head: Head, body: memoryview) -> None:
            found.append(decode_changes(head, body, self.settings))

        self._ask([(shard, changes_query(since), taken)])
        return found[0]

    def _ask(self, queries: list[tuple[int, Head, Callable[[Head, memoryview], None]]]) -> None:
        if not queries:
            return
        waiting = _Waiting(len(queries))

        def ask(shard: int, query: Head, take: Callable[[Head, memoryview], None]) -> Ask:
            def done(asked: Ask, head: Head) -> None:
                try:
                    take(head["answer"], asked.body)
                except (ProtocolError, KeyError, TypeError, ValueError) as error:
                    waiting.answered(ProtocolError(f"an answer of the table {self._name} makes no sense: {error}"))
                else:
                    waiting.answered()

            head = {"op": "read", "fresh": True, "query": query, "wait_s": READ_WAIT_S}
            return Ask(slice_name(self._name, shard), head, (), done, waiting.answered)

        self._servers.asking.submit([ask(*one) for one in queries])
        waiting.finish(self._servers.settings.patience_s)

    # ---- updating

    def push(
        self, ids: Ids, gradients: Values, *, lr: float, times: Counts | None = None, unit: int | None = None
    ) -> None:
        check_finite(gradients, f"the table {self._name}")
        united = self._kernels.unite(np.ascontiguousarray(ids), times)
        sums = self._kernels.add_up(united, np.ascontiguousarray(gradients))
        moment = time_of_update(self.settings)
        pieces = list(spread(united.ids, self.shards))
        waiting = _Waiting(len(pieces))
        updates = [
            (shard, update_of(united.ids[some], sums[some], united.seen[some], lr=lr, time=moment, unit=unit))
            for shard, some in pieces
        ]
        self._servers.asking.submit([self._update(shard, update, waiting) for shard, update in updates])
        self._under_way.append(waiting)
        self._wait_until_at_most(self._servers.settings.updates_max)

    def restore(self, shards: Sequence[Changes]) -> None:
        """Rows from a log, into shards that are not further. Several workers may do so at once."""
        for shard, changes in enumerate(shards):
            if self.updates(shard) <= changes.moment.updates:
                self._fill(shard, changes)

    def put_back(self, shards: Sequence[Changes]) -> None:
        """One worker does so, while no other one trains. PeerError if one does."""
        history = secrets.token_hex(8)
        for shard, changes in enumerate(shards):
            self._fill(shard, changes, history)
        for shard, changes in enumerate(shards):
            if self.updates(shard) != changes.moment.updates:
                raise PeerError(f"a worker has trained the table {self._name} while its rows were put back")

    def _fill(self, shard: int, changes: Changes, history: str = "") -> None:
        rows = max(1, FILL_BYTES // Layout.of(self.settings).nbytes)
        for piece in fill_of(changes, rows, history):
            waiting = _Waiting(1)
            self._servers.asking.submit([self._update(shard, piece, waiting)])
            waiting.finish(self._servers.settings.patience_s)

    def flush(self) -> None:
        """Until all updates are acknowledged."""
        self._wait_until_at_most(0)

    def sent(self) -> Callable[[], None]:
        waiting, patience_s = tuple(self._under_way), self._servers.settings.patience_s

        def wait() -> None:
            for one in waiting:
                one.finish(patience_s)

        return wait

    def _wait_until_at_most(self, count: int) -> None:
        while len(self._under_way) > count:
            self._under_way.pop(0).finish(self._servers.settings.patience_s)

    def _update(self, shard: int, update: Answer, waiting: _Waiting) -> Ask:
        self._sequences[shard] += 1
        worker, incarnation = self._servers.author
        author = {"worker": worker, "incarnation": incarnation, "sequence": self._sequences[shard]}
        name = slice_name(self._name, shard)

        def failed(error: Exception) -> None:
            if not isinstance(error, DivergedError):
                waiting.answered(error)
                return

            # Its place in the order stays empty: say so, or what comes behind it is taken for what is too early.
            def told(*_: object) -> None:
                waiting.answered(error)

            self._servers.asking.submit([Ask(name, {"op": "push", "payload": SKIP, **author}, (), told, told)])

        head = {"op": "push", "payload": update.head, **author}
        return Ask(name, head, update.views, lambda ask, head: waiting.answered(), failed)


def slice_name(table: str, shard: int) -> str:
    return f"{TABLE}/{table}/{shard}"
