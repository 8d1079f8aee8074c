"""Draws the tables of `holdfast run`'s options, and of workers' variables, from where they are declared (core/options).

python scripts/draw_options.py            # print them
python scripts/draw_options.py --check    # exit 1 if docs/reference/cli.md shows others
python scripts/draw_options.py --write    # put them into docs/reference/cli.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from holdfast.core.options.declaring import Option, options_of
from holdfast.core.options.kinds import Choice
from holdfast.core.options.run import DIRECTORY, GENERAL, GROUPS, RUN_OPTIONS
from holdfast.placement.environment import WorkerEnvironment, variable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
PARTS = ("options", "variables")


def begin(part: str) -> str:
    return f"<!-- {part}: drawn by scripts/draw_options.py, do not edit -->"


def end(part: str) -> str:
    return f"<!-- {part}: end -->"


def row(option: Option) -> str:
    value = "\\|".join(option.kind.words) if isinstance(option.kind, Choice) else option.metavar.replace("|", "\\|")
    usual = option.spelled_default
    if usual and not option.usual:
        usual = f"`{usual}`"
    about = f"{option.help} ({option.kind.limits})" if option.kind.limits else option.help
    meaning = f"{about}. {option.more}" if option.more else about
    word = f"{option.flag} [{value}]" if option.kind.alone else f"{option.flag} {value}".strip()
    return f"| `{word}` |{f' {usual} ' if usual else ' '}| {meaning} |"


def tables() -> str:
    declared = [option for settings in RUN_OPTIONS for option in options_of(settings)] + [DIRECTORY]
    drawn = []
    for group in GROUPS:
        heading = [] if group == GENERAL else [f"### {group[0].upper()}{group[1:]}", ""]
        rows = [row(option) for option in declared if option.group == group]
        if group == GENERAL:
            rows.append("| `-m module` | | run a module instead of a script |")
        drawn.append("\n".join([*heading, "| option | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(drawn)


def variables() -> str:
    return ", ".join(f"`{variable(one.name)}`" for one in fields(WorkerEnvironment))


def replaced(page: str) -> str:
    """The page with the parts between their markers drawn anew."""
    for part, drawn in zip(PARTS, (tables(), variables()), strict=True):
        before, opening, rest = page.partition(begin(part))
        _, closing, after = rest.partition(end(part))
        if not opening or not closing:
            raise SystemExit(
                f"{PAGE.name} has no place for its {part}: put in a line {begin(part)} and a line {end(part)}"
            )
        page = f"{before}{opening}\n{drawn}\n{closing}{after}"
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="compare with the page")
    choice.add_argument("--write", action="store_true", help="update the page")
    options = parser.parse_args(arguments)
    if not options.check and not options.write:
        print(tables(), variables(), sep="\n\n")
        return 0
    page = PAGE.read_text()
    drawn = replaced(page)
    if options.write:
        PAGE.write_text(drawn)
    elif drawn != page:
        print(f"{PAGE.name} shows other options than the code\n  hint: python scripts/draw_options.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
