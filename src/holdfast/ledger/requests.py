"""The port's calls as requests: how a client asks, and what the machine makes of it.

The ledger in one process (memory.py) and the one behind a socket (client.py, server.py) share both, so that a call
means the same in each. Pure but for whoever answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.ledger.machine import Grant, LedgerMachine, Put, Record, check_key, check_prefix, check_ttl, check_value
from holdfast.ledger.port import Entry, Reading
from holdfast.ledger.wire import Request


class RequestedLedger:
    """port.Ledger but for `watch` and `close`. What is asked for is checked before anything is sent."""

    def _ask(self, request: Request) -> Any:
        """What `perform` makes of it, wherever the machine is."""
        raise NotImplementedError

    def get(self, key: str) -> Entry | None:
        check_key(key)
        entry: Entry | None = self._ask(Request(op="get", key=key))
        return entry

    def read(self, prefix: str) -> Reading:
        check_prefix(prefix)
        reading: Reading = self._ask(Request(op="read", prefix=prefix))
        return reading

    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        check_key(key)
        check_value(value)
        return int(self._ask(Request(op="put", key=key, value=value, lease=lease)))

    def compare_and_set(
        self, key: str, value: bytes, *, expected: int, lease: int = 0, while_at: tuple[str, int] | None = None
    ) -> int | None:
        check_key(key)
        check_value(value)
        if while_at is not None:
            check_key(while_at[0])
        request = Request(op="compare_and_set", key=key, value=value, lease=lease, expected=expected, while_at=while_at)
        revision: int | None = self._ask(request)
        return revision

    def delete(self, key: str) -> bool:
        check_key(key)
        return bool(self._ask(Request(op="delete", key=key)))

    def grant(self, ttl_s: float) -> int:
        check_ttl(ttl_s)
        return int(self._ask(Request(op="grant", ttl_s=ttl_s)))

    def keep_alive(self, lease: int) -> float:
        return float(self._ask(Request(op="keep_alive", lease=lease)))

    def revoke(self, lease: int) -> None:
        self._ask(Request(op="revoke", lease=lease))


def perform(machine: LedgerMachine, request: Request, now: float, commit: Callable[[Record], None]) -> Any:
    """The answer to any request but a watch. `commit` is told what changes by it, and carries it out."""
    key, lease, op = request.key, request.lease, request.op
    if op == "get":
        return machine.get(key)
    if op == "read":
        return machine.read(request.prefix)
    if op == "keep_alive":
        return machine.keep_alive(lease, now)
    record: Record | None
    if op == "put":
        record = machine.put(key, request.value, lease=lease)
    elif op == "compare_and_set":
        record = machine.compare_and_set(
            key, request.value, expected=request.expected, lease=lease, while_at=request.while_at
        )
    elif op == "grant":
        record = machine.grant(request.ttl_s)
    elif op == "delete":
        record = machine.delete(key)
    else:
        assert op == "revoke", op
        record = machine.revoke(lease)
    if record is not None:
        commit(record)
    if isinstance(record, Put):
        return record.revision
    if isinstance(record, Grant):
        return record.lease
    return None if op == "compare_and_set" else record is not None
