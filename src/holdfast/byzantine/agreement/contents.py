"""Which updates a value stands for: a pure function of its attestations, so that no leader can choose.

An update is in the set if enough of the attesting servers hold it that one of them is honest and can supply its bytes.
A client of which the attestations show two different signed updates is dropped; the two claims are the proof. With
attestations of 2f+1 servers, whatever all honest servers held when they attested is in the set, whoever leads; and no
two updates of one client can both be held by f+1 of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.byzantine.agreement.statements import Claim, Value


@dataclass(frozen=True)
class Contents:
    entries: tuple[Claim, ...]  # in the order of the clients' names: the order in which updates are combined
    dropped: tuple[tuple[Claim, Claim], ...]  # of each client that signed two updates, both claims
    unheld: tuple[str, ...]  # clients whose updates too few servers hold


def contents(value: Value, witnesses_needed: int) -> Contents:
    claims: dict[str, dict[bytes, Claim]] = {}
    witnesses: dict[tuple[str, bytes], set[str]] = {}
    for attest in value.attests:
        for claim in attest.claims:
            claims.setdefault(claim.client, {}).setdefault(claim.digest, claim)
            witnesses.setdefault((claim.client, claim.digest), set()).add(attest.server)
    entries, dropped, unheld = [], [], []
    for client, found in sorted(claims.items()):
        first, *others = [found[digest] for digest in sorted(found)]
        if others:
            dropped.append((first, others[0]))
        elif len(witnesses[client, first.digest]) >= witnesses_needed:
            entries.append(first)
        else:
            unheld.append(client)
    return Contents(tuple(entries), tuple(dropped), tuple(unheld))
