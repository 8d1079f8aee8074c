"""Simulated workers that become slow, that hang, and runs that go back, with all other faults; and each rule broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.core.rewinds import Rewind, Rewinds
from holdfast.core.words import KEY_REWINDS
from holdfast.detection.hang_judge import HangJudge
from holdfast.membership import balance, step_rules
from tests.harness.simulator import Violation, World, simulate
from tests.harness.simulator.feed import Command
from tests.harness.simulator.ledger import Ledger
from tests.harness.simulator.rewinds import Rewinding

SEEDS = 60
Patch = pytest.MonkeyPatch


def slowed(seed: int) -> World:
    """Paces that change for good, and five hundredths of noise."""
    sizes = {"workers": 3 + seed % 2, "shards": 5 + seed % 5, "hosts": 1, "spares": 0}
    quiet = {"hangs": 0, "rewinds": 0, "save_every": 0}
    return simulate(seed, **sizes, **quiet, steps=40, faults=3 * (seed % 2), slowed=3, noise=0.05)


def hung(seed: int) -> World:
    return simulate(seed, hangs=2, rewinds=0, save_every=0)


def rewound(seed: int) -> World:
    return simulate(seed, rewinds=2, hangs=0)


def test_shards_follow_the_paces_and_not_the_noise() -> None:
    moved = [slowed(seed).pacing.moves for seed in range(SEEDS // 2)]
    assert sum(moved) > SEEDS / 4, "they did follow"


def test_who_hangs_is_ended_and_the_run_goes_on() -> None:
    worlds = [hung(seed) for seed in range(SEEDS)]
    assert all(world.steps_committed == world.schedule.steps for world in worlds)
    assert sum(world.hanging.ended for world in worlds) > SEEDS / 4


def test_a_run_goes_back_once_for_each_bad_step_and_comes_to_its_end() -> None:
    rewinds = 0
    for seed in range(SEEDS):
        world = rewound(seed)
        entry = world.ledger.entries.get(KEY_REWINDS)
        assert world.done and world.steps_committed == world.schedule.steps
        assert (entry.value if entry else Rewinds()).passed == world.rewinds.bad
        rewinds += len(world.rewinds.bad)
    assert rewinds > SEEDS


def test_all_of_it_at_once() -> None:
    for seed in range(12):
        world = simulate(seed, workers=5, hosts=3, steps=20, faults=8, hangs=3, rewinds=2, slowed=3)
        assert world.done and world.steps_committed == 20


# ---- rules broken one at a time


def move_for_any_gain(patch: Patch) -> None:
    patch.setattr(balance, "GAIN_MIN", 0.0)
    patch.setattr(balance, "GAIN_S_MIN", 0.0)


def never_move(patch: Patch) -> None:
    patch.setattr(step_rules, "rebalanced", lambda current, shards, paces: None)


def take_the_hung_for_alive(patch: Patch) -> None:
    """It has a lease and answers a knock: that is enough for ever."""
    patch.setattr(HangJudge, "judge", lambda self, processes, members: [])


def end_the_last_one(patch: Patch) -> None:
    """Whoever hangs is ended, whether or not anybody else has the state."""
    patch.setattr(HangJudge, "_spared", lambda self, known, here, members: "")


def take_the_suspect_for_well(patch: Patch) -> None:
    """Two hang at nearly the same time, and the first is ended since the second does not hang yet."""

    def spared(self: HangJudge, known: Any, here: list[str], members: Any) -> str | None:
        others = [self._workers[name] for name in here if self._workers[name] is not known]
        if any(other.suspicion.level < 3 and other.beat.has_state for other in others):
            return ""
        return real(self, known, here, members)

    real = HangJudge._spared
    patch.setattr(HangJudge, "_spared", spared)


def forget_to_pass(patch: Patch) -> None:
    """The new workers train on the step that the run went back for."""
    patch.setattr(Rewinds, "passed", property(lambda self: frozenset()))


def go_back_twice(patch: Patch) -> None:
    """What two ask for at the same time becomes two rewinds."""

    def put(self: Rewinding, record: Rewind, expected: int) -> Command:
        ledger = self._worker.world.ledger

        def append() -> None:
            entry = ledger.entries.get(KEY_REWINDS)
            ledger.put(KEY_REWINDS, (entry.value if entry else Rewinds()).with_(record))

        yield append

    patch.setattr(Rewinding, "put", put)


def write_over_a_rewind(patch: Patch) -> None:
    """The record is put without a compare."""
    real = Ledger.compare_and_set

    def put(self: Ledger, key: str, value: Any, expected: int, *others: Any) -> int | None:
        return self.put(key, value) if key == KEY_REWINDS else real(self, key, value, expected, *others)

    patch.setattr(Ledger, "compare_and_set", put)


def believe_any_checkpoint(patch: Patch) -> None:
    """The newest one counts, though the run has gone back from it."""
    patch.setattr(Rewinds, "believes", lambda self, step, known: True)


def do_not_listen(patch: Patch) -> None:
    """A worker with the old state goes on when the run has gone back."""
    patch.setattr(Rewinding, "overtaken", lambda self, event: False)


def read_the_record_late(patch: Patch) -> None:
    """A new worker takes the record for the one it began with, whatever has been added: it knows of no rewind."""
    real = Rewinding.__init__

    def init(self: Rewinding, worker: Any) -> None:
        real(self, worker)
        self.known = Rewinds(self.known.records[:-1])

    patch.setattr(Rewinding, "__init__", init)


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[int], World]]] = [
    (move_for_any_gain, slowed),
    (never_move, slowed),
    (take_the_hung_for_alive, hung),
    (end_the_last_one, hung),
    (take_the_suspect_for_well, hung),
    (forget_to_pass, rewound),
    (go_back_twice, rewound),
    (write_over_a_rewind, rewound),
    (believe_any_checkpoint, rewound),
    (do_not_listen, rewound),
    (read_the_record_late, rewound),
]


@pytest.mark.parametrize(("mutant", "run"), MUTANTS, ids=lambda one: one.__name__)
def test_a_broken_rule_is_caught(
    mutant: Callable[[Patch], None], run: Callable[[int], World], monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(10 * SEEDS):
            run(seed)
