"""How much a training has told of any one client: (ε, δ) after every round, by Google's `dp-accounting`.

User-level: whether one client ever sends its updates or zeros in their place, anything that is computed from the
buckets' sums is as likely up to a factor of exp(ε), but for a probability of δ. That a client takes part is not hidden.
A client is in one bucket of a round, and its part of the sum is no longer than the clip; so a round is one Gaussian
mechanism, however many buckets there are, and the rule across them, the model and whatever is done with it cost nothing
more. To exchange a client's data for other data changes the sum by twice the clip: that is the privacy of half the
noise.

If all clients take part in each round, the sum of rounds is itself a Gaussian mechanism and ε is exact. If each takes
part by chance (`sampling`), it is a bound by Rényi divergences of whole orders; that holds against who sees the models,
not against a server, which knows who took part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.core.errors import ConfigError

ORDERS = (*range(2, 64), 80, 96, 128, 192, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """`noise`: the multiplier of noise.Noise. `sampling`: with which probability a client takes part in a round."""

    noise: float
    delta: float = 1e-5
    sampling: float = 1.0

    def validate(self) -> Accountant:
        if not 0.0 < self.noise < math.inf:
            raise ConfigError(f"--noise {self.noise:g} keeps nothing private", hint="1 is usual; more hides more")
        if not 0.0 < self.delta < 1.0:
            raise ConfigError(f"--delta {self.delta:g} is no probability", hint="well below 1 / clients, as 1e-5")
        if not 0.0 < self.sampling <= 1.0:
            raise ConfigError(f"sampling={self.sampling:g} is no part of the clients", hint="above 0, up to 1")
        _ = self._library
        return self

    def epsilon(self, rounds: int) -> float:
        """What all rounds up to this one have cost together."""
        if rounds == 0:
            return 0.0
        if self.sampling == 1.0:
            return float(self._library.get_epsilon_gaussian(self.noise / math.sqrt(rounds), self.delta))
        events = self._library
        accountant = events.rdp.RdpAccountant(orders=list(ORDERS))
        event = events.PoissonSampledDpEvent(self.sampling, events.GaussianDpEvent(self.noise))
        accountant.compose(events.SelfComposedDpEvent(event, rounds))
        return float(accountant.get_epsilon(self.delta))

    @cached_property
    def _library(self) -> Any:
        try:
            import dp_accounting  # type: ignore[import-untyped, unused-ignore]
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"an accountant of privacy needs the package {error.name}", hint="pip install 'holdfast[privacy]'"
            ) from error
        return dp_accounting
