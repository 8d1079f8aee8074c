"""What becomes of a round's clients: the port through which a round is held, and the plain way, a rule over updates.

A `Combiner` is given the round's model, the clients that take part, and a `RoundDesk`, through which it asks them: as
often as it needs to within a round, each time with a deadline, replies checked one by one as they come. The plain way
asks once. `masked_buckets.py` asks for keys, for shares, for masked numbers and for what opens their sums, and applies
its rule to sums of buckets in place of updates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

import torch
from flwr.app import ConfigRecord, MessageType, RecordDict

from holdfast.byzantine.rules.columns import Median
from holdfast.byzantine.rules.port import Rule
from holdfast.core.errors import ConfigError, TooFewUpdates
from holdfast.integrations.flower.model_record import Model, State
from holdfast.integrations.flower.replies import Refusal, Update, medians, read_update
from holdfast.integrations.flower.reputation import Conduct

ARRAYS, CONFIG = "arrays", "config"  # what Flower's own strategies call their records
BUFFERS = ("*running_mean", "*running_var")  # those of PyTorch's norms

T = TypeVar("T")


@dataclass(frozen=True)
class Answers:
    """To one question. Everybody who was asked is in one of the two."""

    good: Mapping[int, Any]  # what `read` made of the replies, by client in ascending order
    refused: Mapping[int, Refusal]


class RoundDesk(Protocol):
    """Where a combiner asks the round's clients."""

    number: int  # of the round

    def ask(
        self,
        contents: Mapping[int, RecordDict],
        read: Callable[[RecordDict], Any],
        *,
        kind: str = MessageType.TRAIN,
        late: int = 0,
        needed: int = 1,
        part: float = 1.0,
    ) -> Answers:
        """Sends each client its records and reads the replies as they come. `read` raises Unfit for a malformed one.

        `kind` is Flower's message type, `train` or `train.something`. Once there are `needed` good answers and no more
        than `late` are missing, these are waited for no longer than `late_s`; never longer than the round's deadline,
        or this `part` of the time that is left until then.
        """
        ...


@dataclass(frozen=True)
class RoundOutcome:
    """`model` is None if the round came to nothing, and `reason` says why. Everybody who took part has a conduct."""

    model: Model | None
    conducts: Mapping[int, Conduct]
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)  # of clients that have no part in it


class Combiner(Protocol):
    """Holds rounds. Its state, if it has one, is in the server's checkpoints."""

    f: int

    def needed(self) -> int:
        """How many clients must take part at least."""

    def hold(self, model: Model, config: ConfigRecord, clients: Sequence[int], desk: RoundDesk) -> RoundOutcome: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def __str__(self) -> str:
        """For the log, and compared when a run goes on."""


class ByRule:
    """Every client sends its model; a rule combines the differences to the round's.

    Whole numbers and `buffers` (shell patterns for names of arrays) are no parameters, and their scale would hide these
    in every distance: they are combined by themselves, number by number, as the median, of whole numbers the lower one.
    `seed`: what the rule draws by chance follows from it and the round; clients should not know it.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        f: int | None = None,
        answers_min: int | None = None,
        weighted_by: str = "num-examples",
        weighted: bool = True,
        server_lr: float = 1.0,
        seed: int = 0,
        buffers: Sequence[str] = BUFFERS,
    ) -> None:
        chosen = rule.f if f is None else f
        if isinstance(chosen, bool) or not isinstance(chosen, int) or chosen < 0:
            raise ConfigError(
                f"{rule} was not told how many clients may be hostile",
                hint="RobustStrategy(rule, f=2), or Bulyan(f=2); 0 if all are to be trusted",
            )
        if not 0.0 < server_lr <= 1e3:
            raise ConfigError(f"server_lr={server_lr!r} moves no model", hint="1.0 takes the combined update as it is")
        self.f = chosen
        self._rule, self._weighted_by, self._weighted, self._server_lr = rule, weighted_by, weighted, server_lr
        self._answers_min, self._seed, self._buffers = answers_min, seed, tuple(buffers)

    def needed(self) -> int:
        return max(self._rule.least(self.f), self._answers_min or 0)

    def hold(self, model: Model, config: ConfigRecord, clients: Sequence[int], desk: RoundDesk) -> RoundOutcome:
        content = RecordDict({ARRAYS: model.record(), CONFIG: config})
        answers = desk.ask(
            dict.fromkeys(clients, content),
            lambda reply: read_update(reply, model, self._weighted_by),
            late=self.f,
            needed=self.needed(),
        )
        return self.combine(model, answers, desk.number)

    def combine(self, model: Model, answers: Answers, number: int) -> RoundOutcome:
        """What the answers of round `number` come to. The same ones give the same bits, in whatever order they came."""
        clients: Sequence[int] = sorted(answers.good)
        updates: list[Update] = [answers.good[client] for client in clients]
        refused = {client: refusal.conduct for client, refusal in answers.refused.items()}
        reasons = {client: refusal.reason for client, refusal in answers.refused.items()}
        unheard = {**dict.fromkeys(clients, Conduct.UNHEARD), **refused}
        if len(clients) < (self._answers_min or 1):
            wanted = (
                f"{len(clients)} of {len(unheard)} clients sent something of use, and {self._answers_min or 1} must"
            )
            return RoundOutcome(None, unheard, wanted, reasons=reasons)
        malformed = sum(conduct is Conduct.MALFORMED for conduct in refused.values())
        f = self._rule.bearing(len(clients), self.f, malformed)  # no correct client's answer is malformed
        if len(clients) < self._rule.least(f):
            few = f"{len(clients)} of {len(unheard)} clients sent something of use, and {self._rule} with f={f} needs"
            return RoundOutcome(None, unheard, f"{few} {self._rule.least(f)}", reasons=reasons)
        try:
            value, believed = self._combined(updates, f, number)
        except (TooFewUpdates, ConfigError) as error:  # too many claim nothing, or differ beyond any number
            return RoundOutcome(None, unheard, error.message, reasons=reasons)
        trusted = dict(zip(clients, believed, strict=True))
        conducts = {client: Conduct.TRUSTED if trusted[client] else Conduct.LEFT_OUT for client in clients}
        heard = {client: answers.good[client].metrics for client in clients if trusted[client]}
        return RoundOutcome(
            model.moved(value, self._server_lr), {**conducts, **refused}, metrics=medians(heard), reasons=reasons
        )

    def _combined(self, updates: Sequence[Update], f: int, number: int) -> tuple[State, Sequence[bool]]:
        """The update, and who of these was trusted. TooFewUpdates or ConfigError if no rule can use them."""
        parameters, buffers, whole = self._kinds(updates[0].numbers)
        drawn = hashlib.blake2b(f"{self._seed} in round {number}".encode(), digest_size=8).digest()
        found = self._rule.in_round(int.from_bytes(drawn, "big")).aggregate(
            [{name: update.numbers[name] for name in parameters} for update in updates],
            f,
            weights=[update.examples for update in updates] if self._weighted else None,
        )
        assert isinstance(found.value, dict)
        value, trusted = dict(found.value), list(found.trusted)
        if buffers:
            rows = [{name: update.numbers[name] for name in buffers} for update in updates]
            steady = Median().aggregate(rows, min(f, (len(rows) - 1) // 2))
            assert isinstance(steady.value, dict)
            value |= steady.value
            trusted = [one and score < math.inf for one, score in zip(trusted, steady.scores, strict=True)]
        for name in whole:
            value[name] = torch.stack([update.numbers[name] for update in updates]).median(dim=0).values
        return value, trusted

    def _kinds(self, like: State) -> tuple[list[str], list[str], list[str]]:
        """Names of parameters, of buffers and of whole numbers. A model without parameters: all are taken for such."""
        whole = [name for name, one in like.items() if not one.dtype.is_floating_point]
        floats = [name for name in like if name not in set(whole)]
        buffers = [name for name in floats if any(fnmatchcase(name, pattern) for pattern in self._buffers)]
        parameters = [name for name in floats if name not in set(buffers)]
        return (parameters, buffers, whole) if parameters else (list(like), [], [])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def __str__(self) -> str:
        return f"{self._rule} with f={self.f}"
