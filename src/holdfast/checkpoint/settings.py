"""How a run keeps checkpoints: where, how often, which ones stay. Read from flags and from `holdfast.join`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.host_memory import isal
from holdfast.checkpoint.host_memory.isal import FRAGMENTS_MAX
from holdfast.checkpoint.saving.schedule import Every
from holdfast.checkpoint.storage.opening import check_uri, scheme_of
from holdfast.checkpoint.storage.spelling import check_spelling
from holdfast.core.errors import ConfigError
from holdfast.core.options.declaring import check_options, option_of
from holdfast.core.options.run import CheckpointOptions

NOWHERE = "none"


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(CheckpointOptions):
    """Where `uri` is empty, it is for the agent to say; to a worker that is told nothing else, it means nowhere."""

    own: bool = False  # `uri` is the run's own directory, which may move with it

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

    def overruled(self, *, uri: str | None, every: str | int | None, keep: int | None) -> CheckpointSettings:
        """With what a script says itself, where it says something."""
        if keep is not None:
            about = option_of(self, "keep")
            about.kind.check("keep", keep, about.hint)
        changes: dict[str, Any] = {"uri": uri, "own": False if uri else None, "every": every, "keep": keep}
        given = replace(self, **{name: value for name, value in changes.items() if value is not None}).at_home()
        return replace(given, every=str(given.every), uri="" if given.uri == NOWHERE else given.uri)

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
