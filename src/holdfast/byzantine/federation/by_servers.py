"""A simulated training whose server nobody trusts: real processes agree on every round, and some of them may lie.

Every client signs its update, sends it to all servers, and takes a model that f+1 of them signed. What the rule makes
of the same updates is computed here, too: a model that differs from it by one bit ends the training with an error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from holdfast.byzantine.agreement.client import Client
from holdfast.byzantine.agreement.federation import SERVERS_MAX
from holdfast.byzantine.agreement.machine import Timing
from holdfast.byzantine.agreement.misbehaving import KINDS
from holdfast.byzantine.agreement.processes import Nursery, RoundSettings, ServerGroup, one_round
from holdfast.byzantine.agreement.verifying import chains_in, compare, verify_chain
from holdfast.byzantine.federation.combining import Cohort, Combined, Combiner, Combining
from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import ConfigError, IntegrityError, TooFewUpdates

SERVERS_MIN = 4
LYING = "lying"
WEIGHTS = "weights"  # the one tensor of a simulated model
TIMING = Timing(collect_s=30.0, timeout_s=1.0, resend_s=0.2)  # no client stays away


@dataclass(frozen=True, kw_only=True)
class ServerChoice:
    """So many servers, of which the last `byzantine` lie in this way. `directory`: keep their chains there."""

    servers: int = SERVERS_MIN
    byzantine: int = 0
    lie: str = LYING
    directory: Path | None = None
    round_timeout_s: float = 120.0
    timing: Timing = field(default_factory=lambda: TIMING)

    @property
    def f(self) -> int:
        return (self.servers - 1) // 3

    @property
    def words(self) -> str:
        liars = f", {self.byzantine} of them {self.lie}" if self.byzantine else ""
        return f"{self.servers} servers{liars}"

    def validate(self) -> None:
        if not SERVERS_MIN <= self.servers <= SERVERS_MAX:
            raise ConfigError(
                f"--servers {self.servers} cannot be: one of 4 servers may lie, two of 7, three of 10",
                hint=f"from {SERVERS_MIN} to {SERVERS_MAX}; without --servers one process is trusted",
            )
        if not 0 <= self.byzantine <= self.f:
            raise ConfigError(
                f"{self.byzantine} of {self.servers} servers cannot lie: {self.f} may",
                hint=f"--byzantine-servers {self.f}, or --servers {3 * max(self.byzantine, 1) + 1}",
            )
        if self.lie not in KINDS:
            raise ConfigError(f"there is no lie {self.lie!r}", hint=f"there are {', '.join(KINDS)}")
        place = self.directory
        if place is not None and place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError(
                f"{place} is not an empty directory, and a federation begins with new keys", hint="name a new one"
            )

    def combining(self, nursery: Nursery) -> Combining:
        """Every training has a federation of its own, in a directory of its own: 1-mean-alie-0, 2-median-alie-0."""
        numbers = count(1)

        @contextmanager
        def opened(cohort: Cohort) -> Iterator[Combiner]:
            with ExitStack() as stack:
                top = self.directory or Path(stack.enter_context(_directory_for_now()))
                settings = self._settings(cohort, top / f"{next(numbers)}-{_file_name(cohort)}")
                group = stack.enter_context(ServerGroup(settings, _state(cohort.model), nursery))
                clients = [stack.enter_context(group.client(name)) for name in group.federation.clients]
                yield _ByServers(cohort, clients, self.round_timeout_s)
                _verify(group)

        return opened

    def _settings(self, cohort: Cohort, directory: Path) -> RoundSettings:
        return RoundSettings(
            directory=directory,
            servers=self.servers,
            f=self.f,
            clients=cohort.clients,
            rule=cohort.aggregator,
            hostile=cohort.f,
            liars={self.servers - 1 - number: self.lie for number in range(self.byzantine)},
            timing=self.timing,
            round_timeout_s=self.round_timeout_s,
        )


class _ByServers:
    def __init__(self, cohort: Cohort, clients: list[Client], timeout_s: float) -> None:
        self._rule, self._cohort, self._clients = parse(cohort.aggregator), cohort, clients
        self._order = sorted(range(len(clients)), key=lambda number: clients[number].name)  # of the agreed set
        self._timeout_s = timeout_s
        self._round = 0

    def combine(self, model: torch.Tensor, sent: torch.Tensor) -> Combined:
        self._round += 1
        updates = [_state(-self._cohort.lr * one) for one in sent]
        signed = one_round(
            self._clients, self._round, _state(model), lambda number, round, model: updates[number], self._timeout_s
        )[WEIGHTS]
        expected = self._expected(model, updates)
        if not torch.equal(signed.view(torch.int32), expected.model.view(torch.int32)):
            raise IntegrityError(
                f"the model that the servers signed in round {self._round} is not what the updates come to",
                hint="more servers lie than were borne: `holdfast federate verify` names those that voted twice",
            )
        return Combined(signed, expected.trusted)

    def _expected(self, model: torch.Tensor, updates: list[dict[str, torch.Tensor]]) -> Combined:
        try:
            found = self._rule.aggregate([updates[number] for number in self._order], self._cohort.f)
        except TooFewUpdates:
            return Combined(model)
        assert isinstance(found.value, dict)
        trusted = [False] * len(updates)
        for place, number in enumerate(self._order):
            trusted[number] = found.trusted[place]
        return Combined(model + found.value[WEIGHTS], tuple(trusted))


def _directory_for_now() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="holdfast-", ignore_cleanup_errors=True)


def _file_name(cohort: Cohort) -> str:
    words = f"{cohort.aggregator}-{cohort.attack}-{cohort.seed}".replace("*", "-searched")
    return "".join(one if one.isalnum() or one in "-+." else "-" for one in words)


def _state(model: torch.Tensor) -> dict[str, torch.Tensor]:
    return {WEIGHTS: model}


def _verify(group: ServerGroup) -> None:
    """As `holdfast federate verify` does. A server may be a round behind; two may not differ."""
    paths = [path for path in chains_in(group.settings.directory) if path.parent.name in group.honest]
    compare([verify_chain(path, group.federation) for path in paths])
