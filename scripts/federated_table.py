"""docs/reference/robustness.md: the accuracy of every aggregator under every attack, in simulated federated learning.

    python scripts/federated_table.py                  # goes on with federated_alike.json, federated_skewed.json, …
    python scripts/federated_table.py --minutes 9      # as far as that goes
    python scripts/federated_table.py --only skewed    # one of the tables
    python scripts/federated_table.py --write --check  # the page from the seeds that are done; 1 if a bar is missed

A table of which no seed is done stays on the page as it is.

Bars, with a fifth of the clients hostile: with data alike `nnm+trimmed-mean`, and with skewed labels and twenty local
steps `distinct+centered-clipping`, stay within 3 points of the attack-free mean under every published attack, and the
plain mean falls by more than 20 under one of them. `apart` is ours, made against `distinct`: shown, not barred.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from holdfast.byzantine.attacks import Apart
from holdfast.byzantine.federation.choices import Choices, shown
from holdfast.byzantine.federation.data import load
from holdfast.byzantine.federation.rounds import ALL_ATTACKS, NONE, Settings
from holdfast.byzantine.rules.words import LAST

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "robustness.md"
AGGREGATORS = (*LAST, "nnm+trimmed-mean", "arc+nnm+trimmed-mean", "distinct+centered-clipping")
ATTACKS = (NONE, *ALL_ATTACKS)
PUBLISHED = tuple(attack for attack in ATTACKS if attack != Apart.word)
SEEDS = (0, 1, 2, 3, 4)
WITHIN, FALLS = 0.03, 0.20
# Federated averaging: a client trains for a while before it sends how far it came.
AVERAGED = Settings(dirichlet=0.1, rounds=100, local_steps=20, hidden=128)
AVERAGED_AGGREGATORS = ("mean", "nnm+trimmed-mean", "centered-clipping", "caf", "distinct+centered-clipping")
BEGIN = "<!-- tables: written by scripts/federated_table.py -->"
END = "<!-- tables: end -->"


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    settings: Settings
    aggregators: Sequence[str] = AGGREGATORS
    note: str = ""
    steady: str = ""  # which rule the bar is for

    def choices(self, directory: Path) -> tuple[Choices, Path]:
        choices = Choices(self.settings, "digits", self.aggregators, ATTACKS, SEEDS).validate()
        path = directory / f"federated_{self.name}.json"
        choices.read(path)
        return choices, path


TABLES = (
    Table("alike", "Data alike", Settings(), steady="nnm+trimmed-mean"),
    Table("skewed", "Labels skewed (Dirichlet 0.1)", Settings(dirichlet=0.1)),
    Table(
        "averaged",
        "Labels skewed (Dirichlet 0.1), twenty local steps, 128 hidden units",
        AVERAGED,
        AVERAGED_AGGREGATORS,
        " `holdfast federate --dirichlet 0.1 --rounds 100 --local-steps 20 --hidden 128`.",
        "distinct+centered-clipping",
    ),
)


def written(choices: Choices) -> str:
    rows = shown(choices)
    lines = ["| | " + " | ".join(f"`{attack}`" for attack in rows[0][1:]) + " | worst |"]
    lines.append("|" + "---|" * (len(rows[0]) + 1))
    for aggregator, *cells in rows[1:]:
        known = [float(cell) for cell, attack in zip(cells, rows[0][1:], strict=True) if cell and attack != NONE]
        worst = f"**{min(known):.1f}**" if known else ""
        lines.append(f"| `{aggregator}` | " + " | ".join(cells) + f" | {worst} |")
    return "\n".join(lines)


def finished(choices: Choices) -> Choices:
    """With the seeds of which all is there."""
    seeds = [seed for seed in choices.seeds if replace(choices, seeds=[seed]).is_done]
    return replace(choices, seeds=seeds)


def section(table: Table, choices: Choices | None, page: str) -> str:
    """From what is computed, or as it is on the page if nothing is."""
    title = table.title
    if choices is None or not choices.seeds:
        return known[0] if (known := re.findall(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", page, re.M | re.S)) else ""
    count = len(choices.seeds)
    seeds = f"Mean of {count} {'seed' if count == 1 else 'seeds'}.{table.note}"
    return f"## {title}\n\n{seeds}\n\n{written(choices)}\n\n"


def missed(table: Table, choices: Choices) -> list[str]:
    if not choices.seeds:
        return [f"{table.name}: no seed is computed"]
    free = choices.accuracy("mean", NONE)
    steady = {attack: choices.accuracy(table.steady, attack) for attack in PUBLISHED}
    means = [choices.accuracy("mean", attack) for attack in PUBLISHED]
    if free is None or None in means or None in steady.values():
        return [f"{table.name}: not all cells are computed"]
    found = [
        f"{table.name}: {table.steady} under {attack}: {value:.3f}, and the attack-free mean {free:.3f}"
        for attack, value in steady.items()
        if value is not None and value < free - WITHIN
    ]
    if min(value for value in means if value is not None) > free - FALLS:
        found.append(f"{table.name}: the mean does not fall")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="where the results are kept")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="", choices=[table.name for table in TABLES], help="one of the tables")
    parser.add_argument("--write", action="store_true", help="compute nothing, write the page")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = [table for table in TABLES if options.only in ("", table.name)]
    all_of = {table.name: table.choices(options.directory) for table in asked}
    until = 0.0 if options.write else time.monotonic() + 60.0 * options.minutes
    images = load("digits")
    for name, (choices, path) in all_of.items():
        for _, done, total in choices.compute(images, until=until, keep=path if until else None):
            if done % 100 == 0:
                print(f"{name}: {done} of {total}", flush=True)
    is_done = all(choices.is_done for choices, _ in all_of.values())
    if not options.write and not is_done:
        print("not all is computed yet: start it again", file=sys.stderr)
        return 1
    write_page({name: finished(choices) for name, (choices, _) in all_of.items()})
    barred = [(table, finished(all_of[table.name][0])) for table in asked if table.steady]
    bad = [line for table, choices in barred for line in missed(table, choices)]
    for line in bad:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if bad and options.check else 0


def write_page(found: dict[str, Choices]) -> None:
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    page, _, tail = rest.partition(END)
    body = "".join(section(table, found.get(table.name), page) for table in TABLES)
    PAGE.write_text(f"{head}{BEGIN}\n\n{body}{END}{tail}")


if __name__ == "__main__":
    sys.exit(main())
