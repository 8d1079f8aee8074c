"""`holdfast check`: whether a script is exact, in seconds, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.cli.script_words import script_of, tell_misplaced
from holdfast.core.durations import parse_duration

USAGE = "holdfast check [options] script.py [arguments]\n       holdfast check [options] -m module [arguments]"


def add_arguments(check: argparse.ArgumentParser) -> None:
    check.usage = USAGE
    check.description = (
        "Run the first steps of a script and compute its shards again: fetched another way, in another order, from a "
        "restored state, in a process that joined. Exit code 0 if all gives the same bits, 1 with the name of the "
        "first thing that does not, 2 if the script is refused or does not get so far."
    )
    check.add_argument("--steps", type=int, default=4, metavar="N", help="how many steps (default: 4)")
    check.add_argument("--limit", default="5min", metavar="T", help="how long it may take at most (default: 5min)")
    check.add_argument("--json", metavar="FILE", help="write what came of it, for programs")
    check.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="check a module")
    check.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    check.set_defaults(command=_check, parser=check)


def _check(options: argparse.Namespace) -> int:
    from holdfast.script_check.conduct import CheckRequest, check_script

    words, module = script_of(options)
    tell_misplaced(words, options.parser, module=module)
    return check_script(
        CheckRequest(
            words=("-m", *words) if module else tuple(words),
            steps=options.steps,
            limit_s=parse_duration("--limit", options.limit),
            json=Path(options.json) if options.json else None,
        )
    )
