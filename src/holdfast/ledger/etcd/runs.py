"""The runs that an etcd holds, and forgetting one.

A run takes part in nothing when no host and no worker is registered in it. Registrations are under leases, so those
of hosts that lost power go by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.errors import LedgerUnavailable
from holdfast.core.words import KEY_DONE, KEY_HOSTS, KEY_WORKERS
from holdfast.ledger.etcd import rpc_pb2 as rpc
from holdfast.ledger.etcd.address import parse_url, read_credentials
from holdfast.ledger.etcd.endpoints import RANGE, TXN, Endpoints
from holdfast.ledger.etcd.ledger import MARKS, RUNS, EtcdLedger, after

_RUNS_MAX = 10_000


@dataclass(frozen=True, kw_only=True)
class RunFound:
    """A run as it stands in the ledger."""

    name: str
    keys: int
    hosts: int  # whose agents are registered
    workers: int  # that are registered
    done: bool

    @property
    def alive(self) -> bool:
        return bool(self.hosts or self.workers)


def list_runs(url: str, *, deadline_s: float, environ: Mapping[str, str]) -> list[RunFound]:
    """All runs in this etcd, by name. Raises LedgerError."""
    parsed = parse_url(url)
    endpoints = Endpoints(parsed, read_credentials(parsed, environ))
    try:
        return runs_at(endpoints, time.monotonic() + deadline_s)
    finally:
        endpoints.close()


def runs_at(endpoints: Endpoints, deadline: float) -> list[RunFound]:
    """From the first key of one run to the first key behind it: one question for each run, not for each key."""
    found: list[RunFound] = []
    start = RUNS
    while len(found) < _RUNS_MAX:
        request = rpc.RangeRequest(key=start, range_end=after(RUNS), limit=1, keys_only=True)
        reply = endpoints.call(RANGE, request, deadline)
        if not reply.kvs:
            return found
        name, _, _ = reply.kvs[0].key[len(RUNS) :].partition(b"/")
        found.append(_look_at(endpoints, name, deadline))
        start = after(RUNS + name + b"/")
    raise LedgerUnavailable(f"this etcd holds more than {_RUNS_MAX} runs; forget those that are over")


def delete_run(ledger: EtcdLedger) -> bool:
    """Delete all that the ledger holds of its run; False, and nothing is deleted, if someone takes part in it.

    Asking and deleting are one transaction, so nobody who registers in between is overrun. Deleting twice is
    deleting once, so it may be sent again.
    """
    prefix, marks = RUNS + ledger.run.encode() + b"/", MARKS + ledger.run.encode() + b"/"
    nobody = [
        rpc.Compare(target=rpc.Compare.VERSION, key=prefix + part, range_end=after(prefix + part), version=0)
        for part in (KEY_HOSTS.encode(), KEY_WORKERS.encode())
    ]
    deletions = [
        rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=part, range_end=after(part)))
        for part in (prefix, marks)
    ]
    return ledger.transact(rpc.TxnRequest(compare=nobody, success=deletions)).succeeded


def _look_at(endpoints: Endpoints, name: bytes, deadline: float) -> RunFound:
    prefix = RUNS + name + b"/"
    hosts, workers = prefix + KEY_HOSTS.encode(), prefix + KEY_WORKERS.encode()
    spans = [
        (prefix, after(prefix)),
        (hosts, after(hosts)),
        (workers, after(workers)),
        (prefix + KEY_DONE.encode(), b""),
    ]
    questions = [
        rpc.RequestOp(request_range=rpc.RangeRequest(key=key, range_end=end, count_only=True)) for key, end in spans
    ]
    reply = endpoints.call(TXN, rpc.TxnRequest(success=questions), deadline)
    keys, host_count, worker_count, done = (answer.response_range.count for answer in reply.responses)
    return RunFound(
        name=name.decode(errors="replace"), keys=keys, hosts=host_count, workers=worker_count, done=bool(done)
    )
