"""Draws the phases of a worker from the table that the machine itself obeys (membership/phases.py).

python scripts/draw_phases.py            # print the diagram
python scripts/draw_phases.py --check    # exit 1 if ARCHITECTURE.md shows another one
python scripts/draw_phases.py --write    # put it into ARCHITECTURE.md
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.membership.phases import TRANSITIONS, Phase

PAGE = Path(__file__).resolve().parent.parent / "ARCHITECTURE.md"
BEGIN = "<!-- phases: drawn by scripts/draw_phases.py, do not edit -->"
END = "<!-- phases: end -->"


def diagram(table: Mapping[Phase, frozenset[Phase]]) -> str:
    """A Mermaid state diagram. Phases of a view's member share one frame, and one arrow to the end."""
    inside = [phase for phase in Phase if phase not in (Phase.WAITING, Phase.ENDED)]
    lines = ["stateDiagram-v2", "    [*] --> waiting"]
    lines += [f"    waiting --> {target.value}" for target in _ordered(table[Phase.WAITING])]
    lines.append('    state "member of a view" as member {')
    for phase in inside:
        lines += [f"        {phase.value} --> {to.value}" for to in _ordered(table[phase]) if to in inside]
    lines.append("    }")
    lines += [f"    {phase.value} --> waiting" for phase in inside if Phase.WAITING in table[phase]]
    if all(Phase.ENDED in table[phase] for phase in inside):
        lines.append("    member --> ended")
    else:
        lines += [f"    {phase.value} --> ended" for phase in inside if Phase.ENDED in table[phase]]
    lines.append("    ended --> [*]")
    return "\n".join(lines)


def meanings() -> str:
    """The comment beside each phase, as a table."""
    said = dict(re.findall(r'^\s+[A-Z]+ = "(\w+)"(?:\s+# (.+))?$', inspect.getsource(Phase), re.MULTILINE))
    rows = [f"| {phase.value} | {said.get(phase.value) or 'the worker is out; its process ends'} |" for phase in Phase]
    return "\n".join(["| phase | meaning |", "|---|---|", *rows])


def block() -> str:
    return f"{BEGIN}\n```mermaid\n{diagram(TRANSITIONS)}\n```\n\n{meanings()}\n{END}"


def replaced(page: str) -> str:
    """The page with the block between its markers drawn anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has no place for the diagram: put in a line {BEGIN} and a line {END}")
    return before + block() + after


def _ordered(phases: frozenset[Phase]) -> list[Phase]:
    return [phase for phase in Phase if phase in phases]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="compare with ARCHITECTURE.md")
    choice.add_argument("--write", action="store_true", help="update ARCHITECTURE.md")
    options = parser.parse_args(arguments)
    if not options.check and not options.write:
        print(block())
        return 0
    page = PAGE.read_text()
    drawn = replaced(page)
    if options.write:
        PAGE.write_text(drawn)
    elif drawn != page:
        print(f"{PAGE.name} shows another diagram than the code\n  hint: python scripts/draw_phases.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
