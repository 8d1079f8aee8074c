"""The machine that ships under thousands of schedules of failures: no promise is broken in any of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.log_simulator import Schedule, simulate
from tests.harness.log_simulator.faults import KINDS, LONELY

SCHEDULES = 3000
CHUNKS = 6

BUSY = {
    "replicas": 3,
    "servers": 4,
    "durable": True,
    "faults": 12,
    "pushes": 20,
    "reads": 60,
    "clients": 3,
    "slices": 1,
}
# Schedules that fail if a bug that was once found comes back. 12: a log that could not begin anew was written to. 13: a
# primary that started again counts as ended. 340: a promise that is stored counts entries as stored which are not.
# 380: the table ahead of the log forgets what is not committed, and a retry is acknowledged. 1212, 533: a server ends
# between the snapshot that it fetched and the log that begins after it. 7917: a retry is acknowledged while a
# majority of the new configuration does not have the update yet. 1346: a replica ends when it was proposed, and the
# ledger does not hear of it: nothing else could be changed from then on. 2070: a replica that cannot store is sent more
# and more messages.
REGRESSIONS: tuple[tuple[int, dict[str, Any]], ...] = (
    (12, {}),
    (13, {}),
    (340, {}),
    (380, {}),
    (7917, {}),
    (1346, {"entries_per_append": 1, "lonely": True}),
    (2070, {"entries_per_append": 1, "lonely": True}),
    (1212, {**BUSY, "only": ("isolate_primary", "crash", "crash")}),
    (533, {**BUSY, "only": ("one_way_primary", "one_way", "crash", "cut_ledger")}),
)


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=[pytest.mark.more] if chunk else []) for chunk in range(CHUNKS)]
)
def test_no_schedule_breaks_a_promise(chunk: int) -> None:
    count = SCHEDULES // CHUNKS
    updates = reads = 0
    for seed in range(chunk * count, (chunk + 1) * count):
        books = simulate(seed).books
        updates, reads = updates + len(books.acknowledged), reads + books.fresh_reads
    assert updates > 5 * count and reads > 5 * count  # the schedules did push and read


@pytest.mark.parametrize(("seed", "changes"), REGRESSIONS)
def test_what_once_failed(seed: int, changes: dict[str, Any]) -> None:
    simulate(seed, **{"entries_per_append": 4, "lonely": False, "tells_at_once": False, **changes})


def test_a_seed_replays_event_for_event() -> None:
    first, second = (simulate(7, keep_trace=True, faults=6) for _ in range(2))
    assert first.lines == second.lines
    assert first.lines and any("fault" in line for line in first.lines)


def test_without_faults_there_is_one_epoch_and_everything_is_acknowledged() -> None:
    world = simulate(3, faults=0, loss=0.0, doubling=0.0, drift=0.0, replicas=3, servers=3, clients=2, pushes=6)
    assert len(world.books.acknowledged) == 12
    assert all(world.ledger.read(number)[0].epoch == 1 for number in range(world.schedule.slices))


def test_faults_of_every_kind_are_drawn() -> None:
    seen: set[str] = set()
    for seed in range(60):
        world = simulate(seed, keep_trace=True, faults=9, lonely=True)
        assert world.lines is not None
        seen |= {line.split("fault: ")[1].split()[0] for line in world.lines if "fault: " in line}
    assert seen == {kind.removesuffix("_primary") for kind in KINDS + LONELY}


def test_schedules_differ() -> None:
    assert len({Schedule.draw(seed) for seed in range(50)}) == 50
