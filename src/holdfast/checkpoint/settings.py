"""How a run keeps checkpoints: where, how often, which ones stay. The command says it; without one, the script."""

from __future__ import annotations

import json
import os
import re
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.host_memory import isal
from holdfast.checkpoint.host_memory.isal import FRAGMENTS_MAX
from holdfast.checkpoint.saving.schedule import Every
from holdfast.checkpoint.storage.opening import check_uri, scheme_of
from holdfast.checkpoint.storage.spelling import check_spelling
from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.core.options.declaring import check_options, option_of, option_words, options_of
from holdfast.core.options.run import CheckpointOptions

NOWHERE = "none"


@dataclass(frozen=True)
class Checkpoints:
    """What a script says of its checkpoints: for a run without a command, which has options for all of it."""

    uri: str | os.PathLike[str]
    _: KW_ONLY
    every: str | int | None = None  # 500 (steps), "10min", "auto"
    keep: int | None = None  # how many of the newest stay

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Checkpoints | None) -> Checkpoints | None:
        """What was given to join, with a place that is a word."""
        if given is None:
            return None
        said = given if isinstance(given, cls) else cls(given)  # type: ignore[arg-type]
        if not isinstance(said.uri, str | os.PathLike) or isinstance(os.fspath(said.uri), bytes):
            raise ConfigError(
                f"checkpoint is {a_kind(said.uri)}, not a place",
                hint="give a directory or a URI, or holdfast.Checkpoints(uri, every=..., keep=...)",
            )
        if said.keep is not None:
            about = option_of(CheckpointOptions, "keep")
            about.kind.check("keep", said.keep, about.hint)
        return replace(said, uri=os.fspath(said.uri), every=None if said.every is None else str(said.every))


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(CheckpointOptions):
    """Where `uri` is empty, it is for the agent to say; to a worker that is told nothing else, it means nowhere."""

    own: bool = False  # `uri` is the run's own directory, which may move with it
    given: tuple[str, ...] = ()  # the options that the command was given, by their fields: these hold

    def validate(self) -> CheckpointSettings:
        check_options(self)
        if self.uri and self.uri != NOWHERE:
            check_uri(self.uri)
        Every.parse(self.every)
        if self.keep_best:
            from holdfast.checkpoint.saving.retention import Keep  # loads torch

            Keep(best=self.keep_best).validate()
        parse_memory(self.memory)
        return self

    def at_home(self) -> CheckpointSettings:
        """With an absolute path, where it is one: workers may change their directory."""
        if self.uri in ("", NOWHERE):
            return self
        check_spelling(self.uri)
        if scheme_of(self.uri):
            return self
        return replace(self, uri=str(Path(self.uri).expanduser().resolve()))

    def placed(self, run_directory: Path, *, alone: bool) -> CheckpointSettings:
        """For workers. A run that is alone on its host keeps checkpoints in its own directory, if not told otherwise.

        On several hosts there is no such place: the directories of one are not those of the others.
        """
        if self.uri == NOWHERE:
            return replace(self, uri="")
        if self.uri or not alone:
            return self
        return replace(self, uri=str(run_directory / "checkpoints"), own=True)

    def with_script(self, said: Checkpoints | None) -> CheckpointSettings:
        """With what a script says itself, where the command says nothing."""
        changes = {name: value for name, value in _words_of(said).items() if name not in self.given}
        if changes.get("uri"):
            changes["own"] = False
        changed = replace(self, **changes).at_home()
        return replace(changed, uri="" if changed.uri == NOWHERE else changed.uri)

    def against_script(self, said: Checkpoints | None) -> str:
        """Which of the two holds, where a script says something else than the command; empty: they are of one mind."""
        theirs = replace(self, given=()).with_script(said)
        differ = [name for name in _words_of(said) if getattr(theirs, name) != getattr(self, name)]
        told = [
            f"{one.flag} {one.kind.spell(getattr(self, one.setting)) or NOWHERE}, not "
            f"{getattr(theirs, one.setting) or NOWHERE}"
            for one in options_of(self)
            if one.setting in differ and one.setting in self.given
        ]
        return (
            f"the command's options for checkpoints hold where the script says others: {'; '.join(told)}"
            if told
            else ""
        )

    def words(self) -> list[str]:
        """The words of a command line that give these settings, and what was given with its usual value too."""
        given = [one for one in options_of(self) if one.setting in self.given]
        usual = {one.flag: one.kind.spell(one.default) for one in given if getattr(self, one.setting) == one.default}
        return [*option_words(self), *(word for pair in usual.items() for word in pair)]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> CheckpointSettings:
        if not text:
            return cls()
        try:
            found = cls(**json.loads(text))
            return replace(found, given=tuple(found.given))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the checkpoint settings in the environment make no sense: {text[:80]!r}",
                hint="start workers with `holdfast run`",
            ) from error


def _words_of(said: Checkpoints | None) -> dict[str, Any]:
    return {name: value for name, value in asdict(said).items() if value is not None} if said is not None else {}


def parse_memory(text: str) -> tuple[int, int] | None:
    """ "4+2" as (4, 2); None for plain copies, and for none at all."""
    if text in ("", "plain"):
        return None
    match = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", text)
    k, m = (int(match[1]), int(match[2])) if match else (0, 0)
    if k < 1 or m < 1 or k + m > FRAGMENTS_MAX:
        raise ConfigError(
            f"--memory is {text!r}",
            hint=f"plain, or K+M as in 4+2: K hosts' worth of data and M of parity, {FRAGMENTS_MAX} in all at most",
        )
    if isal.needs_library(k, m):
        isal.load()
    return k, m
