"""The ledger on etcd, for runs on several hosts: `open_etcd("etcd://a:2379,b:2379,c:2379", "my-run")`.

    address.py     URLs, and credentials from environment and files
    endpoints.py   the members as one thing to ask: short tries, failover, authentication
    answers.py     what an answer that is not a result means
    ledger.py      port.Ledger: every write happens once
    watch.py       port.Watch: goes on at another member, nothing missing and nothing twice
    runs.py        the runs that an etcd holds, and forgetting one
    members.py     how the members are doing
    rpc.proto      the part of etcd's API that is used; rpc_pb2.py is made from it by scripts/generate_etcd_rpc.sh

grpc is imported when a ledger is opened, not before. It needs the extra `holdfast[hosts]`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.core.errors import ConfigError
from holdfast.ledger.etcd.address import check_run, parse_url, read_credentials

if TYPE_CHECKING:
    from holdfast.ledger.etcd.ledger import EtcdLedger
    from holdfast.ledger.etcd.members import EtcdStatus
    from holdfast.ledger.etcd.runs import RunFound

__all__ = ["check_url", "delete_run", "list_runs", "open_etcd", "survey"]

DEADLINE_S = 5.0


def check_url(url: str, *, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if the URL, the credentials or the installation cannot work. Does not connect."""
    read_credentials(parse_url(url), environ)
    prepare_grpc()


def open_etcd(
    url: str, run: str, *, deadline_s: float = DEADLINE_S, environ: Mapping[str, str] = os.environ
) -> EtcdLedger:
    """The ledger of `run`. Every call returns or raises within `deadline_s`. Raises ConfigError."""
    parsed = parse_url(url)
    check_run(run)
    credentials = read_credentials(parsed, environ)
    prepare_grpc()
    from holdfast.ledger.etcd.ledger import EtcdLedger

    return EtcdLedger(parsed, credentials, run, deadline_s=deadline_s)


def list_runs(url: str, *, environ: Mapping[str, str] = os.environ) -> list[RunFound]:
    """All runs in this etcd, by name."""
    prepare_grpc()
    from holdfast.ledger.etcd import runs

    return runs.list_runs(url, deadline_s=DEADLINE_S, environ=environ)


def delete_run(ledger: EtcdLedger) -> bool:
    """Delete all that etcd holds of the ledger's run; False, and nothing is deleted, if someone takes part in it."""
    from holdfast.ledger.etcd import runs

    return runs.delete_run(ledger)


def survey(url: str, *, environ: Mapping[str, str] = os.environ) -> EtcdStatus:
    """How each endpoint of the URL is doing, and what runs there are."""
    prepare_grpc()
    from holdfast.ledger.etcd import members

    return members.survey(url, environ=environ)


def prepare_grpc() -> None:
    """Settings that grpc reads when it is imported. Raises ConfigError if it is not installed."""
    for name in ("grpc", "google.protobuf"):
        try:
            missing = importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            missing = True
        if missing:
            raise ConfigError(
                "a ledger on etcd needs grpcio and protobuf, which are not installed",
                hint="pip install 'holdfast[hosts]'",
            )
    # A training script forks loader processes while the client works. They never use it, and grpc's own handling of
    # forks waits for other threads and writes to stderr.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
