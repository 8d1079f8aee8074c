"""The parser of every command: a wrong word is answered by one sentence that names the right one.

argparse looks at options only after it has missed the required ones, and never says which option was meant. So the
words are looked at here first.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from holdfast.core.errors import ConfigError

LIKE = 0.7  # of the letters in common: a typo
FOREIGN = {  # what people of other launchers type
    "--gpus": "--workers",
    "--n": "--workers",
    "--name": "--run",
    "--nproc": "--workers",
    "--nproc-per-node": "--workers",
    "--num-workers": "--workers",
    "--output-dir": "--dir",
    "--processes": "--workers",
    "--resume": "--run",
    "-f": "--follow",
    "-n": "--workers",
    "-np": "--workers",
    "-w": "--workers",
    "-y": "--yes",
}
OTHER_WORDS = {  # commands by the names that they have elsewhere
    "cat": ("logs", "show"),
    "check": ("verify",),
    "clean": ("rm", "prune"),
    "delete": ("rm", "prune"),
    "kill": ("stop",),
    "launch": ("run",),
    "list": ("runs", "ls"),
    "log": ("logs",),
    "ls": ("runs",),
    "new": ("create",),
    "ps": ("runs",),
    "remove": ("rm", "prune"),
    "rm": ("prune", "forget"),
    "start": ("run",),
    "tail": ("logs",),
    "train": ("run",),
    "ui": ("dashboard",),
    "watch": ("top",),
}
_NUMBER = re.compile(r"-\d|-\.\d")
_PLACE = re.compile(r"\d+(\.\d+)?[a-z]{0,3}|\S*:\d+")  # a port, an address with one, a time: an option may lack it
_SAYINGS = (
    (re.compile(r"argument (.+?): invalid int value: (.+)", re.DOTALL), "{0} is {1}, which is not a whole number"),
    (re.compile(r"argument (.+?): invalid float value: (.+)", re.DOTALL), "{0} is {1}, which is not a number"),
    (re.compile(r"argument (.+?): expected (?:one|at least one) argument"), "{0} needs a value after it"),
    (re.compile(r"argument (.+?): ignored explicit argument .+", re.DOTALL), "{0} takes no value"),
    (re.compile(r"the following arguments are required: ([^,]+)"), "{0} is missing"),
    (re.compile(r"the following arguments are required: (.+), ([^,]+)"), "{0} and {1} are missing"),
)
_SHOWN_MAX = 200


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence with a hint, as every other error does. Options cannot be abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, extra = super().parse_known_args(self._checked(list(args or ())), namespace)
        if extra:
            words = " ".join(word for word in extra if word != "--")
            raise ConfigError(f"there is too much in the command: {_short(words)}", hint=f"see `{self.prog} --help`")
        return found, extra

    def error(self, message: str) -> NoReturn:
        for pattern, saying in _SAYINGS:
            match = pattern.fullmatch(message)
            if match:
                message = saying.format(*(_short(part) for part in match.groups()))
                break
        raise ConfigError(message, hint=f"see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [] if action.choices is None else list(map(str, action.choices))
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            raise self._no_command(str(value), choices)
        what = f"{'/'.join(action.option_strings)} is {_short(repr(value))}"
        raise ConfigError(what, hint=meant(nearest(str(value), choices), f"one of {', '.join(choices)}"))

    def _no_command(self, value: str, choices: Sequence[str]) -> ConfigError:
        what = f"there is no command {self.prog} {_short(value)}"
        if value.endswith(".py") and "run" in choices:
            return ConfigError(what, hint=f"a script is run by: {self.prog} run --workers 2 {_short(value)}")
        if value == "help":
            return ConfigError(what, hint=f"see `{self.prog} --help`")
        other = next((word for word in OTHER_WORDS.get(value, ()) if word in choices), "")
        found = other or nearest(value, choices)
        return ConfigError(what, hint=meant(found, f"one of {', '.join(choices)}"))

    def _checked(self, words: Sequence[str]) -> list[str]:
        """The same words, each option known. What is somebody else's, a command's or a script's, is not looked at.

        Where all words are ours, options come first: argparse would not see `logs RUN --follow WORKER` as one command.
        """
        rest = any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._get_positional_actions())
        options: list[str] = []
        others: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            if word == "--" or (rest and not word.startswith("-")):
                left.insert(0, word)
                break
            if not word:
                raise ConfigError(f"a word of `{self.prog}` is empty", hint="does a shell variable have no value?")
            if not word.startswith("-") or word == "-" or _NUMBER.match(word):
                others.append(word)
                continue
            options.append(word)
            name, has_value, value = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                raise self._unknown(name)
            if action.nargs == argparse.REMAINDER:
                break
            if (has_value and not value) or (not has_value and action.nargs is None and left[:1] == [""]):
                raise ConfigError(
                    f"the value of {name} is empty",
                    hint="give it one, or leave the option out; does a shell variable lack one?",
                )
            if has_value or not left:
                continue
            if action.nargs is None and _NUMBER.match(left[0]):
                options[-1] = f"{name}={left.pop(0)}"  # -1s is a value, and argparse would take it for an option
            elif action.nargs is None or (action.nargs == "?" and _PLACE.fullmatch(left[0])):
                options.append(left.pop(0))
            elif action.nargs == "?" and rest:
                options[-1] = f"{word}={action.const}"  # what follows is the script, and argparse would take it
        if others:
            return [*options, "--", *others, *(left[1:] if left[:1] == ["--"] else left)]
        return options + left

    def _unknown(self, name: str) -> ConfigError:
        hint = meant(self.nearest_option(name), f"see `{self.prog} --help`")
        for action in self._get_positional_actions():
            if isinstance(action, argparse._SubParsersAction):
                having = [word for word, child in action.choices.items() if name in child._option_string_actions]
                hint = f"it comes after the command: {self.prog} {having[0]} {name}" if having else hint
        return ConfigError(f"{self.prog} has no option {_short(name)}", hint=hint)

    def nearest_option(self, name: str, like: float = LIKE) -> str:
        """The option of ours that `name` seems to mean; empty if none."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        foreign = FOREIGN.get(name.replace("_", "-"), "")
        return foreign if foreign in known else nearest(name.lower().replace("_", "-"), known, like)


def nearest(word: str, known: Iterable[str], like: float = LIKE) -> str:
    """Of `known`, what `word` is most likely a misspelling of; empty if nothing is near."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=like)), "")


def meant(found: str, otherwise: str) -> str:
    return f"did you mean {found}?" if found else otherwise


def _short(text: str) -> str:
    """In one line that a terminal shows as it is."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= _SHOWN_MAX else f"{plain[:_SHOWN_MAX]}…"
