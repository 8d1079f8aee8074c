"""One simulated training: clients, some of them hostile, a rule, and the accuracy after every round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.byzantine.attacks.data import BackdoorTrigger
from holdfast.byzantine.attacks.port import Attack
from holdfast.byzantine.attacks.words import ATTACKS, SEARCHED, attack_named
from holdfast.byzantine.federation.clients import Clients, Network
from holdfast.byzantine.federation.combining import Cohort, Combining, by_rule
from holdfast.byzantine.federation.data import Images, dealt
from holdfast.byzantine.rules.port import Rule
from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import ConfigError

NONE, LABEL_FLIP, BACKDOOR = "none", "label-flip", "backdoor"
ON_DATA = (LABEL_FLIP, BACKDOOR)
ALL_ATTACKS = (*ATTACKS, *ON_DATA, *SEARCHED)
LAST_ROUNDS = 5  # over which the accuracy at the end is averaged
TARGET = 0  # the label that a backdoor leads to
SEARCH_EVERY = 10  # rounds: a strength that was found holds for so many


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a simulation is. The hostile clients are the last `byzantine` of `clients`."""

    clients: int = 20
    byzantine: int = 4
    rounds: int = 150
    dirichlet: float | None = None
    batch: int = 32
    local_steps: int = 1
    lr: float = 0.5
    beta: float = 0.9
    hidden: int = 32

    def validate(self) -> Settings:
        for name in ("clients", "rounds", "batch", "local_steps", "hidden"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} trains nothing", hint="1 or more")
        if not 0 <= self.byzantine < self.clients:
            raise ConfigError(
                f"{self.byzantine} of {self.clients} clients cannot be hostile", hint="--byzantine is below --clients"
            )
        if self.dirichlet is not None and not 0.0 < self.dirichlet <= 1e6:
            raise ConfigError(f"--dirichlet {self.dirichlet:g} is no spread", hint="0.1 is skewed, 100 nearly even")
        if not 0.0 <= self.beta < 1.0 or not 0.0 < self.lr < 1e3:
            raise ConfigError(f"lr={self.lr:g} and beta={self.beta:g} train nothing", hint="lr above 0, 0 <= beta < 1")
        return self


@dataclass(frozen=True)
class Training:
    """Accuracy after every round, from 0 to 1; of a backdoor, how often marked images are taken for the target."""

    accuracies: tuple[float, ...]
    backdoor: float | None = None
    trusted: tuple[float, ...] = ()  # for each client, in which part of the rounds it was trusted

    @property
    def accuracy(self) -> float:
        """At the end."""
        last = self.accuracies[-LAST_ROUNDS:]
        return sum(last) / len(last)


@dataclass(frozen=True)
class RoundSeen:
    """How far a training has come: so many rounds. `trusted`: who was in the last; empty if it was left out."""

    rounds: int
    accuracy: float
    trusted: tuple[bool, ...]


class _Attackers:
    """What the hostile clients do in a round."""

    def __init__(self, word: str, rule: Rule, f: int) -> None:
        self._attack: Attack | None = None if word in (NONE, *ON_DATA) else attack_named(word, rule)
        self._searches = word in SEARCHED
        self._strength: float | None = None
        self._f = f

    def sent(self, honest: torch.Tensor, own: torch.Tensor, number: int, seed: int) -> torch.Tensor:
        from holdfast.byzantine.attacks.optimising import Optimised

        if self._attack is None:
            return own
        if not isinstance(self._attack, Optimised):
            return self._attack(honest, self._f, seed * 100_003 + number)
        if self._strength is None or number % SEARCH_EVERY == 0:
            self._strength = self._attack.strength(honest, self._f)
        return self._attack.attack.at(honest, self._f, self._strength)


def train(
    images: Images,
    settings: Settings,
    *,
    aggregator: str,
    attack: str,
    seed: int,
    combining: Combining = by_rule,
    each_round: Callable[[RoundSeen], None] = lambda seen: None,
) -> Training:
    """`attack` none: only the honest clients take part, and nobody is hostile."""
    f = settings.byzantine if attack != NONE else 0
    network = Network(images.x.shape[1], settings.hidden, images.classes)
    parts = dealt(images.y, settings.clients, dirichlet=settings.dirichlet, seed=seed)
    honest = settings.clients - settings.byzantine
    clients = Clients(images, parts if f else parts[:honest], f, seed)
    trigger = BackdoorTrigger(TARGET)
    if attack == LABEL_FLIP:
        clients.flip_labels(images.classes)
    if attack == BACKDOOR:
        clients.plant(trigger, images.side, seed)
    cohort = Cohort(
        aggregator=aggregator,
        attack=attack,
        seed=seed,
        clients=honest + f,
        f=f,
        lr=settings.lr,
        model=network.initial(seed),
    )
    rule = parse(aggregator)
    rule.checked(cohort.clients, f)
    attackers = _Attackers(attack, rule, f)
    model, accuracies, trusted = cohort.model, list[float](), torch.zeros(honest + f)
    with combining(cohort) as combiner:
        for number in range(settings.rounds):
            made = clients.updates(
                network, model, batch=settings.batch, steps=settings.local_steps, lr=settings.lr, beta=settings.beta
            )
            if not torch.isfinite(made).all():  # the model is lost, and with it whatever honest clients compute
                accuracies += [_accuracy(network, model, images)] * (settings.rounds - number)
                break
            if f:
                made = torch.cat([made[:honest], attackers.sent(made[:honest], made[honest:], number, seed)])
            found = combiner.combine(model, made)
            model = found.model
            if found.trusted:
                trusted += torch.tensor(found.trusted)
            accuracies.append(_accuracy(network, model, images))
            each_round(RoundSeen(number + 1, accuracies[-1], found.trusted))
    backdoor = _obeyed(network, model, images, trigger) if attack == BACKDOOR else None
    return Training(tuple(accuracies), backdoor, tuple((trusted / settings.rounds).tolist()))


def _accuracy(network: Network, model: torch.Tensor, images: Images) -> float:
    return float((network.predicted(model, images.x_test) == images.y_test).float().mean())


def _obeyed(network: Network, model: torch.Tensor, images: Images, trigger: BackdoorTrigger) -> float:
    others = images.y_test != TARGET
    marked = trigger.stamp(images.x_test[others].view(-1, images.side, images.side)).view(int(others.sum()), -1)
    return float((network.predicted(model, marked) == TARGET).float().mean())
