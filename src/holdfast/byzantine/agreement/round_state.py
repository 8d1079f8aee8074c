"""What one server has heard in one round: claims, attestations, votes, view changes, results. Bounded by the number of
participants: one attestation, one view change, one result of each server, one vote for each phase of a few views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast.byzantine.agreement.contents import contents
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.messages import Decided
from holdfast.byzantine.agreement.statements import (
    Attest,
    Claim,
    Header,
    Proposal,
    Result,
    Value,
    ViewChange,
    Vote,
)

VIEWS_AHEAD = 4  # votes of views further off are dropped: whoever sent them sends them again
VIEWS_BEHIND = 4


class RoundState:
    def __init__(self, federation: Federation, number: int, parent: Header, now: float) -> None:
        self.number = number
        self.parent = parent
        self.began_at = now
        self._federation = federation
        self.claims: dict[str, dict[bytes, Claim]] = {}  # by client; two of one client are a proof
        self.attests: dict[str, Attest] = {}
        self.proposal: Proposal | None = None  # of the view that this server is in
        self.votes: dict[tuple[str, int], dict[str, Vote]] = {}
        self.changes: dict[str, ViewChange] = {}  # the newest of each server
        self.results: dict[str, Result] = {}
        self.decided: Decided | None = None
        self.aggregating = False
        self._fresh: Value | None = None
        self._fresh_of = 0

    # -- claims

    def knows(self, claim: Claim) -> bool:
        return claim.digest in self.claims.get(claim.client, ())

    def learn(self, claim: Claim) -> bool:
        """True if this is the second update that its client signed: the first such proof is kept, and no more."""
        known = self.claims.setdefault(claim.client, {})
        if claim.digest in known or len(known) > 1:
            return False
        known[claim.digest] = claim
        return len(known) > 1

    def attestable(self, held: set[bytes]) -> tuple[Claim, ...]:
        """The claims whose updates are held, and those of clients that signed two."""
        return tuple(
            known[digest]
            for _, known in sorted(self.claims.items())
            for digest in sorted(known)
            if digest in held or len(known) > 1
        )

    # -- what others say

    def take_attest(self, attest: Attest) -> bool:
        known = self.attests.get(attest.server)
        if known is not None and len(known.claims) >= len(attest.claims):
            return False
        self.attests[attest.server] = attest
        return True

    def take_vote(self, vote: Vote, view: int) -> Vote | None:
        """An earlier vote by the same server for something else, if there is one; the first one counts."""
        if not view - VIEWS_BEHIND <= vote.view <= view + VIEWS_AHEAD:
            return None
        first = self.votes.setdefault((vote.phase, vote.view), {}).setdefault(vote.server, vote)
        return first if first.digest != vote.digest else None

    def forget_views_before(self, view: int) -> None:
        for key in [key for key in self.votes if key[1] < view - VIEWS_BEHIND]:
            del self.votes[key]

    def take_change(self, change: ViewChange) -> bool:
        known = self.changes.get(change.server)
        if known is not None and known.view >= change.view:
            return False
        self.changes[change.server] = change
        return True

    # -- what follows from it

    def votes_for(self, phase: str, view: int, digest: bytes) -> tuple[Vote, ...]:
        """So many as prove it, or none."""
        found = self.votes.get((phase, view), {})
        alike = [found[server] for server in sorted(found) if found[server].digest == digest]
        return tuple(alike) if len(alike) >= self._federation.votes_needed else ()

    def voted_for(self, phase: str) -> Iterator[tuple[int, bytes, tuple[Vote, ...]]]:
        """Every (view, digest) that has enough votes of this phase."""
        for (of, view), found in self.votes.items():
            if of == phase and len(found) >= self._federation.votes_needed:
                for digest, count in Counter(vote.digest for vote in found.values()).items():
                    if count >= self._federation.votes_needed:
                        yield view, digest, self.votes_for(phase, view, digest)

    def fresh_value(self) -> Value | None:
        """What a leader that is bound by nothing would propose now, if enough servers attest enough updates."""
        if len(self.attests) < self._federation.votes_needed:
            return None
        if self._fresh_of != (of := sum(1 + len(one.claims) for one in self.attests.values())):
            self._fresh_of, self._fresh = of, self._make_fresh()
        return self._fresh

    def _make_fresh(self) -> Value | None:
        federation = self._federation
        value = Value(self.number, self.parent.digest, tuple(self.attests[server] for server in sorted(self.attests)))
        enough = len(contents(value, federation.witnesses_needed).entries) >= federation.updates_min
        return value if enough else None

    def changes_to(self, view: int) -> tuple[ViewChange, ...]:
        """So many as allow a leader to lead in this view, or none."""
        found = [self.changes[server] for server in sorted(self.changes) if self.changes[server].view == view]
        return tuple(found) if len(found) >= self._federation.votes_needed else ()

    def left_for(self, view: int) -> int:
        """How many servers have left the views before this one."""
        return sum(change.view >= view for change in self.changes.values())

    def view_of_witnesses(self) -> int:
        """The highest view to which at least one honest server has gone."""
        views = sorted((change.view for change in self.changes.values()), reverse=True)
        return views[self._federation.f] if len(views) > self._federation.f else 0

    def agreed_results(self) -> tuple[Result, ...]:
        """Results that so many servers signed alike that one of them is honest, or none."""
        if self.decided is None:
            return ()
        counted = Counter(
            result.header.digest
            for result in self.results.values()
            if (result.header.value, result.header.parent) == (self.decided.value.digest, self.parent.digest)
        )
        for digest, count in counted.most_common(1):
            if count >= self._federation.witnesses_needed:
                return tuple(
                    self.results[server]
                    for server in sorted(self.results)
                    if self.results[server].header.digest == digest
                )
        return ()
