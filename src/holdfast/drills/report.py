"""What a drill hands over: one HTML file that needs nothing else, and the figures for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.drills import plots
from holdfast.drills.checking import PromiseVerdict
from holdfast.drills.figures import Figures
from holdfast.drills.plan import DrillPlan
from holdfast.drills.schedule import DoneFault, Planned
from holdfast.events.telling import count
from holdfast.placement.directory import replace_file

WORDS = {True: "held", False: "broken", None: "not judged"}

STYLE = Path(__file__).with_name("report.css")
METHOD = Path(__file__).with_name("report_method.html")


@dataclass(frozen=True, kw_only=True)
class Drill:
    """Everything that is told of a drill. Times are seconds since 1970."""

    plan: DrillPlan
    script: tuple[str, ...]
    planned: tuple[Planned, ...]
    done: tuple[DoneFault, ...]
    verdicts: tuple[PromiseVerdict, ...]
    figures: Figures
    flat: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    began: float
    ended: float
    interrupted: bool = False
    first_look: str = ""  # what `holdfast check` says of the script

    @property
    def broken(self) -> list[str]:
        return [verdict.promise for verdict in self.verdicts if verdict.held is False]

    @property
    def held(self) -> bool:
        return not self.broken and not self.interrupted

    def headline(self) -> str:
        if self.interrupted:
            return "interrupted: nothing is judged"
        if self.broken:
            return f"broken: {', '.join(self.broken)}"
        return f"every promise held under {len(self.done)} fault{'s' * (len(self.done) != 1)}"

    def lines(self) -> list[str]:
        """For the terminal."""
        lines = [f"{WORDS[one.held]:>10}  {one.promise}: {one.text}" for one in self.verdicts]
        flat = self.flat
        if flat["goodput"] is not None:
            lines.append(
                f"   goodput  {flat['goodput']:.3f} while faults came, {flat['goodput_of_all']:.3f} over all steps"
            )
        if flat["recovery_median_s"] is not None:
            lines.append(
                f"  recovery  median {flat['recovery_median_s']:.2f} s, worst {flat['recovery_worst_s']:.2f} s"
            )
        if len(self.done) < len(self.planned):
            lines.append(
                f"    faults  {len(self.done)} of {len(self.planned)}: the training was over before the others"
            )
        return [*lines, self.headline()]


def write_json(drill: Drill, path: Path) -> None:
    figures = {
        "held": drill.held,
        "interrupted": drill.interrupted,
        "broken": drill.broken,
        **drill.flat,
        "seed": drill.plan.seed,
        "workers": drill.plan.workers,
        "spares": drill.plan.spares,
        "hosts": drill.plan.hosts,
        "faults_planned": len(drill.planned),
        "script": list(drill.script),
        "check": drill.first_look,
        "plan": asdict(drill.plan),
        "promises": [asdict(verdict) for verdict in drill.verdicts],
        "fault_list": [
            {
                "kind": one.planned.kind,
                "at_s": round(one.at - drill.began, 3),
                "planned_at_s": one.planned.at_s,
                "what": one.what,
                "victims": list(one.victims),
                "step": one.step,
                "recovery_s": None if took is None else round(took, 4),
                "longest_pause_s": round(pause, 4),
                "lasted_s": None if one.ended_at is None else round(one.ended_at - one.at, 3),
            }
            for one, took, pause in zip(drill.done, drill.figures.recoveries_s, drill.figures.pauses_s, strict=True)
        ],
    }
    _write(path, json.dumps(figures, indent=1) + "\n")


def write_report(drill: Drill, path: Path) -> None:
    _write(path, html(drill))


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="name another place") from error


def html(drill: Drill) -> str:
    until = max([drill.ended, *(float(event["t"]) for event in drill.events)])
    plotted = [
        ("Who trained when", plots.timeline(drill.events, drill.done, drill.began, until), _LEGEND),
        ("Steps a second", plots.throughput(drill.figures, drill.done, drill.began), ""),
        ("Recovery: from each fault to the next committed step", plots.recoveries(drill.figures, drill.done), ""),
    ]
    sections = "".join(
        f'<h2>{title}</h2>{legend}<div class="wide">{svg}</div>' for title, svg, legend in plotted if svg
    )
    colour = "good" if drill.held else "bad"
    command, plan = shlex.join(drill.script), drill.plan
    asked = f"{plan.workers} workers, {count(plan.spares, 'spare')}, seed {plan.seed}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>Drill of {escape(Path(drill.script[0]).name)}: {escape(drill.headline())}</title>
<style>{STYLE.read_text()}</style></head>
<body><main>
<h1 class="{colour}">{escape(drill.headline().capitalize())}</h1>
<div class="faint"><code>{escape(command)}</code>, {asked}</div>
{f'<div class="faint">Before the drill: {escape(drill.first_look)}</div>' if drill.first_look else ""}
<ul class="tiles">{_tiles(drill)}</ul>
<h2>Promises</h2><div class="wide"><table>{_promises(drill)}</table></div>
{sections}
<h2>Faults</h2><div class="wide"><table><tr><th>at</th><th>step</th><th>what was done</th><th>recovery</th>
<th>longest pause</th></tr>{_faults(drill)}</table></div>
<h2>How this was measured</h2>{METHOD.read_text()}
</main></body></html>
"""


_LEGEND = (
    '<div class="faint">blue: trains; grey: joins, is a spare or is paused; ✕ killed, ‖ stopped, ⚡ a bit flipped; '
    "shaded: an outage</div>"
)


def _tiles(drill: Drill) -> str:
    flat = drill.flat
    tiles = [
        ("goodput", "–" if flat["goodput"] is None else f"{flat['goodput']:.3f}"),
        ("recovery, median", _seconds(flat["recovery_median_s"])),
        ("recovery, worst", _seconds(flat["recovery_worst_s"])),
        ("faults", f"{len(drill.done)} of {len(drill.planned)}"),
        ("steps", f"{flat['steps']:,}"),
        ("workers started", str(flat["workers_started"])),
    ]
    return "".join(f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in tiles)


def _promises(drill: Drill) -> str:
    rows = []
    for one in drill.verdicts:
        colour = {True: "good", False: "bad", None: "faint"}[one.held]
        rows.append(
            f'<tr><td class="word">{escape(one.promise)}</td><td class="word {colour}">{WORDS[one.held]}</td>'
            f"<td>{escape(one.text)}</td></tr>"
        )
    return "".join(rows)


def _faults(drill: Drill) -> str:
    rows = []
    for one, took, pause in zip(drill.done, drill.figures.recoveries_s, drill.figures.pauses_s, strict=True):
        rows.append(
            f'<tr><td class="number">{one.at - drill.began:.1f} s</td><td class="number">{max(one.step, 0)}</td>'
            f'<td>{escape(one.what)}</td><td class="number">{_seconds(took)}</td>'
            f'<td class="number">{_seconds(pause)}</td></tr>'
        )
    return "".join(rows)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"
