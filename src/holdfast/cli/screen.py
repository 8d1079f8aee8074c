"""What `holdfast top` shows of a picture of the run (dashboard/keeper.py), in so many columns and lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.cli.tables import clock_words, size_words
from holdfast.events.telling import count, one_line
from holdfast.observe.summary import duration_words

HEADER_LINES = 4  # with the empty one below
EVENTS_MIN = 4
COLOURS = {
    "computing": "green",
    "serving": "green",
    "slow": "yellow",
    "recovering": "magenta",
    "joining": "cyan",
    "paused": "yellow",
    "spare": "dim",
    "gone": "dim",
    "dead": "bold red",
}
LEVELS = {"ok": "green", "slow to answer": "yellow", "suspect": "bold yellow", "hung": "bold red"}
_QUIET = ("progress", "rebalanced", "left_out", "staleness")
_LOUD = (
    "worker_exited",
    "server_exited",
    "server_hung",
    "server_slow",
    "slices_lost",
    "lost",
    "hung",
    "standstill",
    "corruption",
    "distrusted",
    "script_mistake",
    "inexact",
    "failed",
    "evicted",
    "warning",
    "ledger_down",
    "storage_down",
)


def screen(picture: Mapping[str, Any], width: int, height: int) -> RenderableType:
    """Exactly so high at most: workers and events share what the header leaves, events having a few lines at least."""
    if "reading" in picture:
        part = float(picture["reading"]["part"])
        return Text(f"run {picture['run']['name']}: reading its events, {part:.0%}", overflow="ellipsis", no_wrap=True)
    crew = _sorted(picture.get("crew") or [], picture.get("facts") or {})
    servers = list(picture.get("servers") or [])[: max(0, height // 4)]
    server_lines = len(servers) + 2 if servers else 0  # with its own head, and one between
    room = max(1, height - HEADER_LINES - 3 - EVENTS_MIN - server_lines)  # the table's head, one between, the last line
    shown = crew if len(crew) <= room else crew[: max(0, room - 1)]
    lines: list[RenderableType] = [*_header(picture), Text(""), _table(shown, picture.get("facts") or {})]
    used = HEADER_LINES + 1 + len(shown) + server_lines
    if len(shown) < len(crew):
        lines.append(Text(f"… and {len(crew) - len(shown)} more, who are well", style="dim"))
        used += 1
    if servers:
        lines += [Text(""), _server_table(servers, picture.get("slices") or [])]
    lines.append(Text(""))
    lines += _events(picture.get("events") or [], max(0, height - used - 2))
    lines.append(Text("q: quit", style="dim"))
    return Group(*lines)


def _header(picture: Mapping[str, Any]) -> list[Text]:
    header, run = picture["header"], picture["run"]
    name = f"{run['name']}@{run['host']}" if run.get("host") else run["name"]
    steps = f"/{header['steps']} ({header['step'] / header['steps']:.0%})" if header["steps"] else ""
    first = [f"run {name}: {header['state']}", f"step {header['step']}{steps}"]
    if header["eta_s"] is not None:
        first.append(f"{duration_words(header['eta_s'])} left")
    if header["failures"]:
        first.append(f"{count(header['failures'], 'failure')} survived")
    second = [f"{header['samples_per_s']:,.0f} samples/s"]
    if header["goodput"] is not None:
        second.append(f"goodput {header['goodput']:.1%}".replace("%", " %"))
    if not header["own_views"]:
        second.append(f"view {header['view']}")
    second.append(f"{header['members']} of {count(header['size'], 'worker')}")
    if header["recovery_median_s"] is not None:
        second.append(f"recovery {header['recovery_median_s'] * 1000:.0f} ms")
    third = [f"{metric} {value:.4g}" for metric, value in header["metrics"].items() if isinstance(value, int | float)]
    if header["checkpoint"]:
        age_s = max(0.0, header["now"] - header["checkpoint"]["t"])
        third.append(f"saved step {header['checkpoint']['step']}, {duration_words(age_s)} ago")
    if header["storage_away"]:
        third.append("storage away")
    if header["ledger_away"]:
        third.append("ledger away: membership frozen")
    if header["waiting"]:
        third.append(f"paused: {header['waiting']}")
    lines = [" · ".join(parts) for parts in (first, second, third)]
    return [
        Text(one_line(line), style="bold" if not number else "", overflow="ellipsis", no_wrap=True)
        for number, line in enumerate(lines)
    ]


def _sorted(crew: list[Any], facts: Mapping[str, Any]) -> list[Any]:
    """In order; who needs to be looked at comes first when there is no room for all, so they are put there."""

    def concern(one: Any) -> int:
        level = facts.get(one["worker"], {}).get("level")
        return -(list(LEVELS).index(level) if level in LEVELS else 0) - (one["state"] in ("dead", "paused", "slow"))

    return sorted(crew, key=concern) if len(crew) > 16 else crew


def _table(crew: list[Any], facts: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=False, header_style="dim", show_edge=False)
    table.add_column("worker", no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("suspicion", no_wrap=True)
    table.add_column("a shard", justify="right", no_wrap=True)
    table.add_column("shards", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in crew:
        seen = facts.get(one["worker"], {})
        level = seen.get("level", "")
        phi = f" {seen['phi']:.1f}" if seen.get("phi") else ""
        table.add_row(
            one_line(str(one["worker"] or one["lane"])),
            Text(one["state"], style=COLOURS.get(one["state"], "")),
            str(seen.get("step", "")),
            Text(f"{level}{phi}", style=LEVELS.get(level, "")),
            "" if one["pace_s"] is None else f"{one['pace_s'] * 1000:,.0f} ms",
            "" if one["shards"] is None else str(one["shards"]),
            size_words(seen["rss"]) if seen.get("rss") else "",
            Text(one_line(str(seen.get("reason") or seen.get("activity", ""))), style="dim"),
        )
    return table


def _server_table(servers: list[Any], slices: list[Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=False, header_style="dim", show_edge=False)
    table.add_column("server", no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True)
    for name in ("log", "updates", "confirms in"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("leads", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in servers:
        led = ", ".join(
            f"{each['slice']} (epoch {each['epoch']})" for each in slices if each["primary"] == one["server"]
        )
        table.add_row(
            one_line(str(one["server"])),
            Text(one["state"], style=COLOURS.get(one["state"], "")),
            str(one["entries"]),
            str(one["updates"]),
            "" if one["lag_s"] is None else f"{one['lag_s'] * 1000:,.1f} ms",
            Text(one_line(led), style="dim"),
        )
    return table


def _events(events: list[Any], most: int) -> list[Text]:
    """The newest, the last one below."""
    lines = []
    for event in reversed([event for event in events if event["kind"] not in _QUIET][:most]):
        reason = f" ({event['reason']})" if event.get("reason") else ""
        when = clock_words(event["t"], "%H:%M:%S", "--:--:--")
        text = Text(f"{when} ", style="dim", overflow="ellipsis", no_wrap=True)
        text.append(
            one_line(f"{event['who']} {event['text']}{reason}"), "yellow" if event["kind"] in _LOUD else "not dim"
        )
        lines.append(text)
    return lines
