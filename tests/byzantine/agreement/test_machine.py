"""One server's machine, step by step: it votes once in a view, whatever it is shown, and also after a restart."""

from __future__ import annotations

from typing import Any

from holdfast.byzantine.agreement import messages as m
from holdfast.byzantine.agreement.canonical import digest_of
from holdfast.byzantine.agreement.machine import ServerMachine, Timing
from holdfast.byzantine.agreement.statements import COMMIT, PREPARE, Proposal, Value, ViewChange, Vote
from tests.byzantine.agreement.test_checking import NEW, OLD, change, value
from tests.byzantine.agreement.test_verify import CHECKER, FEDERATION, KEYS, claim, signed

ME, LEADER = "s2", "s1"  # s1 leads round 1 in view 0
TIMING = Timing(collect_s=1.0, timeout_s=1.0, resend_s=0.5)


def started(stored: m.Stored | None = None) -> ServerMachine:
    stored = stored or m.Stored(blobs=frozenset({FEDERATION.model}))
    return ServerMachine(ME, CHECKER, KEYS[ME], TIMING, now=0.0, stored=stored)


def proposal(which: Value, view: int = 0, changes: tuple[ViewChange, ...] = ()) -> Proposal:
    leader = FEDERATION.leader(1, view)
    return signed(Proposal(leader, 1, view, which, changes), leader)


def heard(machine: ServerMachine, *messages: Any) -> list[m.Effect]:
    return [effect for message in messages for effect in machine.handle(m.Heard("s0", message), 0.1)]


def votes(effects: list[m.Effect]) -> list[tuple[str, int, bytes]]:
    said = [effect.message for effect in effects if isinstance(effect, m.Broadcast)]
    return [(one.phase, one.view, one.digest) for one in said if isinstance(one, Vote)]


def vote(phase: str, server: str, which: Value, view: int = 0) -> Vote:
    return signed(Vote(phase, server, 1, view, which.digest), server)


def test_it_votes_once_in_a_view() -> None:
    machine = started()
    assert votes(heard(machine, proposal(OLD))) == [(PREPARE, 0, OLD.digest)]
    assert votes(heard(machine, proposal(NEW), proposal(OLD), proposal(value(2)))) == []


def test_a_vote_is_kept_before_it_is_sent() -> None:
    effects = heard(started(), proposal(OLD))
    kept = [place for place, effect in enumerate(effects) if isinstance(effect, m.Persist)]
    sent = [place for place, effect in enumerate(effects) if isinstance(effect, m.Broadcast)]
    assert kept and sent and kept[0] < sent[0]


def test_after_a_restart_it_says_the_same_and_nothing_else() -> None:
    before = started()
    ballot = next(one.ballot for one in heard(before, proposal(OLD)) if isinstance(one, m.Persist))
    machine = started(m.Stored(ballot=ballot, blobs=frozenset({FEDERATION.model})))
    assert votes(heard(machine, proposal(NEW))) == []
    assert votes(machine.handle(m.Tick(), 1.0)) == [(PREPARE, 0, OLD.digest)]
    assert votes(heard(machine, proposal(OLD))) == []
    effects = heard(machine, vote(PREPARE, "s0", OLD), vote(PREPARE, LEADER, OLD))
    assert votes(effects) == [(COMMIT, 0, OLD.digest)]


def test_it_does_not_vote_in_a_view_that_it_has_left() -> None:
    machine = started()
    heard(machine, change("s0", view=1), change("s3", view=1))  # one of them is honest: it goes along
    assert machine.ballots.ballot.view == 1
    assert votes(heard(machine, proposal(OLD))) == []


def test_it_shows_what_it_saw_prepared_when_it_leaves() -> None:
    machine = started()
    heard(machine, proposal(OLD), vote(PREPARE, "s0", OLD), vote(PREPARE, LEADER, OLD))
    effects = heard(machine, change("s0", view=3), change("s3", view=3))
    (shown,) = [one.message for one in effects if isinstance(one, m.Broadcast) and isinstance(one.message, ViewChange)]
    assert shown.prepared is not None and shown.prepared.value == OLD
    assert CHECKER.view_change(shown, OLD.parent) == ""


def test_a_second_update_of_a_client_is_kept_as_a_proof_and_a_third_is_not() -> None:
    machine = started()
    answers = [
        heard(machine, m.Submit(claim("c0", 1, content), content)) for content in (b"one", b"two", b"three", b"one")
    ]
    kept = [one.content for effects in answers for one in effects if isinstance(one, m.KeepUpdate)]
    assert kept == [b"one"]
    assert machine.round.claims["c0"].keys() == {digest_of(b"one"), digest_of(b"two")}


def test_whoever_is_not_registered_or_late_is_told_why() -> None:
    machine = started()
    stranger = signed(type(claim("c0", 1))("stranger", 1, digest_of(b"x")), "stranger")
    asked = {
        "not a registered client": m.Submit(stranger, b"x"),
        "not the one that it signed": m.Submit(claim("c0", 1), b"other bytes"),
        "has not come to it yet": m.Submit(claim("c0", 2), b"update"),
        "the signature is not that of c1": m.Submit(type(stranger)("c1", 1, digest_of(b"x"), b"s" * 64), b"x"),
    }
    for why, submit in asked.items():
        (answer,) = heard(machine, submit)
        assert isinstance(answer, m.Send) and isinstance(answer.message, m.Refused) and why in answer.message.reason
