"""What proves what. Each method says what is wrong with a statement, or nothing.

A certificate counts votes of different servers, each with its own valid signature, for the same phase, round, view and
digest: a signature is checked before a vote is counted, so one bad vote never spoils good ones. A view change with a
proof that does not hold is refused as a whole, so it never hides another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from holdfast.byzantine.agreement.contents import Contents, contents
from holdfast.byzantine.agreement.federation import DIGEST_BYTES, Federation
from holdfast.byzantine.agreement.statements import (
    COMMIT,
    PREPARE,
    Attest,
    Claim,
    Prepared,
    Proposal,
    Record,
    Result,
    Value,
    ViewChange,
    Vote,
)

GOOD = ""


class Verifier(Protocol):
    def __call__(self, public_key: bytes, said: bytes, signature: bytes) -> bool: ...


Signer = Callable[[bytes], bytes]


class Checker:
    """Knows the federation. It has no memory, but for values that it has found good."""

    def __init__(self, federation: Federation, verify: Verifier) -> None:
        self.federation = federation
        self._verify = verify
        self._good: dict[tuple[bytes, bytes], None] = {}  # values, with their parents

    def said(self, said: bytes) -> bytes:
        """What is really signed: in this federation and no other."""
        return self.federation.realm + said

    def contents(self, value: Value) -> Contents:
        return contents(value, self.federation.witnesses_needed)

    def _by_server(self, statement: Attest | Vote | ViewChange | Proposal | Result) -> str:
        key = self.federation.servers.get(statement.server)
        if key is None:
            return f"{statement.server!r:.40} is not a registered server"
        if not self._verify(key, self.said(statement.said), statement.signature):
            return f"the signature is not that of {statement.server}"
        return GOOD

    def claim(self, claim: Claim) -> str:
        key = self.federation.clients.get(claim.client)
        if key is None:
            return f"{claim.client!r:.40} is not a registered client: its key is not in the federation"
        if len(claim.digest) != DIGEST_BYTES or not self._verify(key, self.said(claim.said), claim.signature):
            return f"the signature is not that of {claim.client}"
        return GOOD

    def attest(self, attest: Attest) -> str:
        order = [(claim.client, claim.digest) for claim in attest.claims]
        clients = [client for client, _ in order]
        if order != sorted(set(order)) or any(
            client == clients[place - 2] for place, client in enumerate(clients) if place >= 2
        ):
            return "claims that are not in order"
        if any(claim.round != attest.round for claim in attest.claims):
            return "a claim of another round"
        return self._by_server(attest) or next((bad for one in attest.claims if (bad := self.claim(one))), GOOD)

    def vote(self, vote: Vote) -> str:
        if vote.phase not in (PREPARE, COMMIT) or len(vote.digest) != DIGEST_BYTES:
            return "a vote on nothing"
        return self._by_server(vote)

    def result(self, result: Result) -> str:
        return self._by_server(result)

    def certificate(self, votes: Iterable[Vote], phase: str, round: int, view: int | None, digest: bytes) -> str:
        """Enough different servers said the same. `view` None: in whichever view, but all in one."""
        votes = tuple(votes)
        if len(votes) > len(self.federation.servers):
            return "more votes than servers"
        views = {vote.view for vote in votes} if view is None else {view}
        alike = [
            vote
            for vote in votes
            if (vote.phase, vote.round, vote.digest) == (phase, round, digest) and vote.view in views
        ]
        voters = {vote.server for vote in alike if not self.vote(vote)}
        if len(views) != 1 or len(voters) < self.federation.votes_needed:
            return f"{len(voters)} of {self.federation.votes_needed} votes"
        return GOOD

    def value(self, value: Value, round: int, parent: bytes) -> str:
        key = (value.digest, parent)
        if key in self._good and value.round == round:
            return GOOD
        if value.round != round or value.parent != parent:
            return "a value of another round, or after another one"
        servers = [attest.server for attest in value.attests]
        if servers != sorted(set(servers)) or len(servers) < self.federation.votes_needed:
            return f"attestations of {len(set(servers))} servers, which are not {self.federation.votes_needed}"
        for attest in value.attests:
            bad = "an attestation of another round" if attest.round != round else self.attest(attest)
            if bad:
                return bad
        if len(self.contents(value).entries) < self.federation.updates_min:
            return f"fewer than {self.federation.updates_min} updates that enough servers hold"
        if len(self._good) >= 64:
            self._good.pop(next(iter(self._good)))
        self._good[key] = None
        return GOOD

    def prepared(self, prepared: Prepared, round: int, parent: bytes) -> str:
        return self.value(prepared.value, round, parent) or self.certificate(
            prepared.votes, PREPARE, round, prepared.view, prepared.value.digest
        )

    def view_change(self, change: ViewChange, parent: bytes) -> str:
        bad = self._by_server(change)
        if bad or change.prepared is None:
            return bad or (GOOD if change.view > 0 else "a change to the first view")
        if change.prepared.view >= change.view:
            return "a proof from a view that is not over"
        return self.prepared(change.prepared, change.round, parent)

    def proposal(self, proposal: Proposal, parent: bytes) -> str:
        round, view = proposal.round, proposal.view
        if proposal.server != self.federation.leader(round, view):
            return f"{proposal.server!r:.40} does not lead in view {view}"
        bad = self._by_server(proposal) or self.value(proposal.value, round, parent)
        if bad or view == 0:
            return bad or (GOOD if not proposal.changes else "changes to the first view")
        return self.justification(proposal, parent)

    def justification(self, proposal: Proposal, parent: bytes) -> str:
        """A later leader shows that enough servers have left the views before, and goes on with what they may have
        committed: the value that was prepared in the newest view.
        """
        changes = proposal.changes
        if len(changes) > len(self.federation.servers):
            return "more changes than servers"
        alike = [one for one in changes if (one.round, one.view) == (proposal.round, proposal.view)]
        good = {one.server: one for one in alike if not self.view_change(one, parent)}
        if len(good) != len(changes) or len(good) < self.federation.votes_needed:
            return f"{len(good)} of {self.federation.votes_needed} view changes"
        newest = newest_prepared(good.values())
        if newest is not None and newest.value.digest != proposal.value.digest:
            return "another value than the one that was prepared"
        return GOOD

    def record(self, record: Record, round: int, parent: bytes) -> str:
        header = record.header
        if (header.round, header.parent) != (round, parent):
            return f"it does not follow the record before it: it says round {header.round}, and {round} is due"
        if header.value != record.value.digest:
            return "its set of updates is not the one that its header names"
        bad = self.value(record.value, round, parent)
        if bad:
            return f"its set of updates does not hold: {bad}"
        bad = self.certificate(record.commits, COMMIT, round, None, header.value)
        return f"its set was not decided: {bad}" if bad else self.results(record)

    def results(self, record: Record) -> str:
        """Whether so many servers signed this model that one of them is honest. All that a client needs to know."""
        if len(record.results) > len(self.federation.servers):
            return "more results than servers"
        alike = [one for one in record.results if one.header == record.header]
        signers = {one.server for one in alike if not self.result(one)}
        if len(signers) < self.federation.witnesses_needed:
            return f"{len(signers)} servers signed its model, and {self.federation.witnesses_needed} are needed"
        return GOOD


def newest_prepared(changes: Iterable[ViewChange]) -> Prepared | None:
    proofs = [one.prepared for one in changes if one.prepared is not None]
    return max(proofs, key=lambda one: one.view, default=None)
