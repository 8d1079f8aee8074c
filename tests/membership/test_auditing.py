"""Are shards audited as often as asked, by everybody in turn, and is the one who is wrong the one who is named?"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ProtocolError
from holdfast.membership import messages as m
from holdfast.membership.auditing import (
    Auditing,
    AuditRules,
    Finding,
    Said,
    auditor_of,
    first_audit,
    majority,
    sampled,
)
from holdfast.membership.codec import decode, encode
from holdfast.membership.suspecting import Details, StateEntry
from holdfast.membership.view_rules import assign
from holdfast.net.framing import LENGTH

MEMBERS = ("w0.1", "w1.1", "w2.1", "w3.1")
seeds = st.integers(-(1 << 63), (1 << 63) - 1)
fractions = st.one_of(st.floats(0.0, 1.0), st.sampled_from((0.0, 0.001, 0.01, 0.1, 1 / 3, 0.5, 1.0)))


def crew(count: int) -> tuple[str, ...]:
    return tuple(f"w{slot}.1" for slot in range(count))


# ---- which shards, and who


@given(seeds, st.integers(1, 64), fractions, st.integers(1, 400))
def test_the_fraction_is_exact_over_a_run(seed: int, shards: int, fraction: float, steps: int) -> None:
    rules = AuditRules(seed=seed, fraction=fraction)
    counted = sum(len(sampled(rules, shards, step)) for step in range(steps))
    assert counted == first_audit(rules, shards, steps)
    assert abs(counted - fraction * shards * steps) <= 1 + 1e-6 * shards * steps


@given(seeds, st.integers(1, 64), fractions)
def test_every_shard_has_its_turn(seed: int, shards: int, fraction: float) -> None:
    rules = AuditRules(seed=seed, fraction=fraction)
    counts = Counter(shard for step in range(200) for shard in sampled(rules, shards, step))
    assert all(0 <= shard < shards for shard in counts)
    assert max(counts.values(), default=0) - min((counts[shard] for shard in range(shards)), default=0) <= 1


def test_all_shards_and_none() -> None:
    assert sorted(sampled(AuditRules(fraction=1.0), 8, 5)) == list(range(8))
    assert not sampled(AuditRules(fraction=0.0), 8, 5)


@given(st.integers(2, 9), st.integers(1, 32))
def test_a_shards_auditors_take_turns_and_never_own_it(count: int, shards: int) -> None:
    members = crew(count)
    owners = {shard: member for member, mine in assign(shards, members).items() for shard in mine}
    rules = AuditRules(fraction=1.0)
    seen: dict[int, list[str]] = {shard: [] for shard in range(shards)}
    for step in range(count - 1):
        for shard, number in sampled(rules, shards, step).items():
            seen[shard].append(auditor_of(number, shards, owners[shard], members))
    for shard, auditors in seen.items():
        assert sorted(auditors) == sorted(member for member in members if member != owners[shard])


@given(st.integers(1, 6), st.integers(1, 16), fractions, st.integers(0, 100))
def test_members_agree_on_who_computes_what(count: int, shards: int, fraction: float, step: int) -> None:
    members, rules = crew(count), AuditRules(fraction=fraction)
    assignment = assign(shards, members)
    extras = {member: Auditing(member, shards, rules).extra(step, assignment) for member in members}
    computed = sorted(shard for extra in extras.values() for shard in extra)
    assert computed == (sorted(sampled(rules, shards, step)) if count > 1 else [])
    assert not any(set(extras[member]) & set(assignment[member]) for member in members)


@given(st.integers(1, 300), st.integers(1, 500))
def test_the_whole_state_is_compared_once_in_an_interval(every: int, slices: int) -> None:
    rules = AuditRules(every=every, slices=slices)
    due = [rules.slice_due(step) for step in range(every, 2 * every)]
    assert [number for number in due if number is not None] == list(range(min(slices, every)))


def test_without_an_interval_no_state_is_compared() -> None:
    assert all(AuditRules(every=0, slices=4).slice_due(step) is None for step in range(20))
    for slices in range(1, 20):
        rules = AuditRules(every=100, slices=slices)
        assert rules.slice_due(700) is rules.slice_due(350) is None, "checkpoints are saved in such steps"


# ---- who is believed


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_the_believed_are_more_than_any_other_and_two_at_least(said: list[str]) -> None:
    believed = majority({f"w{slot}.1": digest for slot, digest in enumerate(said)})
    counts = Counter(said)
    if believed:
        assert counts[believed] >= 2 and all(counts[believed] > n for other, n in counts.items() if other != believed)
    else:
        top = counts.most_common(2)
        assert top[0][1] == 1 or top[0][1] == top[1][1]


def judge(said: dict[str, Said], rules: AuditRules, *, me: str = "w0.1", step: int = 250) -> Finding | None:
    auditing = Auditing(me, 8, rules)
    found = auditing.judge(step, tuple(said), said)
    if found is not None and found.narrow:  # nobody says more: as if there had been no room for it
        found = auditing.judge(step, tuple(said), said)
    return found


STATE = AuditRules(every=60)
DUE = 260  # a step in which it is compared
SHARDS = AuditRules(fraction=1.0)


def states(*digests: str) -> dict[str, Said]:
    return {member: Said(state=digest) for member, digest in zip(crew(len(digests)), digests, strict=True)}


def shard_five(*digests: str | None) -> dict[str, Said]:
    members = crew(len(digests))
    return {member: Said(((5, digest),)) if digest else Said() for member, digest in zip(members, digests, strict=True)}


def test_all_agree() -> None:
    assert judge(states("a", "a", "a"), STATE, step=DUE) is None
    assert judge(shard_five("a", None, "a"), SHARDS) is None


@given(st.integers(3, 9), st.data())
def test_one_wrong_state_among_three_or_more_is_named(count: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, count - 1))
    finding = judge(states(*("b" if slot == wrong else "a" for slot in range(count))), STATE, step=DUE)
    assert finding is not None and finding.liars == (f"w{wrong}.1",)
    assert finding.good == 200  # where this part of the state was compared before


def test_two_states_that_differ_are_nobodys_majority() -> None:
    for digests in (("a", "b"), ("a", "b", "c"), ("a", "a", "b", "b")):
        finding = judge(states(*digests), STATE, step=DUE)
        assert finding is not None and not finding.liars and not finding.third
        assert "no majority" in finding.reason


def test_a_shard_that_two_disagree_on_is_computed_by_a_third() -> None:
    rules, assignment = AuditRules(fraction=0.001), assign(8, MEMBERS)
    said = shard_five(None, None, "a", "b")  # w2.1 owns it
    finding = judge(said, rules)
    assert finding is not None and not finding.liars and finding.third in ("w0.1", "w1.1")
    for member in MEMBERS:
        auditing = Auditing(member, 8, rules)
        before = auditing.extra(250, assignment)
        assert auditing.judge(250, MEMBERS, said) == finding
        assert auditing.extra(250, assignment) == ((5,) if member == finding.third else before)
        assert auditing.extra(251, assignment) == Auditing(member, 8, rules).extra(251, assignment)  # it is forgotten


def test_the_third_decides() -> None:
    finding = judge(shard_five("a", "b", None, "b"), SHARDS)
    assert finding is not None and finding.liars == ("w0.1",) and finding.good is None
    finding = judge(shard_five("a", "b", None, "c"), SHARDS)
    assert finding is not None and not finding.liars and finding.third == "w2.1"


def test_a_shard_that_gives_other_bits_on_each_of_three_is_the_scripts() -> None:
    finding = judge(shard_five("a", "b", "c"), SHARDS)
    assert finding is not None and finding.script and not finding.liars and not finding.third
    assert "w0.1, w1.1 and w2.1 each got other gradients for shard 5 of step 250" in finding.reason


def test_two_members_that_disagree_on_a_shard_stop() -> None:
    finding = judge(shard_five("a", "b"), SHARDS)
    assert finding is not None and not finding.liars and not finding.third


def test_what_is_named_comes_before_what_is_asked() -> None:
    said = {
        "w0.1": Said(((1, "a"), (2, "x"))),
        "w1.1": Said(((1, "b"),)),
        "w2.1": Said(((2, "y"),)),
        "w3.1": Said(((2, "y"),)),
    }
    finding = judge(said, SHARDS)
    assert finding is not None and finding.number == 2 and finding.liars == ("w0.1",)


def test_a_shard_that_its_owner_doubts_is_looked_at_by_one_other() -> None:
    finding = judge(shard_five(None, "a", None), STATE)
    assert finding is not None and finding.third in ("w0.1", "w2.1") and "doubts" in finding.reason
    assert judge(shard_five("a", "a", None), STATE) is None
    assert judge(shard_five("a"), STATE) is None  # there is nobody else


def test_gradients_may_be_spoiled_since_others_last_found_the_worker_right() -> None:
    auditing = Auditing("w0.1", 8, AuditRules(fraction=0.5, every=40))
    for step in range(100, 200):
        right = Said(((5, "a"),)) if step in (110, 190) else Said()
        assert auditing.judge(step, MEMBERS, {**dict.fromkeys(MEMBERS, Said()), "w1.1": right, "w2.1": right}) is None
    wrong = {**dict.fromkeys(MEMBERS, Said(((5, "a"),))), "w1.1": Said(((5, "b"),))}
    finding = auditing.judge(200, MEMBERS, wrong)
    assert finding is not None and finding.liars == ("w1.1",)
    assert finding.good == 160  # its state was last compared before the gradient was
    wrong = {**dict.fromkeys(MEMBERS, Said(((5, "a"),))), "w3.1": Said(((5, "b"),))}
    finding = auditing.judge(201, MEMBERS, wrong)
    assert finding is not None and finding.good == 100  # nobody ever looked at what it brings


# ---- on the wire


@given(
    st.lists(st.tuples(st.integers(0, 4095), st.text("0123456789abcdef", min_size=32, max_size=32)), max_size=5),
    st.text("0123456789abcdef", max_size=32),
    st.lists(st.integers(0, 9), max_size=3),
    st.one_of(
        st.none(),
        st.builds(Details, st.lists(st.builds(StateEntry, *[st.text(max_size=9)] * 4), max_size=3).map(tuple)),
    ),
)
def test_what_is_said_arrives(
    shards: list[tuple[int, str]], state: str, calls: list[int], details: Details | None
) -> None:
    ready = m.Ready(4, (1, 2), pace=0.5, said=Said(tuple(shards), state, tuple(calls), details, 7, ("w0.1", 3)))
    assert decode(encode(ready, {"n": []})[LENGTH.size :]) == (ready, {"n": []})


@pytest.mark.parametrize(
    "said",
    ["7", "[1,2]", "[[[1]],'']", '[[[-1,"a"]],""]', '[[[1,2]],""]', '[[],["a"]]', '[[["a","b"]],""]', "[[],3,4]"],
)
def test_digests_that_no_member_sends(said: str) -> None:
    body = '{"t":"ready","s":1,"v":[],"n":null,"a":' + said.replace("'", '"') + "}"
    with pytest.raises(ProtocolError):
        decode(body.encode())


@pytest.mark.parametrize(
    "field",
    [
        '"o":3',
        '"o":[-1]',
        '"o":["1"]',
        '"e":[]',
        '"e":[[],-1,true]',
        '"e":[[["a","b","c"]],0,true]',
        '"e":[[],0,1]',
        '"i":["w0.1"]',
    ],
)
def test_calls_and_details_that_no_member_sends(field: str) -> None:
    with pytest.raises(ProtocolError):
        decode(('{"t":"ready","s":1,"v":[],"n":null,' + field + "}").encode())


def test_a_digest_has_a_bound() -> None:
    with pytest.raises(ProtocolError):
        decode(encode(m.Ready(1, (), said=Said(state="a" * 257)))[LENGTH.size :])
