"""A server's votes in one round: prepare, commit, view change. Whatever binds it is kept before it is said.

`ballot` is what this server may not contradict, also after a restart: the view that it is in, what it voted there, and
the newest value that it saw prepared. It leaves a view when its leader takes too long, or when so many servers have
left it that one of them is honest. The time of a view begins when there is something to decide in it: in the first,
once enough servers attest enough updates; in a later one, once 2f+1 servers have come to it. So a server that is cut
off does not run ahead through views alone, and views that do not succeed get longer, until an honest leader has time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.byzantine.agreement.checking import newest_prepared
from holdfast.byzantine.agreement.messages import Ballot, Broadcast, Decided, Effect, Persist, Tell
from holdfast.byzantine.agreement.statements import COMMIT, PREPARE, Prepared, Proposal, Value, ViewChange, Vote

if TYPE_CHECKING:
    from holdfast.byzantine.agreement.machine import ServerMachine


class Ballots:
    """Belongs to a server's machine. `progress` is called after every event until the round is decided."""

    def __init__(self, machine: ServerMachine, ballot: Ballot | None, now: float) -> None:
        self._machine = machine
        self.ballot = ballot or Ballot(machine.round.number)
        self._timed_from: float | None = None
        if ballot is not None:
            self._say_again(ballot)

    def _say_again(self, ballot: Ballot) -> None:
        """After a restart: what was said is what would be said now."""
        state, me = self._machine.round, self._machine.me
        if ballot.view > 0 and (ballot.prepared is None or ballot.prepared.view < ballot.view):
            state.changes[me] = self._change()
        for vote in self._votes():
            state.take_vote(vote, ballot.view)

    def _votes(self) -> list[Vote]:
        """Both votes of this view, as far as they are given."""
        machine, ballot = self._machine, self.ballot
        return [
            machine.sign(Vote(phase, machine.me, ballot.round, ballot.view, digest))
            for phase, digest in ((PREPARE, ballot.prepare), (COMMIT, ballot.commit))
            if digest
        ]

    def begin(self, now: float) -> None:
        """Another round."""
        self.ballot = Ballot(self._machine.round.number)
        self._timed_from = None

    # ---- what others say; messages of this round, before it is decided

    def proposed(self, proposal: Proposal, now: float) -> list[Effect]:
        state = self._machine.round
        again = proposal.view == self.ballot.view and self.ballot.prepare
        if proposal.view < self.ballot.view or (again and state.proposal is not None):
            return []
        if self._machine.checker.proposal(proposal, state.parent.digest):
            return []
        if again:  # it was voted for before a restart
            state.proposal = proposal if proposal.value.digest == self.ballot.prepare else None
            return []
        effects: list[Effect] = []
        for attest in proposal.value.attests:
            if state.take_attest(attest):
                effects += self._machine.learn_of(attest)
        return effects + self._take(proposal, now)

    def _take(self, proposal: Proposal, now: float) -> list[Effect]:
        """Vote for it, and for nothing else in its view."""
        state, view, digest = self._machine.round, proposal.view, proposal.value.digest
        if view > self.ballot.view:
            self._timed_from = now
        self.ballot = replace(self.ballot, view=view, prepare=digest, commit=b"")
        state.proposal = proposal
        return self._vote(PREPARE, digest)

    def _vote(self, phase: str, digest: bytes) -> list[Effect]:
        machine, ballot = self._machine, self.ballot
        vote = machine.sign(Vote(phase, machine.me, ballot.round, ballot.view, digest))
        machine.round.take_vote(vote, ballot.view)
        return [Persist(ballot), Broadcast(vote)]

    def voted(self, vote: Vote, now: float) -> list[Effect]:
        state = self._machine.round
        known = state.votes.get((vote.phase, vote.view), {}).get(vote.server)
        if (known is not None and known.digest == vote.digest) or self._machine.checker.vote(vote):
            return []
        first = state.take_vote(vote, self.ballot.view)
        if first is None:
            return []
        return [Tell(f"count the first vote of {vote.server}", f"it voted twice to {vote.phase} in view {vote.view}")]

    def changed(self, change: ViewChange, now: float) -> list[Effect]:
        state = self._machine.round
        known = state.changes.get(change.server)
        if known is not None and known.view >= change.view:
            return []
        if self._machine.checker.view_change(change, state.parent.digest) or not state.take_change(change):
            return []
        joined = state.view_of_witnesses()
        if joined > self.ballot.view:
            return self._leave_for(joined, "an honest server has gone there")
        return []

    # ---- views

    def _change(self) -> ViewChange:
        machine, ballot = self._machine, self.ballot
        return machine.sign(ViewChange(machine.me, ballot.round, ballot.view, self._proof()))

    def _proof(self) -> Prepared | None:
        return self.ballot.prepared

    def _leave_for(self, view: int, reason: str) -> list[Effect]:
        assert view > self.ballot.view
        state = self._machine.round
        self.ballot = replace(self.ballot, view=view, prepare=b"", commit=b"")
        self._timed_from = None
        state.proposal = None
        state.forget_views_before(view)
        change = self._change()
        state.changes[change.server] = change
        return [Persist(self.ballot), Broadcast(change), Tell(f"round {state.number}: view {view}", reason)]

    def tick(self, now: float) -> list[Effect]:
        if self._timed_from is None:
            if self._is_due():
                self._timed_from = now
            return []
        if now - self._timed_from < self._machine.timing.timeout_of(self.ballot.view):
            return []
        leader = self._machine.federation.leader(self.ballot.round, self.ballot.view)
        return self._leave_for(self.ballot.view + 1, f"{leader} did not lead view {self.ballot.view} to its end")

    def _is_due(self) -> bool:
        state = self._machine.round
        if self.ballot.prepare:
            return True
        if self.ballot.view == 0:
            return state.fresh_value() is not None
        return state.left_for(self.ballot.view) >= self._machine.federation.votes_needed

    # ---- what follows

    def progress(self, now: float) -> list[Effect]:
        effects = self._propose_if_due(now)
        effects += self._commit_if_due()
        self._decide_if_due()
        return effects

    def _propose_if_due(self, now: float) -> list[Effect]:
        machine, state, view = self._machine, self._machine.round, self.ballot.view
        if self.ballot.prepare or machine.federation.leader(state.number, view) != machine.me:
            return []
        changes = state.changes_to(view) if view else ()
        if view and not changes:
            return []
        value = self._choose(changes)
        if value is None:
            return []
        proposal = machine.sign(Proposal(machine.me, state.number, view, value, changes))
        persist, vote = self._take(proposal, now)
        return [persist, Broadcast(proposal), vote]

    def _choose(self, changes: tuple[ViewChange, ...]) -> Value | None:
        """What may have been committed in an earlier view binds; otherwise what the attestations come to."""
        bound = newest_prepared(changes)
        return bound.value if bound is not None else self._machine.round.fresh_value()

    def _commit_if_due(self) -> list[Effect]:
        ballot, state = self.ballot, self._machine.round
        if not ballot.prepare or ballot.commit or state.proposal is None:
            return []
        votes = state.votes_for(PREPARE, ballot.view, ballot.prepare)
        if not votes:
            return []
        prepared = Prepared(ballot.view, state.proposal.value, votes)
        self.ballot = replace(ballot, commit=ballot.prepare, prepared=prepared)
        return self._vote(COMMIT, ballot.prepare)

    def _decide_if_due(self) -> None:
        state, known = self._machine.round, dict[bytes, Value]()
        if state.proposal is not None:
            known[state.proposal.value.digest] = state.proposal.value
        if self.ballot.prepared is not None:
            known[self.ballot.prepared.value.digest] = self.ballot.prepared.value
        if not known:
            return
        for _, digest, votes in state.voted_for(COMMIT):
            if digest in known:
                state.decided = Decided(known[digest], votes)
                return

    def resend(self) -> list[Effect]:
        state, machine = self._machine.round, self._machine
        effects: list[Effect] = []
        if state.proposal is not None and state.proposal.server == machine.me:
            effects.append(Broadcast(state.proposal))
        change = state.changes.get(machine.me)
        if change is not None:
            effects.append(Broadcast(change))
        return effects + [Broadcast(vote) for vote in self._votes()]
