"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def listed(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """For argparse: some of these, with commas between them."""

    def split(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(choices)}")
        return chosen

    return split
