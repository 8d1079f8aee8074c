"""How far honest clients' updates differ while they learn skewed labels, without any attack: what robustness.md says.

    python scripts/federated_spread.py --local-steps 10
    python scripts/federated_spread.py --local-steps 20 --hidden 128 --rounds 100 --seeds 0,1

`spread` is the mean of |update - m|² over |m|², where m is the mean of all honest updates. No rule against 4 hostile of
20 can promise to move in the right direction where it is 3 or more: the best possible κ is f / (n - 2f) = 1/3.
`agreement` is the length of the mean of updates that are shortened to the median length, in that length. Where it is
below 1/4, four updates of the median length outweigh sixteen honest ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdfast.byzantine.federation.combining import ByRule, Cohort, Combined
from holdfast.byzantine.federation.data import load
from holdfast.byzantine.federation.rounds import LAST_ROUNDS, NONE, Settings, train


class Watched(ByRule):
    """The mean, and what it was a mean of."""

    def __init__(self, cohort: Cohort, seen: list[tuple[float, float]]) -> None:
        super().__init__(cohort)
        self._seen = seen

    def combine(self, model: torch.Tensor, sent: torch.Tensor) -> Combined:
        lengths, mean = sent.norm(dim=1), sent.mean(dim=0)
        median = lengths.median()
        shortened = sent * torch.clamp(median / lengths, max=1.0).unsqueeze(1)
        spread = (sent - mean).square().sum(dim=1).mean() / mean.square().sum()
        self._seen.append((float(spread), float(shortened.mean(dim=0).norm() / median)))
        return super().combine(model, sent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirichlet", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--local-steps", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--seeds", default="0")
    given = parser.parse_args()
    torch.set_num_threads(1)
    images = load("digits")
    settings = Settings(
        dirichlet=given.dirichlet, rounds=given.rounds, local_steps=given.local_steps, hidden=given.hidden
    ).validate()
    for seed in map(int, given.seeds.split(",")):
        seen: list[tuple[float, float]] = []

        @contextmanager
        def watched(cohort: Cohort, seen: list[tuple[float, float]] = seen) -> Iterator[Watched]:
            yield Watched(cohort, seen)

        found = train(images, settings, aggregator="mean", attack=NONE, seed=seed, combining=watched)
        means = [
            sum(last) / len(last)
            for number in range(len(seen))
            if (last := found.accuracies[max(0, number + 1 - LAST_ROUNDS) : number + 1])
        ]
        print(f"seed {seed}: round, accuracy, spread, agreement")
        for number in sorted({0, 5, 10, 20, 50, 100, len(seen) - 1} & set(range(len(seen)))):
            print(f"{number + 1:>5} {100 * means[number]:>6.1f} {seen[number][0]:>8.1f} {seen[number][1]:>6.2f}")
        agreed = max((one for one, (_, agreement) in zip(means, seen, strict=True) if agreement >= 0.25), default=0.0)
        print(f"the best accuracy of a round in which four did not outweigh sixteen: {100 * agreed:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
