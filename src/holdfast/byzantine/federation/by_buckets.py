"""A simulated training whose server sees no client's update: sums of random buckets, masked, and the rule across them.

Every client masks its numbers as a real one would, and everything between it and the server is bytes. Honest clients
clip, and add their share of the noise. Hostile ones do neither, and send any numbers that the sum has room for; what is
not finite becomes the largest such number. Buckets and keys are new in every round. Which clients are dealt together
is the same for the same seed; masks and noise are from the kernel's generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast.byzantine.federation.combining import Cohort, Combined, Combiner, Combining
from holdfast.byzantine.privacy import across
from holdfast.byzantine.privacy.accounting import Accountant
from holdfast.byzantine.privacy.ciphers import Secrets
from holdfast.byzantine.privacy.client import MaskedClient
from holdfast.byzantine.privacy.exchange import carried
from holdfast.byzantine.privacy.fixed_point import Encoding, Residues
from holdfast.byzantine.privacy.masked_round import MaskedRound
from holdfast.byzantine.privacy.messages import Phase
from holdfast.byzantine.privacy.noise import Noise
from holdfast.byzantine.privacy.terms import SMALLEST, Terms
from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import TooFewUpdates

LIMIT = 16.0  # of a number, where nothing says how long an update is
DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class BucketChoice:
    """So many buckets in each round. `colluding`: so many members of one may act together with the server."""

    buckets: int
    noise: Noise | None = None
    delta: float = DELTA
    colluding: int = 0

    @property
    def words(self) -> str:
        parts = [f"{self.buckets} masked buckets"]
        if self.colluding:
            parts.append(f"{self.colluding} colluding")
        if self.noise:
            parts.append(f"clip {self.noise.clip:g}")
            if self.noise.multiplier:
                parts.append(f"noise {self.noise.multiplier:g}")
        return ", ".join(parts)

    def check(self, aggregator: str, clients: int, f: int) -> None:
        """ConfigError if so many clients in these buckets cannot bear f hostile ones by this rule."""
        if self.noise:
            self.noise.validate()
            if self.noise.multiplier:
                self._accountant.validate()
        across.check(parse(aggregator), clients, f, self.terms(clients, 1, self.buckets))

    @property
    def _accountant(self) -> Accountant:
        assert self.noise is not None
        return Accountant(noise=self.noise.multiplier, delta=self.delta)

    def epsilons(self, rounds: int) -> list[float]:
        """After every round; none without noise."""
        if self.noise is None or not self.noise.multiplier:
            return []
        return [self._accountant.epsilon(number + 1) for number in range(rounds)]

    def terms(self, clients: int, numbers: int, buckets: int) -> Terms:
        """In as fine units as there is room for, with noise in the smallest bucket that there can be."""
        bare = Terms(buckets, numbers, Encoding(32, 0, 1), self.colluding).checked(clients)
        limit = self.noise.limit(self.noise.share(bare, bare.smallest)) if self.noise else LIMIT
        return replace(bare, encoding=Encoding.fitting(limit, -(-clients // buckets)))

    def combining(self) -> Combining:
        @contextmanager
        def opened(cohort: Cohort) -> Iterator[Combiner]:
            yield _ByBuckets(self, cohort)

        return opened


class _ByBuckets:
    def __init__(self, choice: BucketChoice, cohort: Cohort) -> None:
        fitting = min(
            choice.buckets, cohort.clients // (SMALLEST + choice.colluding)
        )  # fewer if no hostile ones are here
        self._terms = choice.terms(cohort.clients, cohort.model.numel(), max(fitting, 1))
        self._noise, self._cohort, self._rule = choice.noise, cohort, parse(cohort.aggregator)
        self._names = [f"c{number:04}" for number in range(cohort.clients)]
        self._round = 0

    def combine(self, model: torch.Tensor, sent: torch.Tensor) -> Combined:
        self._round += 1
        clients = {name: self._client(number, sent[number]) for number, name in enumerate(self._names)}
        found = carried(MaskedRound(self._round, self._names, self._terms, self._drawn("server")), clients)
        try:
            value = across.combine(found, self._terms.encoding, self._rule.in_round(self._round), self._cohort.f)
        except TooFewUpdates:
            return Combined(model)
        trusted = tuple(value.trusted.get(name, False) for name in self._names)
        return Combined(model - self._cohort.lr * value.value, trusted)

    def _client(self, number: int, update: torch.Tensor) -> _Client:
        name = self._names[number]
        secrets = replace(Secrets.draw(), nonce=self._drawn(name)[:16])
        is_hostile = number >= self._cohort.clients - self._cohort.f
        return _Client(MaskedClient(name, self._round, self._terms, secrets), update, self._noise, is_hostile)

    def _drawn(self, what: str) -> bytes:
        """By chance in a federation; here a simulation's seed decides who is dealt with whom."""
        return hashlib.sha256(f"{self._cohort.seed} {self._round} {what}".encode()).digest()


class _Client:
    """Knows how large its bucket is before it must say what it adds, and draws its noise by that."""

    def __init__(self, machine: MaskedClient, update: torch.Tensor, noise: Noise | None, is_hostile: bool) -> None:
        self._machine, self._update, self._noise, self._is_hostile = machine, update, noise, is_hostile

    def hear(self, content: bytes) -> bytes:
        if self._machine.phase is Phase.MASK:
            self._machine.contribute(self._numbers())
        return self._machine.hear(content)

    def _numbers(self) -> Residues:
        update, terms = self._update.double().numpy(), self._machine.terms
        members = len(self._machine.members)
        if self._is_hostile:
            encoding = terms.encoding
            room = replace(encoding, limit_units=encoding.limit_units * members)
            return room.encode(np.nan_to_num(update, nan=room.limit, posinf=room.limit, neginf=-room.limit))
        if self._noise:
            update = self._noise.added(update, self._noise.share(terms, members))
        return terms.encoding.encode(update)
