"""docs/reference/supported.md, written from what the runs of the zoo turned out to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from catalogue import PARTS
from shape import EXACT, NOT_PROMISED, REFUSED, Shape

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "supported.md"

HEAD = """# What is supported

`tests/zoo/run.py --json FILE --write-docs` has written this page from the results of {count} training scripts. Each was
run alone (`python train.py`), with three workers, and with two of them killed and a scale to five in mid-run, and the
digests of the weights were compared. `make zoo` does it again; `tests/zoo/run.py --script NAME` prints a script.
"""
EXACT_HEAD = """
## Exact

The same weights, bit for bit, in all three runs.
"""
REFUSED_HEAD = """
## Refused

What could not be exact ends with exit code 2 and a sentence, or with an error when the script runs alone.

| what | the sentence has | shape |
|---|---|---|
"""
NOT_PROMISED_HEAD = """
## Not promised

These depend on something that differs between workers and that Holdfast does not see
([the conditions](../guarantees.md#conditions)). Such a run ends with weights of its own and says so: in its second step
the first worker [computes a shard again](../explanation/audits.md#a-shard-that-is-computed-again), and if it gets other
bits each time, the run's last line says that it is not exact, and its exit code is 65. If its workers come to differ
among themselves, a sentence that names the first tensor ends it: at the next comparison of their states, or when a
worker joins.

| what | why, and what to do | shape |
|---|---|---|
"""
PENDING_HEAD = """
## Not tried yet

In the catalogue, and not run when this page was written: {names}.
"""


def write_page(results: dict[str, dict[str, Any]]) -> None:
    """`results`: by the name of the shape. One that is not as expected has no place on the page."""
    PAGE.write_text(text_of(results))


def text_of(results: dict[str, dict[str, Any]]) -> str:
    shapes = [shape for part in PARTS.values() for shape in part]
    tried = [shape for shape in shapes if results.get(shape.name, {}).get("expected")]
    text = HEAD.format(count=len(tried)) + EXACT_HEAD
    for part, members in PARTS.items():
        found = [shape for shape in members if shape in tried and shape.expected == EXACT]
        if found:
            text += f"\n### {part}\n\n| what | shape |\n|---|---|\n" + "".join(map(row, found))
    for kind, head in ((REFUSED, REFUSED_HEAD), (NOT_PROMISED, NOT_PROMISED_HEAD)):
        found = [shape for shape in tried if shape.expected == kind]
        text += head + "".join(map(row, found)) if found else ""
    pending = [f"`{shape.name}`" for shape in shapes if shape not in tried]
    return text + (PENDING_HEAD.format(names=", ".join(pending)) if pending else "")


def row(shape: Shape) -> str:
    cells = [shape.what, *([shape.sentence] if shape.sentence else []), f"`{shape.name}`"]
    return f"| {' | '.join(cells)} |\n"
