"""docs/reference/robustness.md: the accuracy of every aggregator under every attack, in simulated federated learning.

    python scripts/federated_table.py                  # goes on with federated_alike.json and federated_skewed.json
    python scripts/federated_table.py --minutes 9      # as far as that goes
    python scripts/federated_table.py --write --check  # the page from the seeds that are done; 1 if a bar is missed

Bars, with data alike and a fifth of the clients hostile: `nnm+trimmed-mean` stays within 3 points of the attack-free
mean under every attack, and the plain mean falls by more than 20 under one of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.byzantine.federation.choices import Choices, shown
from holdfast.byzantine.federation.data import load
from holdfast.byzantine.federation.rounds import ALL_ATTACKS, NONE, Settings
from holdfast.byzantine.rules.words import LAST

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "robustness.md"
AGGREGATORS = (*LAST, "nnm+trimmed-mean", "arc+nnm+trimmed-mean")
ATTACKS = (NONE, *ALL_ATTACKS)
SEEDS = (0, 1, 2, 3, 4)
WITHIN, FALLS = 0.03, 0.20
STEADY = "nnm+trimmed-mean"
BEGIN = "<!-- tables: written by scripts/federated_table.py -->"
END = "<!-- tables: end -->"


def tables(directory: Path) -> dict[str, tuple[Choices, Path]]:
    made = {}
    for name, dirichlet in (("alike", None), ("skewed", 0.1)):
        choices = Choices(Settings(dirichlet=dirichlet), "digits", AGGREGATORS, ATTACKS, SEEDS).validate()
        path = directory / f"federated_{name}.json"
        choices.read(path)
        made[name] = (choices, path)
    return made


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


def section(title: str, choices: Choices) -> str:
    count = len(choices.seeds)
    if not count:
        return ""
    return f"## {title}\n\nMean of {count} {'seed' if count == 1 else 'seeds'}.\n\n{written(choices)}\n\n"


def missed(choices: Choices) -> list[str]:
    free = choices.accuracy("mean", NONE)
    steady = {attack: choices.accuracy(STEADY, attack) for attack in ATTACKS}
    means = [choices.accuracy("mean", attack) for attack in ATTACKS]
    if free is None or None in means or None in steady.values():
        return ["not all cells are computed"]
    found = [
        f"{STEADY} under {attack}: {value:.3f}, and the attack-free mean {free:.3f}"
        for attack, value in steady.items()
        if value is not None and value < free - WITHIN
    ]
    if min(value for value in means if value is not None) > free - FALLS:
        found.append("the mean does not fall")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="where the results are kept")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="compute nothing, write the page")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    both, images = tables(options.directory), load("digits")
    until = 0.0 if options.write else time.monotonic() + 60.0 * options.minutes
    for name, (choices, path) in both.items():
        done = total = 0
        for _, done, total in choices.compute(images, until=until, keep=path if until else None):
            if done % 100 == 0:
                print(f"{name}: {done} of {total}", flush=True)
    if not options.write and not all(choices.is_done for choices, _ in both.values()):
        print("not all is computed yet: start it again", file=sys.stderr)
        return 1
    alike, skewed = (finished(choices) for choices, _ in both.values())
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    body = f"{BEGIN}\n\n{section('Data alike', alike)}{section('Labels skewed (Dirichlet 0.1)', skewed)}{END}"
    PAGE.write_text(head + body + tail)
    for line in (bad := missed(alike)):
        print(f"missed: {line}", file=sys.stderr)
    return 1 if bad and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
