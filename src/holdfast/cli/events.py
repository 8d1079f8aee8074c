"""`holdfast events`: what happened in a run, in order, as sentences or as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.cli.control import find_run
from holdfast.cli.following import while_it_lives
from holdfast.cli.parser import meant, nearest
from holdfast.cli.tables import clock_words
from holdfast.core.durations import parse_duration
from holdfast.core.errors import ConfigError
from holdfast.core.events import KINDS
from holdfast.events import EventReader
from holdfast.events.telling import sentence
from holdfast.placement.directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="go on with what happens, until the run is over")
    parser.add_argument("--kind", default="", metavar="K,...", help="only these kinds: lost,recovered")
    parser.add_argument("--worker", default="", metavar="W", help="only by or about this worker: w0.1, or w0")
    parser.add_argument("--since", default="", metavar="T", help="only of the last 30s, 5min, 2h, 1d")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object a line")
    parser.set_defaults(command=_events)


def _events(options: argparse.Namespace) -> int:
    kinds = parse_kinds(options.kind)
    since = time.time() - parse_duration("--since", options.since) if options.since else -float("inf")
    directory = find_run(options.run, options.dir)
    reader = EventReader(directory.events)
    show = _as_json if options.json else _as_line
    shown = 0
    for event in _following(reader, directory, since) if options.follow else reader.stream(since=since):
        if (not kinds or event["kind"] in kinds) and (not options.worker or is_about(event, options.worker)):
            print(show(event), flush=options.follow)
            shown += 1
    if not shown and (kinds or options.worker or options.since):
        print(f"holdfast: no event of run {directory.name} is like that", file=sys.stderr)
    sys.stdout.flush()  # here, where a pipe that nobody reads is told from an error
    return 0


def parse_kinds(text: str) -> frozenset[str]:
    kinds = frozenset(part.strip() for part in text.split(",") if part.strip())
    unknown = sorted(kinds - KINDS.keys())
    if unknown:
        hint = meant(nearest(unknown[0], KINDS), f"one of {', '.join(sorted(KINDS))}")
        raise ConfigError(f"there are no events of kind {unknown[0]!r:.80}", hint=hint)
    return kinds


def is_about(event: Mapping[str, Any], worker: str) -> bool:
    """`worker` is a worker's id, or its slot: w0 stands for w0.1, w0.2 and so on."""
    names = (str(event.get(field, "")) for field in ("who", "worker", "peer"))
    return any(name == worker or name.startswith(f"{worker}.") for name in names)


def _as_json(event: Mapping[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _as_line(event: Mapping[str, Any]) -> str:
    when = clock_words(event["t"], "%Y-%m-%d %H:%M:%S.%f", "at no time known")[:23]
    return f"{when}  {event['who']!s:<7} {sentence(event)}"


def _following(reader: EventReader, directory: RunDirectory, since: float) -> Iterator[dict[str, Any]]:
    """All events, and those that come, until the run is over."""
    for _ in while_it_lives(directory):
        yield from reader.stream(since=since)
