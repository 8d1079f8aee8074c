"""Many simulated trainings: every aggregator with every attack and seed, in a file with which one can go on later.

A cell is one training. The file is JSON, written anew after every few seconds and at the end, under a temporary name
first. What it holds is only used for the same settings and the same data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from holdfast.byzantine.attacks.words import attack_named
from holdfast.byzantine.federation.combining import Combining, by_rule
from holdfast.byzantine.federation.data import Images
from holdfast.byzantine.federation.rounds import NONE, ON_DATA, RoundSeen, Settings, Training, train
from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import ConfigError

WRITE_S = 5.0
FORMAT = 1


@dataclass(frozen=True)
class Cell:
    aggregator: str
    attack: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.aggregator} | {self.attack} | {self.seed}"


@dataclass
class Choices:
    """What is compared, and what was found so far."""

    settings: Settings
    data: str
    aggregators: Sequence[str]
    attacks: Sequence[str]
    seeds: Sequence[int]
    how: str = ""  # updates are combined, if not by a rule in this process: results of two ways do not mix
    epsilons: Sequence[float] = ()  # what every round has cost of the clients' privacy, if noise is added
    found: dict[str, Training] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What is simulated."""
        about = self.settings
        spread = "data alike" if about.dirichlet is None else f"labels skewed (Dirichlet {about.dirichlet:g})"
        clients = f"{about.clients} clients of which {about.byzantine} are hostile"
        return f"{self.data}, {clients}, {spread}, {about.rounds} rounds{', ' if self.how else ''}{self.how}"

    def validate(self) -> Choices:
        """ConfigError for what cannot be trained, before anything is."""
        self.settings.validate()
        for word in self.aggregators:
            parse(word).checked(self.settings.clients, self.settings.byzantine)
        for word in self.attacks:
            if word not in (NONE, *ON_DATA):
                attack_named(word)
        if self.settings.byzantine == 0 and set(self.attacks) != {NONE}:
            raise ConfigError("there is nobody to attack with --byzantine 0", hint="--attack none, or --byzantine 1")
        return self

    def cells(self) -> list[Cell]:
        return [
            Cell(aggregator, attack, seed)
            for seed in self.seeds
            for attack in self.attacks
            for aggregator in self.aggregators
        ]

    def accuracy(self, aggregator: str, attack: str) -> float | None:
        """Over the seeds that are done; None: not all are."""
        done = [self.found.get(Cell(aggregator, attack, seed).name) for seed in self.seeds]
        return mean(one.accuracy for one in done if one is not None) if all(done) else None

    def curve(self, aggregator: str, attack: str) -> list[float]:
        """Accuracy after every round, over the seeds that are done."""
        done = [one for seed in self.seeds if (one := self.found.get(Cell(aggregator, attack, seed).name)) is not None]
        return [mean(values) for values in zip(*(one.accuracies for one in done), strict=True)] if done else []

    def compute(
        self,
        images: Images,
        *,
        until: float = float("inf"),
        keep: Path | None = None,
        combining: Combining = by_rule,
        each_round: Callable[[Cell, RoundSeen], None] = lambda cell, seen: None,
    ) -> Iterator[tuple[Cell, int, int]]:
        """Trains what is missing, and says after each how many are done of how many. Stops at `until`, a time of
        time.monotonic. `each_round` is told how far a training has come."""
        cells, written = self.cells(), time.monotonic()
        missing = [cell for cell in cells if cell.name not in self.found]
        try:
            for number, cell in enumerate(missing):
                if time.monotonic() >= until:
                    return
                self.found[cell.name] = train(
                    images,
                    self.settings,
                    aggregator=cell.aggregator,
                    attack=cell.attack,
                    seed=cell.seed,
                    combining=combining,
                    each_round=partial(each_round, cell),
                )
                if keep is not None and time.monotonic() - written > WRITE_S:
                    self.write(keep)
                    written = time.monotonic()
                yield cell, len(cells) - len(missing) + number + 1, len(cells)
        finally:
            if keep is not None:
                self.write(keep)

    @property
    def is_done(self) -> bool:
        return all(cell.name in self.found for cell in self.cells())

    def _about(self) -> dict[str, Any]:
        return {"format": FORMAT, "data": self.data, "settings": asdict(self.settings), "how": self.how}

    def _cost(self) -> dict[str, Any]:
        return {"epsilon": list(self.epsilons)} if self.epsilons else {}

    def write(self, path: Path) -> None:
        cells = {name: asdict(one) for name, one in self.found.items()}
        table = {
            aggregator: {attack: self.accuracy(aggregator, attack) for attack in self.attacks}
            for aggregator in self.aggregators
        }
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text(json.dumps({**self._about(), "accuracy": table, **self._cost(), "cells": cells}))
        unfinished.replace(path)

    def read(self, path: Path) -> None:
        """What was found before, if it is of the same settings; ConfigError if it is of others."""
        if not path.exists():
            return
        try:
            known = json.loads(path.read_text())
            cells = {
                str(name): Training(tuple(map(float, one["accuracies"])), one["backdoor"], tuple(one["trusted"]))
                for name, one in known["cells"].items()
            }
            about = {name: known[name] for name in ("format", "data", "settings")} | {"how": known.get("how", "")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not holdfast federate's: {error}", hint="name another file") from error
        if about != self._about():
            raise ConfigError(f"{path} has results of other settings", hint="name another file, or delete it")
        self.found.update(cells)


def shown(choices: Choices, cell_words: Callable[[float], str] = lambda value: f"{100 * value:.1f}") -> list[list[str]]:
    """Rows of a table, aggregator by attack; empty where it is not known."""
    rows = [["", *choices.attacks]]
    for aggregator in choices.aggregators:
        values = [choices.accuracy(aggregator, attack) for attack in choices.attacks]
        rows.append([aggregator, *("" if value is None else cell_words(value) for value in values)])
    return rows
