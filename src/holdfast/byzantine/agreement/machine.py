"""One aggregation server as a machine: events in, effects out. No IO, no clock, no threads.

A round goes through attesting (which updates do I hold?), proposing (the leader puts 2f+1 attestations together),
preparing, committing, aggregating and publishing. A leader that does not get on is left behind by a view change.
The rules are those of Castro and Liskov's PBFT for one slot at a time, with everything signed; the differences are in
docs/explanation/server-agreement.md. The server (server.py) and the simulator (tests/harness/agreement_simulator)
drive this same class.

Invariants, which hold as long as no more than f servers lie:
- a server signs one prepare and one commit in a view, also if it is killed in between and starts again;
- having left a view, it never votes in it again;
- two values of one round are never both committed: whatever 2f+1 may have committed binds every later leader;
- an update that is attested is on disk here; one that is in the set is held by an honest server;
- a record is appended only with 2f+1 commits and f+1 results, after the record that it follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from holdfast.byzantine.agreement.ballots import Ballots
from holdfast.byzantine.agreement.canonical import digest_of
from holdfast.byzantine.agreement.checking import Checker, Signer
from holdfast.byzantine.agreement.messages import (
    Accepted,
    Aggregate,
    Aggregated,
    AppendRecord,
    Ask,
    Ballot,
    Blob,
    Broadcast,
    Decided,
    Effect,
    Event,
    Forget,
    Heard,
    KeepBlob,
    KeepUpdate,
    Records,
    Refused,
    Send,
    SendBlob,
    SendRecords,
    Stored,
    Submit,
    Tell,
    Tick,
    Want,
)
from holdfast.byzantine.agreement.round_state import RoundState
from holdfast.byzantine.agreement.statements import (
    COMMIT,
    NOTHING,
    Attest,
    Claim,
    Header,
    Proposal,
    Record,
    Result,
    Statement,
    ViewChange,
    Vote,
)

MODELS_KEPT = 4  # of the newest rounds, for servers and clients that are a little late
Signed = TypeVar("Signed", bound=Statement)


@dataclass(frozen=True, kw_only=True)
class Timing:
    collect_s: float = 5.0  # a round waits so long for clients that have not sent their update
    timeout_s: float = 2.0  # for a leader, in the first view; each later one has twice as long
    doublings_max: int = 8
    resend_s: float = 0.5

    def timeout_of(self, view: int) -> float:
        return self.timeout_s * 2.0 ** min(view, self.doublings_max)


def genesis(model: bytes) -> Header:
    """What the first round builds on."""
    return Header(0, NOTHING, NOTHING, model)


class ServerMachine:
    """`handle` takes an event and returns the effects to perform, in order. `fits` says why an update is of no use.

    With `stored` it goes on with what an earlier process left.
    """

    def __init__(
        self,
        me: str,
        checker: Checker,
        sign: Signer,
        timing: Timing,
        *,
        now: float,
        stored: Stored | None = None,
        fits: Callable[[bytes], str] = lambda content: "",
    ) -> None:
        stored = stored or Stored()
        self.me = me
        self.checker = checker
        self.federation = checker.federation
        self.timing = timing
        self._sign_bytes = sign
        self._fits = fits
        self.held: set[bytes] = set(stored.blobs)
        self._models: deque[bytes] = deque(maxlen=MODELS_KEPT)
        self._last_helped: dict[str, float] = {}
        self._early: dict[tuple[str, str], Heard] = {}  # of the next round: others may be there a moment sooner
        self._resent_at = now
        self.round = self._state_of(stored.last.header if stored.last else genesis(self.federation.model), now)
        self._models.append(self.round.parent.model)
        self.ballots = Ballots(self, self._ballot_of(stored), now)
        for claim in stored.claims:
            if claim.round == self.round.number and claim.digest in self.held and not checker.claim(claim):
                self.round.learn(claim)
        self._handlers: dict[type, Callable[..., list[Effect]]] = {
            Submit: self._submitted,
            Attest: self._attested,
            Proposal: self._in_round(self.ballots.proposed),
            Vote: self._in_round(self.ballots.voted),
            ViewChange: self._in_round(self.ballots.changed),
            Result: self._resulted,
            Decided: self._decided,
            Ask: lambda peer, ask, now: [SendRecords(peer, ask.round)],
            Records: self._caught_up,
            Want: lambda peer, want, now: [SendBlob(peer, want.digest)],
            Blob: self._received,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        before = self.round
        if isinstance(event, Heard):
            effects = self._hear(event, now)
        elif isinstance(event, Aggregated):
            effects = self._aggregated(event, now)
        else:
            assert isinstance(event, Tick)
            effects = self._tick(now)
        effects += self._progress(now)
        while self.round is not before:
            before, early, self._early = self.round, self._early, {}
            for one in early.values():
                effects += self._hear(one, now) + self._progress(now)
        return effects

    def _hear(self, event: Heard, now: float) -> list[Effect]:
        message = event.message
        if isinstance(message, Attest | Proposal | Vote | Result) and event.peer in self.federation.servers:
            round = message.header.round if isinstance(message, Result) else message.round
            if round == self.round.number + 1:
                self._early[event.peer, getattr(message, "phase", type(message).__name__)] = event
        handler = self._handlers.get(type(message))
        return handler(event.peer, message, now) if handler is not None else []

    def waits_for(self) -> str:
        """What this server waits for."""
        state = self.round
        where = f"round {state.number}, view {self.ballots.ballot.view}"
        if state.decided is not None:
            missing = self._missing()
            return f"{where}: " + (f"the bytes of {len(missing)} digests" if missing else "results of others")
        if state.fresh_value() is None and not self.ballots.ballot.prepare:
            return f"{where}: attestations, {len(state.attests)} of {self.federation.votes_needed}"
        return f"{where}: {self.federation.leader(state.number, self.ballots.ballot.view)} to lead it to its end"

    def sign(self, statement: Signed) -> Signed:
        return replace(statement, signature=self._sign_bytes(self.checker.said(statement.said)))

    # ---- rounds

    def _state_of(self, parent: Header, now: float) -> RoundState:
        return RoundState(self.federation, parent.round + 1, parent, now)

    def _ballot_of(self, stored: Stored) -> Ballot | None:
        ballot = stored.ballot
        return ballot if ballot is not None and ballot.round == self.round.number else None

    def _begin(self, header: Header, now: float) -> None:
        self.round = self._state_of(header, now)
        self._models.append(header.model)
        self.ballots.begin(now)

    def _in_round(self, handler: Callable[..., list[Effect]]) -> Callable[..., list[Effect]]:
        def handle(peer: str, message: Proposal | Vote | ViewChange, now: float) -> list[Effect]:
            if message.round != self.round.number or self.round.decided is not None:
                return self._help(peer, message.round, now)
            return handler(message, now)

        return handle

    def _help(self, peer: str, round: int, now: float) -> list[Effect]:
        """Somebody is in another round, or has not seen this one decided. Once in a while for each of them."""
        if now - self._last_helped.get(peer, -1e9) < self.timing.resend_s / 2 or peer not in self.federation.servers:
            return []
        self._last_helped[peer] = now
        if round > self.round.number:
            return [Send(peer, Ask(self.round.number))]
        if round < self.round.number:
            return [SendRecords(peer, round)]
        return [Send(peer, self.round.decided)] if self.round.decided is not None else []

    # ---- updates

    def _submitted(self, peer: str, message: Submit, now: float) -> list[Effect]:
        claim, state = message.claim, self.round
        reason, again, late = self._why_not(message), 0, 0
        if not reason and claim.round != state.number:
            again = int(claim.round > state.number)
            late = 1 - again
            when = "this server has not come to it yet" if again else "it is over, and updates count in their own round"
            reason = f"round {claim.round}: {when} (round {state.number} is under way)"
        if not reason and state.decided is not None and not self._is_entry(claim.digest):
            late = 1
            reason = f"round {claim.round}: its set of updates is agreed on, and this one came too late"
        if not reason and self._is_second(claim):
            reason = f"{claim.client} signed two different updates for round {claim.round}: both are left out"
        if reason:
            return [Send(peer, Refused(claim.round, reason, again, late))]
        effects: list[Effect] = []
        if claim.digest not in self.held:
            self.held.add(claim.digest)
            effects.append(KeepUpdate(claim, message.content))
        return [*effects, Send(peer, Accepted(claim.round, claim.digest))]

    def _is_second(self, claim: Claim) -> bool:
        self.round.learn(claim)
        return len(self.round.claims[claim.client]) > 1

    def _why_not(self, message: Submit) -> str:
        claim, content = message.claim, message.content
        if len(content) > self.federation.update_bytes_max:
            return f"an update of {len(content)} bytes, and {self.federation.update_bytes_max} are the most"
        bad = self.checker.claim(claim)
        if bad:
            return bad
        if self.round.knows(claim) and claim.digest in self.held:
            return ""
        if claim.round == self.round.number and len(self.round.claims.get(claim.client, ())) > 1:
            return ""  # it is out already: its bytes are not worth looking at
        if digest_of(content) != claim.digest:
            return f"the update of {claim.client} is not the one that it signed"
        return self._fits(content)

    def _is_entry(self, digest: bytes) -> bool:
        decided = self.round.decided
        return decided is not None and any(
            claim.digest == digest for claim in self.checker.contents(decided.value).entries
        )

    def _attested(self, peer: str, attest: Attest, now: float) -> list[Effect]:
        if attest.round != self.round.number or self.round.decided is not None:
            return self._help(peer, attest.round, now)
        if self.checker.attest(attest) or not self.round.take_attest(attest):
            return []
        return self.learn_of(attest)

    def learn_of(self, attest: Attest) -> list[Effect]:
        """Where another server holds a second update of a client, the two claims together are the proof."""
        found = [claim.client for claim in attest.claims if self.round.learn(claim)]
        return [Tell(f"leave out {client}", f"it signed two updates for round {attest.round}") for client in found]

    def _attest_if_due(self, now: float) -> list[Effect]:
        state, mine = self.round, self.round.attests.get(self.me)
        if state.decided is not None:
            return []
        claims = state.attestable(self.held)
        if mine is not None and mine.claims == claims:
            return []
        clients = {claim.client for claim in claims}
        waited = now - state.began_at >= self.timing.collect_s
        if len(clients) < len(self.federation.clients) and not (
            waited and len(clients) >= min(self.federation.updates_min, len(self.federation.clients))
        ):
            return []
        attest = self.sign(Attest(self.me, state.number, claims))
        state.attests[self.me] = attest
        return [Broadcast(attest)]

    # ---- bytes

    def _needed(self) -> list[bytes]:
        """For the set that is decided or proposed, and the model that it builds on."""
        state = self.round
        value = state.decided.value if state.decided is not None else state.proposal.value if state.proposal else None
        entries = self.checker.contents(value).entries if value is not None else ()
        return [state.parent.model, *[claim.digest for claim in entries]]

    def _missing(self) -> list[bytes]:
        return [digest for digest in self._needed() if digest not in self.held]

    def _received(self, peer: str, message: Blob, now: float) -> list[Effect]:
        digest = digest_of(message.content)
        if digest not in self._missing():
            return []
        self.held.add(digest)
        kept: list[Effect] = [KeepBlob(digest, message.content)]
        return kept + self._forget() if digest == self.round.parent.model else kept

    def _forget(self) -> list[Effect]:
        """Once the model of the round before is here, nothing else of earlier rounds is needed.

        Only then: the model of a round under way may be on disk before its record is, and others may build on it.
        """
        if self.round.parent.model not in self.held:
            return []
        needed = {*self._models, *self._needed()} | {digest for known in self.round.claims.values() for digest in known}
        dropped = tuple(sorted(self.held - needed))
        self.held -= set(dropped)
        return [Forget(dropped)] if dropped else []

    # ---- deciding, aggregating, publishing

    def _decided(self, peer: str, message: Decided, now: float) -> list[Effect]:
        state, value = self.round, message.value
        if value.round != state.number:
            return self._help(peer, value.round, now)
        if state.decided is not None or self.checker.value(value, state.number, state.parent.digest):
            return []
        if self.checker.certificate(message.commits, COMMIT, state.number, None, value.digest):
            return []
        state.decided = message
        return [Tell(f"round {state.number} is decided", f"{peer} showed the votes")]

    def _aggregate_if_due(self) -> list[Effect]:
        state = self.round
        if state.decided is None or state.aggregating or self._missing():
            return []
        state.aggregating = True
        return [Aggregate(state.number, state.parent.model, self.checker.contents(state.decided.value).entries)]

    def _aggregated(self, event: Aggregated, now: float) -> list[Effect]:
        self.held.add(event.model)
        state = self.round
        if event.round != state.number or state.decided is None:
            return []
        header = Header(state.number, state.parent.digest, state.decided.value.digest, event.model)
        state.results[self.me] = self.sign(Result(self.me, header))
        return [Broadcast(state.results[self.me])]

    def _resulted(self, peer: str, result: Result, now: float) -> list[Effect]:
        if result.header.round != self.round.number:
            return self._help(peer, result.header.round, now)
        if result.server != self.me and not self.checker.result(result):
            self.round.results[result.server] = result
        return []

    def _publish_if_due(self, now: float) -> list[Effect]:
        state = self.round
        results = state.agreed_results()
        if not results or state.decided is None:
            return []
        header = results[0].header
        effects: list[Effect] = []
        mine = state.results.get(self.me)
        if mine is not None and mine.header != header:
            reason = f"{len(results)} servers signed another model for round {state.number} than was computed here"
            effects.append(Tell("take the others' model, and look at this server's hardware and version", reason))
        return effects + self._append(Record(header, state.decided.value, state.decided.commits, results), now)

    def _append(self, record: Record, now: float) -> list[Effect]:
        self._begin(record.header, now)
        return [AppendRecord(record), *self._forget()]

    def _caught_up(self, peer: str, message: Records, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for record in message.records:
            due = self.round
            if record.header.round < due.number:
                continue
            if self.checker.record(record, due.number, due.parent.digest):
                break
            if due.decided is not None and due.decided.value.digest != record.header.value:
                reason = f"{peer} has other votes for round {due.number} than were seen here, and both are complete"
                effects.append(Tell(f"more than f={self.federation.f} servers lie", reason))
            effects += self._append(record, now)
        return effects

    # ---- time

    def _progress(self, now: float) -> list[Effect]:
        effects = self._attest_if_due(now)
        if self.round.decided is None:
            effects += self.ballots.progress(now)
        effects += self._aggregate_if_due()
        return effects + self._publish_if_due(now)

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.round.decided is None:
            effects += self.ballots.tick(now)
        if now - self._resent_at >= self.timing.resend_s:
            self._resent_at = now
            effects += self._resend()
        return effects

    def _resend(self) -> list[Effect]:
        """Whatever was said in this round and may have been lost. Those that have gone on answer with records; and
        since a server with nothing to say would not be answered, it asks.
        """
        state = self.round
        own: list[Attest | Result | None] = [state.attests.get(self.me) if state.decided is None else None]
        own.append(state.results.get(self.me))
        effects: list[Effect] = [Broadcast(one) for one in own if one is not None]
        if state.decided is None:
            effects += self.ballots.resend()
        return [*effects, Broadcast(Ask(state.number))] + [Broadcast(Want(digest)) for digest in self._missing()]
