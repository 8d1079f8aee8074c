"""Variables that modules set at their import: what a person has set stays, and a forked worker gets them again."""

from __future__ import annotations

import os

import pytest

from holdfast.placement import early_variables


def test_they_are_set_unless_given_and_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_variables, "_set", {})
    monkeypatch.setenv("HOLDFAST_TEST_GIVEN", "4")
    monkeypatch.delenv("HOLDFAST_TEST_MISSING", raising=False)
    early_variables.set_unless_given("HOLDFAST_TEST_GIVEN", "1")
    early_variables.set_unless_given("HOLDFAST_TEST_MISSING", "1")
    assert (os.environ["HOLDFAST_TEST_GIVEN"], os.environ["HOLDFAST_TEST_MISSING"]) == ("4", "1")
    del os.environ["HOLDFAST_TEST_MISSING"]  # as in a worker whose environment is its own
    os.environ["HOLDFAST_TEST_GIVEN"] = "2"
    early_variables.set_again()
    assert (os.environ["HOLDFAST_TEST_GIVEN"], os.environ["HOLDFAST_TEST_MISSING"]) == ("2", "1")
    monkeypatch.delenv("HOLDFAST_TEST_MISSING")
