"""Options of ours that stand behind the script: they are the script's, and mostly were not meant for it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.cli.parser import Parser
from holdfast.core.errors import ConfigError

LIKE = 0.85  # of the letters in common: nearer than a typo before the script, for the script has options of its own
SOURCE_BYTES_MAX = 4 * 1024 * 1024


def script_of(options: argparse.Namespace) -> tuple[list[str], bool]:
    """The script, or the module, and its arguments; and whether it is a module."""
    module = options.module is not None
    words = list(options.module if module else options.script)
    if words and words[0] == "--":
        del words[0]
    return words, module


def tell_misplaced(words: Sequence[str], parser: Parser, *, module: bool, before: str = "") -> None:
    for sentence in misplaced(words, parser, module=module, before=before):
        print(f"holdfast: {sentence}", file=sys.stderr)


def check_workers_given(workers: str | None, words: Sequence[str], parser: Parser) -> None:
    """A ConfigError if their number is missing, which knows whether it stands behind the script."""
    if workers is not None:
        return
    script = words[0] if words else "train.py"
    for option, meant, value in _ours(words, parser):
        if meant == "--workers":
            raise ConfigError(
                f"{option} comes after {script}, so {script} gets it, and holdfast has no number of workers",
                hint=f"options of holdfast come before the script: {parser.prog} --workers {value or 'N'} {script}",
            )
    raise ConfigError("--workers is missing", hint=f"say how many workers train: {parser.prog} --workers 2 {script}")


def misplaced(words: Sequence[str], parser: Parser, *, module: bool, before: str = "") -> list[str]:
    """A sentence for each option of ours that the script gets and does not seem to know. `before` it stands `-- `?"""
    if not words:
        return []
    source = "" if module else _source(words[0])
    if source is None:  # not a Python file, or one that nobody can read
        return []
    said = []
    for option, meant, value in _ours(words, parser):
        if source and _knows(source, option):
            continue
        if option != meant and not source:
            continue
        right = f"{meant} {value}" if value else meant
        said.append(
            f"{option} comes after {words[0]}, so {words[0]} gets it; "
            f"if it is meant for holdfast: {parser.prog} … {right} {before}{'-m ' if module else ''}{words[0]} …"
        )
    return said


def _ours(words: Sequence[str], parser: Parser) -> Iterator[tuple[str, str, str]]:
    """(as it was typed, the option of ours that it is or resembles, its value)."""
    for index, word in enumerate(words[1:], start=1):
        if word == "--":
            return
        option, _, value = word.partition("=")
        if not option.startswith("--") or option == "--help":
            continue
        meant = parser.nearest_option(option, LIKE)
        if meant:
            following = words[index + 1] if index + 1 < len(words) else ""
            yield option, meant, value or ("" if following.startswith("-") else following)


def _source(script: str) -> str | None:
    try:
        with Path(script).open("rb") as file:
            text = file.read(SOURCE_BYTES_MAX).decode(errors="replace")
    except OSError:
        return None
    return text if script.endswith(".py") else None


def _knows(source: str, option: str) -> bool:
    """Whether a script names it, as an option or as the variable that parsers make options of."""
    name = option.lstrip("-")
    return option in source or re.search(rf"\b{re.escape(name.replace('-', '_'))}\b", source) is not None
