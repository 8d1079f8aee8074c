"""`holdfast events`: what happened in a run, in order, as sentences or as JSON lines."""

from __future__ import annotations

import argparse
import json
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from holdfast.cli.control import find_run
from holdfast.core.errors import ConfigError
from holdfast.core.events import KINDS
from holdfast.events import EventReader
from holdfast.events.telling import sentence
from holdfast.launch.directory import RunDirectory
from holdfast.launch.proc import find_workers

LOOK_S = 0.2
OVER_S = 1.0  # a run without agent and workers for so long is over
_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SINCE = re.compile(r"(\d+(?:\.\d+)?)\s*(|s|sec|m|min|h|d)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="go on with what happens, until the run is over")
    parser.add_argument("--kind", default="", metavar="K,...", help="only these kinds: lost,recovered")
    parser.add_argument("--worker", default="", metavar="W", help="only by or about this worker: w0.1, or w0")
    parser.add_argument("--since", default="", metavar="T", help="only of the last 30s, 5min, 2h, 1d")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object a line")
    parser.set_defaults(command=_events)


def _events(options: argparse.Namespace) -> int:
    kinds = parse_kinds(options.kind)
    since = time.time() - parse_since(options.since) if options.since else -float("inf")
    directory = find_run(options.run, options.dir)
    reader = EventReader(directory.events)
    show = _as_json if options.json else _as_line
    for event in _following(reader, directory, since) if options.follow else reader.stream(since=since):
        if (not kinds or event["kind"] in kinds) and (not options.worker or is_about(event, options.worker)):
            print(show(event), flush=options.follow)
    sys.stdout.flush()  # here, where a pipe that nobody reads is told from an error
    return 0


def parse_kinds(text: str) -> frozenset[str]:
    kinds = frozenset(part.strip() for part in text.split(",") if part.strip())
    unknown = sorted(kinds - KINDS.keys())
    if unknown:
        raise ConfigError(f"there are no events of kind {unknown[0]!r}", hint=f"one of {', '.join(sorted(KINDS))}")
    return kinds


def parse_since(text: str) -> float:
    """Seconds."""
    match = _SINCE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--since is {text[:40]!r}", hint="give a time: 30s, 5min, 2h, 1d")
    return float(match[1]) * _UNITS[match[2]]


def is_about(event: Mapping[str, Any], worker: str) -> bool:
    """`worker` is a worker's id, or its slot: w0 stands for w0.1, w0.2 and so on."""
    names = (str(event.get(field, "")) for field in ("who", "worker", "peer"))
    return any(name == worker or name.startswith(f"{worker}.") for name in names)


def _as_json(event: Mapping[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _as_line(event: Mapping[str, Any]) -> str:
    try:
        when = datetime.fromtimestamp(event["t"]).isoformat(sep=" ", timespec="milliseconds")
    except (OverflowError, OSError, ValueError):
        when = "at no time known"
    return f"{when}  {event['who']!s:<7} {sentence(event)}"


def _following(reader: EventReader, directory: RunDirectory, since: float) -> Iterator[dict[str, Any]]:
    """All events, and those that come, until the run has had neither agent nor workers for a moment."""
    wait = _waiter()
    seen_alive = time.monotonic()
    while True:
        yield from reader.stream(since=since)
        now = time.monotonic()
        if directory.agent() is not None or find_workers(directory.path):
            seen_alive = now
        elif now - seen_alive > OVER_S:
            return
        wait(LOOK_S)


def _waiter() -> Callable[[float], None]:
    """Sleeps; BrokenPipeError when nobody reads any more, which a run that is quiet would not show."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return time.sleep

    def wait(seconds: float) -> None:
        if poll.poll(seconds * 1000):
            raise BrokenPipeError

    return wait
