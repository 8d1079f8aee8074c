"""Arguments that several benchmarks take, and what follows from --json and --check."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def listed(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """For argparse: some of these, with commas between them."""

    def split(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(choices)}")
        return chosen

    return split


def conclude(args: argparse.Namespace, figures: Mapping[str, Any], missed: Sequence[str]) -> int:
    """Writes the figures where they are wanted, names the bars that were missed if asked to; the exit code."""
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if not args.check:
        return 0
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0
