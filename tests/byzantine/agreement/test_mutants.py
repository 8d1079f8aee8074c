"""The simulator earns its keep only if it notices: break one rule of the agreement at a time, and it must say so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.byzantine.agreement import checking, contents, round_state
from holdfast.byzantine.agreement import messages as m
from holdfast.byzantine.agreement.ballots import Ballots
from holdfast.byzantine.agreement.canonical import pack
from holdfast.byzantine.agreement.checking import GOOD, Checker
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.machine import ServerMachine
from holdfast.byzantine.agreement.round_state import RoundState
from holdfast.byzantine.agreement.statements import PREPARE, Claim, Record, Result, Value, Vote
from tests.harness.agreement_simulator import SimulationFailed, Violation, servers, simulate

SEEDS = 3000
Patch = pytest.MonkeyPatch
EQUIVOCATING: dict[str, Any] = {"f": 1, "liars": ("equivocating",), "clients": ("honest",) * 3, "rounds": 3}
STORMY = {"faults": 9, "loss": 0.15}
KILLED = {"faults": 14, "loss": 0.3, "only": ("crash", "crash_at_vote", "one_way"), "rounds": 4}
DYING = {"faults": 14, "loss": 0.3, "only": ("crash_at_vote", "crash_at_vote", "isolate_decider")}
LONELY = {"faults": 6, "loss": 0.15, "only": ("isolate_decider", "isolate_decider", "isolate", "one_way")}


def one_phase_only(patch: Patch) -> None:
    """What is prepared is decided."""
    certificate, voted_for = Checker.certificate, RoundState.voted_for
    patch.setattr(Checker, "certificate", lambda self, votes, phase, *rest: certificate(self, votes, PREPARE, *rest))
    patch.setattr(RoundState, "voted_for", lambda self, phase: voted_for(self, PREPARE))


def no_durable_votes(patch: Patch) -> None:
    """A server that starts again does not know what it has voted."""
    patch.setitem(servers._PERFORM, m.Persist, lambda self, effect: None)


def no_durable_proof(patch: Patch) -> None:
    """It knows what it has voted, and not what it saw prepared."""

    def forgetful(self: servers.Server, effect: m.Persist) -> None:
        self.disk.ballot = replace(effect.ballot, prepared=None)

    patch.setitem(servers._PERFORM, m.Persist, forgetful)


def votes_are_sent_before_they_are_kept(patch: Patch) -> None:
    real = ServerMachine.handle

    def hasty(self: ServerMachine, event: m.Event, now: float) -> list[m.Effect]:
        effects = real(self, event, now)
        return sorted(effects, key=lambda effect: isinstance(effect, m.Persist))

    patch.setattr(ServerMachine, "handle", hasty)


def set_without_attestation(patch: Patch) -> None:
    """Whatever anybody mentions is in the set."""
    real = contents.contents
    for module in (checking, round_state):
        patch.setattr(module, "contents", lambda value, needed: real(value, 0))


def leave_a_client_out(patch: Patch) -> None:
    """All servers agree to do without the first one."""
    real = contents.contents

    def fewer(value: Value, needed: int) -> contents.Contents:
        found = real(value, needed)
        return replace(found, entries=found.entries[1:] if len(found.entries) > 2 else found.entries)

    for module in (checking, round_state):
        patch.setattr(module, "contents", fewer)


def f_matching_signatures(patch: Patch) -> None:
    """Clients and servers believe one server."""

    def results(self: Checker, record: Record) -> str:
        signers = {one.server for one in record.results if one.header == record.header and not self.result(one)}
        return GOOD if len(signers) >= self.federation.f else "nobody signed it"

    patch.setattr(Checker, "results", results)


def publish_with_one_result(patch: Patch) -> None:
    def one(self: RoundState) -> tuple[Result, ...]:
        return tuple(self.results.values())[:1] if self.decided is not None else ()

    patch.setattr(RoundState, "agreed_results", one)


def two_f_votes(patch: Patch) -> None:
    """One vote fewer than any two certificates share an honest server with."""
    patch.setattr(Federation, "votes_needed", property(lambda self: 2 * self.f))


def view_change_without_proofs(patch: Patch) -> None:
    """A later leader is believed."""
    patch.setattr(Checker, "justification", lambda self, proposal, parent: GOOD)


def no_lock(patch: Patch) -> None:
    """A server leaves a view without saying what it saw prepared there."""
    patch.setattr(Ballots, "_proof", lambda self: None)


def commit_in_a_view_that_was_left(patch: Patch) -> None:
    """The votes of an earlier view are counted for what is prepared now."""
    real = RoundState.votes_for

    def any_view(self: RoundState, phase: str, view: int, digest: bytes) -> tuple[Vote, ...]:
        found = {
            server: vote
            for (of, _), votes in self.votes.items()
            if of == phase
            for server, vote in votes.items()
            if vote.digest == digest
        }
        return tuple(found.values()) if len(found) >= self._federation.votes_needed else real(self, phase, view, digest)

    patch.setattr(RoundState, "votes_for", any_view)


def count_votes_and_not_voters(patch: Patch) -> None:
    """Who says it three times is three."""

    def certificate(self: Checker, votes: Any, phase: str, round: int, view: int | None, digest: bytes) -> str:
        alike = [one for one in votes if (one.phase, one.round, one.digest) == (phase, round, digest)]
        good = [one for one in alike if not self.vote(one)]
        return GOOD if len(good) >= self.federation.votes_needed else "too few"

    patch.setattr(Checker, "certificate", certificate)


def believe_names(patch: Patch) -> None:
    """Servers' signatures are not looked at."""
    patch.setattr(Checker, "_by_server", lambda self, statement: GOOD)


def take_strangers_updates(patch: Patch) -> None:
    """A key need not be registered."""
    patch.setattr(Checker, "claim", lambda self, claim: GOOD)


def sign_without_the_round(patch: Patch) -> None:
    """A claim of one round can be shown in another."""
    patch.setattr(Claim, "said", property(lambda self: pack(("claim", self.client, self.digest))))


def never_say_it_again(patch: Patch) -> None:
    """What is lost is lost."""
    patch.setattr(ServerMachine, "_resend", lambda self: [])


def never_leave_a_leader(patch: Patch) -> None:
    patch.setattr(Ballots, "tick", lambda self, now: [])


def help_nobody(patch: Patch) -> None:
    """A server that was away gets no records."""
    patch.setattr(ServerMachine, "_help", lambda self, peer, round, now: [])


def fetch_nothing(patch: Patch) -> None:
    """Bytes that a client did not send here are not asked for."""
    real = ServerMachine._resend

    def silent(self: ServerMachine) -> list[m.Effect]:
        return [one for one in real(self) if not (isinstance(one, m.Broadcast) and isinstance(one.message, m.Want))]

    patch.setattr(ServerMachine, "_resend", silent)


MUTANTS: dict[Callable[[Patch], None], dict[str, Any]] = {
    one_phase_only: {**EQUIVOCATING, **LONELY},
    no_durable_votes: {**EQUIVOCATING, **KILLED},
    no_durable_proof: {**EQUIVOCATING, **STORMY, "only": ("crash", "crash", "one_way")},
    votes_are_sent_before_they_are_kept: {**EQUIVOCATING, **DYING},
    set_without_attestation: {"f": 1, "liars": ("lying",), "clients": ("honest", "honest", "partial")},
    leave_a_client_out: {"clients": ("honest",) * 4},
    f_matching_signatures: {"f": 1, "liars": ("lying",)},
    publish_with_one_result: {"f": 1, "liars": ("lying",)},
    two_f_votes: EQUIVOCATING,
    view_change_without_proofs: {**EQUIVOCATING, **LONELY},
    no_lock: {**EQUIVOCATING, **LONELY},
    commit_in_a_view_that_was_left: {**EQUIVOCATING, **LONELY},
    count_votes_and_not_voters: {"f": 1, "liars": ("forging",)},
    believe_names: {"f": 1, "liars": ("forging",)},
    take_strangers_updates: {},
    sign_without_the_round: {"f": 1, "liars": ("replaying",), "rounds": 3},
    never_say_it_again: {"loss": 0.15},
    never_leave_a_leader: {"f": 1, "liars": ("silent",), "rounds": 3},
    help_nobody: {"f": 1, "only": ("isolate",), "faults": 6},
    fetch_nothing: {"f": 1, "liars": ("silent",), "clients": ("honest", "honest", "partial")},
}
TWO_VALUES = "sees another value of round"
WRONG_MODEL = r"is not what its set comes to|and another has|and the servers have"
# What must be said of each: the promise that its rule keeps. Of the others: a standstill.
SAID = {
    **dict.fromkeys(
        (one_phase_only, no_durable_votes, no_durable_proof, votes_are_sent_before_they_are_kept), TWO_VALUES
    ),
    **dict.fromkeys((two_f_votes, view_change_without_proofs, no_lock), TWO_VALUES),
    **dict.fromkeys((count_votes_and_not_voters, believe_names), TWO_VALUES),
    **dict.fromkeys((f_matching_signatures, publish_with_one_result), WRONG_MODEL),
    set_without_attestation: "without faults .* the bytes of",
    leave_a_client_out: "leaves out",
    take_strangers_updates: "Claim.client='stranger'.* which stranger never signed",
    sign_without_the_round: r"which c\d never signed",
}
STANDSTILL = "without faults .* are not done"


def first_violation(said: str, **changes: Any) -> str:
    """Of this kind: others are passed over, since they may have other causes."""
    for seed in range(SEEDS):
        try:
            simulate(seed, **changes)
        except Violation as violation:
            if re.search(said, str(violation).splitlines()[0]):
                return str(violation)
    return ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_caught_for_what_it_breaks(
    mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    said = SAID.get(mutant, STANDSTILL)
    assert first_violation(said, **MUTANTS[mutant]), f"{mutant.__name__}: {SEEDS} schedules without {said!r}"


def test_a_mistake_in_a_program_is_no_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that raises would be caught for that, whatever the simulator looks at."""

    def mistaken(self: ServerMachine, event: m.Event, now: float) -> list[m.Effect]:
        raise KeyError("a mistake")

    def doubting(self: ServerMachine, event: m.Event, now: float) -> list[m.Effect]:
        raise AssertionError("what must not be")

    monkeypatch.setattr(ServerMachine, "handle", mistaken)
    with pytest.raises(SimulationFailed, match="seed 5: KeyError"):
        simulate(5)
    monkeypatch.setattr(ServerMachine, "handle", doubting)
    with pytest.raises(Violation, match=r"seed 5: .*what must not be"):
        simulate(5)


def test_the_shipped_machine_passes_the_same_schedules() -> None:
    """What catches a mutant is not the schedule alone."""
    for changes in MUTANTS.values():
        for seed in range(10):
            simulate(seed, **changes)
