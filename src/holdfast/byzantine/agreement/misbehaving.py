"""Servers that lie, for drills and tests: an honest server's machine whose effects are changed on their way out.

    silent        says nothing
    slow          says everything late
    selective     talks to some of the others only
    equivocating  as a leader proposes two values, votes for whatever it hears of, and forgets what was prepared
    voting        tells each server another vote
    lying         signs another model, serves other bytes, attests what it does not have
    replaying     says again what it or others said before, in older rounds too
    forging       speaks in others' names, and counts itself several times

What they cannot do is sign for others. Pure: chance is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from holdfast.byzantine.agreement import messages as m
from holdfast.byzantine.agreement.canonical import digest_of, pack
from holdfast.byzantine.agreement.machine import ServerMachine, Signed
from holdfast.byzantine.agreement.statements import (
    COMMIT,
    PREPARE,
    Attest,
    Proposal,
    Record,
    Result,
    Value,
    ViewChange,
    Vote,
)

KINDS = ("silent", "slow", "selective", "equivocating", "voting", "lying", "replaying", "forging")
KEPT = 64
SLOW_S = (0.2, 3.0)


class Misbehaving:
    """Has the same `handle` as the machine that it is made from. `draw` gives numbers from 0 to 1."""

    def __init__(self, machine: ServerMachine, kind: str, draw: Callable[[], float]) -> None:
        assert kind in KINDS, kind
        self.machine = machine
        self.kind = kind
        self._draw = draw
        self._change = getattr(self, f"_{kind}")
        self._late: deque[tuple[float, m.Effect]] = deque()
        self._heard: deque[m.Message] = deque(maxlen=KEPT)
        self._favoured: tuple[int, tuple[str, ...]] = (0, ())
        self._voted: set[tuple[int, int, str, bytes]] = set()

    def handle(self, event: m.Event, now: float) -> list[m.Effect]:
        effects: list[m.Effect] = []
        for effect in self.machine.handle(event, now):
            if isinstance(effect, m.Broadcast):
                effects += [m.Send(server, effect.message) for server in self._others()]
            else:
                effects.append(effect)
        changed: list[m.Effect] = self._change(event, effects, now)
        return changed

    def _others(self) -> list[str]:
        return [server for server in self.machine.federation.order if server != self.machine.me]

    def _pick(self) -> str:
        others = self._others()
        return others[int(self._draw() * len(others)) % len(others)]

    # -- the kinds

    def _silent(self, event: m.Event, effects: list[m.Effect], now: float) -> list[m.Effect]:
        return [effect for effect in effects if not isinstance(effect, m.Send | m.SendBlob | m.SendRecords)]

    def _slow(self, event: m.Event, effects: list[m.Effect], now: float) -> list[m.Effect]:
        at_once = self._silent(event, effects, now)
        delay_s = SLOW_S[0] + self._draw() * (SLOW_S[1] - SLOW_S[0])
        self._late += [(now + delay_s, effect) for effect in effects if effect not in at_once]
        while self._late and (self._late[0][0] <= now or len(self._late) > 16 * KEPT):
            at_once.append(self._late.popleft()[1])
        return at_once

    def _selective(self, event: m.Event, effects: list[m.Effect], now: float) -> list[m.Effect]:
        round = self.machine.round.number
        if self._favoured[0] != round:
            self._favoured = (round, tuple(server for server in self._others() if self._draw() < 0.5))
        clients = [
            one for one in effects if not hasattr(one, "peer") or one.peer not in self.machine.federation.servers
        ]
        return [one for one in effects if one in clients or getattr(one, "peer", "") in self._favoured[1]]

    def _equivocating(self, event: m.Event, effects: list[m.Effect], now: float) -> list[m.Effect]:
        changed: list[m.Effect] = []
        for effect in effects:
            if not isinstance(effect, m.Send):
                changed.append(effect)
            elif isinstance(effect.message, Proposal):
                changed += self._two_proposals(effect, effect.message)
            elif isinstance(effect.message, ViewChange):
                changed.append(replace(effect, message=self._sign(replace(effect.message, prepared=None))))
            elif not isinstance(effect.message, Vote):
                changed.append(effect)
        return changed + self._vote_for_all(event)

    def _two_proposals(self, effect: m.Send, proposal: Proposal) -> list[m.Effect]:
        """Each is told one of two values, each time anew. In later views too, whatever was prepared."""
        value = proposal.value
        if proposal.view:
            value = self.machine.round.fresh_value() or value
        other = self._other_value(value)
        values = [value if self._draw() < 0.5 else other]
        if self._draw() < 0.2:
            values = [value, other]  # somebody in league sees both
        made = [self._sign(replace(proposal, value=one)) for one in values]
        return [m.Send(effect.peer, one) for one in made]

    def _other_value(self, value: Value) -> Value:
        """The same attestations, of which this server's own leaves a claim out."""
        mine = [one for one in value.attests if one.server == self.machine.me]
        if not mine or not mine[0].claims:
            return replace(value, attests=value.attests[:-1])
        less = self._sign(replace(mine[0], claims=mine[0].claims[1:]))
        return replace(value, attests=tuple(less if one is mine[0] else one for one in value.attests))

    def _vote_for_all(self, event: m.Event) -> list[m.Effect]:
        message = event.message if isinstance(event, m.Heard) else None
        state = self.machine.round
        heard = [(message.view, message.value.digest)] if isinstance(message, Proposal) else []
        if isinstance(message, Vote) and message.round == state.number:
            heard.append((message.view, message.digest))
        if len(self._voted) > 16 * KEPT:
            self._voted.clear()
        changed: list[m.Effect] = []
        for view, digest in heard:
            for peer in self._others():
                if (state.number, view, peer, digest) not in self._voted:
                    self._voted.add((state.number, view, peer, digest))
                    for phase in (PREPARE, COMMIT):
                        vote = self._sign(Vote(phase, self.machine.me, state.number, view, digest))
                        changed.append(m.Send(peer, vote))
        return changed

    def _voting(self, event: m.Event, effects: list[m.Effect], now: float) -> list[m.Effect]:
        changed: list[m.Effect] = []
        for effect in effects:
            if isinstance(effect, m.Send) and isinstance(effect.message, Vote) and self._draw() < 0.5:
                effect = replace(effect, message=self._sign(replace(effect.message, digest=digest_of(b"another"))))
            changed.append(effect)
        return changed + self._vote_for_all(event)

    def _lying(self, event: m.Event, effects: list[m.Effect], now: float) -> list[m.Effect]:
        changed: list[m.Effect] = []
        for effect in effects:
            if isinstance(effect, m.Send) and isinstance(effect.message, Result):
                changed.append(replace(effect, message=self._false_result(effect.message)))
            elif isinstance(effect, m.Send) and isinstance(effect.message, Attest):
                changed.append(replace(effect, message=self._false_attest(effect.message)))
            elif isinstance(effect, m.SendBlob):
                changed.append(m.Send(effect.peer, m.Blob(b"other bytes")))
            else:
                changed.append(effect)
        if isinstance(event, m.Heard) and isinstance(event.message, m.Ask):
            changed += self._false_record(event.peer, event.message.round)
        return changed

    def _false_result(self, result: Result) -> Result:
        """The same lie from everyone who lies."""
        model = digest_of(pack(("a model of its own", result.header.round)))
        return self._sign(replace(result, header=replace(result.header, model=model)))

    def _false_attest(self, attest: Attest) -> Attest:
        """Whatever it has heard of, and not what it holds."""
        state = self.machine.round
        heard = {claim.client: claim for one in state.attests.values() for claim in one.claims}
        heard |= {client: next(iter(known.values())) for client, known in state.claims.items()}
        return self._sign(replace(attest, claims=tuple(heard[client] for client in sorted(heard))))

    def _false_record(self, peer: str, round: int) -> list[m.Effect]:
        state = self.machine.round
        mine = state.results.get(self.machine.me)
        if state.decided is None or round != state.number or mine is None:
            return []
        false = self._false_result(mine)
        record = Record(false.header, state.decided.value, state.decided.commits, (false, false))
        return [m.Send(peer, m.Records((record,)))]

    def _replaying(self, event: m.Event, effects: list[m.Effect], now: float) -> list[m.Effect]:
        if isinstance(event, m.Heard) and not isinstance(event.message, m.Submit | m.Blob) and self._draw() < 0.3:
            self._heard.append(event.message)
        if isinstance(event, m.Tick) and self._heard:
            old = [self._heard[int(self._draw() * len(self._heard)) % len(self._heard)] for _ in range(4)]
            effects = effects + [m.Send(self._pick(), one) for one in old]
        return [self._with_old_claims(one) for one in effects]

    def _with_old_claims(self, effect: m.Effect) -> m.Effect:
        """Shows claims of earlier rounds as if they were of this one."""
        if not (isinstance(effect, m.Send) and isinstance(effect.message, Attest)) or self._draw() < 0.5:
            return effect
        attest = effect.message
        old = {
            claim.client: replace(claim, round=attest.round)
            for one in self._heard
            if isinstance(one, Attest) and one.round < attest.round
            for claim in one.claims
        }
        claims = {claim.client: claim for claim in attest.claims} | old
        return replace(effect, message=self._sign(replace(attest, claims=tuple(claims[one] for one in sorted(claims)))))

    def _forging(self, event: m.Event, effects: list[m.Effect], now: float) -> list[m.Effect]:
        state, me = self.machine.round, self.machine.me
        if not isinstance(event, m.Tick) or self._draw() < 0.5:
            return effects
        victim, view = self._pick(), self.machine.ballots.ballot.view
        value = state.fresh_value() or Value(state.number, state.parent.digest, ())
        value = self._other_value(value) if value.attests else value
        commit = self._sign(Vote(COMMIT, me, state.number, view, value.digest))
        change = self._sign(ViewChange(me, state.number, view + 1, None))
        lies: list[m.Message] = [
            m.Decided(value, (commit,) * self.machine.federation.votes_needed),
            m.Decided(value, tuple(replace(commit, server=one) for one in self.machine.federation.order)),
            *[replace(commit, server=one, phase=phase) for one in self._others() for phase in (PREPARE, COMMIT)],
            *[replace(change, server=one) for one in self._others()],
            self._sign(Proposal(me, state.number, view + 1, value, (change,) * self.machine.federation.votes_needed)),
        ]
        return effects + [m.Send(victim, lie) for lie in lies]

    def _sign(self, statement: Signed) -> Signed:
        return self.machine.sign(statement)
