"""The ledger on etcd while members die, stop and come back, and while answers are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.core.errors import LedgerRefused, LedgerUnavailable, WatchGap
from holdfast.ledger.etcd.endpoints import KEEP_ALIVE_TRY_S, TRY_S
from holdfast.ledger.etcd.ledger import EtcdLedger
from holdfast.ledger.etcd.watch import EtcdWatch
from holdfast.ledger.port import Change, Watch
from tests.harness import etcd_faults

from .contract import WAIT_S, collect, count
from .etcd_serving import EtcdFactory, Relay, all_serving, compact, fresh_run, until

pytestmark = [pytest.mark.xdist_group("etcd"), pytest.mark.processes]

APPLIED = "etcd_server_proposals_applied_total"
BACK_S = 3.0  # from when etcd serves again until a client does, on a busy machine; about 0.5 s on a quiet one


@pytest.fixture
def cluster(three_members: EtcdCluster) -> Iterator[EtcdCluster]:
    with all_serving(three_members):
        yield three_members


@pytest.fixture
def factory(cluster: EtcdCluster) -> EtcdFactory:
    return EtcdFactory(cluster.url)


@pytest.fixture
def ledger(factory: EtcdFactory) -> Iterator[EtcdLedger]:
    with closing(factory.open()) as ledger:
        yield ledger


@pytest.fixture
def relay(one_member: EtcdCluster) -> Iterator[Relay]:
    relay = Relay(one_member.address(0))
    yield relay
    relay.close()


def patiently(watch: Watch, number: int) -> list[Change]:
    """So many changes from a watch whose ledger may be away for a while."""
    changes: list[Change] = []
    deadline = time.monotonic() + 2 * WAIT_S
    while len(changes) < number:
        assert time.monotonic() < deadline, f"only {len(changes)} of {number} changes came"
        try:
            changes += watch.next(1.0)
        except LedgerUnavailable:
            continue
    return changes


@contextmanager
def afterwards(action: Callable[[], None]) -> Iterator[None]:
    """Also if the test fails in between: threads that are not told to stop would keep it from ending."""
    try:
        yield
    finally:
        action()


def settled(watch: EtcdWatch) -> None:
    """Wait until its stream is up."""
    until(lambda: watch._endpoint is not None, "the watch has a stream")


def serving(watch: EtcdWatch, cluster: EtcdCluster) -> int:
    """Which member serves the watch."""
    settled(watch)
    endpoint = watch._endpoint
    assert endpoint is not None
    return [cluster.address(index) for index in range(3)].index(str(endpoint.address))


# -- the leader dies


def test_a_lease_is_kept_alive_while_the_leader_dies(cluster: EtcdCluster, ledger: EtcdLedger) -> None:
    lease = ledger.grant(2.0)
    revision = ledger.put("worker/a", b"", lease=lease)
    with closing(ledger.watch("worker/", revision=revision)) as watch:
        cluster.kill(etcd_faults.leader(cluster))
        for _ in range(8):  # twice its time to live
            assert ledger.keep_alive(lease) >= 2.0
            try:
                assert watch.next(0.5) == ()
            except LedgerUnavailable:
                pass
        assert ledger.get("worker/a") is not None
        ledger.revoke(lease)
        assert [change.kind for change in patiently(watch, 1)] == ["delete"]


def test_calls_wait_out_an_election(cluster: EtcdCluster, ledger: EtcdLedger) -> None:
    """Whichever member a client is at: none is told that the ledger is away."""
    first = ledger.put("a", b"0")
    cluster.kill(etcd_faults.leader(cluster))
    start = time.monotonic()
    second = ledger.compare_and_set("a", b"1", expected=first)
    took_s = time.monotonic() - start
    assert second is not None
    entry = ledger.get("a")
    assert entry is not None and (entry.value, entry.revision) == (b"1", second)
    assert ledger.delete("a") is True
    assert took_s < 5.0  # an election takes about one second here


def test_a_watch_goes_on_over_dying_leaders(cluster: EtcdCluster, factory: EtcdFactory, ledger: EtcdLedger) -> None:
    """Every change once and in order, while two leaders die under continuous writes."""
    start = ledger.put("start", b"")
    stop = threading.Event()

    def write(writer: int) -> list[int]:
        revisions = []
        with closing(factory.open()) as mine:
            while not stop.is_set():
                revisions.append(mine.put(f"w/{writer}", b"%d" % len(revisions)))
        return revisions

    with ExitStack() as stack:
        watches = [stack.enter_context(closing(ledger.watch("w/", revision=start))) for _ in range(3)]
        with ThreadPoolExecutor(5) as pool, afterwards(stop.set):
            written = [pool.submit(write, writer) for writer in range(2)]
            for _ in range(2):
                old = etcd_faults.leader(cluster)
                cluster.kill(old)
                before = ledger.put("still writable", b"")
                cluster.restart(old)
                until(lambda after=before: ledger.read("w/").revision > after + 20, "writers go on")
            stop.set()
            revisions = sorted(revision for future in written for revision in future.result(WAIT_S))
            assert len(revisions) == len(set(revisions)) > 40
            seen = [pool.submit(patiently, watch, len(revisions)) for watch in watches]
            for future in seen:
                assert [change.revision for change in future.result(3 * WAIT_S)] == revisions


def test_every_outcome_that_is_told_is_true(cluster: EtcdCluster, factory: EtcdFactory, ledger: EtcdLedger) -> None:
    """Racing compare-and-sets while the leader dies: who is told yes has won, once; who is told no has not."""
    start = ledger.put("view", b"start")
    stop = threading.Event()
    deadline_s = 1.2  # short, so that some outcomes stay unknown
    expected: dict[bytes, int] = {}

    def race(racer: int) -> dict[bytes, int | str | None]:
        outcomes: dict[bytes, int | str | None] = {}
        with closing(factory.open(deadline_s=deadline_s)) as mine:
            while not stop.is_set():
                value = b"%d.%d" % (racer, len(outcomes))
                try:
                    entry = mine.get("view")
                    assert entry is not None
                    expected[value] = entry.revision
                    outcomes[value] = mine.compare_and_set("view", value, expected=entry.revision)
                except LedgerUnavailable:
                    outcomes[value] = "unknown"
        return outcomes

    with ThreadPoolExecutor(4) as pool, afterwards(stop.set):
        racing = [pool.submit(race, racer) for racer in range(4)]
        for _ in range(2):
            old = etcd_faults.leader(cluster)
            cluster.kill(old)
            ledger.put("still writable", b"")
            cluster.restart(old)
        stop.set()
        outcomes = {value: outcome for future in racing for value, outcome in future.result(WAIT_S).items()}
    end = ledger.put("view", b"end")
    with closing(ledger.watch("view", revision=start)) as watch:
        changes = collect(watch, lambda changes: bool(changes) and changes[-1].revision == end)[:-1]
    happened = {change.value: change.revision for change in changes}
    assert len(happened) == len(changes), "a write happened twice"
    assert len(happened) > 20
    for value, outcome in outcomes.items():
        if outcome is None:
            assert value not in happened
        elif outcome != "unknown":
            assert happened[value] == outcome
    assert all(value in outcomes for value in happened)
    for before, after in pairwise([start, *happened.values()]):
        (value,) = (value for value, revision in happened.items() if revision == after)
        assert expected[value] == before, "a write happened although another had come before it"


# -- members stop, and come back


def test_a_stopped_member_is_left(cluster: EtcdCluster, ledger: EtcdLedger) -> None:
    revision = ledger.put("w/a", b"0")
    with closing(ledger.watch("w/", revision=revision)) as watch:
        member = serving(watch, cluster)
        etcd_faults.freeze(cluster, member)
        start = time.monotonic()
        revision = ledger.put("w/a", b"1")
        assert time.monotonic() - start < 3.5  # one try, or an election too if it was the leader
        assert patiently(watch, 1) == [Change("put", "w/a", b"1", revision)]
        assert serving(watch, cluster) != member


def test_keeping_a_lease_alive_is_not_held_up_by_a_stopped_member(cluster: EtcdCluster, factory: EtcdFactory) -> None:
    """Workers renew leases of two seconds twice a second, from the thread that does everything else too."""
    follower = etcd_faults.followers(cluster)[0]
    with closing(factory.open()) as ledger:
        lease = ledger.grant(2.0)
        ledger._endpoints._current = follower
        assert ledger.keep_alive(lease) >= 2.0
        etcd_faults.freeze(cluster, follower)
        start = time.monotonic()
        assert ledger.keep_alive(lease) >= 2.0
        assert time.monotonic() - start < 1.0
        start = time.monotonic()
        assert ledger.keep_alive(lease) >= 2.0
        assert time.monotonic() - start < KEEP_ALIVE_TRY_S, "it asked the stopped one again"
        ledger.revoke(lease)


def test_a_silent_watch_leaves_a_stopped_member_by_itself(cluster: EtcdCluster, factory: EtcdFactory) -> None:
    """Nothing else asks through this client, so the watch itself must find out."""
    with ExitStack() as stack:
        mine, other = (stack.enter_context(closing(factory.open())) for _ in range(2))
        watch = stack.enter_context(closing(mine.watch("w/", revision=other.put("w/a", b"0"))))
        member = serving(watch, cluster)
        etcd_faults.freeze(cluster, member)
        start = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(patiently, watch, 1)
            until(lambda: watch._endpoint is None or serving(watch, cluster) != member, "it left")
            assert time.monotonic() - start < 3.0
            revision = other.put("w/a", b"1")
            assert waiting.result(WAIT_S) == [Change("put", "w/a", b"1", revision)]


def test_without_a_majority_it_says_so_in_time(cluster: EtcdCluster, factory: EtcdFactory) -> None:
    with closing(factory.open(deadline_s=1.5)) as ledger:
        revision = ledger.put("a", b"0")
        with closing(ledger.watch("", revision=revision)) as watch:
            settled(watch)
            for member in (0, 1):
                etcd_faults.freeze(cluster, member)
            start = time.monotonic()
            with pytest.raises(LedgerUnavailable, match="does not answer"):
                ledger.get("a")
            with pytest.raises(LedgerUnavailable, match="may or may not have happened"):
                ledger.put("a", b"1")
            assert 1.5 <= time.monotonic() - start < 4.5
            with pytest.raises(LedgerUnavailable):
                for _ in range(20):
                    watch.next(0.2)
            for member in (0, 1):
                etcd_faults.thaw(cluster, member)
            cluster.wait_serving()
            until(lambda: answers(ledger), "the client is back", BACK_S)
            revision = ledger.put("a", b"2")
            assert patiently(watch, 1)[-1].value in (b"1", b"2")


def answers(ledger: EtcdLedger) -> bool:
    try:
        ledger.get("a")
    except LedgerUnavailable:
        return False
    return True


def test_all_members_down_and_back(cluster: EtcdCluster, factory: EtcdFactory) -> None:
    """What was acknowledged is there afterwards, clients are back soon, and the watch has missed nothing."""
    with closing(factory.open(deadline_s=1.0)) as ledger:
        revision = ledger.put("a", b"0")
        with closing(ledger.watch("", revision=revision)) as watch:
            settled(watch)
            for member in range(3):
                cluster.kill(member)
            down = time.monotonic()
            while time.monotonic() - down < 4.0:  # long enough for grpc to wait long between its attempts
                with pytest.raises(LedgerUnavailable, match="connection refused"):
                    ledger.get("a")
                with pytest.raises(LedgerUnavailable):
                    watch.next(0.1)
            for member in range(3):
                cluster.restart(member, wait_s=0)
            cluster.wait_serving()
            start = time.monotonic()
            until(lambda: answers(ledger), "the client is back", BACK_S)
            revision = ledger.put("b", b"1")
            assert patiently(watch, 1) == [Change("put", "b", b"1", revision)]
            assert time.monotonic() - start < BACK_S
            entry = ledger.get("a")
            assert entry is not None and entry.value == b"0"


# -- answers are lost


def test_a_write_whose_answer_is_lost_happens_once_and_is_told(one_member: EtcdCluster, relay: Relay) -> None:
    run = fresh_run()
    with (
        closing(EtcdFactory(f"etcd://{relay.address}", run).open()) as ledger,
        closing(EtcdFactory(one_member.url, run).open()) as direct,
        ThreadPoolExecutor(1) as pool,
    ):
        start = ledger.put("a", b"0")

        def while_muted(call: object, arrived: object) -> object:
            relay.mute = True
            future = pool.submit(call)  # type: ignore[arg-type]
            until(arrived, "the request arrived")  # type: ignore[arg-type]
            relay.cut()
            relay.mute = False
            return future.result(WAIT_S)

        def value(key: str) -> bytes | None:
            entry = direct.get(key)
            return entry.value if entry else None

        put = while_muted(lambda: ledger.put("a", b"1"), lambda: value("a") == b"1")
        assert isinstance(put, int)
        won = while_muted(lambda: ledger.compare_and_set("a", b"2", expected=put), lambda: value("a") == b"2")
        assert isinstance(won, int) and won > put
        created = while_muted(lambda: ledger.compare_and_set("b", b"3", expected=0), lambda: value("b") == b"3")
        deleted = while_muted(lambda: ledger.delete("b"), lambda: value("b") is None)
        assert deleted is True
        assert relay.swallowed > 0
        with closing(direct.watch("", revision=start)) as watch:
            assert [(c.kind, c.key, c.value) for c in collect(watch, count(4))] == [
                ("put", "a", b"1"),
                ("put", "a", b"2"),
                ("put", "b", b"3"),
                ("delete", "b", b""),
            ]
            assert watch.next(0.1) == ()
        entry = direct.get("a")
        assert entry is not None and entry.revision == won
        assert isinstance(created, int)


def test_a_write_that_was_given_up_does_not_come_back(one_member: EtcdCluster, relay: Relay) -> None:
    """A stopped etcd has the request in its socket and may act on it when it wakes: before the next, or never."""
    run = fresh_run()
    with closing(EtcdFactory(one_member.url, run).open(deadline_s=0.5)) as ledger:
        start = ledger.put("a", b"start")
        told: list[bytes] = []
        for round_ in range(3):
            etcd_faults.freeze(one_member, 0)
            with pytest.raises(LedgerUnavailable, match="may or may not"):
                ledger.put("a", b"given up %d" % round_)
            etcd_faults.thaw(one_member, 0)
            one_member.wait_serving()
            until(lambda: answers(ledger), "the client is back", BACK_S)
            told.append(b"told %d" % round_)
            ledger.put("a", told[-1])
        end = ledger.put("a", b"end")
        with closing(ledger.watch("a", revision=start)) as watch:
            values = [c.value for c in collect(watch, lambda changes: bool(changes) and changes[-1].revision == end)]
    assert len(set(values)) == len(values), "a write happened twice"
    assert [value for value in values if value.startswith(b"told")] == told
    for round_ in range(3):
        late = b"given up %d" % round_
        assert late not in values or values.index(late) < values.index(told[round_])


def test_a_write_that_was_given_up_and_had_happened_is_not_taken_for_the_next(
    one_member: EtcdCluster, relay: Relay
) -> None:
    run = fresh_run()
    with (
        closing(EtcdFactory(f"etcd://{relay.address}", run).open(deadline_s=1.0)) as ledger,
        closing(EtcdFactory(one_member.url, run).open()) as direct,
    ):
        ledger.put("a", b"0")
        relay.mute = True
        with pytest.raises(LedgerUnavailable, match="may or may not"):
            ledger.put("a", b"given up")
        entry = direct.get("a")
        assert entry is not None and entry.value == b"given up"
        relay.cut()
        relay.mute = False
        until(lambda: answers(ledger), "the client is back", BACK_S)
        assert ledger.compare_and_set("a", b"x", expected=0) is None
        won = ledger.compare_and_set("a", b"1", expected=entry.revision)
        entry = direct.get("a")
        assert entry is not None and (entry.value, entry.revision) == (b"1", won)


def test_a_no_stays_a_no(one_member: EtcdCluster, relay: Relay) -> None:
    """A request that was overtaken by its own second try must not find the condition true when it arrives at last."""
    run = fresh_run()
    with (
        closing(EtcdFactory(f"etcd://{relay.address},{one_member.address(0)}", run).open()) as ledger,
        closing(EtcdFactory(one_member.url, run).open()) as direct,
    ):
        ledger._endpoints._current = 0
        for told_no in (
            lambda: ledger.compare_and_set("a", b"mine", expected=0) is None,
            lambda: ledger.compare_and_set("c", b"mine", expected=0, while_at=("a", 0)) is None,
            lambda: ledger.delete("b") is False,
        ):
            direct.put("a", b"theirs")
            direct.delete("b")
            ledger._endpoints._current = 0
            ledger.put("warm", b"")  # so that what is held is the request alone
            relay.hold = True
            assert told_no()
            assert ledger._endpoints._current == 1, "the relay was not asked"
            direct.delete("a")
            direct.put("b", b"theirs")
            before = etcd_faults.metrics(one_member.members[0])[APPLIED]
            relay.release(TRY_S / 2)
            relay.hold = False
            until(
                lambda before=before: etcd_faults.metrics(one_member.members[0])[APPLIED] > before,
                "the late request arrived",
            )
            relay.cut()
            assert {entry.key: entry.value for entry in direct.read("").entries} == {"b": b"theirs", "warm": b""}


def test_a_lease_whose_grant_was_lost_is_granted_once(one_member: EtcdCluster, relay: Relay) -> None:
    with closing(EtcdFactory(f"etcd://{relay.address}").open()) as ledger, ThreadPoolExecutor(1) as pool:
        ledger.put("a", b"")
        before = etcd_faults.metrics(one_member.members[0])["etcd_debugging_lease_granted_total"]
        relay.mute = True
        granting = pool.submit(ledger.grant, 60.0)
        metric = "etcd_debugging_lease_granted_total"
        until(lambda: etcd_faults.metrics(one_member.members[0])[metric] > before, "the request arrived")
        relay.cut()
        relay.mute = False
        lease = granting.result(WAIT_S)
        assert etcd_faults.metrics(one_member.members[0])[metric] == before + 1
        assert ledger.keep_alive(lease) >= 60.0
        ledger.revoke(lease)


# -- what is no longer kept


def test_compaction_makes_a_gap(one_member: EtcdCluster) -> None:
    with closing(EtcdFactory(one_member.url).open()) as ledger:
        start = ledger.put("a", b"0")
        last = [ledger.put("a", b"%d" % index) for index in range(5)][-1]
        with closing(ledger.watch("", revision=last)) as unharmed:
            assert unharmed.next(0.1) == ()
            compact(one_member, last)
            with closing(ledger.watch("", revision=start)) as watch:
                with pytest.raises(WatchGap, match=f"after revision {start} are asked for"):
                    watch.next(WAIT_S)
                with pytest.raises(WatchGap):
                    watch.next(0.0)
            revision = ledger.put("a", b"after")
            assert collect(unharmed, count(1)) == [Change("put", "a", b"after", revision)]
        reading = ledger.read("")
        with closing(ledger.watch("", revision=reading.revision)) as watch:
            ledger.delete("a")
            assert [change.kind for change in collect(watch, count(1))] == ["delete"]


def test_a_reading_in_pages_survives_compaction(one_member: EtcdCluster) -> None:
    """More keys than a page has; between pages the revision of the first is compacted away."""
    stop = threading.Event()
    with (
        closing(EtcdFactory(one_member.url).open()) as ledger,
        ThreadPoolExecutor(1) as pool,
        afterwards(stop.set),
    ):
        for index in range(600):
            ledger.put(f"many/{index:03}", b"")

        def compact_again_and_again() -> int:
            rounds = 0
            with closing(EtcdFactory(one_member.url).open()) as other:
                while not stop.is_set():
                    compact(one_member, other.put("other", b""))
                    rounds += 1
            return rounds

        compacting = pool.submit(compact_again_and_again)
        for _ in range(20):
            assert len(ledger.read("many/").entries) == 600
        stop.set()
        assert compacting.result(WAIT_S) > 0


def test_a_revision_that_was_never_reached_is_a_gap(one_member: EtcdCluster) -> None:
    with closing(EtcdFactory(one_member.url).open()) as ledger:
        last = ledger.put("a", b"")
        with closing(ledger.watch("", revision=last + 1000)) as watch, pytest.raises(WatchGap, match="only reached"):
            watch.next(WAIT_S)


# -- two clusters in one URL


def test_endpoints_of_two_clusters_are_refused(cluster: EtcdCluster, one_member: EtcdCluster) -> None:
    """Two majorities would be two ledgers."""
    leader, other = cluster.address(0), one_member.address(0)
    with closing(EtcdFactory(f"etcd://{leader},{other}").open(deadline_s=2.0)) as ledger:
        ledger.put("a", b"")
        first = str(ledger._endpoints.current().address)
        etcd_faults.freeze(cluster if first == leader else one_member, 0)
        try:
            with pytest.raises(LedgerRefused, match="another etcd cluster"):
                ledger.get("a")
        finally:
            etcd_faults.thaw(one_member, 0)
            etcd_faults.thaw(cluster, 0)
