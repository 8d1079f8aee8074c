"""`holdfast federate`: simulate federated learning with hostile clients, and see which rule withstands which attack."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.federate_ways import add_arguments as add_ways
from holdfast.cli.federate_ways import buckets_of, servers_of
from holdfast.cli.tables import aligned
from holdfast.core.errors import ConfigError
from holdfast.core.options.run import DASHBOARD_PORT

if TYPE_CHECKING:
    from holdfast.byzantine.federation.by_buckets import BucketChoice
    from holdfast.byzantine.federation.by_servers import ServerChoice
    from holdfast.byzantine.federation.choices import Cell, Choices
    from holdfast.byzantine.federation.rounds import RoundSeen

_CLEAR = "\r\x1b[2K"
BAR = 30
SHOW_EVERY_S = 0.1
ALL = "all"
USUAL_AGGREGATORS = "mean,nnm+trimmed-mean"
USUAL_ATTACKS = "none,alie"
EPSILONS_SHOWN = 12
DELTA = 1e-5


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
    federate.add_argument("--hidden", type=int, default=32, metavar="N", help="width of the network (default: 32)")
    federate.add_argument("--json", metavar="F", help="keep the results there, and go on with what is there")
    federate.add_argument("--plot", metavar="F.png", help="draw accuracy over rounds")
    federate.add_argument(
        "--dashboard",
        type=int,
        nargs="?",
        const=DASHBOARD_PORT,
        metavar="PORT",
        help=f"show it in the browser while it goes on (port {DASHBOARD_PORT}; 0: any that is free)",
    )
    add_ways(federate)
    federate.set_defaults(command=_federate)


def _federate(options: argparse.Namespace) -> int:
    import torch

    from holdfast.byzantine.federation.choices import shown
    from holdfast.byzantine.federation.combining import Combining, by_rule
    from holdfast.byzantine.federation.data import load

    torch.set_num_threads(1)  # models this small are not worth more
    servers, buckets = servers_of(options), buckets_of(options)
    choices = _choices(options, servers, buckets)
    images, keep = load(options.data), Path(options.json) if options.json else None
    if keep is not None:
        choices.read(keep)
    with ExitStack() as stack:
        bar = stack.enter_context(_Bar(choices))
        combining: Combining = by_rule
        if servers is not None:
            from holdfast.byzantine.agreement.processes import Nursery

            combining = servers.combining(stack.enter_context(Nursery()))
        if buckets is not None:
            combining = buckets.combining()
        watched = [bar.show, *_shown_in_browser(options.dashboard, choices, stack)]

        def tell(cell: Cell, seen: RoundSeen) -> None:
            for show in watched:
                show(cell, seen)

        for _ in choices.compute(images, keep=keep, combining=combining, each_round=tell):
            pass
    print(f"{choices.words}: accuracy in %")
    print("\n".join(_right(shown(choices))))
    if choices.epsilons:
        print(f"privacy of a client after so many rounds, at delta {options.delta or DELTA:g}")
        print("\n".join(_right(_spent(choices))))
    if options.plot:
        from holdfast.byzantine.federation.plots import draw

        draw(choices, Path(options.plot))
    if options.chains:
        print(f"chains: holdfast federate verify {options.chains}")
    return 0


def _shown_in_browser(port: int | None, choices: Choices, stack: ExitStack) -> list[Callable[[Cell, RoundSeen], None]]:
    """Whom to tell of every round, if a page is asked for."""
    if port is None:
        return []
    from holdfast.cli.dashboard import check_port
    from holdfast.dashboard.federation import FederationDashboard

    check_port(port)
    dashboard = FederationDashboard(choices, port)
    stack.callback(dashboard.close)
    print(f"dashboard: {dashboard.url}", flush=True)
    return [dashboard.record.add]


def _choices(options: argparse.Namespace, servers: ServerChoice | None, buckets: BucketChoice | None) -> Choices:
    from holdfast.byzantine.federation.choices import Choices
    from holdfast.byzantine.federation.rounds import ALL_ATTACKS, NONE, Settings
    from holdfast.byzantine.rules.words import LAST

    settings = Settings(
        clients=options.clients,
        byzantine=options.byzantine,
        rounds=options.rounds,
        dirichlet=options.dirichlet,
        local_steps=options.local_steps,
        hidden=options.hidden,
    )
    way = servers or buckets
    choices = Choices(
        settings,
        options.data,
        _listed(options.aggregator, [*LAST, "nnm+trimmed-mean"]),
        _listed(options.attack, [NONE, *ALL_ATTACKS]),
        _seeds(options.seed),
        how=way.words if way else "",
    ).validate()
    if buckets is not None:
        for aggregator in choices.aggregators:
            buckets.check(aggregator, settings.clients, settings.byzantine)
        choices.epsilons = buckets.epsilons(settings.rounds)
    return choices


def _spent(choices: Choices) -> list[list[str]]:
    """Every round if they are few, else some of them; --json has all."""
    count = len(choices.epsilons)
    rounds = sorted({max(1, round(count * part / EPSILONS_SHOWN)) for part in range(1, EPSILONS_SHOWN + 1)})
    return [
        ["round", *(str(number) for number in rounds)],
        ["epsilon", *(f"{choices.epsilons[number - 1]:.3g}" for number in rounds)],
    ]


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


class _Bar:
    """How far all trainings have come, on a terminal only."""

    def __init__(self, choices: Choices) -> None:
        self._missing = [cell.name for cell in choices.cells() if cell.name not in choices.found]
        self._rounds, self._epsilons = choices.settings.rounds, choices.epsilons
        self._began, self._shown = time.monotonic(), 0.0
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def show(self, cell: Cell, seen: RoundSeen) -> None:
        rounds = seen.rounds
        now = time.monotonic()
        if not self._is_shown or now - self._shown < SHOW_EVERY_S:
            return
        self._shown = now
        number, total = self._missing.index(cell.name), len(self._missing)
        part = (number + rounds / self._rounds) / total
        filled = int(BAR * part)
        spent = f", epsilon {self._epsilons[rounds - 1]:.3g}" if self._epsilons else ""
        left_s = (now - self._began) * (1 - part) / part
        print(
            f"{_CLEAR}[{'#' * filled}{'.' * (BAR - filled)}] {number + 1}/{total}, {left_s:.0f} s left: "
            f"{cell.aggregator} under {cell.attack}, round {rounds} of {self._rounds}{spent}",
            end="",
            file=sys.stderr,
            flush=True,
        )
