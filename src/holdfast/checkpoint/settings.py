"""How a run keeps checkpoints: where, how often, which ones stay. Read from flags and from `holdfast.join`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint import isal
from holdfast.checkpoint.isal import FRAGMENTS_MAX
from holdfast.checkpoint.schedule import Every
from holdfast.checkpoint.storage.opening import check_uri, scheme_of
from holdfast.core.errors import ConfigError

FLAGS = (
    ("--checkpoint", "uri"),
    ("--save-every", "every"),
    ("--keep", "keep"),
    ("--keep-every", "keep_every"),
    ("--keep-best", "keep_best"),
    ("--notice", "notice_s"),
    ("--memory", "memory"),
)
NOWHERE = "none"
NOTICE_S_MIN, NOTICE_S_MAX = 1.0, 3600.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Where `uri` is empty, it is for the agent to say; to a worker that is told nothing else, it means nowhere."""

    uri: str = ""
    every: str = "auto"
    keep: int = 3  # the newest so many
    keep_every: int = 0  # and those of every so many steps; 0: no others
    keep_best: str = ""  # and the best by a metric, as in "loss:min"
    notice_s: float = 25.0  # how long a worker that is asked to leave may take to save
    memory: str = ""  # copies in hosts' memory: "plain", or "4+2" for an erasure code; empty: none
    own: bool = False  # `uri` is the run's own directory, which may move with it

    def validate(self) -> CheckpointSettings:
        if self.uri and self.uri != NOWHERE:
            check_uri(self.uri)
        Every.parse(self.every)
        if type(self.keep) is not int or self.keep < 1:
            raise ConfigError(f"keep is {self.keep!r}", hint="at least the newest checkpoint is kept: keep 1 or more")
        if type(self.keep_every) is not int or self.keep_every < 0:
            raise ConfigError(f"keep_every is {self.keep_every!r}", hint="give a number of steps, or 0 for no others")
        if self.keep_best:
            from holdfast.checkpoint.retention import Keep  # loads torch

            Keep(best=self.keep_best).validate()
        if not NOTICE_S_MIN <= self.notice_s <= NOTICE_S_MAX:
            hint = f"from {NOTICE_S_MIN:g} to {NOTICE_S_MAX:g} s: as long as the machine gives notice before it goes"
            raise ConfigError(f"the notice is {self.notice_s!r} s", hint=hint)
        parse_memory(self.memory)
        return self

    def at_home(self) -> CheckpointSettings:
        """With an absolute path, where it is one: workers may change their directory."""
        if self.uri in ("", NOWHERE) or scheme_of(self.uri):
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

    def overruled(self, *, uri: str | None, every: str | int | None, keep: int | None) -> CheckpointSettings:
        """With what a script says itself, where it says something."""
        changes: dict[str, Any] = {"uri": uri, "own": False if uri else None, "every": every, "keep": keep}
        given = replace(self, **{name: value for name, value in changes.items() if value is not None}).at_home()
        return replace(given, every=str(given.every), uri="" if given.uri == NOWHERE else given.uri)

    def flags(self) -> list[str]:
        """The options of `holdfast run` that give these settings."""
        words = []
        for option, name in FLAGS:
            value = getattr(self, name)
            if value != getattr(CheckpointSettings(), name):
                words += [option, str(value)]
        return words

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> CheckpointSettings:
        if not text:
            return cls()
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the checkpoint settings in the environment make no sense: {text[:80]!r}",
                hint="start workers with `holdfast run`",
            ) from error


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
