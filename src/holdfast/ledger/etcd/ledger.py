"""port.Ledger on etcd.

    /holdfast/runs/RUN/KEY       the run's keys
    /holdfast/marks/RUN/CLIENT   the mark of a client: which of its writes was the last

Writes happen once, however often they are sent. Every write is a transaction that also puts the client's mark, on
the condition that the mark is still as the client left it. So a request that is sent again after silence, or that
arrives late, finds the mark moved and does nothing; and the mark says whether it was this write that moved it. That
makes it safe to try one endpoint after another while a leader is being elected, and leaves an outcome unknown only
if the deadline passes first. A no is made as certain: if a request was lost on the way to it, the mark is moved, so
that the lost one cannot find the condition true later. Leases have numbers that the client chooses, to the same end.

Reads are linearizable. Threads: calls from any thread; writes take turns.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from typing import TypeVar

from holdfast.core.errors import HoldfastError, LedgerUnavailable
from holdfast.ledger.etcd import rpc_pb2 as rpc
from holdfast.ledger.etcd.address import Credentials, EtcdUrl, check_run
from holdfast.ledger.etcd.answers import Compacted, Elsewhere, LeaseExists, NotFound, TokenOld, lease_gone, refusal
from holdfast.ledger.etcd.endpoints import GRANT, KEEP_ALIVE, RANGE, REVOKE, TXN, Endpoints, Method
from holdfast.ledger.etcd.watch import EtcdWatch
from holdfast.ledger.machine import check_key, check_prefix, check_ttl, check_value
from holdfast.ledger.port import Entry, Reading

RUNS, MARKS = b"/holdfast/runs/", b"/holdfast/marks/"
_PAGE_KEYS = 256  # with values of at most 64 KiB: 16 MiB
_LEASE_MAX = 1 << 62
_GOODBYE_S = 0.25

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class EtcdLedger:
    """The ledger of one run. It connects with the first call."""

    def __init__(self, url: EtcdUrl, credentials: Credentials, run: str, *, deadline_s: float) -> None:
        check_run(run)
        self.run = run
        self._deadline_s = deadline_s
        self._endpoints = Endpoints(url, credentials, first=secrets.randbelow(len(url.addresses)))
        self._prefix = RUNS + run.encode() + b"/"
        self._mark = MARKS + run.encode() + b"/" + secrets.token_hex(8).encode()
        self._mark_revision = 0
        self._writes = 0
        self._strays = False  # a write was sent without an answer, and may arrive at any time
        self._turn = threading.Lock()  # whoever holds it owns the mark
        self._opening = threading.Lock()  # so that no watch is opened behind the back of `close`
        self._watches: set[EtcdWatch] = set()
        self._closed = False

    # -- reading

    def get(self, key: str) -> Entry | None:
        check_key(key)
        reply = self._call(RANGE, rpc.RangeRequest(key=self._full(key)))
        return self._entry(reply.kvs[0]) if reply.kvs else None

    def read(self, prefix: str) -> Reading:
        check_prefix(prefix)
        deadline = time.monotonic() + self._deadline_s
        while True:
            try:
                return self._read(self._full(prefix), deadline)
            except Compacted:
                continue  # between two pages; begin again

    # -- writing

    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        check_key(key)
        check_value(value)
        revision = self._write([], self._put(key, value, lease), lease)
        assert revision is not None, "a write without a condition happened or raised"
        return revision

    def compare_and_set(
        self, key: str, value: bytes, *, expected: int, lease: int = 0, while_at: tuple[str, int] | None = None
    ) -> int | None:
        check_key(key)
        check_value(value)
        conditions = [self._is_at(key, expected)]
        if while_at is not None:
            check_key(while_at[0])
            conditions.append(self._is_at(*while_at))
        return self._write(conditions, self._put(key, value, lease), lease)

    def delete(self, key: str) -> bool:
        check_key(key)
        full = self._full(key)
        exists = rpc.Compare(result=rpc.Compare.GREATER, target=rpc.Compare.CREATE, key=full, create_revision=0)
        operation = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=full))
        return self._write([exists], operation, 0) is not None

    # -- leases

    def grant(self, ttl_s: float) -> int:
        """Whole seconds, rounded up; etcd itself may give a little more."""
        check_ttl(ttl_s)
        lease = 1 + secrets.randbelow(_LEASE_MAX)
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=lease)
        try:
            reply = self._call(GRANT, request)
        except LeaseExists:  # an earlier send of the same request arrived
            return lease
        if reply.error:
            raise refusal(reply.error)
        return lease

    def keep_alive(self, lease: int) -> float:
        reply = self._call(KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=lease))
        if reply.TTL <= 0:
            raise lease_gone(lease)
        return float(reply.TTL)

    def revoke(self, lease: int) -> None:
        try:
            self._call(REVOKE, rpc.LeaseRevokeRequest(ID=lease))
        except NotFound:
            pass

    # -- watches, and the end

    def watch(self, prefix: str, *, revision: int) -> EtcdWatch:
        check_prefix(prefix)
        self._endpoints.check_open()
        with self._opening:
            if self._closed:
                raise LedgerUnavailable("this ledger is closed")
            full = self._full(prefix)
            watch = EtcdWatch(self._endpoints, (full, after(full)), len(self._prefix), revision, self._forget)
            self._watches.add(watch)
        watch.start()
        return watch

    def close(self) -> None:
        if self._endpoints.forked:
            return
        with self._opening:
            if self._closed:
                return
            self._closed = True
            watches = tuple(self._watches)
        for watch in watches:
            watch.close()
        if self._mark_revision and not self._strays and self._turn.acquire(blocking=False):
            self._remove_mark()
            self._turn.release()
        self._endpoints.close()
        for watch in watches:
            watch.join()

    def transact(self, request: rpc.TxnRequest) -> rpc.TxnResponse:
        """A transaction that may be carried out twice without harm."""
        return self._call(TXN, request)

    # -- inside

    def _forget(self, watch: EtcdWatch) -> None:
        with self._opening:
            self._watches.discard(watch)

    def _call(self, method: Method[Request, Reply], request: Request) -> Reply:
        return self._endpoints.call(method, request, time.monotonic() + self._deadline_s)

    def _read(self, full: bytes, deadline: float) -> Reading:
        """In pages, all as of the revision of the first."""
        entries: list[Entry] = []
        start, revision = full, 0
        while True:
            request = rpc.RangeRequest(key=start, range_end=after(full), limit=_PAGE_KEYS, revision=revision)
            reply = self._endpoints.call(RANGE, request, deadline)
            revision = revision or reply.header.revision
            entries += map(self._entry, reply.kvs)
            if not reply.more:
                return Reading(tuple(entries), revision)
            start = reply.kvs[-1].key + b"\0"

    def _write(self, conditions: list[rpc.Compare], operation: rpc.RequestOp, lease: int) -> int | None:
        """Carry out `operation` once if `conditions` hold; the revision, or None if they did not."""
        deadline = time.monotonic() + self._deadline_s
        self._endpoints.check_open()
        if not self._turn.acquire(timeout=self._deadline_s):
            raise LedgerUnavailable("other writes to the ledger are still waiting for their answers")
        try:
            self._writes += 1
            return self._write_marked(b"%d" % self._writes, conditions, operation, deadline)
        except NotFound as error:
            raise lease_gone(lease) from error
        except LedgerUnavailable as error:
            raise LedgerUnavailable(f"the write may or may not have happened: {error.message}") from error
        finally:
            self._turn.release()

    def _write_marked(
        self, name: bytes, conditions: list[rpc.Compare], operation: rpc.RequestOp, deadline: float
    ) -> int | None:
        strays = 0
        sealing = False  # the answer is no: see to it that no lost request makes it a yes later

        def lost() -> None:
            nonlocal strays
            strays += 1
            self._strays = True

        while True:
            untouched = rpc.Compare(target=rpc.Compare.MOD, key=self._mark, mod_revision=self._mark_revision)
            value = b"not " + name if sealing else name
            request = rpc.TxnRequest(
                compare=[untouched] if sealing else [untouched, *conditions],
                success=[rpc.RequestOp(request_put=rpc.PutRequest(key=self._mark, value=value))],
                failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=self._mark))],
            )
            if not sealing:
                request.success.append(operation)
            reply = self._endpoints.call(TXN, request, deadline, lost=lost)
            if reply.succeeded:
                self._mark_revision = reply.header.revision
                return None if sealing else self._mark_revision
            marks = reply.responses[0].response_range.kvs
            revision, last = (marks[0].mod_revision, marks[0].value) if marks else (0, b"")
            if revision == self._mark_revision:  # so it was the caller's condition that did not hold
                if not strays:
                    return None
                sealing = True
                continue
            self._mark_revision = revision
            if last == name:
                return revision  # an earlier send of this very request arrived
            if sealing:
                return None
            # Else a write arrived that we had given up on. This one did not, and with the old mark it never will.

    def _remove_mark(self) -> None:
        """One short try: a mark that stays is some bytes, and goes with its run."""
        operation = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._mark))
        try:
            self._endpoints.ask(self._endpoints.current(), TXN, rpc.TxnRequest(success=[operation]), _GOODBYE_S)
        except (Elsewhere, TokenOld, HoldfastError):
            pass

    def _put(self, key: str, value: bytes, lease: int) -> rpc.RequestOp:
        return rpc.RequestOp(request_put=rpc.PutRequest(key=self._full(key), value=value, lease=lease))

    def _is_at(self, key: str, revision: int) -> rpc.Compare:
        return rpc.Compare(target=rpc.Compare.MOD, key=self._full(key), mod_revision=revision)

    def _full(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _entry(self, kv: rpc.KeyValue) -> Entry:
        key = kv.key[len(self._prefix) :].decode(errors="replace")
        return Entry(key, kv.value, kv.mod_revision, kv.create_revision, kv.lease)


def after(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with `prefix`."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1])
