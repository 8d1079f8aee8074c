"""A sample of the zoo, with real processes; all of it is `make zoo`. And what the page makes of results."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalogue import PARTS, SAMPLE, SHAPES
from page import PAGE, text_of
from shape import EXACT, REFUSED, TOLD, exact, not_promised, refused
from trying import ALONE, BLAME, BLAMED, DIFFERENT, FAILED, INEXACT, NOTICED, Result, ended, judge


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """The process that runs scripts alone ends with the tests."""
    yield
    ALONE.close()


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("zoo")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_shape_is_what_the_catalogue_says(name: str, tmp_path: Path) -> None:
    result = judge(SHAPES[name], tmp_path)
    assert result.expected, f"{result.kind} {result.digests}\n{result.said}"


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_script(name: str) -> None:
    shape = SHAPES[name]
    ast.parse(shape.script())
    assert shape.sentence or shape.expected == EXACT
    assert all(text.strip() for text in shape.lines.values())


def test_a_shape_replaces_what_is_under_its_marks() -> None:
    script = exact("a", "b", shard="one(batch)\ntwo()", after="three()").script()
    assert "        # -- shard\n        one(batch)\n        two()\n    # -- apply\n    optimizer.step()\n" in script
    assert "# -- after\nthree()\n" in script and "model(x)" not in script and 'print("DIGEST"' in script
    with pytest.raises(AssertionError, match="no mark"):
        exact("a", "b", nowhere="pass").script()


def test_what_is_as_expected() -> None:
    plain, odd = exact("a", "b"), not_promised("c", "d", "why")
    assert Result(plain, EXACT).expected and not Result(plain, DIFFERENT).expected
    assert Result(odd, EXACT).expected and Result(odd, TOLD).expected and not Result(odd, DIFFERENT).expected
    assert Result(odd, REFUSED).expected and not Result(odd, FAILED).expected and not Result(odd, BLAMED).expected


def test_what_an_end_in_failure_is_called() -> None:
    shape = refused("a", "b", "is a set, which cannot travel")
    assert ended(shape, "x is a set,\n which cannot travel", refused=True).kind == REFUSED
    assert ended(shape, "x is a set, which cannot travel", refused=False).kind == FAILED
    assert ended(shape, "is a list", refused=True).kind == FAILED
    assert ended(not_promised("a", "b", "why"), f"{NOTICED} 0.bias", refused=True).kind == REFUSED
    assert ended(shape, f"is a set, which cannot travel; {BLAME}", refused=True).kind == BLAMED
    last = f"run r {INEXACT}the workers ended with different weights\n"
    assert ended(not_promised("a", "b", "why"), last, refused=False, inexact=True).kind == TOLD
    assert ended(not_promised("a", "b", "why"), f"{last}more\n", refused=False, inexact=True).kind == FAILED
    assert ended(exact("a", "b"), last, refused=False, inexact=True).kind == DIFFERENT


def test_the_page_has_every_shape_once() -> None:
    results = {name: {"expected": True} for name in SHAPES}
    text = text_of(results)
    assert [name for name in SHAPES if text.count(f"| `{name}` |") != 1] == []
    assert "Not tried yet" not in text and all(f"### {part}" in text for part in PARTS)
    results["sgd"] = {"expected": False}
    assert "| `sgd` |" not in text_of(results) and "not run when this page was written: `sgd`." in text_of(results)


def test_the_page_knows_every_shape() -> None:
    """After a change of the catalogue: tests/zoo/run.py --json FILE NEW, and --write-docs."""
    text = PAGE.read_text()
    assert [name for name in SHAPES if f"`{name}`" not in text] == []
