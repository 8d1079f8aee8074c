"""Workers on several hosts, which share memory within one and loopback TCP between them: deaths and joiners, exact."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
from cases import CASES, Case, dataset, sgd
from test_workers import BATCH, SHARDS, die, let_in, wait_for_file
from torch import nn

import holdfast
from holdfast.core.errors import EXIT_EVICTED
from holdfast.core.words import host_of
from holdfast.engine.worker import Worker
from holdfast.membership import messages as m
from holdfast.membership.codec import decode
from holdfast.net.framing import LENGTH
from holdfast.net.groups import Group
from holdfast.placement.environment import variable
from holdfast.reduce.hosts import Hosts
from holdfast.reduce.network import Network
from holdfast.reduce.shared_memory import SharedMemory
from holdfast.trust.keys import create_keys
from tests.harness.forked import Outcome, agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

WIDE = 300
LARGE = Case(  # more than 256 KiB: leaders exchange slices of it
    lambda: sgd(
        nn.Sequential(
            *(nn.Linear(6, WIDE), nn.BatchNorm1d(WIDE), nn.ReLU()),
            *(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 4)),
        )
    )
)
SMALL = CASES["batch norm"]
TWO_HOSTS = ("w0.1@a", "w1.1@a", "w0.1@b", "w1.1@b")
AtStep = Callable[[holdfast.Run, int, int], None]


def train(case: Case, at_step: AtStep | None = None) -> Any:
    """Train in a worker of a run; `at_step(run, step, shard)` is called after each shard, and with -1 before them."""
    training = case.start()
    run = holdfast.join(
        training.model, training.optimizer, dataset(), batch_size=BATCH, shards=SHARDS, seed=reference.SEED
    )
    for step in run.steps(case.steps):
        case.before(training, step.number)
        if at_step:
            at_step(run, step.number, -1)
        for number, batch in enumerate(step):
            step.record(loss=case.shard(training, batch, step.number))
            if at_step:
                at_step(run, step.number, number)
        case.apply(training, step.number)
    run.close()
    return reference.state_of(training)


def expected(case: Case) -> Any:
    training, _ = reference.train(case, shards=SHARDS, batch=BATCH)
    return reference.state_of(training)


def leads(me: str, members: Sequence[str]) -> bool:
    return me == next(member for member in members if host_of(member) == host_of(me))


def die_once(mark: Path) -> None:
    """The first to come here dies: its successor as a leader will pass by, too."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    die()


def killed(outcomes: dict[str, Outcome]) -> list[str]:
    return [worker for worker, outcome in outcomes.items() if outcome.signal == signal.SIGKILL]


@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (3,), (1, 1, 1), (3, 1, 2)], ids=str)
def test_hosts_change_no_bit(counts: tuple[int, ...], case: Case) -> None:
    def at_step(run: holdfast.Run, step: int, shard: int) -> None:
        path = run._worker.gradients._path  # of the steps before
        assert step == 0 or isinstance(path, Hosts if len(counts) > 1 else SharedMemory)

    workers = [f"w{slot}.1@{'abc'[host]}" for host, count in enumerate(counts) for slot in range(count)]
    assert agreed(forked({worker: lambda: train(case, at_step) for worker in workers})) == expected(case)


@pytest.mark.parametrize("name", ["partly used", "bfloat16", "complex and float64", "buffers of all kinds", "groups"])
def test_hosts_change_no_bit_of_other_models(name: str) -> None:
    assert agreed(forked({worker: lambda: train(CASES[name]) for worker in TWO_HOSTS})) == expected(CASES[name])


@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
def test_encryption_changes_no_bit(case: Case, tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    outcomes = forked({worker: lambda: train(case) for worker in TWO_HOSTS}, keys=tmp_path / "keys")
    assert agreed(outcomes) == expected(case)


def test_all_over_connections_if_asked() -> None:
    def at_step(run: holdfast.Run, step: int, shard: int) -> None:
        assert step == 0 or isinstance(run._worker.gradients._path, Network)

    outcomes = forked({worker: lambda: train(LARGE, at_step) for worker in TWO_HOSTS}, path="network")
    assert agreed(outcomes) == expected(LARGE)


def test_workers_that_send_gradients_another_way_are_not_let_in() -> None:
    def other() -> Any:
        os.environ[variable("path")] = "network"
        return train(SMALL)

    outcomes = forked({"w0.1@a": lambda: train(SMALL), "w0.1@b": other}, size=1)
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    assert len(errors) == 1
    assert "this worker has gradients " in errors[0] and "but the run has gradients " in errors[0]


@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("leader", [True, False], ids=["leader", "follower"])
def test_a_death_while_computing_changes_no_bit(leader: bool, case: Case, tmp_path: Path) -> None:
    def at_step(run: holdfast.Run, step: int, shard: int) -> None:
        if step == 2 and shard == 0 and host_of(run.id) == "a" and leads(run.id, run.workers) == leader:
            die_once(tmp_path / "gone")

    outcomes = forked({worker: lambda: train(case, at_step) for worker in TWO_HOSTS})
    assert [host_of(worker) for worker in killed(outcomes)] == ["a"]
    assert agreed(outcomes) == expected(case)


@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("number", [3, 4, 5])
def test_a_leader_that_dies_while_it_exchanges_changes_no_bit(number: int, case: Case, tmp_path: Path) -> None:
    """Only leaders move bulk data: this one dies before one of the exchanges of its second step or later."""

    def body() -> Any:
        exchange, count = Group.exchange, 0

        def exchange_or_die(group: Group, *arguments: Any, **options: Any) -> None:
            nonlocal count
            if count == number:
                die_once(tmp_path / "gone")
            count += 1
            exchange(group, *arguments, **options)

        Group.exchange = exchange_or_die  # type: ignore[method-assign]
        return train(case)

    mortal = {worker: body for worker in TWO_HOSTS if host_of(worker) == "b"}
    outcomes = forked({worker: lambda: train(case) for worker in TWO_HOSTS} | mortal)
    assert [host_of(worker) for worker in killed(outcomes)] == ["b"]
    assert agreed(outcomes) == expected(case)


def with_last_word(case: Case, gone: Path, on_give: Callable[[Worker, m.Give], None]) -> Any:
    """The last word of host a's leader reaches its neighbour only, which applies the step; the other host does not."""
    broadcast, give = Group.broadcast, Worker._give

    def last_word(group: Group, data: bytes, *, keep: bool = False) -> Any:
        message, _ = decode(data[LENGTH.size :])
        if message == m.Done(3) and host_of(group.me) == "a" and leads(group.me, group.view.members):
            neighbour = next(peer for peer in group.connections if host_of(peer) == "a")
            group.send(neighbour, data)
            die_once(gone)
        return broadcast(group, data, keep=keep)

    def watched_give(worker: Worker, effect: m.Give) -> None:
        on_give(worker, effect)
        give(worker, effect)

    Group.broadcast = last_word  # type: ignore[method-assign]
    Worker._EFFECTS[m.Give] = watched_give
    return train(case)


@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
def test_a_mean_in_a_dead_leaders_memory_is_given_to_those_that_lack_it(case: Case, tmp_path: Path) -> None:
    def note(worker: Worker, effect: m.Give) -> None:
        (tmp_path / f"{effect.step} from {worker.machine.me} to {effect.to}").touch()

    outcomes = forked(dict.fromkeys(TWO_HOSTS, lambda: with_last_word(case, tmp_path / "gone", note)))
    (dead,) = killed(outcomes)
    (neighbour,) = {"w0.1@a", "w1.1@a"} - {dead}
    given = {path.name for path in tmp_path.iterdir()} - {"gone"}
    assert given == {f"3 from {neighbour} to w0.1@b", f"3 from {neighbour} to w1.1@b"}
    assert agreed(outcomes) == expected(case)


def test_a_mean_that_is_no_longer_whole_is_not_given(tmp_path: Path) -> None:
    """Its memory was used for a later step: who has it gives up its place, and the others do the step again."""

    def spoil(worker: Worker, effect: m.Give) -> None:
        assert worker.gradients.kept is not None
        worker.gradients.kept.memory.random_()
        worker.gradients.kept = replace(worker.gradients.kept, is_intact=lambda: False)

    outcomes = forked(dict.fromkeys(TWO_HOSTS, lambda: with_last_word(LARGE, tmp_path / "gone", spoil)))
    (dead,) = killed(outcomes)
    (neighbour,) = {"w0.1@a", "w1.1@a"} - {dead}
    evicted = outcomes.pop(neighbour)
    assert evicted.code == EXIT_EVICTED and "no longer whole" in evicted.value
    assert agreed(outcomes) == expected(LARGE)


@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("host", ["a", "b", "c"], ids=["on the dead one's", "on another", "on a new host"])
def test_a_death_and_a_joiner_change_no_bit(host: str, case: Case, tmp_path: Path) -> None:
    gone, joined = tmp_path / "gone", tmp_path / "joined"
    spare = f"w2.1@{host}"

    def at_step(run: holdfast.Run, step: int, shard: int) -> None:
        if step == 1 and shard == 0 and host_of(run.id) == "a" and leads(run.id, run.workers):
            die_once(gone)
        if step >= 2 and shard == -1:
            let_in(spare, joined)

    def late() -> Any:
        wait_for_file(gone)
        return train(case, lambda run, step, shard: joined.touch())

    outcomes = forked({worker: lambda: train(case, at_step) for worker in TWO_HOSTS} | {spare: late}, size=4)
    assert len(killed(outcomes)) == 1
    assert agreed(outcomes) == expected(case)
    assert joined.exists()


def test_a_host_that_is_gone_leaves_the_others_without_a_network(tmp_path: Path) -> None:
    """Then all members are on one host again, in a run that counts on two rounds."""

    def at_step(run: holdfast.Run, step: int, shard: int) -> None:
        if step == 2 and shard == 0 and host_of(run.id) == "b":
            die()

    outcomes = forked({worker: lambda: train(SMALL, at_step) for worker in TWO_HOSTS})
    assert sorted(killed(outcomes)) == ["w0.1@b", "w1.1@b"]
    assert agreed(outcomes) == expected(SMALL)
