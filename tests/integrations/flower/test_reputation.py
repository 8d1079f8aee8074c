"""Who is asked and who rests: a pure function of what became of clients in the rounds before."""

from __future__ import annotations

import json
import random

import pytest

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.integrations.flower.reputation import CLIENTS_KEPT, Conduct, Quarantine, ReputationBook

T, L, M, F, S = Conduct.TRUSTED, Conduct.LEFT_OUT, Conduct.MALFORMED, Conduct.FAILED, Conduct.SILENT


def played(book: ReputationBook, rounds: dict[int, dict[int, Conduct]]) -> list[str]:
    return [sentence for number in sorted(rounds) for sentence in book.count(number, rounds[number])]


@pytest.mark.parametrize("conduct", [M, F, S])
def test_a_client_that_brings_nothing_three_times_rests_for_five_rounds_and_comes_back(conduct: Conduct) -> None:
    book = ReputationBook(Quarantine())
    told = played(book, {number: {1: T, 2: T, 3: T, 4: conduct} for number in (1, 2, 3)})
    assert told == ["client 4 is not asked in rounds 4 to 8: it brought nothing of use for 3 rounds"]
    for number in range(4, 9):
        assert book.choose([4, 3, 2, 1], number, 3).asked == (1, 2, 3)
        assert book.choose([4, 3, 2, 1], number, 3).resting == (4,)
    assert book.choose([4, 3, 2, 1], 9, 3).asked == (1, 2, 3, 4)


def test_a_good_answer_in_between_clears_the_strikes() -> None:
    book = ReputationBook(Quarantine())
    assert not played(book, {1: {1: M}, 2: {1: M}, 3: {1: T}, 4: {1: M}, 5: {1: M}})
    assert played(book, {6: {1: S, 2: T}}), "the third in a row"


def test_each_further_rest_is_twice_as_long_up_to_a_limit() -> None:
    book = ReputationBook(Quarantine(strikes=1, rounds=5, rounds_max=12))
    assert "rounds 2 to 6" in played(book, {1: {1: M}})[0]
    assert "rounds 8 to 17" in played(book, {7: {1: M}})[0]
    assert "rounds 19 to 30" in played(book, {18: {1: M}})[0]


def test_an_attacker_that_the_rule_always_leaves_out_rests_within_eight_rounds() -> None:
    book = ReputationBook(Quarantine())
    rested: dict[int, int] = {}
    for number in range(1, 9):
        asked = book.choose(range(10), number, 5).asked
        told = book.count(number, {client: L if client in (8, 9) else T for client in asked})
        rested.update({client: number for client in (8, 9) if any(f"client {client} " in one for one in told)})
    assert set(rested) == {8, 9} and max(rested.values()) <= 8
    assert book.choose(range(10), max(rested.values()) + 1, 5).asked == tuple(range(8))


def test_one_that_turns_hostile_after_a_hundred_good_rounds_is_found_as_soon() -> None:
    book = ReputationBook(Quarantine())
    rng = random.Random(3)
    for number in range(1, 101):  # a rule that must leave somebody out, with nobody hostile
        out = rng.sample(range(10), 2)
        book.count(number, {client: L if client in out else T for client in range(10)})
    told: list[str] = []
    for number in range(101, 110):
        told += book.count(number, {client: L if client in (8, 9) else T for client in range(10)})
    assert {8, 9} <= {int(one.split()[1]) for one in told}


def test_clients_that_are_alike_hardly_ever_rest_though_the_rule_always_leaves_some_out() -> None:
    rests = 0
    for seed in range(20):
        rng, book = random.Random(seed), ReputationBook(Quarantine())
        for number in range(1, 101):
            out = rng.sample(range(10), 3)
            rests += len(book.count(number, {client: L if client in out else T for client in range(10)}))
    assert rests <= 20 * 10 * 100 / Quarantine().alarm_rounds, "one in alarm_rounds, of each client"


def test_nobody_rests_for_being_left_out_where_that_is_turned_off() -> None:
    book = ReputationBook(Quarantine(alarm_rounds=0))
    assert not played(book, {number: {1: T, 2: T, 3: T, 4: L} for number in range(1, 200)})


def test_a_round_in_which_nobody_was_heard_counts_against_nobody() -> None:
    book = ReputationBook(Quarantine())
    assert not played(book, {number: {1: S, 2: S} for number in range(1, 50)})


def test_a_round_that_came_to_nothing_counts_against_nobody_who_answered() -> None:
    book = ReputationBook(Quarantine())
    assert not played(book, {number: {1: Conduct.UNHEARD, 2: Conduct.UNHEARD} for number in range(1, 50)})


def test_those_whose_rest_ends_first_are_recalled_if_the_round_needs_them() -> None:
    book = ReputationBook(Quarantine(strikes=1))
    played(book, {1: {4: M, 1: T}, 2: {5: M, 1: T}, 3: {3: M, 1: T}})
    chosen = book.choose([1, 2, 3, 4, 5], 4, 4)
    assert chosen.asked == (1, 2, 4, 5) and chosen.recalled == (4, 5) and chosen.resting == (3,)


def test_a_recalled_client_that_fails_again_is_not_told_of_twice() -> None:
    book = ReputationBook(Quarantine(strikes=1))
    assert len(played(book, {1: {1: M}, 2: {1: M}, 3: {1: M}})) == 1


def test_the_book_comes_back_from_a_checkpoint_as_it_was() -> None:
    book = ReputationBook(Quarantine())
    played(book, {number: {1: T, 2: L, 2**63 + 5: M} for number in range(1, 4)})
    other = ReputationBook(Quarantine())
    other.load_state_dict(json.loads(json.dumps(book.state_dict())))
    assert other.standings == book.standings
    assert other.count(4, {1: T, 2: L}) == book.count(4, {1: T, 2: L}) and other.standings == book.standings


@pytest.mark.parametrize("damage", [{"x": {}}, {"1": {"worths": [1.0]}}, {"1": {"nothing": 1}}, {"1": 3}])
def test_what_is_no_book_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="not a book of reputations"):
        ReputationBook(Quarantine()).load_state_dict(damage)  # type: ignore[arg-type]


def test_only_so_many_clients_are_remembered() -> None:
    book = ReputationBook(Quarantine())
    for client in range(CLIENTS_KEPT + 10):
        book.count(1, {client: T})
    assert len(book.standings) == CLIENTS_KEPT and CLIENTS_KEPT + 9 in book.standings and 0 not in book.standings


@pytest.mark.parametrize("wrong", [{"strikes": 0}, {"rounds": 0}, {"rounds": 9, "rounds_max": 8}, {"alarm_rounds": -1}])
def test_settings_without_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ReputationBook(Quarantine(**wrong))
