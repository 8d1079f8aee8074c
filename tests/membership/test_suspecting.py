"""Members differ: is it the script's doing, is that named, and does a flipped bit still name its worker?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.rewinds import Rewind
from holdfast.membership.auditing import Auditing, AuditRules, Finding, Said
from holdfast.membership.suspecting import (
    BUFFER,
    EXTRA,
    NUMBER,
    OPTIMIZER,
    PARAMETER,
    TENSOR,
    VALUE,
    Details,
    StateEntry,
    calls_sentence,
)

MEMBERS = ("w0.1", "w1.1", "w2.1")
STATE = AuditRules(every=60)
DUE = 260
ENTRIES = (
    StateEntry("the extra 'best', key loss", EXTRA + "best", VALUE, "9.0"),
    StateEntry("the optimizer's lr (parameter group 0)", OPTIMIZER, VALUE, "0.1"),
    *(StateEntry(f"the optimizer's step of {name}", OPTIMIZER, NUMBER, "7.0") for name in "abcd"),
    *(StateEntry(f"the parameter {name}", PARAMETER, TENSOR, "(3, 4) 00") for name in "abcd"),
    StateEntry("the buffer mean", BUFFER, TENSOR, "(3,) 00"),
    *(StateEntry(f"the optimizer's exp_avg of {name}", OPTIMIZER, TENSOR, "(3, 4) 00") for name in "abcd"),
    *(StateEntry(f"the extra 'average', key {name}", EXTRA + "average", TENSOR, "(3, 4) 00") for name in "ab"),
)


def changed(*values: tuple[str, str]) -> Details:
    """The entries, of which those with these names have another value."""
    new = dict(values)
    assert new.keys() <= {entry.name for entry in ENTRIES}
    return Details(tuple(replace(entry, value=new.get(entry.name, entry.value)) for entry in ENTRIES))


def judged(odd: Details, *, earlier: tuple[Rewind, ...] = (), who: str = "w0.1", digest: str = "wrong") -> Finding:
    """The finding when one member differs from two others, and all say in what."""
    auditing = Auditing("w0.1", 8, STATE)
    auditing.earlier = earlier
    members = tuple(who if member.startswith(who[:2]) else member for member in MEMBERS)
    said = {
        member: Said(state=digest if member == who else "right", details=odd if member == who else changed())
        for member in members
    }
    first = auditing.judge(DUE, members, {member: replace(one, details=None) for member, one in said.items()})
    assert first is not None and first.narrow and not first.liars and not first.script
    found = auditing.judge(DUE, members, said)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            changed(("the extra 'best', key loss", "1.5")),
            "the extra 'best', key loss (1.5 on w0.1, 9.0 on w1.1 and w2.1)",
        ),
        (
            changed(("the optimizer's lr (parameter group 0)", "0.2")),
            "the optimizer's lr (parameter group 0) (0.2 on w0.1",
        ),
        (
            changed(*((f"the optimizer's step of {name}", "8.0") for name in "abcd")),
            "the optimizer's step of a (8.0 on w0",
        ),
        (
            changed(*((f"the parameter {name}", "(3, 4) 01") for name in "abc")),
            "the parameter a (w0.1 has other bits than w1.1 and w2.1)",
        ),
        (changed(("the parameter a", "(4, 4) 00")), "the parameter a"),
        (changed(*((f"the extra 'average', key {name}", "(3, 4) 01") for name in "ab")), "the extra 'average', key a"),
        (Details(ENTRIES[1:]), "the extra 'best', key loss (w0.1 has none)"),
    ],
    ids=["a value", "a setting", "counts", "all parameters", "a shape", "all of an extra", "a key"],
)
def test_what_no_flipped_bit_does_is_the_scripts(odd: Details, words: str) -> None:
    found = judged(odd)
    assert found.script and not found.liars and words in found.reason
    assert "at step 260, and agreed at step 200" in found.reason
    assert "`if run.leader:`" in found.hint and "memory" not in found.hint


@pytest.mark.parametrize(
    "names",
    [
        ["the parameter a"],
        ["the parameter b", "the optimizer's exp_avg of b"],
        ["the optimizer's exp_avg of c"],
        ["the buffer mean"],
        ["the optimizer's step of d"],
        ["the extra 'average', key a"],
        ["the parameter a", "the extra 'average', key a"],
    ],
)
def test_a_flipped_bit_is_its_workers(names: list[str]) -> None:
    kinds = {entry.name: entry.value for entry in ENTRIES}
    found = judged(changed(*((name, f"{kinds[name]}1") for name in names)))
    assert found.liars == ("w0.1",) and not found.script and found.good == 200
    assert all(name in found.where for name in names)


def gone_back(found: Finding) -> tuple[Rewind, ...]:
    return (Rewind(back_to=200, passed=(), reason=found.reason, kind="corruption", evict=found.liars, clue=found.clue),)


def test_what_comes_back_is_the_scripts() -> None:
    odd = changed(("the parameter a", "(3, 4) 01"))
    earlier = gone_back(judged(odd))
    again = judged(odd, earlier=earlier, who="w0.2")
    assert again.script and not again.liars and "it came back" in again.reason
    elsewhere = judged(odd, earlier=earlier, who="w1.2", digest="other")
    assert elsewhere.script and not elsewhere.liars


def test_a_worker_that_is_wrong_again_elsewhere_is_wrong() -> None:
    earlier = gone_back(judged(changed(("the parameter a", "(3, 4) 01"))))
    found = judged(changed(("the parameter b", "(3, 4) 02")), earlier=earlier, who="w0.2", digest="other")
    assert found.liars == ("w0.2",) and not found.script


def test_a_record_of_rewinds_keeps_what_was_found() -> None:
    (record,) = gone_back(judged(changed(("the parameter a", "(3, 4) 01"))))
    assert Rewind.of(record.fields()) == record and record.clue is not None and record.clue.where == "the parameter a"


def test_three_that_all_differ_are_the_scripts() -> None:
    auditing = Auditing("w0.1", 8, STATE)
    details = [changed(("the parameter a", f"(3, 4) 0{number}")) for number in range(3)]
    said = {member: Said(state=str(number), details=details[number]) for number, member in enumerate(MEMBERS)}
    found = auditing.judge(DUE, MEMBERS, said)
    assert found is not None and found.script and "other bits on w0.1, on w1.1, on w2.1" in found.reason


def test_two_that_differ_by_a_bit_are_undecidable_and_what_differs_is_named() -> None:
    said = {
        "w0.1": Said(state="a", details=changed()),
        "w1.1": Said(state="b", details=changed(("the parameter a", "(3, 4) 01"))),
    }
    found = Auditing("w0.1", 8, STATE).judge(DUE, tuple(said), said)
    assert found is not None and not (found.script or found.liars or found.third or found.narrow)
    assert "w0.1 and w1.1 disagree about the state at step 260, in the parameter a" in found.reason


def test_who_joined_with_another_state_is_told_what_did_not_travel() -> None:
    odd = replace(changed(*((f"the parameter {name}", "(3, 4) 01") for name in "abcd")), came=243)
    found = judged(odd)
    assert "agreed at step 243" in found.reason and "extras" in found.hint


def test_details_that_were_cut_off_say_nothing_of_what_is_missing() -> None:
    odd = Details(changed(("the parameter a", "(3, 4) 01")).entries[:-3], whole=False)
    found = judged(odd)
    assert found.liars == ("w0.1",) and found.where == "the parameter a"


# ---- how often optimizers were called


def called(*counts: tuple[int, ...]) -> Finding | None:
    said = {member: Said(calls=count) for member, count in zip(MEMBERS, counts, strict=True)}
    return Auditing("w0.1", 8, AuditRules()).judge(4, MEMBERS, said)


def test_calls_on_some_workers_only() -> None:
    found = called((1,), (0,), (0,))
    assert found is not None and found.script == "optimizer.step() was called on w0.1 only at step 3"
    assert "every worker" in found.hint and not found.liars


def test_the_same_calls_are_nobodys_mistake() -> None:
    assert called((1,), (1,), (1,)) is None
    assert called((0,), (0,), (0,)) is None
    assert called((1, 2), (1, 2), ()) is None  # the last was not in that step


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({"w0.1": (1,), "w1.1": (2,), "w2.1": (2,)}, "called once on w0.1, twice on w1.1 and w2.1 at step 5"),
        ({"w0.1": (0,), "w1.1": (1,), "w2.1": (2,)}, "not at all on w0.1, once on w1.1, twice on w2.1"),
        ({"w0.1": (1, 0), "w1.1": (0, 1)}, "different optimizers at step 5"),
        ({"w0.1": (0,), "w1.1": (3,), "w2.1": (3,)}, "called on w1.1 and w2.1 only at step 5"),
    ],
)
def test_the_words_for_calls(calls: dict[str, tuple[int, ...]], words: str) -> None:
    assert words in calls_sentence(5, calls)


# ---- shards


def test_one_leader_after_the_other_that_is_wrong_about_shards_is_the_scripts() -> None:
    rules = AuditRules(fraction=1.0)
    members = ("w0.1", "w1.1", "w2.1", "w3.1")
    wrong = {"w0.1": "x"}
    auditing = Auditing("w2.1", 8, rules)
    first = auditing.judge(4, members, {one: Said(((5, wrong.get(one, "a")),)) for one in members})
    assert first is not None and first.liars == ("w0.1",) and auditing.recent_leader(6) == ("w0.1", 4)
    assert auditing.recent_leader(40) is None
    later, wrong = ("w1.1", "w2.1", "w3.1", "w0.2"), {"w1.1": "x"}
    said = {one: Said(((5, wrong.get(one, "a")),)) for one in later}
    said["w2.1"] = replace(said["w2.1"], leader=auditing.recent_leader(6))
    for member in ("w2.1", "w0.2"):  # who came since then is told
        found = Auditing(member, 8, rules).judge(6, later, said)
        assert found is not None and found.script and not found.liars and "w0.1 at step 4 and then w1.1" in found.reason
    said["w2.1"] = replace(said["w2.1"], leader=None)
    alone = Auditing("w2.1", 8, rules).judge(6, later, said)
    assert alone is not None and alone.liars == ("w1.1",) and not alone.script


def test_who_came_while_all_said_more_changes_nothing() -> None:
    odd = changed(("the extra 'best', key loss", "1.5"))
    said = {
        "w0.1": Said(state="wrong", details=odd),
        "w1.1": Said(state="right", details=changed()),
        "w2.1": Said(state="right", details=changed()),
        "w3.1": Said(state="right"),
    }
    for member in said:
        found = Auditing(member, 8, STATE).judge(DUE, tuple(said), said)
        assert found is not None and found.script and "1.5 on w0.1, 9.0 on w1.1 and w2.1" in found.reason
