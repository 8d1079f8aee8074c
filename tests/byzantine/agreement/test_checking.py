"""What binds a later leader: enough view changes of different servers, and the value that was prepared last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.byzantine.agreement.machine import genesis
from holdfast.byzantine.agreement.statements import PREPARE, Attest, Prepared, Proposal, Value, ViewChange, Vote
from tests.byzantine.agreement.test_verify import CHECKER, FEDERATION, SERVERS, claim, signed

PARENT = genesis(FEDERATION.model).digest
VIEW = 6  # led by s3, as all of 1 + VIEW = 7 = 3 modulo 4


def value(number: int) -> Value:
    claims = tuple(claim(name, 1) for name in ("c0", "c1", "c2")[: 2 + number % 2])
    return Value(
        1, PARENT, tuple(signed(Attest(name, 1, claims), name) for name in SERVERS[number // 2 : 3 + number // 2])
    )


def prepared(which: Value, view: int, voters: list[str] = SERVERS[:3]) -> Prepared:
    votes = tuple(signed(Vote(PREPARE, name, 1, view, which.digest), name) for name in voters)
    return Prepared(view, which, votes)


def change(server: str, proof: Prepared | None = None, view: int = VIEW) -> ViewChange:
    return signed(ViewChange(server, 1, view, proof), server)


def judged(which: Value, *changes: ViewChange, leader: str = "s3") -> str:
    return CHECKER.proposal(signed(Proposal(leader, 1, VIEW, which, changes), leader), PARENT)


OLD, NEW = value(0), value(1)
OLD_PROOF, NEW_PROOF = prepared(OLD, 2), prepared(NEW, 4)


def test_the_newest_proof_binds() -> None:
    changes = [change("s0", OLD_PROOF), change("s1", NEW_PROOF), change("s2")]
    assert judged(NEW, *changes) == ""
    assert "another value" in judged(OLD, *changes)
    assert "another value" in judged(value(2), *changes)


def test_without_a_proof_any_good_value_will_do() -> None:
    for which in (OLD, NEW, value(2)):
        assert judged(which, change("s0"), change("s1"), change("s2")) == ""


@pytest.mark.parametrize(
    "changes",
    [
        (change("s0"), change("s1")),
        (change("s0"), change("s0"), change("s0")),
        (change("s0"), change("s1"), change("s2", view=VIEW + 1)),
        (change("s0"), change("s1"), replace(change("s2"), signature=b"x" * 64)),
        (change("s0"), change("s1"), replace(change("s2", NEW_PROOF), prepared=None)),
        (change("s0"), change("s1"), change("s2", prepared(NEW, VIEW))),
        (change("s0"), change("s1"), change("s2", prepared(NEW, 4, SERVERS[:2]))),
        (change("s0"), change("s1"), change("s2", prepared(NEW, 4, ["s0", "s0", "s0"]))),
        (change("s0"), change("s1"), change("s2", replace(NEW_PROOF, view=5))),
        (),
    ],
    ids=[
        "two of three",
        "one three times",
        "of another view",
        "forged",
        "with its proof taken out",
        "with a proof from the same view",
        "with two votes",
        "with one vote three times",
        "with votes of another view",
        "none",
    ],
)
def test_a_leader_without_enough_changes_is_not_followed(changes: tuple[ViewChange, ...]) -> None:
    assert "of 3 view changes" in judged(OLD, *changes)


def test_only_the_leader_proposes() -> None:
    changes = [change("s0"), change("s1"), change("s2")]
    assert "does not lead" in judged(OLD, *changes, leader="s0")


def test_a_statement_of_another_federation_does_not_count() -> None:
    from holdfast.byzantine.agreement.checking import Checker
    from holdfast.byzantine.agreement.signing import verify

    other = Checker(replace(FEDERATION, name="another"), verify)
    assert CHECKER.vote(NEW_PROOF.votes[0]) == ""
    assert "the signature is not that of s0" in other.vote(NEW_PROOF.votes[0])
