"""The command line of `holdfast run`, as core/options declares it."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.core.options.declaring import Option, options_of
from holdfast.core.options.kinds import ON, Choice, Switch
from holdfast.core.options.run import DIRECTORY, GENERAL, GROUPS, RUN_OPTIONS


def add_run_options(run: argparse.ArgumentParser) -> None:
    """In the groups in which the help shows them."""
    groups = {name: run if name == GENERAL else run.add_argument_group(name) for name in GROUPS}
    for settings in RUN_OPTIONS:
        for option in options_of(settings):
            add_option(groups[option.group], option)
    add_option(run, DIRECTORY)


def add_option(parser: argparse._ActionsContainer, option: Option, *, usual: str = "") -> None:
    """What is given stays a word: `given_words` finds it. `usual` is another command's default."""
    kind = option.kind
    usual = (usual or option.spelled_default).replace("`", "")
    about: dict[str, Any] = {"help": f"{option.help} (default: {usual})" if usual else option.help}
    if option.metavar:
        about["metavar"] = option.metavar
    if isinstance(kind, Choice):
        about["choices"] = kind.words
    if isinstance(kind, Switch):
        about |= {"action": "store_const", "const": ON}
    if kind.alone:
        about |= {"nargs": "?", "const": kind.alone}
    parser.add_argument(option.flag, **about)


def given_words(parsed: argparse.Namespace) -> dict[str, str]:
    """The options of `holdfast run` that were given, by their flags."""
    found = {option.flag: getattr(parsed, _name(option), None) for each in RUN_OPTIONS for option in options_of(each)}
    return {flag: word for flag, word in found.items() if word is not None}


def _name(option: Option) -> str:
    return option.flag.removeprefix("--").replace("-", "_")
