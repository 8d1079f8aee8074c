"""Stories about several hosts and their ledger, told to the simulator one fault at a time, on many seeds."""

from __future__ import annotations

import pytest

from holdfast.core.words import KEY_VIEW, View, host_of
from tests.harness.simulator import Schedule, World, simulate
from tests.harness.simulator.network import Network
from tests.harness.simulator.worker import Worker

SEEDS = range(8)
HOSTS = ("alpha", "beta", "gamma")


def fleet(seed: int, *, workers: int = 6, hosts: int = 3, steps: int = 200, **options: bool) -> World:
    return World(
        Schedule(seed=seed, workers=workers, hosts=hosts, shards=6, steps=steps, faults=0, two_rounds=False, **options)
    )


def cut_off(name: str, *, one_way: bool = False) -> list[tuple[str, str]]:
    others = [other for other in HOSTS if other != name]
    out = [(name, other) for other in others]
    return out if one_way else out + [(other, name) for other in others]


def during(world: World, start: float, stop: float, ways: list[tuple[str, str]]) -> None:
    def cut() -> None:
        world.books.disturbed()
        world.network.cut(ways)

    def heal() -> None:
        world.books.disturbed()
        world.network.heal(ways)

    world.after(start, cut)
    world.after(stop, heal)


def look(world: World, at: float, into: dict[str, object]) -> None:
    def note() -> None:
        into["view"] = world.ledger.entries[KEY_VIEW].value
        into["steps"] = world.steps_committed

    world.after(at, note)


def places(view: View) -> list[str]:
    return sorted(member.partition(".")[0] + "@" + host_of(member) for member in view.members)


def all_are_back(world: World, since: object) -> bool:
    """A later view has them all. (The very last ones do not: who is through first ends first.)"""
    assert isinstance(since, View)
    return any(places(view) == ALL for number, view in world.views.items() if number > since.number)


ALL = sorted(f"w{slot}@{host}" for host in HOSTS for slot in range(2))


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("name", HOSTS)
def test_the_larger_side_goes_on_and_the_other_comes_back_when_the_cut_is_healed(name: str, one_way: bool) -> None:
    """Whoever proposes, and though no lease runs out: both sides reach the ledger all the time."""
    for seed in SEEDS:
        world = fleet(seed, network=True)
        during(world, 5.0, 45.0, cut_off(name, one_way=one_way))
        before: dict[str, object] = {}
        after: dict[str, object] = {}
        look(world, 30.0, before)
        look(world, 44.9, after)
        world.run()
        view = after["view"]
        assert isinstance(view, View)
        assert {host_of(member) for member in view.members} == {*HOSTS} - {name}, (seed, view)
        assert len(view.members) == 4, (seed, view)
        assert isinstance(before["steps"], int) and isinstance(after["steps"], int)
        assert after["steps"] > before["steps"], seed
        assert all_are_back(world, view), (seed, world.views)
        assert all(worker.state == 200 for worker in world.workers.values() if worker.finished)


def test_one_of_two_hosts_goes_on_when_the_cut_never_heals() -> None:
    for seed in SEEDS:
        world = fleet(seed, workers=2, hosts=2, steps=60)
        during(world, 3.0, 10_000.0, [("alpha", "beta"), ("beta", "alpha")])
        world.run()
        assert world.done
        assert len(world.views) <= 4, (seed, world.views)  # the other does not break it again and again


def test_a_short_cut_costs_nobody_its_place() -> None:
    for seed in SEEDS:
        world = fleet(seed, steps=60)
        during(world, 5.0, 7.0, cut_off("beta"))
        world.run()
        assert len(world.workers) == 6, seed  # nobody was replaced


def test_a_link_that_flaps_does_not_stop_the_others() -> None:
    for seed in SEEDS:
        world = fleet(seed, steps=150)
        for beat in range(8):
            during(world, 5.0 + 10.0 * beat, 10.0 + 10.0 * beat, cut_off("gamma"))
        world.run()
        assert world.done
        assert len(world.views) <= 40, (seed, len(world.views))


@pytest.mark.parametrize("hosts", [1, 3])
def test_steps_go_on_while_the_ledger_is_away_and_a_death_is_dealt_with_when_it_is_back(hosts: int) -> None:
    for seed in SEEDS:
        world = fleet(seed, workers=6, hosts=hosts, steps=300)
        noted: dict[float, dict[str, object]] = {at: {} for at in (5.0, 30.0, 40.0, 64.0)}
        world.after(5.0, world.ledger.go_down)
        for at, into in noted.items():
            look(world, at, into)

        def die(world: World = world) -> None:
            worker = max(world.living(), key=lambda worker: worker.id)
            worker.agent.crash(worker)

        world.after(32.0, die)
        world.after(65.0, world.ledger.come_up)
        world.run()
        steps = [into["steps"] for into in noted.values()]
        assert steps[1] >= steps[0] + 5, (seed, steps)  # type: ignore[operator]
        assert steps[3] == steps[2], (seed, steps)  # without the ledger nobody can agree to go on without the dead
        assert world.done and any(len(view.members) == 6 for number, view in world.views.items() if number > 1)


def test_a_host_that_loses_power_is_done_without_and_comes_back() -> None:
    for seed in SEEDS:
        world = fleet(seed)
        world.after(5.0, lambda world=world: world.hosts[1].lose_power(20.0))  # type: ignore[misc]
        noted: dict[str, object] = {}
        look(world, 20.0, noted)
        world.run()
        view = noted["view"]
        assert isinstance(view, View) and {host_of(member) for member in view.members} == {"alpha", "gamma"}
        assert all_are_back(world, view), (seed, world.views)


@pytest.mark.parametrize("kind", ["partition", "isolate", "leader", "outage", "lease", "gap", "power"])
def test_many_faults_of_one_kind(kind: str) -> None:
    for seed in range(30):
        world = simulate(seed, hosts=3, workers=5, steps=25, faults=8, fault=kind)
        assert world.done and world.steps_committed == 25


def test_a_greeting_that_failed_does_not_leave_the_other_side_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was never connected sees no connection close: only the roll says that the view was given up."""
    dial = Network._dial

    def fails_once(self: Network, worker: Worker, peer: str, number: int, deadline: float) -> None:
        if number == 1:
            self._refuse(worker, peer, number, "the connection broke at the greeting")
        else:
            dial(self, worker, peer, number, deadline)

    monkeypatch.setattr(Network, "_dial", fails_once)
    world = simulate(3, workers=2, hosts=2, spares=0, faults=0, steps=4)
    assert world.done and world.views[2].reason == "a connection broke"
    assert world.views[1].members == world.views[2].members
