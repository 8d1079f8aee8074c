"""Where an elastic run is in its data: every unit of an epoch once, whatever is lost on the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.cursor import Cursor

SLOTS = st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=60)


def units(places: list[tuple[int, int]], shards: int) -> list[int]:
    return [step * shards + shard for step, shard in places]


@given(st.integers(1, 8), st.integers(1, 5), SLOTS)
def test_every_unit_of_an_epoch_is_used_once_whatever_is_lost(shards: int, steps: int, brought: list[set[int]]) -> None:
    cursor = Cursor(shards, steps)
    done: list[int] = []
    for slots in brought:
        places = units(cursor.places(), shards)
        epoch = cursor.epoch
        assert 1 <= len(places) <= shards and len(set(places)) == len(places)
        assert {unit // (shards * steps) for unit in places} == {epoch}
        slots = {slot for slot in slots if slot < len(places)}
        ends = cursor.ends_epoch(slots)
        cursor.used(slots)
        done += [places[slot] for slot in slots]
        assert len(cursor._left) < shards
        assert ends == (cursor.epoch > epoch) == (set(range((epoch + 1) * shards * steps)) <= set(done))
    assert len(set(done)) == len(done)
    while not cursor.ends_epoch():
        done += units(cursor.places(), shards)
        cursor.used(range(len(cursor.places())))
    done += units(cursor.places(), shards)
    assert sorted(done) == list(range((cursor.epoch + 1) * shards * steps))


@given(st.integers(1, 8), st.integers(1, 5), SLOTS)
def test_its_state_is_all_there_is_to_it(shards: int, steps: int, brought: list[set[int]]) -> None:
    cursor, other = Cursor(shards, steps), Cursor(shards, steps)
    for slots in brought:
        cursor.used(slot for slot in slots if slot < len(cursor.places()))
        other.load(cursor.state())
        assert other.places() == cursor.places() == cursor.copy().places()
        assert other.epoch == cursor.epoch and other.steps_left == cursor.steps_left


def test_while_nothing_is_lost_a_step_has_the_shards_of_the_exact_mode() -> None:
    cursor = Cursor(4, 3)
    for step in range(7):
        assert cursor.places() == [(step, shard) for shard in range(4)] and cursor.epoch == step // 3
        assert cursor.ends_epoch() == ((step + 1) % 3 == 0)
        cursor.used(range(4))


def test_what_was_lost_comes_first_in_the_next_step() -> None:
    cursor = Cursor(4, 2)
    cursor.used([0, 1, 3])
    assert cursor.places() == [(0, 2), (1, 0), (1, 1), (1, 2)]
    cursor.used([0, 1])
    assert cursor.places() == [(1, 1), (1, 2), (1, 3)] and cursor.epoch == 0
    assert not cursor.ends_epoch([0, 1]) and cursor.ends_epoch([0, 1, 2])
    cursor.used([0, 2])
    assert cursor.places() == [(1, 2)] and cursor.steps_left == 1
    cursor.used([0])
    assert cursor.places() == [(2, shard) for shard in range(4)] and cursor.epoch == 1


def test_what_a_worker_fetches_ahead_is_what_it_will_need() -> None:
    cursor = Cursor(4, 2)
    cursor.used([0, 1, 3])
    assert list(cursor.upcoming((0,), (1, 2), 3, 2)) == [(0, 2), (1, 3)]  # two units are left of the epoch then
    assert list(cursor.upcoming((0,), (1, 2), 3, 3)) == [(0, 2), (1, 3), (2, 1), (2, 2)]


def test_a_state_that_says_nothing_of_it_has_had_full_steps() -> None:
    cursor = Cursor(4, 2)
    cursor.load({"done": 0})
    cursor.begin(3)
    assert cursor.places() == [(3, shard) for shard in range(4)]
    cursor.begin(9)
    assert cursor.places()[0] == (3, 0)
