"""`holdfast top`: a run in the terminal, live, by the same record as the dashboard's.

Works over ssh and in 80 columns. What is shown is made in cli/screen.py; here are the terminal and the keys.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import ConfigError

PERIOD_S = 0.5
QUIT = (b"q", b"Q", b"\x03", b"\x04", b"")  # also Ctrl-C, Ctrl-D and the end of the input


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Watch a run in the terminal, while it goes on or afterwards. q ends it."
    parser.set_defaults(command=_top)


def _top(options: argparse.Namespace) -> int:
    from holdfast.cli.control import find_run

    directory = find_run(options.run, options.dir)
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise ConfigError(
            "holdfast top draws on a terminal, and this is none",
            hint=f"use `holdfast status {options.run}` or `holdfast events {options.run} --follow`",
        )
    try:
        from rich.console import Console
        from rich.live import Live

        from holdfast.cli.screen import screen
    except ImportError as error:
        raise ConfigError(
            f"holdfast top needs the package rich: {error}", hint="pip install 'holdfast[top]'"
        ) from error
    from holdfast.dashboard.keeper import RecordKeeper

    keeper = RecordKeeper(directory)
    console = Console()
    live = Live(console=console, screen=True, auto_refresh=False)
    try:
        with _keys():
            with _signals_later():
                live.start()
            while True:
                live.update(screen(keeper.picture(), console.width, console.height), refresh=True)
                if _pressed(PERIOD_S) in QUIT:
                    return 0
    finally:
        live.stop()
        keeper.close()


@contextmanager
def _signals_later() -> Iterator[None]:
    """Half a change of screens cannot be taken back: signals to end are heard when it is whole."""
    heard: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _frame: heard.append(number)) for number in ends]
    try:
        yield
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)
    for sent in heard:
        signal.raise_signal(sent)


@contextmanager
def _keys() -> Iterator[None]:
    """Keys come one by one and are not shown; afterwards all is as it was."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(timeout_s: float) -> bytes | None:
    """The next key, for which this waits; None: there was none. An arrow, say, is one key of several bytes."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return os.read(sys.stdin.fileno(), 64) if ready else None
