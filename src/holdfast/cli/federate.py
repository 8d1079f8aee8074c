"""`holdfast federate`: simulate federated learning with hostile clients, and see which rule withstands which attack."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from holdfast.cli.tables import aligned
from holdfast.core.errors import ConfigError

_CLEAR = "\r\x1b[2K"
BAR = 30
ALL = "all"
USUAL_AGGREGATORS = "mean,nnm+trimmed-mean"
USUAL_ATTACKS = "none,alie"


def add_arguments(federate: argparse.ArgumentParser) -> None:
    federate.description = (
        "Train a small model on real images with simulated clients, some of them hostile, and print the accuracy of "
        "every aggregator under every attack."
    )
    federate.add_argument("--clients", type=int, default=20, metavar="N", help="(default: 20)")
    federate.add_argument("--byzantine", type=int, default=4, metavar="F", help="so many are hostile (default: 4)")
    federate.add_argument(
        "--aggregator",
        default=USUAL_AGGREGATORS,
        metavar="A,B",
        help="rules, or all (default: %(default)s)",
    )
    federate.add_argument(
        "--attack", default=USUAL_ATTACKS, metavar="A,B", help="attacks, or all (default: %(default)s)"
    )
    federate.add_argument("--rounds", type=int, default=150, metavar="N", help="(default: 150)")
    federate.add_argument("--data", default="digits", metavar="D", help="digits, fashion, mnist, or a directory")
    federate.add_argument("--dirichlet", type=float, metavar="A", help="skew labels; without it all are alike")
    federate.add_argument("--seed", default="0", metavar="S", help="one, or several: 0,1,2 (default: 0)")
    federate.add_argument("--local-steps", type=int, default=1, metavar="N", help="of a client in a round (default: 1)")
    federate.add_argument("--json", metavar="F", help="keep the results there, and go on with what is there")
    federate.add_argument("--plot", metavar="F.png", help="draw accuracy over rounds")
    federate.set_defaults(command=_federate)


def _federate(options: argparse.Namespace) -> int:
    import torch

    from holdfast.byzantine.federation.choices import Choices, shown
    from holdfast.byzantine.federation.data import load
    from holdfast.byzantine.federation.rounds import ALL_ATTACKS, NONE, Settings
    from holdfast.byzantine.rules.words import LAST

    torch.set_num_threads(1)  # models this small are not worth more
    choices = Choices(
        Settings(
            clients=options.clients,
            byzantine=options.byzantine,
            rounds=options.rounds,
            dirichlet=options.dirichlet,
            local_steps=options.local_steps,
        ),
        options.data,
        _listed(options.aggregator, [*LAST, "nnm+trimmed-mean"]),
        _listed(options.attack, [NONE, *ALL_ATTACKS]),
        _seeds(options.seed),
    ).validate()
    images, keep = load(options.data), Path(options.json) if options.json else None
    if keep is not None:
        choices.read(keep)
    began = time.monotonic()
    for cell, done, total in choices.compute(images, keep=keep):
        _bar(done, total, f"{cell.aggregator} under {cell.attack}", time.monotonic() - began)
    if sys.stderr.isatty():
        print(_CLEAR, end="", file=sys.stderr, flush=True)
    spread = "data alike" if options.dirichlet is None else f"labels skewed (Dirichlet {options.dirichlet:g})"
    print(
        f"{options.data}, {options.clients} clients of which {options.byzantine} are hostile, {spread}, "
        f"{options.rounds} rounds: accuracy in %"
    )
    print("\n".join(_right(shown(choices))))
    if options.plot:
        from holdfast.byzantine.federation.plots import draw

        draw(choices, Path(options.plot))
    return 0


def _right(rows: list[list[str]]) -> list[str]:
    """Names to the left, numbers to the right."""
    width = max(len(row[0]) for row in rows)
    numbers = aligned([row[1:] for row in rows], right=len(rows[0]) - 1)
    return [f"{row[0]:<{width}}  {line}" for row, line in zip(rows, numbers, strict=True)]


def _listed(text: str, every: list[str]) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{text!r} names nothing", hint=f"some of {', '.join(every)}, or {ALL}")
    return list(dict.fromkeys(word for one in words for word in (every if one == ALL else [one])))


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seed {text} is not a whole number", hint="--seed 0, or --seed 0,1,2,3,4") from None
    if any(not 0 <= seed < 1 << 31 for seed in seeds):
        raise ConfigError(f"--seed {text} is out of range", hint="seeds are from 0 to 2147483647")
    return list(dict.fromkeys(seeds))


def _bar(done: int, total: int, what: str, seconds: float) -> None:
    if not sys.stderr.isatty():
        return
    filled = BAR * done // total
    left_s = seconds / done * (total - done)
    print(
        f"{_CLEAR}[{'#' * filled}{'.' * (BAR - filled)}] {done}/{total}, {left_s:.0f} s left: {what}",
        end="",
        file=sys.stderr,
        flush=True,
    )
