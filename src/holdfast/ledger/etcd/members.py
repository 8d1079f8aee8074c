"""How the members of an etcd are doing: for `holdfast ledger status`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from holdfast.core.errors import HoldfastError
from holdfast.ledger.etcd import rpc_pb2 as rpc
from holdfast.ledger.etcd.address import parse_url, read_credentials
from holdfast.ledger.etcd.answers import Elsewhere, TokenOld, handshake_refused, refusal
from holdfast.ledger.etcd.endpoints import MEMBER_LIST, RANGE, STATUS, Endpoint, Endpoints
from holdfast.ledger.etcd.runs import RunFound, runs_at

_ASK_S = 1.5
_READS = 5
_RUNS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """One endpoint. It `serves` if it could read with a majority behind it."""

    address: str
    name: str = ""
    serves: bool = False
    leads: bool = False
    revision: int = 0
    db_bytes: int = 0
    version: str = ""
    read_s: float | None = None  # the quickest of a few linearizable reads
    trouble: str = ""
    member_id: int = 0


@dataclass(frozen=True, kw_only=True)
class EtcdStatus:
    members: tuple[MemberStatus, ...]
    unnamed: tuple[str, ...]  # members of the cluster that the URL does not name
    runs: tuple[RunFound, ...] | None  # None if no majority answers

    @property
    def serves(self) -> bool:
        return any(member.serves for member in self.members)


def survey(url: str, *, environ: Mapping[str, str]) -> EtcdStatus:
    """Ask every endpoint. Raises LedgerRefused if they all refuse us, ConfigError for what cannot be asked."""
    parsed = parse_url(url)
    endpoints = Endpoints(parsed, read_credentials(parsed, environ))
    try:
        with ThreadPoolExecutor(len(endpoints.all)) as pool:
            members = list(pool.map(lambda endpoint: _ask(endpoints, endpoint), endpoints.all))
        serving = next((index for index, member in enumerate(members) if member.serves), None)
        if serving is None:
            return EtcdStatus(members=tuple(members), unnamed=(), runs=None)
        names, unnamed = _names(endpoints, endpoints.all[serving], {member.member_id for member in members})
        members = [replace(member, name=names.get(member.member_id, "")) for member in members]
        runs = tuple(runs_at(endpoints, time.monotonic() + _RUNS_S))
        return EtcdStatus(members=tuple(members), unnamed=unnamed, runs=runs)
    finally:
        endpoints.close()


def _ask(endpoints: Endpoints, endpoint: Endpoint) -> MemberStatus:
    known = MemberStatus(address=str(endpoint.address))
    try:
        # Its own word, which needs no leader: a member without one still says how it is.
        status = endpoints.ask(endpoint, STATUS, rpc.StatusRequest(), _ASK_S)
        known = replace(
            known,
            member_id=status.header.member_id,
            leads=status.leader == status.header.member_id,
            revision=status.header.revision,
            db_bytes=status.dbSize,
            version=status.version,
            trouble="; ".join(status.errors),
        )
        return replace(known, serves=True, read_s=min(_read_s(endpoints, endpoint) for _ in range(_READS)))
    except Elsewhere as error:
        if error.tls:
            raise handshake_refused(error.reason) from error
        return replace(known, trouble="no majority" if known.version else error.reason)
    except TokenOld as error:
        raise refusal(str(error)) from error


def _read_s(endpoints: Endpoints, endpoint: Endpoint) -> float:
    start = time.monotonic()
    endpoints.ask(endpoint, RANGE, rpc.RangeRequest(key=b"/holdfast/", count_only=True), _ASK_S)
    return time.monotonic() - start


def _names(endpoints: Endpoints, endpoint: Endpoint, named: set[int]) -> tuple[dict[int, str], tuple[str, ...]]:
    try:
        listed = endpoints.ask(endpoint, MEMBER_LIST, rpc.MemberListRequest(), _ASK_S).members
    except (Elsewhere, TokenOld, HoldfastError):
        return {}, ()
    unnamed = tuple(f"{member.name} ({', '.join(member.clientURLs)})" for member in listed if member.ID not in named)
    return {member.ID: member.name for member in listed}, unnamed
