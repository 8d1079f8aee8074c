"""What the value of an option can be: how it is read from a word, checked, and written as a word again. Pure.

Whatever is wrong is a ConfigError that names the option.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.durations import HINT, parse_duration, spell_duration
from holdfast.core.errors import ConfigError

SEE = "see `holdfast run --help`"
ON = "on"
NEVER = "none"  # the word for a duration that never ends
PORT_MAX = 65535
_ADDRESS = re.compile(r"(?:(?P<bare>\d+)|(?P<host>[A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]):(?P<port>\d+))")


@dataclass(frozen=True)
class Text:
    """A name, a path or a URI, whose meaning is checked where it is known. The other kinds are more particular."""

    alone: str = field(default="", kw_only=True)  # the word for an option that was given without one, where it may be

    @property
    def limits(self) -> str:
        """The range, in words."""
        return ""

    def parse(self, what: str, text: str, hint: str) -> Any:
        self.check(what, text, hint)
        return text

    def check(self, what: str, value: Any, hint: str) -> None:
        assert isinstance(value, str), (what, value)

    def spell(self, value: Any) -> str:
        """The word that `parse` reads as this value."""
        return str(value)

    def _outside(self, what: str, said: str, hint: str) -> ConfigError:
        return ConfigError(f"{what} is {said}, but must be from {self.limits}", hint=hint or SEE)


@dataclass(frozen=True)
class Whole(Text):
    """A whole number from `low` to `high`."""

    low: int
    high: int

    @property
    def limits(self) -> str:
        return f"{self.low} to {self.high}"

    def parse(self, what: str, text: str, hint: str) -> int:
        value = parse_whole(what, text, SEE)
        self.check(what, value, hint)
        return value

    def check(self, what: str, value: Any, hint: str) -> None:
        if type(value) is not int:
            raise ConfigError(f"{what} is {value!r:.40}, which is not a whole number", hint=hint or SEE)
        if not self.low <= value <= self.high:
            raise self._outside(what, str(value), hint)


@dataclass(frozen=True)
class Fraction(Text):
    """A number from `low` to `high`, such as 0.3."""

    low: float
    high: float

    @property
    def limits(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    def parse(self, what: str, text: str, hint: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise ConfigError(f"{what} is {text[:40]!r}, which is not a number", hint=hint or SEE) from error
        self.check(what, value, hint)
        return value

    def check(self, what: str, value: Any, hint: str) -> None:
        if not self.low <= value <= self.high:
            raise self._outside(what, f"{value:g}", hint)

    def spell(self, value: float) -> str:
        return str(int(value) if value == int(value) else value)


@dataclass(frozen=True)
class Duration(Text):
    """Seconds from `low` to `high`, written as 30s or 2min. Where `never` is allowed, that is the word none, and 0."""

    low: float
    high: float
    never: bool = False

    @property
    def limits(self) -> str:
        return f"{spell_duration(self.low)} to {spell_duration(self.high)}"

    def parse(self, what: str, text: str, hint: str) -> float:
        if self.never and text.strip() == NEVER:
            return 0.0
        seconds = parse_duration(what, text, hint or (f"{HINT}, or {NEVER}" if self.never else HINT))
        self._check_range(what, seconds, hint)
        return seconds

    def check(self, what: str, value: Any, hint: str) -> None:
        if value or not self.never:
            self._check_range(what, value, hint)

    def _check_range(self, what: str, seconds: float, hint: str) -> None:
        if not self.low <= seconds <= self.high:
            raise self._outside(what, f"{seconds:g} s", hint or (f"{NEVER} switches it off" if self.never else HINT))

    def spell(self, value: float) -> str:
        return spell_duration(value) if value or not self.never else NEVER


@dataclass(frozen=True)
class Choice(Text):
    words: tuple[str, ...]

    def check(self, what: str, value: Any, hint: str) -> None:
        if value not in self.words:
            raise ConfigError(f"{what} is {value!r:.40}", hint=f"choose one of {', '.join(self.words)}")


@dataclass(frozen=True)
class ChoiceOrCount(Text):
    """One of the words, or a whole number from `low` to `high`, as a word."""

    words: tuple[str, ...]
    low: int
    high: int

    def check(self, what: str, value: Any, hint: str) -> None:
        if value in self.words:
            return
        count = int(value) if str(value).isascii() and str(value).isdigit() else None
        if count is None:
            words = ", ".join(self.words)
            raise ConfigError(f"{what} is {value!r:.40}", hint=f"{words}, or a number from {self.low} to {self.high}")
        if not self.low <= count <= self.high:
            raise ConfigError(f"{what} is {count}, but must be from {self.low} to {self.high}", hint=hint or SEE)


@dataclass(frozen=True)
class Switch(Text):
    """Off, the empty word, unless its flag is given, which takes no word: then ON."""

    def check(self, what: str, value: Any, hint: str) -> None:
        if value not in ("", ON):
            raise ConfigError(f"{what} is {value!r:.40}", hint=f"{what} takes no word")


@dataclass(frozen=True)
class ListenAddress(Text):
    """PORT or ADDR:PORT, where a server of ours listens. Port 0 is any that is free."""

    def check(self, what: str, value: Any, hint: str) -> None:
        split_address(value, what)


def parse_whole(what: str, text: str, hint: str) -> int:
    """The one parser of counts."""
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{what} is {text[:40]!r}, which is not a whole number", hint=hint) from error


def split_address(text: str, what: str) -> tuple[str, int]:
    """(host, port); the host is this one if it is not said."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ConfigError(f"{what} is {text[:40]!r}, which is not an address", hint="give a port, or ADDR:PORT")
    port = int(match["bare"] or match["port"])
    if port > PORT_MAX:
        raise ConfigError(f"{what}: {port} is not a port", hint=f"ports are from 1 to {PORT_MAX}; 0: any that is free")
    return (match["host"] or "127.0.0.1").strip("[]"), port
