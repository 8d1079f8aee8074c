"""The plots of a drill's report as SVG: who worked when, how fast it went, how long each recovery took. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from holdfast.core.words import host_of, slot_of
from holdfast.drills.figures import Figures
from holdfast.drills.schedule import DoneFault
from holdfast.observe.fold import record_of
from holdfast.observe.lanes import JOINING, LIVING, PAUSED, SPARE

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 22, 26
LANE = 22
BARS_MAX = 120  # more faults than that share bars no longer: the slowest are shown
MARKS = {"kill": "✕", "stop": "‖", "slow": "~", "corrupt": "⚡"}


class Axis:
    """Seconds from left to right."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, max(high, low + 1e-6)

    def x(self, value: float) -> float:
        inside = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(LEFT + inside * (WIDTH - LEFT - RIGHT), 1)

    def draw(self, height: float) -> str:
        return "".join(
            f'<line class="grid" x1="{self.x(tick)}" x2="{self.x(tick)}" y1="{TOP}" y2="{height - BOTTOM}"/>'
            f'<text class="tick" x="{self.x(tick)}" y="{height - 8}" text-anchor="middle">{tick:g} s</text>'
            for tick in nice_ticks(self.low, self.high, 9)
        )


class Upwards:
    """Values from the bottom to the top, from 0 on: where one of them is, and the lines at round ones."""

    def __init__(self, values: Sequence[float], height: float) -> None:
        self._top, self._height = max(values) * 1.1 or 1.0, height

    def __call__(self, value: float) -> float:
        return round(self._height - BOTTOM - value / self._top * (self._height - TOP - BOTTOM), 1)

    def draw(self, most: int, unit: str) -> str:
        return "".join(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self(tick)}" y2="{self(tick)}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{self(tick) + 4}" text-anchor="end">{tick:g}{unit}</text>'
            for tick in nice_ticks(0, self._top, most)
        )


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


def _outages(done: Sequence[DoneFault], axis: Axis, began: float, height: float) -> str:
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


def timeline(events: Sequence[Mapping[str, Any]], done: Sequence[DoneFault], began: float, until: float) -> str:
    """A lane for each slot: grey while a worker starts or waits as a spare, coloured while it trains."""
    lanes = sorted(record_of(events).workers.lanes.values(), key=lambda lane: lane.order)
    lanes = [lane for lane in lanes if lane.stretches]
    if not lanes:
        return ""
    axis = Axis(min(lane.stretches[0][0] for lane in lanes) - began, until - began)
    height = TOP + LANE * len(lanes) + BOTTOM
    tops = {lane.order: TOP + LANE * index for index, lane in enumerate(lanes)}
    parts = [axis.draw(height), _outages(done, axis, began, height)]
    for lane in lanes:
        top = tops[lane.order]
        parts.append(f'<text class="lane" x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(lane.name)}</text>')
        ends = [*(at for at, _, _ in lane.stretches[1:]), until]
        for (since, state, worker), to in zip(lane.stretches, ends, strict=True):
            if state in LIVING:
                kind = "waits" if state in (JOINING, SPARE, PAUSED) else "trains"
                parts.append(_span(kind, axis, since - began, to - began, top, f"{worker}: {state}"))
    parts += [_mark(one, victim, tops, axis, began) for one in done for victim in one.victims]
    return _svg(height, "Which worker trained when, and the faults", "".join(parts))


def _span(kind: str, axis: Axis, since: float, to: float, top: float, text: str) -> str:
    left, right = axis.x(since), axis.x(to)
    return (
        f'<rect class="{kind}" x="{left}" y="{top + 4}" width="{max(right - left, 1):g}" height="{LANE - 8}" rx="2">'
        f"<title>{escape(text)}, {since:.1f} to {to:.1f} s</title></rect>"
    )


def _mark(one: DoneFault, victim: str, tops: Mapping[tuple[str, int], float], axis: Axis, began: float) -> str:
    top = tops.get((host_of(victim), slot_of(victim)))
    mark = MARKS.get(one.planned.kind)
    if top is None or mark is None:
        return ""
    at = one.at - began
    return (
        f'<text class="mark" x="{axis.x(at)}" y="{top + 16}" text-anchor="middle">{mark}'
        f"<title>{escape(one.what)}, at {at:.1f} s</title></text>"
    )


def throughput(figures: Figures, done: Sequence[DoneFault], began: float) -> str:
    points = figures.throughput
    if len(points) < 2:
        return ""
    height = 200
    axis = Axis(points[0][0], points[-1][0])
    y = Upwards([figures.quiet_steps_per_s, *(rate for _, rate in points)], height)
    parts = [axis.draw(height), _outages(done, axis, began, height), y.draw(4, "")]
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


def recoveries(figures: Figures, done: Sequence[DoneFault]) -> str:
    """A bar for each fault."""
    known = [(one, took) for one, took in zip(done, figures.recoveries_s, strict=True) if took is not None]
    if not known:
        return ""
    if len(known) > BARS_MAX:
        slowest = sorted(known, key=lambda pair: -pair[1])[:BARS_MAX]
        known = [pair for pair in known if pair in slowest]
    height = 200
    room = (WIDTH - LEFT - RIGHT) / len(known)
    y = Upwards([took for _, took in known], height)
    parts = [y.draw(5, " s")]
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
