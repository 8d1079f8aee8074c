"""What a malformed answer means for f: it was one of the f where the others are too few for f, and only then."""

from __future__ import annotations

import pytest
import torch

from holdfast.byzantine import Bulyan, TrimmedMean
from holdfast.integrations.flower import ByRule
from holdfast.integrations.flower.combining import Answers
from holdfast.integrations.flower.model_record import Model
from holdfast.integrations.flower.replies import Refusal, Update
from holdfast.integrations.flower.reputation import Conduct


@pytest.mark.parametrize(("answered", "malformed", "borne"), [(11, 1, 2), (10, 1, 1), (7, 2, 1), (4, 7, 0), (3, 2, 0)])
def test_a_malformed_answer_was_one_of_the_f_only_where_that_is_needed(
    answered: int, malformed: int, borne: int
) -> None:
    assert Bulyan().bearing(answered, 2, malformed) == borne


def test_who_does_not_answer_was_not_one_of_them() -> None:
    assert TrimmedMean().bearing(4, 2, 0) == 2


def test_many_malformed_answers_do_not_let_a_hostile_one_through() -> None:
    """Clients of another version, say: the four others are enough to bear one, and it is there."""
    sent = {client: torch.full((3,), 1e6 if client == 2 else 1.0 + 0.1 * client) for client in range(4)}
    good = {client: Update({"weight": one}, 10.0, {}) for client, one in sent.items()}
    refused = {client: Refusal(Conduct.MALFORMED, "no array") for client in (4, 5, 6)}
    found = ByRule(TrimmedMean(), f=2).combine(Model({"weight": torch.zeros(3)}), Answers(good, refused), 1)
    assert found.model is not None and found.model.state["weight"].max() < 2.0
    assert found.conducts[2] is Conduct.LEFT_OUT
