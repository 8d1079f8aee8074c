"""The checker of histories, against histories of which the answer is known."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.harness.linearizability import BITS, COUNTER, REGISTER, Operation, explain, is_linearizable


def write(value: int, called_at: float, returned_at: float = float("inf")) -> Operation:
    return Operation("a", ("write", value), called_at, returned_at)


def add(number: int, called_at: float, returned_at: float = float("inf")) -> Operation:
    return Operation("a", ("add", number), called_at, returned_at)


def read(outcome: int | None, called_at: float, returned_at: float) -> Operation:
    return Operation("b", ("read",), called_at, returned_at, outcome)


@pytest.mark.parametrize(
    "history",
    [
        [],
        [write(1, 0, 1), read(1, 2, 3)],
        [write(1, 0, 10), read(None, 1, 2), read(1, 3, 4)],  # the write takes effect between the reads
        [write(1, 0, 10), write(2, 0, 10), read(2, 1, 2), read(1, 3, 4)],  # in either order
        [write(1, 0), read(None, 5, 6)],  # nobody knows: it need not have happened,
        [write(1, 0), read(None, 5, 6), read(1, 7, 8)],  # and may happen much later
        [write(1, 0, 1), read(1, 1, 2)],  # at the same instant they are concurrent
    ],
)
def test_good_histories_of_a_register(history: list[Operation]) -> None:
    assert is_linearizable(history, REGISTER)


@pytest.mark.parametrize(
    "history",
    [
        [write(1, 0, 1), read(None, 2, 3)],  # a stale read
        [write(1, 0, 10), read(1, 1, 2), read(None, 3, 4)],  # what was seen is gone again
        [write(1, 0, 1), write(2, 2, 3), read(1, 4, 5)],
        [read(1, 0, 1), write(1, 2, 3)],  # it reads what is not written yet
        [write(1, 0, 10), write(2, 0, 10), read(1, 1, 2), read(2, 3, 4), read(1, 5, 6)],
        [write(1, 0), read(1, 5, 6), read(None, 7, 8)],
    ],
)
def test_bad_histories_of_a_register(history: list[Operation]) -> None:
    assert explain(history, REGISTER)


def test_a_counter_tells_lost_and_doubled_additions() -> None:
    both = [add(1, 0, 1), add(2, 0, 1)]
    for total, fits in ((3, True), (1, False), (2, False), (4, False)):
        assert is_linearizable([*both, read(total, 2, 3)], COUNTER) is fits
        assert is_linearizable([*both, read(total, 2, 3)], BITS) is fits
    assert is_linearizable([add(1, 0, 1), add(2, 0), read(1, 2, 3), read(3, 4, 5)], BITS)
    assert not is_linearizable([add(1, 0, 1), add(2, 0), read(3, 2, 3), read(1, 4, 5)], BITS)


def test_what_does_not_fit_is_said() -> None:
    assert "after 1 operations the state is 1" in explain([add(1, 0, 1), read(2, 2, 3)], COUNTER)


def test_it_agrees_with_trying_every_order() -> None:
    rng = random.Random(5)
    answers = set()
    for _ in range(300):
        history = []
        for bit in range(rng.randint(1, 3)):
            called_at = rng.randint(0, 6)
            history.append(add(1 << bit, called_at, called_at + rng.randint(1, 4)))
        for _ in range(rng.randint(1, 2)):
            called_at = rng.randint(0, 8)
            history.append(read(rng.randrange(8), called_at, called_at + rng.randint(1, 3)))
        fits = any(_is_an_order(order) for order in itertools.permutations(history))
        assert is_linearizable(history, COUNTER) is is_linearizable(history, BITS) is fits
        answers.add(fits)
    assert answers == {True, False}


def _is_an_order(order: tuple[Operation, ...]) -> bool:
    total = 0
    for position, one in enumerate(order):
        if any(later.returned_at < one.called_at for later in order[position + 1 :]):
            return False
        if one.call[0] == "add":
            total += one.call[1]
        elif one.outcome != total:
            return False
    return True


def test_a_long_history_with_many_open_operations_is_quick() -> None:
    history = [add(1 << bit, 0) for bit in range(30)]
    total = 0
    for bit in range(30, 60):
        history.append(add(1 << bit, bit, bit + 0.5))
        total |= 1 << bit
        history.append(read(total, bit + 0.6, bit + 0.9))
    assert is_linearizable(history, BITS)
    assert explain([*history, read(total & ~(1 << 30), 61, 62)], BITS)
