"""How an option is declared: as a field of a frozen dataclass, with all that is to be known of it beside it.

    lease_s: float = option(Duration(0.2, 3600), 2.0, group=PATIENCE, metavar="T", help="…")

The field's name gives the flag, --lease, unless `flag` says another. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from holdfast.core.options.kinds import Switch, Text

_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. `help` is for the command line, `more` is what the reference page adds to it, in Markdown."""

    setting: str = ""  # the field's name
    flag: str
    kind: Text
    default: Any
    usual: str = ""  # what is said of a default that is not a value: "the host's own name"
    group: str
    metavar: str = ""
    help: str
    more: str = ""
    hint: str = ""

    @property
    def spelled_default(self) -> str:
        if self.usual or self.default in (MISSING, None, ""):
            return self.usual
        return self.kind.spell(self.default)

    def parse(self, text: str) -> Any:
        return self.kind.parse(self.flag, text, self.hint)

    def check(self, value: Any) -> None:
        """ConfigError if it cannot be. The default always can."""
        if value != self.default:
            self.kind.check(self.flag, value, self.hint)

    def words(self, value: Any) -> list[str]:
        """The words of a command line that give this value; none for the default."""
        if value == self.default:
            return []
        return [self.flag] if isinstance(self.kind, Switch) else [self.flag, self.kind.spell(value)]


def option(kind: Text, default: Any = MISSING, *, flag: str = "", **about: Any) -> Any:
    """A field that is an option; see `Option` for what can be said about it."""
    return field(default=default, metadata={_KEY: {"flag": flag, "kind": kind, "default": default, **about}})


def options_of(settings: Any) -> tuple[Option, ...]:
    """The options of a dataclass, or of one of its objects, in the order in which they are declared."""
    return tuple(_option(one.name, one.metadata[_KEY]) for one in fields(settings) if _KEY in one.metadata)


def option_of(settings: Any, setting: str) -> Option:
    return next(one for one in options_of(settings) if one.setting == setting)


def parse_options(settings: Any, words: Mapping[str, str]) -> dict[str, Any]:
    """The values of the options of `settings` that `words` gives, by their flags; by the names of the fields."""
    return {one.setting: one.parse(words[one.flag]) for one in options_of(settings) if one.flag in words}


def check_options(settings: Any) -> None:
    """Each option by itself; what several of them must be together is for whoever holds them."""
    for one in options_of(settings):
        one.check(getattr(settings, one.setting))


def option_words(settings: Any) -> list[str]:
    """The words of a command line that give these settings."""
    return [word for one in options_of(settings) for word in one.words(getattr(settings, one.setting))]


def _option(setting: str, about: Mapping[str, Any]) -> Option:
    flag = about["flag"] or "--" + setting.removesuffix("_s").replace("_", "-")
    return Option(setting=setting, **{**about, "flag": flag})
