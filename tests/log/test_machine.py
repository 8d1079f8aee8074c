"""The machine of a replicated log, in stories: what is acknowledged, who leads, what is read, who comes and goes."""

from __future__ import annotations

import pytest

from holdfast.core.errors import IntegrityError
from holdfast.log.configuration import Configuration, LogEnd
from holdfast.log.machine import ReplicaMachine
from holdfast.log.messages import (
    AddReplica,
    Append,
    Appended,
    Configured,
    DropPrefix,
    Entry,
    Exited,
    Fenced,
    HandOver,
    Heard,
    LedgerReached,
    LedgerSaw,
    Opened,
    Propose,
    RefuseRead,
    RemoveReplica,
    Resigned,
    Retire,
    Seal,
    Sealed,
    Send,
    Serve,
    Snapshot,
    Stored,
    StoreFailed,
    TakeSnapshot,
    Update,
    WorkerGone,
)
from holdfast.log.rules import Rules
from tests.log.story import Story

DURABLE = Rules(durable=True, snapshot_every=1000)


def led(*, rules: Rules | None = None, outside: tuple[str, ...] = ()) -> Story:
    """Three replicas, of which a leads, and its epoch is established."""
    story = Story("a", "b", "c", rules=rules, outside=outside)
    for _ in range(3):
        for name in story.machines:
            story.sync(name)
        story.deliver()
    leading = story["a"].leading
    assert leading is not None and leading.is_established
    return story


def sent_to(story: Story, peer: str) -> list[int]:
    """The indices of the entries that went to it, in order."""
    appends = [one.message for one in story.heard(Send) if one.peer == peer and isinstance(one.message, Append)]
    return [entry.index for message in appends for entry in message.entries]


# ---- acknowledging


def test_an_update_is_acknowledged_when_a_majority_has_it() -> None:
    story = led()
    story.push("a", 1, "x")
    assert story.acknowledged() == []
    story.deliver(lost=("c",))
    assert story.acknowledged() == ["x"]
    assert story.state == {"a": ["x"], "b": [], "c": []}
    story.pass_time(0.3)
    assert story.state == {"a": ["x"], "b": ["x"], "c": ["x"]}, "the others apply what they hear to be committed"


def test_alone_a_primary_acknowledges_nothing() -> None:
    story = led()
    story.push("a", 1, "x")
    story.deliver(lost=("b", "c"))
    assert story.acknowledged() == [] and story.state["a"] == []


def test_on_disk_means_on_the_disks_of_a_majority() -> None:
    story = led(rules=DURABLE)
    story.push("a", 1, "x")
    story.deliver()
    story.sync("b")
    story.deliver()
    assert story.acknowledged() == [], "only b has it on its disk"
    story.sync("a")
    assert story.acknowledged() == ["x"]


def test_a_retry_is_acknowledged_again_and_applied_once() -> None:
    story = led()
    story.push("a", 1, "x")
    story.push("a", 1, "x")
    story.deliver()
    story.push("a", 1, "x")
    story.deliver()
    assert story.acknowledged() == ["x", "x"] and story.state["a"] == ["x"]


def test_a_retry_waits_until_a_majority_of_the_new_replicas_has_the_update() -> None:
    story = led()
    story.push("a", 1, "x")
    story.deliver(lost=("b",))  # a and c have it
    story.happens("a", RemoveReplica("c"))
    story.show_ledger("a")
    story.push("a", 1, "x")
    assert story.refusals() == ["epoch 2 is not established yet"]
    story.deliver()
    story.push("a", 1, "x")
    assert story.acknowledged() == ["x", "x"]


def test_a_worker_with_too_many_updates_under_way_is_refused() -> None:
    story = led(rules=Rules(sequence_window=2))
    story.push("a", 3, "z")
    assert "more than 2 past 0" in story.refusals()[-1]
    story.push("a", 2, "y")
    story.push("a", 1, "x")
    story.deliver()
    story.push("a", 3, "z")
    story.deliver()
    assert story.state["a"] == ["y", "x", "z"], "in the order of the log, whatever the sequences are"


def test_too_many_updates_that_wait_for_a_majority_are_refused() -> None:
    story = led(rules=Rules(uncommitted_max=2))
    for sequence in (1, 2, 3):
        story.push("a", sequence, f"u{sequence}")
    assert story.refusals() == ["2 updates wait for a majority"]


def test_a_worker_that_is_gone_is_forgotten_and_not_mistaken_for_a_new_one() -> None:
    story = led()
    story.push("a", 1, "x")
    story.deliver()
    story.happens("a", WorkerGone("w0", 1))
    story.deliver()
    story.push("a", 1, "x")
    assert story.refusals() == ["incarnation 1 of w0 is gone"]
    story.push("a", 1, "y", incarnation=2)
    story.deliver()
    assert story.state["a"] == ["x", "y"]
    assert [row.worker for row in story["a"].copy.table.export()] == ["w0"]


def test_who_is_not_the_primary_says_who_is() -> None:
    story = led()
    story.push("b", 1, "x")
    assert story.told[-1][1].primary == "a"  # type: ignore[union-attr]


# ---- failing over


def depose_a(story: Story) -> None:
    """Nobody hears a any more: b takes over with c."""
    story.pass_time(0.8, lost=("a",))
    assert story.ledger[0].epoch == 2
    story.show_ledger("b", "c")
    story.deliver(lost=("a",))


def test_a_silent_primary_is_replaced_when_its_lease_has_run_out() -> None:
    story = led()
    story.push("a", 1, "x")
    story.deliver()
    story.pass_time(0.4, lost=("a",))
    assert not story.heard(Propose), "the lease still runs"
    depose_a(story)
    assert story.ledger[0].primary == "b" and "was not heard for 0.5" in story.ledger[0].reason
    assert story.state["b"] == ["x"]
    story.push("b", 2, "y")
    story.push("b", 1, "x")
    story.deliver(lost=("a",))
    assert story.acknowledged() == ["x", "x", "y"], "a retry after the failover gets the old acknowledgement"
    assert story.state["b"] == ["x", "y"]


def test_a_primary_whose_end_was_seen_is_replaced_at_once() -> None:
    story = led()
    story.push("a", 1, "x")
    story.deliver()
    story.happens("b", Exited("a", 1))
    story.deliver(lost=("a",))
    assert story.ledger[0].primary == "b" and story.now == 100.0
    assert "has ended or resigned" in story.ledger[0].reason


def test_the_end_of_an_earlier_process_says_nothing_about_the_one_that_leads() -> None:
    story = Story("b", "c")
    story.happens("c", Heard("b", Append(1, 7, 0.0, LogEnd(0, 0), (), 0)))
    story.happens("c", Exited("b", 6))
    assert story["c"].candidacy is None
    story.happens("c", Exited("b", 7))
    assert story["c"].candidacy is not None


def test_the_newest_log_wins_whoever_asks() -> None:
    story = led()
    story.push("a", 1, "x")
    story.deliver(lost=("b",))  # c has it, b does not
    assert story.acknowledged() == ["x"]
    story.pass_time(0.8, lost=("a",))
    assert story.ledger[0].primary == "c", "b asked, and c has the newest log"
    story.show_ledger("b", "c")
    story.deliver(lost=("a",))
    assert story.state["c"] == ["x"]


def test_a_newer_epoch_beats_a_longer_log() -> None:
    rules = Rules(snapshot_every=1000)
    long = tuple(Entry(1, index, Opened("x")) for index in range(1, 6))
    short = (Entry(1, 1, Opened("x")), Entry(2, 2, Opened("y")))
    story = Story("a", "b", "c")
    for name, entries in (("b", long), ("c", short)):
        story.machines[name] = ReplicaMachine(name, rules, now=0.0, stored=Stored(entries=entries))
    story.ledger = (Configuration(3, "a", ("a", "b", "c")), 9)
    story.show_ledger("b", "c")
    story.pass_time(0.9, lost=("a",))
    assert (story.ledger[0].epoch, story.ledger[0].primary) == (4, "c")


def test_a_deposed_primary_changes_nothing_and_gives_way() -> None:
    story = led()
    story.push("a", 1, "never acknowledged")
    story.letters.clear()
    depose_a(story)
    story.push("b", 1, "x", worker="w1")
    story.deliver(lost=("a",))
    assert story.acknowledged() == ["x"]
    story.push("a", 2, "y")
    story.deliver()
    assert story.state["b"] == ["x"] and story.acknowledged() == ["x"]
    assert any("epoch 2 has begun" in reason for reason in story.refusals())
    story.pass_time(0.5)
    assert story["a"].leading is None and story.state["a"] == ["x"], "what only it had is cut off"
    assert story.state["b"] == story.state["c"] == ["x"]


def test_a_replica_that_has_sealed_an_epoch_takes_nothing_of_it() -> None:
    story = led()
    story.happens("c", Heard("b", Seal(1, released=True)))
    assert Send("b", Sealed(1, LogEnd(1, 1))) in [effect for _, effect in story.told]
    story.push("a", 1, "x")
    story.deliver(lost=("b",))
    assert story.acknowledged() == [], "c has promised to take nothing of epoch 1"
    assert ("c", Send("a", Fenced(1))) in story.told


def test_a_primary_wins_back_a_replica_that_sealed_its_epoch_in_vain() -> None:
    story = led()
    story.happens("c", Heard("b", Seal(1, released=True)))
    story.letters.clear()
    story.pass_time(0.2, lost=("b",))
    story.pass_time(0.2)
    assert story.ledger[0] == Configuration(2, "a", ("a", "b", "c"), "c has sealed epoch 1")
    story.show_ledger()
    story.deliver()
    story.push("a", 1, "x")
    story.deliver(lost=("b",))
    assert story.acknowledged() == ["x"]


def test_a_replica_that_heard_the_primary_helps_nobody_to_depose_it() -> None:
    story = led()
    story.happens("c", Heard("b", Seal(1, released=False)))
    assert not any(isinstance(message, Sealed) for _, _, message in story.letters)


def test_a_replica_keeps_its_promises_when_it_starts_again() -> None:
    """It may have confirmed the primary just before it ended, and cannot know."""
    machine = ReplicaMachine("c", DURABLE, now=50.0, start=2, stored=Stored(promised=0))
    machine.handle(LedgerSaw(Configuration(1, "a", ("a", "b", "c")), 1), 50.0)
    assert machine.handle(Heard("b", Seal(1, released=False)), 50.1) == []
    assert machine.handle(Heard("b", Seal(1, released=False)), 50.6) != []
    sealed = ReplicaMachine("c", DURABLE, now=60.0, start=3, stored=Stored(promised=1))
    answer = sealed.handle(Heard("a", Append(1, 1, 0.0, LogEnd(0, 0), (Entry(1, 1, Opened("a")),), 0)), 60.0)
    assert answer == [Send("a", Fenced(1))]


def test_a_replica_reports_where_its_log_ends_once_its_promise_is_stored() -> None:
    story = led(rules=DURABLE)
    story.happens("c", Heard("b", Seal(1, released=True)))
    assert not any(isinstance(message, Sealed) for _, _, message in story.letters)
    story.sync("c")
    assert ("c", "b", Sealed(1, LogEnd(1, 1))) in story.letters


def test_a_primary_that_starts_again_does_not_lead_twice_in_an_epoch() -> None:
    log = (Entry(1, 1, Opened("a")),)
    machine = ReplicaMachine("a", DURABLE, now=0.0, start=2, stored=Stored(entries=log))
    machine.handle(LedgerSaw(Configuration(1, "a", ("a", "b", "c")), 1), 0.0)
    assert machine.leading is None and machine.candidacy is not None
    assert machine.waits_for(0.0).startswith("epoch 2 (the primary starts again")


def test_a_primary_says_nothing_before_it_has_stored_that_it_leads() -> None:
    story = Story("a", "b", "c", rules=DURABLE)
    assert not story.letters
    story.sync("a")
    assert {receiver for _, receiver, _ in story.letters} == {"b", "c"}


def test_who_is_cut_off_from_the_ledger_hears_from_the_others_that_it_leads() -> None:
    story = led()
    story.push("a", 1, "x")
    story.deliver(lost=("b",))
    story.pass_time(0.8, lost=("a",))
    story.show_ledger("b")
    story.pass_time(0.2, lost=("a",))
    assert any(isinstance(effect, Send) and isinstance(effect.message, Configured) for _, effect in story.told)
    assert story["c"].leading is not None


# ---- reading


def test_a_read_is_fresh_while_a_majority_has_confirmed_the_epoch_within_the_lease() -> None:
    story = led()
    assert story.read("a") == Serve("client", 1, fresh=True)
    story.now += story.rules.lease_held_s - 0.001
    assert isinstance(story.read("a"), Serve)
    story.now += 0.002
    stale = story.read("a")
    assert isinstance(stale, RefuseRead) and "within the lease" in stale.reason
    assert story.read("a", fresh=False) == Serve("client", 1, fresh=False)


def test_the_primary_counts_on_less_than_the_replicas_promise() -> None:
    rules = Rules(lease_s=1.0, clock_drift_max=0.1)
    slowest_primary, fastest_replica = 0.9, 1.1
    assert rules.lease_held_s / slowest_primary <= rules.lease_s / fastest_replica + 1e-12


def test_a_follower_and_a_new_primary_serve_nothing_as_fresh() -> None:
    story = led()
    assert isinstance(story.read("b"), RefuseRead)
    assert story.read("b", fresh=False) == Serve("client", 0, fresh=False)
    story.pass_time(0.8, lost=("a",))
    story.show_ledger("b")
    answer = story.read("b")
    assert isinstance(answer, RefuseRead) and "not established" in answer.reason
    story.show_ledger("c")
    story.deliver(lost=("a",))
    assert story.read("b") == Serve("client", 2, fresh=True)


# ---- replicas that come and go


def test_a_new_replica_counts_only_once_it_is_level() -> None:
    story = led(outside=("d",))
    for sequence in (1, 2, 3):
        story.push("a", sequence, f"u{sequence}")
    story.deliver()
    story.happens("a", AddReplica("d"))
    story.push("a", 4, "u4")
    story.deliver(lost=("b", "c"))
    assert story.acknowledged() == ["u1", "u2", "u3"], "d has it, and does not count yet"
    assert story.ledger[0].replicas == ("a", "b", "c", "d") and story.ledger[0].reason == "d is level"
    story.show_ledger()
    story.deliver(lost=("b",))
    assert story.acknowledged() == ["u1", "u2", "u3", "u4"]
    assert story["d"].copy.end == story["a"].copy.end


def test_a_slice_moves_by_adding_handing_over_and_removing() -> None:
    story = led(outside=("d",))
    story.push("a", 1, "x")
    story.deliver()
    for wish in (AddReplica("d"), HandOver("d")):
        story.happens("a", wish)
        story.deliver()
        story.show_ledger()
        story.pass_time(0.2)
    assert story.ledger[0].primary == "d" and story["d"].leading is not None and story["a"].leading is None
    story.happens("d", RemoveReplica("a"))
    story.deliver()
    story.show_ledger()
    assert story.ledger[0].replicas == ("b", "c", "d") and story.heard(Retire, "a") == [Retire("a is removed")]
    story.deliver(lost=("a",))
    story.push("d", 2, "y")
    story.deliver(lost=("a",))
    assert story.acknowledged() == ["x", "y"] and story.state["d"] == ["x", "y"]


def test_while_it_is_handed_over_a_slice_takes_no_updates_until_the_ledger_decides() -> None:
    story = led()
    story.happens("a", HandOver("b"))
    story.push("a", 1, "x")
    assert story.refusals() == ["the primary is being handed over"]
    assert isinstance(story.read("a"), RefuseRead)
    leading = story["a"].leading
    assert leading is not None and leading.is_frozen
    story.pass_time(5.0)
    assert leading.is_frozen, "the proposal may still be carried out, however late"


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (AddReplica("b"), "b is a replica already"),
        (RemoveReplica("z"), "z is no replica"),
        (RemoveReplica("a"), "it is the primary itself, which is handed over first"),
        (HandOver("a"), "it is the primary itself"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(wish: AddReplica | RemoveReplica | HandOver, reason: str) -> None:
    story = led()
    story.happens("a", wish)
    assert story.decisions("a")[-1] == f"no: {type(wish).__name__} {wish.server}: {reason}"


def test_a_change_that_does_not_get_on_is_given_up() -> None:
    story = led(rules=Rules(change_timeout_s=1.0))
    story.happens("a", AddReplica("nobody"))
    story.happens("a", RemoveReplica("c"))
    assert story.decisions("a")[-1] == "no: RemoveReplica c: AddReplica nobody is under way"
    story.pass_time(1.2)
    assert story.decisions("a")[-1] == "given up: AddReplica nobody: it was not level in time"


# ---- snapshots


def test_the_log_is_cut_only_when_the_snapshot_is_held() -> None:
    story = Story("a", rules=Rules(snapshot_every=3, kept_behind=1))
    machine = story["a"]
    story._perform = lambda name, effect: None  # type: ignore[method-assign]
    machine.copy.stored(1)
    for sequence in (1, 2, 3):
        story.push("a", sequence, f"u{sequence}")
        machine.copy.stored(sequence + 1)
    story.happens("a", AddReplica("a"))
    (asked,) = story.heard(TakeSnapshot)
    assert machine.copy.tail.base.index == 0 and not story.heard(DropPrefix)
    machine.copy.snapshot_taken(asked.snapshot)
    assert machine.copy.tail.base.index == asked.snapshot.end.index - 1


def test_a_replica_that_is_far_behind_gets_the_snapshot_and_goes_on_from_there() -> None:
    story = led(rules=Rules(snapshot_every=4, kept_behind=0))
    for sequence in range(1, 8):
        story.push("a", sequence, f"u{sequence}")
        story.deliver(lost=("c",))
    assert story["a"].copy.tail.base.index > 0
    story.pass_time(0.5)
    assert story["c"].copy.committed == story["a"].copy.committed
    assert story["c"].copy.table.export() == story["a"].copy.table.export(), "the table comes with the snapshot"


def test_a_log_with_a_hole_before_it_is_damage() -> None:
    stored = Stored(Snapshot(LogEnd(1, 3)), (Entry(1, 5, Opened("a")),))
    with pytest.raises(IntegrityError, match="begins at entry 5 and the snapshot ends at 3"):
        ReplicaMachine("a", DURABLE, now=0.0, stored=stored)


def test_a_log_that_the_snapshot_has_replaced_is_let_go() -> None:
    old = tuple(Entry(1, index, Opened("a")) for index in range(1, 8))
    machine = ReplicaMachine("b", DURABLE, now=0.0, stored=Stored(Snapshot(LogEnd(2, 5)), old))
    assert machine.copy.end == LogEnd(2, 5)


# ---- a ledger that does not answer


def test_without_the_ledger_nobody_seals_the_epoch_of_a_primary_that_may_come_back() -> None:
    story = led()
    for name in story.machines:
        story.happens(name, LedgerReached(False))
    story.pass_time(3.0, lost=("a",))
    assert not story.heard(Propose), "nobody could take it"
    story.push("a", 1, "x")
    story.pass_time(0.5)
    assert story.acknowledged() == ["x"] and story.ledger[0].epoch == 1
    for name in story.machines:
        story.happens(name, LedgerReached(True))
    story.pass_time(3.0, lost=("a",))
    assert story.ledger[0].epoch == 2 and story.ledger[0].primary != "a"


# ---- what is left over


def test_one_that_is_no_replica_and_that_nobody_adds_has_nothing_to_keep() -> None:
    story = led(outside=("d",))
    machine = story["d"]
    assert not machine.is_left_over(story.now + 1.0), "it may be being added"
    assert machine.is_left_over(story.now + machine.rules.change_timeout_s + 1.0)
    assert not story["b"].is_left_over(story.now + 1e6), "a replica keeps what it has"
    story.happens("d", Heard("b", Seal(7, True)))
    assert not machine.is_left_over(story.now + 1e6), "an epoch that the ledger has not shown may have it"


# ---- disks that fail


def test_a_primary_that_cannot_store_resigns_and_nothing_is_lost() -> None:
    story = led(rules=DURABLE)
    story.push("a", 1, "x")
    (store,) = story.stores["a"]
    story.stores["a"].clear()
    story.happens("a", StoreFailed(store.ticket, "the disk is full"))
    assert story["a"].leading is None
    assert any(isinstance(message, Resigned) for _, _, message in story.letters)
    assert any("the disk is full" in reason for reason in story.refusals())
    for _ in range(4):
        story.deliver()
        for name in story.machines:
            story.sync(name)
    assert story.ledger[0].epoch == 2 and "cannot store" in story.ledger[0].reason


def test_a_replica_that_cannot_store_confirms_nothing_and_catches_up_later() -> None:
    story = led(rules=DURABLE)
    story.push("a", 1, "x")
    story.sync("a")
    story.deliver()
    (store,) = story.stores["c"]
    story.stores["c"].clear()
    story.happens("c", StoreFailed(store.ticket, "the disk is full"))
    story.sync("b")
    story.deliver()
    assert story.acknowledged() == ["x"]
    for _ in range(30):
        story.pass_time(0.05)
        for name in story.machines:
            story.sync(name)
    assert story["c"].copy.persisted == story["a"].copy.end.index


def test_a_confirmation_never_names_what_is_not_stored() -> None:
    story = led(rules=DURABLE)
    story.push("a", 1, "x")
    story.push("a", 2, "y")
    story.deliver()
    confirmed = [effect.message.matched for effect in story.heard(Send, "b") if isinstance(effect.message, Appended)]
    assert max(confirmed) == 1 == story["b"].copy.persisted
    assert Update("w0", 1, 2, "y") in [entry.content for entry in story["b"].copy.tail.after(0)]


# ---- what is under way


@pytest.mark.parametrize("kept_behind_bytes", [1 << 40, 50])
def test_one_that_confirms_nothing_is_sent_no_more_than_the_bound(kept_behind_bytes: int) -> None:
    """Also where the entries are cut off from the log as soon as a majority has them."""
    rules = Rules(snapshot_bytes=50, kept_behind_bytes=kept_behind_bytes, under_way_bytes_max=300)
    story = led(rules=rules)
    before = len(sent_to(story, "c"))
    for sequence in range(1, 21):
        story.push_bytes("a", sequence, 100)
        story.deliver(lost=("c",))
    assert len(story.acknowledged()) == 20, "a majority lives"
    assert len(sent_to(story, "c")) - before == 3
    story.pass_time(1.0)
    assert story.state["c"] == story.state["a"], "and it comes after them once it is heard"


def test_what_is_confirmed_makes_room_for_more() -> None:
    story = led(rules=Rules(snapshot_bytes=50, kept_behind_bytes=50, under_way_bytes_max=100))
    for sequence in range(1, 11):
        story.push_bytes("a", sequence, 100)
    story.deliver()
    assert len(story.acknowledged()) == 10


# ---- before the epoch is established


def test_nothing_new_enters_the_log_before_the_epoch_is_established() -> None:
    """The state that it would be checked against may lack what the last epoch has left."""
    story = led()
    story.push("a", 1, "x")
    story.deliver(lost=("c",))
    story.pass_time(2.0, lost=("a",))
    story.show_ledger("b")
    leading = story["b"].leading
    assert leading is not None and not leading.is_established
    end = story["b"].copy.end
    story.push("b", 2, "y")
    assert story["b"].copy.end == end
    assert story.refusals()[-1] == f"epoch {story['b'].epoch} is not established yet"
    story.push("b", 1, "x")  # it is in the log, and was checked
    story.deliver(lost=("a",))
    assert story.acknowledged() == ["x", "x"]
    story.push("b", 2, "y")
    story.deliver(lost=("a",))
    assert story.acknowledged() == ["x", "x", "y"]
