"""Whom a round asks, how long it waits, and what f means when some answers are malformed."""

from __future__ import annotations

import pytest

from holdfast.core.errors import ConfigError
from holdfast.integrations.flower.rounds import Patience, Rounds


def test_the_draw_depends_on_seed_round_and_who_is_there_and_nothing_else() -> None:
    rounds = Rounds(clients=3, seed=5)
    assert rounds.drawn(7, [9, 4, 2, 6, 1]) == rounds.drawn(7, [1, 2, 4, 6, 9])
    assert len({rounds.drawn(number, range(20)) for number in range(10)}) > 5
    assert Rounds(clients=3, seed=6).drawn(7, range(20)) != rounds.drawn(7, range(20))
    assert Rounds().drawn(1, [3, 1, 2]) == (1, 2, 3) and rounds.drawn(1, [3, 1]) == (1, 3)


def test_the_late_are_waited_for_only_once_there_are_enough() -> None:
    patience = Patience(deadline_s=60.0, late_s=5.0, late=2, needed=5)
    assert patience.is_enough(good=8, missing=2) and patience.is_enough(good=5, missing=0)
    assert not patience.is_enough(good=7, missing=3) and not patience.is_enough(good=4, missing=0)
    assert patience.ends_s(None) == 60.0 and patience.ends_s(10.0) == 15.0 and patience.ends_s(58.0) == 60.0


@pytest.mark.parametrize(
    "wrong",
    [{"clients": 0}, {"answers_min": -1}, {"deadline_s": 0.0}, {"late_s": -1.0}, {"clients": 3, "answers_min": 4}],
)
def test_settings_without_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Rounds(**wrong).validate()  # type: ignore[arg-type]
