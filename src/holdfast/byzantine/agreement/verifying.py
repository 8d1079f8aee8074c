"""The chain of rounds, verified by anyone afterwards: from its file, or from the directories of several servers.

What a chain proves by itself: each round's set was decided by 2f+1 of the servers that it names, contains only updates
that its clients signed, follows the round before it, and f+1 servers signed its model. That those servers and clients
are who they should be is proved by comparing the federation's fingerprint, or by giving its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.byzantine.agreement.chain_file import FILE, read_chain
from holdfast.byzantine.agreement.checking import Checker
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.machine import genesis
from holdfast.byzantine.agreement.signing import verify
from holdfast.byzantine.agreement.statements import Header, Record
from holdfast.core.errors import ConfigError, IntegrityError


@dataclass(frozen=True)
class RoundVerdict:
    """What is known of a round whose record holds."""

    header: Header
    updates: tuple[str, ...]  # clients
    dropped: tuple[str, ...]  # those that signed two updates
    view: int  # in which it was decided
    signers: tuple[str, ...]  # of the model


@dataclass(frozen=True)
class ChainVerdict:
    path: Path
    federation: Federation
    rounds: tuple[RoundVerdict, ...]


def verify_chain(path: Path, federation: Federation | None = None) -> ChainVerdict:
    """IntegrityError, naming the first round that does not hold. `federation`: what the chain's must be."""
    own, records, _ = read_chain(path)
    if federation is not None and own.realm != federation.realm:
        raise IntegrityError(
            f"{path} is the chain of another federation than the one that was named",
            hint=f"its fingerprint is {fingerprint(own)}, and {fingerprint(federation)} was expected",
        )
    return ChainVerdict(path, own, tuple(_rounds(path, own, records)))


def _rounds(path: Path, federation: Federation, records: Sequence[Record]) -> Iterator[RoundVerdict]:
    checker, parent = Checker(federation, verify), genesis(federation.model)
    for record in records:
        bad = checker.record(record, parent.round + 1, parent.digest)
        if bad:
            raise IntegrityError(
                f"{path}: round {parent.round + 1} does not hold: {bad}",
                hint="compare it with the chain of another server",
            )
        inside = checker.contents(record.value)
        yield RoundVerdict(
            record.header,
            tuple(claim.client for claim in inside.entries),
            tuple(one.client for one, _ in inside.dropped),
            record.commits[0].view,
            tuple(result.server for result in record.results),
        )
        parent = record.header


def chains_in(place: Path) -> list[Path]:
    """A chain's file itself, that of a server's directory, those of all servers of a federation, or of several."""
    if place.is_file():
        return [place]
    for below in ("", "*/", "servers/*/", "*/servers/*/"):
        if found := sorted(place.glob(below + FILE)):
            return found
    raise ConfigError(f"there is no {FILE} in {place}", hint="name the file, a server's directory or a federation's")


def compare(verdicts: Sequence[ChainVerdict]) -> None:
    """IntegrityError if two chains of one federation have different records of one round."""
    first: dict[tuple[bytes, int], tuple[Path, Header]] = {}
    for verdict in verdicts:
        for one in verdict.rounds:
            key = (verdict.federation.realm, one.header.round)
            path, header = first.setdefault(key, (verdict.path, one.header))
            if header != one.header:
                raise IntegrityError(
                    f"{path} and {verdict.path} have different rounds {one.header.round}, and both are signed",
                    hint=f"more than f={verdict.federation.f} servers lied: their votes in both files say which",
                )


def fingerprint(federation: Federation) -> str:
    return federation.realm.hex()[:32]
