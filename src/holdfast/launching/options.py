"""The options of a launch: those of `holdfast run`, by the names of their flags. Checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from holdfast.agent.settings import check_workers
from holdfast.core.errors import ArgumentError, ConfigError
from holdfast.core.options.declaring import Option, options_of
from holdfast.core.options.kinds import Switch
from holdfast.core.options.run import DIRECTORY, RUN_OPTIONS
from holdfast.placement.directory import home_directory
from holdfast.placement.naming import check_name

_SEVERAL_HOSTS = ("--ledger", "--keys", "--host", "--advertise")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    name: str  # of the run; empty: it gets one
    home: Path
    words: tuple[str, ...]  # for `holdfast run`, without the two above


def parse_launch_options(workers: Any, options: dict[str, Any]) -> LaunchOptions:
    """ConfigError for what `holdfast run` would not take, or a launch cannot have."""
    if type(workers) is not int:
        raise ConfigError(f"launch(workers={workers!r:.40})", hint="give a whole number of workers, such as workers=4")
    check_workers(workers)
    known = {_keyword(option): option for kind in RUN_OPTIONS for option in options_of(kind)}
    given = {"dashboard": 0, **options}
    name = str(given.pop("run", "") or "")
    home = given.pop("dir", None)
    if name:
        check_name(name)
    words = ["--workers", str(workers)]
    for keyword, value in given.items():
        if keyword not in known or keyword == "workers":
            raise _unknown(keyword, [*known, DIRECTORY.flag.removeprefix("--")])
        option = known[keyword]
        if option.flag in _SEVERAL_HOSTS and value:
            raise ConfigError(
                f"{keyword}= is for a run on several hosts, and launch starts the workers of one",
                hint="start `holdfast run` on every host, or use holdfast.integrations.ray.launch",
            )
        words += _words(option, value)
    return LaunchOptions(name=name, home=home_directory(None if home is None else str(home)), words=tuple(words))


def _keyword(option: Option) -> str:
    return option.flag.removeprefix("--").replace("-", "_")


def _words(option: Option, value: Any) -> list[str]:
    """None or False: the option is not given."""
    if isinstance(option.kind, Switch):
        return [option.flag] if value else []
    if value is None or value is False:
        return []
    if value is True and option.kind.alone:
        value = option.kind.alone
    option.parse(str(value))  # says at once what is wrong with it
    return [option.flag, str(value)]


def _unknown(keyword: str, known: list[str]) -> ConfigError:
    near = get_close_matches(keyword, known, 1)
    return ArgumentError(
        f"launch has no argument {keyword}",
        hint=f"{keyword} is {near[0]}, it seems" if near else "options are those of `holdfast run`, see its --help",
    )
