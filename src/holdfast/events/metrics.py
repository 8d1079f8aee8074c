"""A run in numbers, for Prometheus and whatever reads its text format: a fold over the events. Pure.

Names follow the conventions of Prometheus and OpenTelemetry: base units, `_total` for what only grows. Labels are few:
a living worker's id, a category of time, a kind of event, the name of a recorded metric.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from holdfast.core.events import KINDS
from holdfast.core.spending import CATEGORIES
from holdfast.events.accounting import Accounting

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WORKERS_KEPT = 4096
RECORDED_MAX = 64  # names of metrics that the script records
_FAILURES = ("failed", "killed", "hung", "died while no agent ran")


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*BUCKETS_S, math.inf), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{_number(bound)}"}} {total}'
        yield f"{name}_sum {_number(self._sum)}"
        yield f"{name}_count {total}"


class Metrics:
    """Takes events in order; what is missing in one or wrong is passed over."""

    def __init__(self) -> None:
        self._time = Accounting()
        self._events = dict.fromkeys(KINDS, 0)
        self._step = self._steps = self._steps_made = self._wanted = 0
        self._samples_per_s = 0.0
        self._recorded: dict[str, float] = {}
        self._view = 0
        self._members: tuple[str, ...] = ()
        self._failures = self._evictions = self._rewinds = 0
        self._recoveries = Histogram()
        self._recovery: tuple[int, float] | None = None  # the last view's: its survivors may still tell
        self._checkpoint: Mapping[str, Any] | None = None
        self._saves, self._held = Histogram(), Histogram()
        self._reduced: dict[str, int] = {}  # bytes, by worker
        self._reduced_before = 0  # by those that are no longer kept
        self._memory: dict[str, int] = {}
        self._last = 0.0

    def feed(self, event: Mapping[str, Any]) -> None:
        self._time.feed(event)
        try:
            kind, when = event["kind"], float(event["t"])
            self._last = max(self._last, when)
            if kind in self._events:
                self._events[kind] += 1
            handler = getattr(self, f"_on_{kind}", None)
            if handler is not None:
                handler(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass

    def _on_agent_started(self, event: Mapping[str, Any]) -> None:
        self._wanted = int(event["workers"])

    _on_scaled = _on_agent_started

    def _on_progress(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        self._steps_made += max(0, step - self._step)
        self._step, self._steps = step, int(event.get("steps") or self._steps)
        self._samples_per_s = float(event.get("samples_per_s") or 0.0)
        for name, value in (event.get("metrics") or {}).items():
            if name in self._recorded or len(self._recorded) < RECORDED_MAX:
                self._recorded[name] = float(value)

    def _on_resumed(self, event: Mapping[str, Any]) -> None:
        self._step = int(event["step"])

    def _on_view(self, event: Mapping[str, Any]) -> None:
        if int(event["view"]) > self._view:
            self._view, self._members = int(event["view"]), tuple(map(str, event["members"]))

    def _on_worker_exited(self, event: Mapping[str, Any]) -> None:
        self._failures += event["reason"] in _FAILURES
        self._evictions += event["reason"] == "evicted"
        self._memory.pop(str(event["worker"]), None)

    def _on_rewound(self, event: Mapping[str, Any]) -> None:
        self._rewinds = max(self._rewinds, int(event["number"]))

    def _on_recovered(self, event: Mapping[str, Any]) -> None:
        """Every survivor tells; the slowest counts, and each view once."""
        view, seconds = int(event["view"]), float(event["duration_s"])
        if self._recovery is not None and self._recovery[0] == view:
            seconds = max(seconds, self._recovery[1])
        elif self._recovery is not None:
            self._recoveries.add(self._recovery[1])
        self._recovery = view, seconds

    def _on_checkpoint(self, event: Mapping[str, Any]) -> None:
        self._saves.add(float(event["duration_s"]))
        self._held.add(float(event["held_s"]))
        self._checkpoint = event

    def _on_spent(self, event: Mapping[str, Any]) -> None:
        who = str(event["who"])
        if who not in self._reduced and len(self._reduced) >= WORKERS_KEPT:
            self._reduced_before += self._reduced.pop(next(iter(self._reduced)))
        self._reduced[who] = int(event["bytes"])
        self._memory[who] = int(event["memory_bytes"])

    # ---- what it comes to

    def render(
        self,
        now: float,
        *,
        run: str = "",
        alive: Collection[str] = (),
        suspicion: Mapping[str, tuple[int, float]] | None = None,
    ) -> str:
        """The text format. `alive`: the workers that live; `suspicion`: their level, 0 to 3, and phi."""
        page = _Page()
        self._add_training(page, run)
        self._add_membership(page, alive, suspicion or {})
        self._add_time(page, now, alive)
        self._add_checkpoints(page, now)
        page.add("reduced_bytes_total", "Gradient bytes reduced by all workers together.", self._reduced_bytes())
        page.many("events_total", "Events read so far.", "kind", self._events)
        page.add("last_event_timestamp_seconds", "When the newest event was written.", self._last)
        return page.text()

    def _reduced_bytes(self) -> int:
        return self._reduced_before + sum(self._reduced.values())

    def _add_training(self, page: _Page, run: str) -> None:
        page.many("run_info", "The run.", "run", {run: 1})
        page.add("step", "Steps applied.", self._step)
        page.add("target_steps", "Steps that the script asks for.", self._steps)
        page.add("steps_total", "Steps made, those that were repeated included.", self._steps_made)
        page.add("samples_per_second", "Throughput of all workers together.", self._samples_per_s)
        page.many("recorded", "The newest means of what the script records.", "name", self._recorded)
        page.add("rewinds_total", "How often the run went back.", self._rewinds)

    def _add_membership(self, page: _Page, alive: Collection[str], suspicion: Mapping[str, tuple[int, float]]) -> None:
        page.add("view", "The number of the newest view.", self._view)
        page.add("members", "Members of the newest view.", len(self._members))
        page.add("workers_wanted", "Workers that the run shall have.", self._wanted)
        page.add("workers_alive", "Workers that live on this host.", len(alive))
        page.add("failures_total", "Workers that failed, were killed or hung.", self._failures)
        page.add("evictions_total", "Workers that the others went on without.", self._evictions)
        words = "What the heartbeats say: 0 ok, 1 slow to answer, 2 suspect, 3 hung."
        page.many("worker_suspicion", words, "worker", {who: level for who, (level, _) in suspicion.items()})
        words = "How unlikely it is that the worker still gets on, as minus log10."
        page.many("worker_suspicion_phi", words, "worker", {who: phi for who, (_, phi) in suspicion.items()})
        memory = {worker: size for worker, size in self._memory.items() if worker in alive}
        page.many("worker_memory_bytes", "Resident memory.", "worker", memory)
        page.histogram("recovery_seconds", "From a noticed loss to the next commit.", self._all_recoveries())

    def _all_recoveries(self) -> Histogram:
        copy = Histogram()
        copy._counts, copy._sum = list(self._recoveries._counts), self._recoveries._sum
        if self._recovery is not None:
            copy.add(self._recovery[1])
        return copy

    def _add_time(self, page: _Page, now: float, alive: Collection[str]) -> None:
        until = now if alive else None
        spent = self._time.run(until, alive)
        if spent.goodput is not None and self._time.told:
            page.add("goodput_ratio", "The part of the workers' time that was not lost to failures.", spent.goodput)
        words = "Where the time of all workers went."
        page.many("time_seconds", words, "category", {category: spent.seconds[category] for category in CATEGORIES})
        each = {worker: one for worker, one in self._time.workers(until, alive).items() if worker in alive}
        words = "Where the time of a living worker went."
        page.head("worker_time_seconds", words, "gauge")
        for worker, one in each.items():
            for category in CATEGORIES:
                page.value("worker_time_seconds", one.seconds[category], worker=worker, category=category)

    def _add_checkpoints(self, page: _Page, now: float) -> None:
        page.histogram("checkpoint_duration_seconds", "From the beginning of a save to its commit.", self._saves)
        page.histogram("checkpoint_held_seconds", "How long a save held training up.", self._held)
        newest = self._checkpoint
        if newest is None:
            return
        page.add("checkpoint_step", "The step of the newest checkpoint.", newest["step"])
        page.add("checkpoint_bytes", "Its size.", newest.get("bytes") or 0)
        page.add("checkpoint_timestamp_seconds", "When it was committed.", newest["t"])
        page.add("checkpoint_age_seconds", "How long ago that was.", max(0.0, now - float(newest["t"])))


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def head(self, name: str, words: str, kind: str) -> None:
        self._lines += [f"# HELP holdfast_{name} {words}", f"# TYPE holdfast_{name} {kind}"]

    def value(self, metric: str, number: float, /, **labels: str) -> None:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        self._lines.append(f"holdfast_{metric}" + (f"{{{inside}}}" if inside else "") + f" {_number(number)}")

    def add(self, name: str, words: str, value: float) -> None:
        self.head(name, words, "counter" if name.endswith("_total") else "gauge")
        self.value(name, value)

    def many(self, name: str, words: str, label: str, values: Mapping[str, float]) -> None:
        self.head(name, words, "counter" if name.endswith("_total") else "gauge")
        for text, value in values.items():
            self.value(name, value, **{label: text})

    def histogram(self, name: str, words: str, histogram: Histogram) -> None:
        self.head(name, words, "histogram")
        self._lines += histogram.lines(f"holdfast_{name}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(round(value, 9))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
