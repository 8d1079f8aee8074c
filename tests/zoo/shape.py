"""A shape: what differs from the plain training of template.py, and what is expected of its runs."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = Path(__file__).with_name("template.py")
MARK = re.compile(r"^( *)# -- ([a-z]+)$")

EXACT = "exact"
REFUSED = "refused"
NOT_PROMISED = "not promised"
TOLD = "told"  # the run ended, and said that it is not exact


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`lines`: by their mark in the template. `sentence`: of a refusal, or why nothing is promised."""

    name: str
    what: str  # for the page of what is supported
    lines: dict[str, str]
    expected: str = EXACT
    sentence: str = ""
    nightly: bool = False  # takes memory or minutes

    def script(self) -> str:
        """The whole training script."""
        unknown = set(self.lines)
        text: list[str] = []
        skipped = False
        for line in TEMPLATE.read_text().splitlines():
            mark = MARK.match(line)
            if mark:
                indent, name = mark.groups()
                unknown.discard(name)
                skipped = name in self.lines
                text.append(line)
                if skipped:
                    text.append(textwrap.indent(textwrap.dedent(self.lines[name]).strip("\n"), indent))
            elif not skipped:
                text.append(line)
            elif not line.strip() or len(line) - len(line.lstrip()) < len(indent):
                skipped = False
                text.append(line)
        assert not unknown, f"{self.name}: the template has no mark {unknown}"
        return "\n".join(text) + "\n"


def exact(name: str, what: str, *, nightly: bool = False, **lines: str) -> Shape:
    return Shape(name=name, what=what, lines=lines, nightly=nightly)


def refused(name: str, what: str, sentence: str, **lines: str) -> Shape:
    """`sentence`: a part of what the run must say when it ends with exit code 2."""
    return Shape(name=name, what=what, lines=lines, expected=REFUSED, sentence=sentence)


def not_promised(name: str, what: str, why: str, **lines: str) -> Shape:
    """The run ends with other weights and says so, or its workers notice it; nothing hangs, no machine is blamed."""
    return Shape(name=name, what=what, lines=lines, expected=NOT_PROMISED, sentence=why)
