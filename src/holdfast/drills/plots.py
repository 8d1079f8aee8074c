"""The plots of a drill's report as SVG: who worked when, how fast it went, how long each recovery took. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from holdfast.core.words import host_of, slot_of
from holdfast.drills.figures import Figures
from holdfast.drills.schedule import Done

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 22, 26
LANE = 22
BARS_MAX = 120  # more faults than that share bars no longer: the slowest are shown
MARKS = {"kill": "✕", "stop": "‖", "slow": "~", "corrupt": "⚡"}


@dataclass
class Life:
    """Of one worker, in seconds since 1970."""

    began: float
    member: list[tuple[float, float]] = field(default_factory=list)
    ended: float = math.inf


def lives(events: Iterable[Mapping[str, Any]], until: float) -> dict[str, Life]:
    found: dict[str, Life] = {}
    entered: dict[str, float] = {}
    newest = -1

    def leave(worker: str, at: float) -> None:
        since = entered.pop(worker, None)
        if since is not None and worker in found:
            found[worker].member.append((since, at))

    for event in events:
        kind, at = event["kind"], float(event["t"])
        if kind == "worker_started":
            found[str(event.get("worker"))] = Life(at)
        elif kind == "worker_exited" and str(event.get("worker")) in found:
            worker = str(event["worker"])
            leave(worker, at)
            found[worker].ended = at
        elif kind == "view" and int(event.get("view", -1)) > newest:
            newest = int(event["view"])
            members = set(map(str, event.get("members", ())))
            for worker in [one for one in entered if one not in members]:
                leave(worker, at)
            for worker in members:
                entered.setdefault(worker, at)
    for worker in list(entered):
        leave(worker, until)
    for life in found.values():
        life.ended = min(life.ended, until)
    return found


class Axis:
    """Seconds from left to right."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, max(high, low + 1e-6)

    def x(self, value: float) -> float:
        inside = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(LEFT + inside * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self) -> list[float]:
        return nice_ticks(self.low, self.high, 9)

    def draw(self, height: float) -> str:
        parts = [
            f'<line class="grid" x1="{self.x(tick)}" x2="{self.x(tick)}" y1="{TOP}" y2="{height - BOTTOM}"/>'
            f'<text class="tick" x="{self.x(tick)}" y="{height - 8}" text-anchor="middle">{tick:g} s</text>'
            for tick in self.ticks()
        ]
        return "".join(parts)


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between the two, at most so many."""
    span = max(high - low, 1e-9)
    unit = 10 ** math.floor(math.log10(span / most))
    step = next(unit * factor for factor in (1, 2, 5, 10, 20) if span / (unit * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(step * number, 10) + 0.0 for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _svg(height: float, label: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label, quote=True)}">'
        f"<title>{escape(label)}</title>{body}</svg>"
    )


def _outages(done: Sequence[Done], axis: Axis, began: float, height: float) -> str:
    parts = []
    for one in done:
        if one.planned.duration_s and one.planned.kind != "slow":
            left = axis.x(one.at - began)
            right = axis.x((one.ended_at or one.at + one.planned.duration_s) - began)
            parts.append(
                f'<rect class="outage" x="{left}" y="{TOP}" width="{max(right - left, 2):g}" '
                f'height="{height - TOP - BOTTOM:g}"><title>{escape(one.what)}</title></rect>'
                f'<text class="outage-name" x="{left + 3:g}" y="{TOP - 6}">{escape(one.planned.kind)}</text>'
            )
    return "".join(parts)


def timeline(events: Sequence[Mapping[str, Any]], done: Sequence[Done], began: float, until: float) -> str:
    """A lane for each slot: grey while a worker starts or waits as a spare, coloured while it trains."""
    found = lives(events, until)
    slots = sorted({(host_of(worker), slot_of(worker)) for worker in found})
    if not slots:
        return ""
    first = min(life.began for life in found.values())
    axis = Axis(first - began, until - began)
    height = TOP + LANE * len(slots) + BOTTOM
    tops = {slot: TOP + LANE * index for index, slot in enumerate(slots)}
    parts = [axis.draw(height), _outages(done, axis, began, height)]
    for (host, slot), top in tops.items():
        name = f"w{slot}@{host}" if host else f"w{slot}"
        parts.append(f'<text class="lane" x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(name)}</text>')
    for worker, life in found.items():
        top = tops[host_of(worker), slot_of(worker)]
        parts.append(_span("waits", axis, life.began - began, life.ended - began, top, f"{worker} starts or waits"))
        for since, to in life.member:
            parts.append(_span("trains", axis, since - began, to - began, top, f"{worker} trains"))
    parts += [_mark(one, victim, tops, axis, began) for one in done for victim in one.victims]
    return _svg(height, "Which worker trained when, and the faults", "".join(parts))


def _span(kind: str, axis: Axis, since: float, to: float, top: float, text: str) -> str:
    left, right = axis.x(since), axis.x(to)
    return (
        f'<rect class="{kind}" x="{left}" y="{top + 4}" width="{max(right - left, 1):g}" height="{LANE - 8}" rx="2">'
        f"<title>{escape(text)}, {since:.1f} to {to:.1f} s</title></rect>"
    )


def _mark(one: Done, victim: str, tops: Mapping[tuple[str, int], float], axis: Axis, began: float) -> str:
    top = tops.get((host_of(victim), slot_of(victim)))
    mark = MARKS.get(one.planned.kind)
    if top is None or mark is None:
        return ""
    at = one.at - began
    return (
        f'<text class="mark" x="{axis.x(at)}" y="{top + 16}" text-anchor="middle">{mark}'
        f"<title>{escape(one.what)}, at {at:.1f} s</title></text>"
    )


def throughput(figures: Figures, done: Sequence[Done], began: float) -> str:
    points = figures.throughput
    if len(points) < 2:
        return ""
    height = 200
    axis = Axis(points[0][0], points[-1][0])
    top = max([figures.quiet_steps_per_s, *(rate for _, rate in points)]) * 1.1 or 1.0

    def y(rate: float) -> float:
        return round(height - BOTTOM - rate / top * (height - TOP - BOTTOM), 1)

    parts = [axis.draw(height), _outages(done, axis, began, height)]
    for tick in nice_ticks(0, top, 4):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>'
        )
    for one in done:
        x = axis.x(one.at - began)
        parts.append(
            f'<line class="fault" x1="{x}" x2="{x}" y1="{TOP}" y2="{height - BOTTOM}">'
            f"<title>{escape(one.what)}</title></line>"
        )
    usual = y(figures.quiet_steps_per_s)
    parts.append(f'<line class="quiet" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{usual}" y2="{usual}"/>')
    parts.append(f'<text class="quiet-name" x="{WIDTH - RIGHT}" y="{usual - 5}" text-anchor="end">quiet run</text>')
    line = " ".join(f"{axis.x(at)},{y(rate)}" for at, rate in points)
    parts.append(f'<polyline class="rate" points="{line}"/>')
    return _svg(height, "Steps a second over time", "".join(parts))


def recoveries(figures: Figures, done: Sequence[Done]) -> str:
    """A bar for each fault."""
    known = [(one, took) for one, took in zip(done, figures.recoveries_s, strict=True) if took is not None]
    if not known:
        return ""
    if len(known) > BARS_MAX:
        slowest = sorted(known, key=lambda pair: -pair[1])[:BARS_MAX]
        known = [pair for pair in known if pair in slowest]
    height = 200
    top = max(took for _, took in known) * 1.1 or 1.0
    room = (WIDTH - LEFT - RIGHT) / len(known)

    def y(value: float) -> float:
        return round(height - BOTTOM - value / top * (height - TOP - BOTTOM), 1)

    parts = []
    for tick in nice_ticks(0, top, 5):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:g} s</text>'
        )
    for index, (one, took) in enumerate(known):
        left, width = LEFT + room * (index + 0.15), min(room * 0.7, 48)
        middle = left + width / 2
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{y(took)}" width="{width:.1f}" '
            f'height="{height - BOTTOM - y(took):.1f}" rx="1"><title>{escape(one.what)}: {took:.2f} s</title></rect>'
        )
        if room >= 34:
            name = one.victims[0].partition(".")[0] if one.planned.kind in MARKS and one.victims else one.planned.kind
            label = f"{MARKS.get(one.planned.kind, '')} {name}".strip()
            parts.append(
                f'<text class="tick" x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{escape(label)}</text>'
            )
    return _svg(height, "Time from each fault to the next committed step", "".join(parts))
