"""The server's side of masked buckets on Flower: it learns sums of small random buckets, and combines these by a rule.

A `Combiner` that asks a round's clients four times: for keys, for shares of secrets, for masked numbers (with the
model to train), and for what opens the sums. `byzantine.privacy` has the machine, which decides everything; here its
messages are carried, each question has its part of the round's time, and what became of every client is told. A client
that says what no correct one says, or nothing, is left out of its bucket, and the round goes on as long as enough
buckets do. Owns how many rounds' sums were opened: that is what the accountant of privacy counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from logging import INFO
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.supercore import log

from holdfast.byzantine.privacy import across
from holdfast.byzantine.privacy.accounting import Accountant
from holdfast.byzantine.privacy.dealing import SECRET_BYTES
from holdfast.byzantine.privacy.fixed_point import Encoding
from holdfast.byzantine.privacy.masked_round import MaskedRound, RoundSums
from holdfast.byzantine.privacy.messages import Phase, Send
from holdfast.byzantine.privacy.noise import Noise
from holdfast.byzantine.privacy.terms import Terms
from holdfast.byzantine.rules.port import Rule
from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import ConfigError, ProtocolError, TooFewUpdates
from holdfast.integrations.flower.combining import ARRAYS, CONFIG, Answers, RoundDesk, RoundOutcome
from holdfast.integrations.flower.masked_records import RECORD, record_of, said_in, words_bytes_max
from holdfast.integrations.flower.model_record import Model, Unfit
from holdfast.integrations.flower.replies import Refusal
from holdfast.integrations.flower.reputation import Conduct

LIMIT = 16.0  # of a number of an update, where nothing says how long that is
PARTS = {Phase.ADVERTISE: 0.15, Phase.SHARE: 0.2, Phase.MASK: 0.8, Phase.UNMASK: 1.0}  # of the time that is left
MALFORMED = b""  # what the machine is told in place of a reply that cannot be read: no client says it


class MaskedBuckets:
    """`RobustStrategy(MaskedBuckets("trimmed-mean", f=2))`, with `MaskedUpdates` at the clients.

    `f`: hostile clients, which spoil as many buckets. `buckets`: None for as few as the rule needs, which lets the
    largest number of clients fall silent. `limit`: what is beyond it in an update is cut off. `noise`: what clients
    add; they are told the same. `colluding`: so many members of one bucket may act together with the server.
    """

    def __init__(
        self,
        rule: Rule | str,
        *,
        f: int,
        buckets: int | None = None,
        limit: float = LIMIT,
        colluding: int = 0,
        noise: Noise | None = None,
        delta: float = 1e-5,
        server_lr: float = 1.0,
    ) -> None:
        self._rule = parse(rule) if isinstance(rule, str) else rule
        if isinstance(f, bool) or not isinstance(f, int) or f < 0:
            raise ConfigError(f"f={f!r} is not a number of clients", hint="MaskedBuckets(rule, f=2), for example")
        if not 0.0 < server_lr <= 1e3:
            raise ConfigError(f"server_lr={server_lr!r} moves no model", hint="1.0 takes the combined update as it is")
        self.f = f
        self._least = max(self._rule.least(f), 1)
        self._buckets = self._least if buckets is None else buckets
        self._limit, self._noise, self._server_lr = limit, noise.validate() if noise else None, server_lr
        self._accountant: Accountant | None = None
        if noise is not None and noise.multiplier:
            self._accountant = Accountant(noise=noise.multiplier, delta=delta).validate()
        self._bare = Terms(self._buckets, 1, Encoding(32, 0, 1), colluding)
        across.check(self._rule, self._buckets * self._bare.smallest, f, self._bare)
        self._terms(self._buckets * self._bare.smallest, 1)
        self._opened = 0  # rounds of which the server has seen sums

    def needed(self) -> int:
        return self._least * self._bare.smallest

    # -- a round

    def hold(self, model: Model, config: ConfigRecord, clients: Sequence[int], desk: RoundDesk) -> RoundOutcome:
        terms = self._terms(len(clients), _count(model))
        names = [str(client) for client in clients]
        machine = MaskedRound(desk.number, names, terms, os.urandom(SECRET_BYTES))
        refused: dict[int, Refusal] = {}
        sends, phase = machine.begin(), Phase.ADVERTISE
        while machine.outcome is None:
            answers = self._ask(sends, phase, terms, desk, {ARRAYS: model.record(), CONFIG: config})
            refused |= answers.refused
            sends = self._told(machine, phase, answers)
            phase = Phase(phase + 1)
        if machine.outcome.sums:
            self._opened += 1
        return self._combined(model, machine.outcome, terms, clients, refused, desk.number)

    def _terms(self, clients: int, numbers: int) -> Terms:
        """In as fine units as so many clients leave room for. Fewer buckets than were asked for, if there are few."""
        smallest, colluding = self._bare.smallest, self._bare.colluding
        buckets = max(min(self._buckets, clients // smallest), self._least)
        limit = self._limit
        if self._noise is not None:
            bare = Terms(buckets, numbers, Encoding(32, 0, 1), colluding)
            limit = self._noise.limit(self._noise.share(bare, smallest))
        encoding = Encoding.fitting(limit, -(-clients // buckets))
        return Terms(buckets, numbers, encoding, colluding).checked(clients)

    def _ask(
        self, sends: Sequence[Send], phase: Phase, terms: Terms, desk: RoundDesk, training: Mapping[str, Any]
    ) -> Answers:
        contents = {int(send.client): RecordDict({RECORD: record_of(send.content)}) for send in sends}
        if phase is Phase.MASK:
            for content in contents.values():
                content.update(training)
        bytes_max = words_bytes_max(len(sends)) + (terms.content_bytes if phase is Phase.MASK else 0)

        def read(reply: RecordDict) -> bytes:
            said = said_in(reply, bytes_max)
            if isinstance(said, str):
                raise Unfit(said)
            return said

        needed = terms.buckets * terms.smallest if phase is Phase.ADVERTISE else 1
        return desk.ask(contents, read, late=self.f, needed=needed, part=PARTS[phase])

    @staticmethod
    def _told(machine: MaskedRound, phase: Phase, answers: Answers) -> list[Send]:
        """What is to be sent in the next phase, once the machine has heard all of this one."""
        sends = [more for client, said in answers.good.items() for more in machine.hear(str(client), said)]
        for client, refusal in answers.refused.items():
            if refusal.conduct is Conduct.MALFORMED:
                sends += machine.hear(str(client), MALFORMED)
        if machine.phase is phase:
            sends += machine.close()
        return sends

    def _combined(
        self,
        model: Model,
        found: RoundSums,
        terms: Terms,
        clients: Sequence[int],
        refused: Mapping[int, Refusal],
        number: int,
    ) -> RoundOutcome:
        conducts = dict.fromkeys(clients, Conduct.UNHEARD)
        conducts |= {client: refusal.conduct for client, refusal in refused.items()}
        reasons = {client: refusal.reason for client, refusal in refused.items()}
        for name, sentence in found.left_out.items():
            conducts[int(name)] = Conduct.MALFORMED
            reasons.setdefault(int(name), sentence.partition("left out: ")[2])
        metrics = self._cost(number)
        try:
            value = across.combine(found, terms.encoding, self._rule.in_round(number), self.f)
        except (TooFewUpdates, ConfigError) as error:
            return RoundOutcome(None, conducts, error.message, metrics, reasons)
        for name, is_trusted in value.trusted.items():
            if conducts[int(name)] is Conduct.UNHEARD:
                conducts[int(name)] = Conduct.TRUSTED if is_trusted else Conduct.LEFT_OUT
        for one in found.lost:
            log(INFO, "round %d: %s", number, one.reason)
        return RoundOutcome(
            model.moved(_shaped(value.value, model), self._server_lr), conducts, metrics=metrics, reasons=reasons
        )

    def _cost(self, number: int) -> dict[str, float]:
        if self._accountant is None:
            return {}
        epsilon = self._accountant.epsilon(self._opened)
        said = "round %d: all rounds so far have cost every client (ε, δ) = (%.3g, %g)"
        log(INFO, said, number, epsilon, self._accountant.delta)
        return {"epsilon": epsilon, "delta": self._accountant.delta}

    # -- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"opened": self._opened}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """One round more than was saved: a server that was killed may have opened sums that no checkpoint knows of."""
        opened = state.get("opened", 0)
        if isinstance(opened, bool) or not isinstance(opened, int) or opened < 0:
            raise ProtocolError(f"{opened!r:.40} is no number of rounds")
        self._opened = opened + 1

    def __str__(self) -> str:
        added = f", noise {self._noise.multiplier:g} at clip {self._noise.clip:g}" if self._noise else ""
        return f"{self._rule} across {self._buckets} masked buckets with f={self.f}{added}"


def _names(model: Model) -> list[str]:
    """Of the arrays that are masked, in the order that clients have them in."""
    return sorted(name for name, tensor in model.state.items() if tensor.dtype.is_floating_point)


def _count(model: Model) -> int:
    return sum(model.state[name].numel() for name in _names(model))


def _shaped(value: torch.Tensor, model: Model) -> dict[str, torch.Tensor]:
    """A flat update as one of the model. Whole numbers stay what they are."""
    update = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in model.state.items()}
    at = 0
    for name in _names(model):
        tensor = model.state[name]
        update[name] = value[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    return update
