"""Which clients are asked, by what became of them in the rounds before. Pure: rounds in, decisions and reasons out.

Two things count against a client. **Strikes**: rounds in a row to which it brought nothing of use: its reply was
malformed, an error, or never came. **Suspicion**: it is left out by the robust rule more often than chance explains. A
rule that must choose leaves somebody out in every round, also where all are honest. So bets are kept as in
`membership/trusting.py`, one draw a round, but with a new unit staked on each of them in every round (Shiryaev and
Roberts; as an e-detector, Shin et al. 2023): what they are worth, less the number of rounds, is then on average zero
while the client is honest, whatever comes, so that a client that is like the others reaches `alarm_rounds` on average
after so many rounds at the earliest. And one that turns hostile late is found as soon as one that always was. An honest
client with data like nobody else's is left out again and again too, and rests as well: set `alarm_rounds` to 0 if such
clients must be heard.

Who has too many strikes or is too suspect rests for some rounds: it is not asked. Then it comes back with a clean
sheet; each further rest is twice as long. Nobody rests if the round would have too few clients without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from math import exp, isfinite
from typing import Any

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.membership.trusting import BETS, average

CLIENTS_KEPT = 4096  # of whom something is remembered; whoever was heard of last stays
WORTH_MAX = 1e12


class Conduct(Enum):
    """What became of a client that was asked in a round."""

    TRUSTED = "trusted"
    LEFT_OUT = "left out"
    MALFORMED = "malformed"  # no correct client sends that
    FAILED = "failed"  # it said that it could not do it
    SILENT = "silent"  # no answer in time
    UNHEARD = "unheard"  # it answered well, and the round came to nothing

    @property
    def is_strike(self) -> bool:
        return self in (Conduct.MALFORMED, Conduct.FAILED, Conduct.SILENT)


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """When a client rests, and for how long."""

    strikes: int = 3  # rounds in a row without anything of use
    rounds: int = 5  # of the first rest
    rounds_max: int = 80
    alarm_rounds: int = 1000  # how rarely a client like the others rests because it was left out; 0: none ever does

    def validate(self) -> Quarantine:
        if self.strikes < 1 or not 1 <= self.rounds <= self.rounds_max:
            raise ConfigError(f"{self!r} has no sense", hint="strikes and rounds are 1 or more, rounds_max not below")
        if self.alarm_rounds < 0:
            raise ConfigError(f"alarm_rounds={self.alarm_rounds} is below zero", hint="1000 is usual, 0 for never")
        return self


@dataclass
class ClientStanding:
    """One client's. `worths`: of its bets; it rests up to and with round `rests_until`."""

    strikes: int = 0
    worths: list[float] = field(default_factory=lambda: [0.0] * len(BETS))
    rests: int = 0
    rests_until: int = 0
    asked: int = 0
    left_out: int = 0
    malformed: int = 0

    @property
    def worth(self) -> float:
        return sum(self.worths) / len(BETS)


@dataclass(frozen=True)
class Choice:
    """Whom to ask. `recalled` are among them although they should rest: the round needs them."""

    asked: tuple[int, ...]
    resting: tuple[int, ...]
    recalled: tuple[int, ...] = ()


class ReputationBook:
    """Owned by the strategy. Clients are the numbers of Flower's nodes."""

    def __init__(self, settings: Quarantine) -> None:
        self._settings = settings.validate()
        self.standings: dict[int, ClientStanding] = {}

    def choose(self, available: Collection[int], number: int, needed: int) -> Choice:
        """Of those who are there, in ascending order; whose rest ends first is recalled first."""
        resting = sorted(one for one in available if self.rests(one, number))
        free = [one for one in available if one not in set(resting)]
        missing = max(0, needed - len(free))
        recalled = sorted(resting, key=lambda one: (self.standings[one].rests_until, one))[:missing]
        asked = tuple(sorted([*free, *recalled]))
        return Choice(asked, tuple(one for one in resting if one not in recalled), tuple(sorted(recalled)))

    def rests(self, client: int, number: int) -> bool:
        standing = self.standings.get(client)
        return standing is not None and number <= standing.rests_until

    def count(self, number: int, conducts: Mapping[int, Conduct]) -> list[str]:
        """A round is over. A sentence for each client that rests from now on.

        A round in which nobody was heard says more of the server's connections than of anybody, and does not count.
        """
        if all(one is Conduct.SILENT for one in conducts.values()):
            return []
        heard = [one for one in conducts.values() if one in (Conduct.TRUSTED, Conduct.LEFT_OUT)]
        out = sum(one is Conduct.LEFT_OUT for one in heard)
        told = []
        for client in sorted(conducts):
            standing = self._standing(client)
            _count_one(standing, conducts[client], len(heard), out)
            if not self.rests(client, number) and (why := self._why_rest(standing)):
                told.append(f"client {client} is not asked {self._rest(standing, number)}: {why}")
        return told

    def _standing(self, client: int) -> ClientStanding:
        standing = self.standings.pop(client, None) or ClientStanding()
        self.standings[client] = standing  # heard of last
        while len(self.standings) > CLIENTS_KEPT:
            del self.standings[next(iter(self.standings))]
        return standing

    def _why_rest(self, standing: ClientStanding) -> str:
        if standing.strikes >= self._settings.strikes:
            return f"it brought nothing of use for {standing.strikes} rounds"
        if self._settings.alarm_rounds and standing.worth >= self._settings.alarm_rounds:
            said = f"it was left out in {standing.left_out} of the {standing.asked} rounds that it was asked in"
            return f"{said}; a client like the others comes to that once in {self._settings.alarm_rounds} rounds"
        return ""

    def _rest(self, standing: ClientStanding, number: int) -> str:
        rounds = min(self._settings.rounds << min(standing.rests, 32), self._settings.rounds_max)
        standing.rests += 1
        standing.rests_until = number + rounds
        standing.strikes, standing.worths = 0, [0.0] * len(BETS)
        return f"in rounds {number + 1} to {number + rounds}"

    # -- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {str(client): asdict(standing) for client, standing in self.standings.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            self.standings = {int(client): _standing_of(fields) for client, fields in state.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not a book of reputations: {error}") from error


def _standing_of(fields: Mapping[str, Any]) -> ClientStanding:
    standing = ClientStanding(**fields)
    worths: Sequence[float] = standing.worths
    if len(worths) != len(BETS) or not all(isfinite(one) for one in worths):
        raise ValueError(f"bets of {worths!r:.80}")
    return standing


def _count_one(standing: ClientStanding, conduct: Conduct, heard: int, out: int) -> None:
    standing.asked += 1
    standing.left_out += conduct is Conduct.LEFT_OUT
    standing.malformed += conduct is Conduct.MALFORMED
    standing.strikes = standing.strikes + 1 if conduct.is_strike else 0
    if conduct in (Conduct.TRUSTED, Conduct.LEFT_OUT):
        mine = int(conduct is Conduct.LEFT_OUT)
        standing.worths = [
            min((worth + 1.0) * exp(bet * mine - average(heard, out, 1, bet)), WORTH_MAX)
            for worth, bet in zip(standing.worths, BETS, strict=True)
        ]
