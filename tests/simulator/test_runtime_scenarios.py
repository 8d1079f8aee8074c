"""Runs that are written down as text, on the runtime that ships; and that the language says what it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.runtime import Violation
from tests.harness.runtime.scenario import Scenario

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_comes_out_as_expected(path: Path) -> None:
    scenario = Scenario.parse(path.read_text())
    assert scenario.expected, "a scenario says how it must end"
    scenario.play(keep_trace=True)


def test_what_is_not_as_expected_is_said() -> None:
    with pytest.raises(Violation, match="not as expected: expect 1 view"):
        Scenario.parse("workers 2\nloops 6\nat step 1 kill w1\nexpect 1 view").play()


@pytest.mark.parametrize("line", ["at step 3 explode w1", "loop 8, sideways", "expect happiness", "workers many"])
def test_a_line_that_makes_no_sense_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"line 2 makes no sense"):
        Scenario.parse(f"workers 2\n{line}")
