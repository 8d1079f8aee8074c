"""A run in numbers, for Prometheus and whatever reads its text format. Pure: a projection of the fold (fold.py).

Names follow the conventions of Prometheus and OpenTelemetry: base units, `_total` for what only grows. Labels are few:
a living worker's id, a category of time, a kind of event, the name of a recorded metric.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from holdfast.core.events import KINDS
from holdfast.core.spending import CATEGORIES
from holdfast.observe.fold import RunRecord
from holdfast.observe.series import BUCKETS_S, Histogram
from holdfast.observe.servers import STALENESS_BUCKETS, Servers
from holdfast.observe.workers import Workers

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def render(
    record: RunRecord,
    now: float,
    *,
    run: str = "",
    alive: Collection[str] = (),
    suspicion: Mapping[str, tuple[int, float]] | None = None,
) -> str:
    """The text format. `alive`: the workers that live; `suspicion`: their level, 0 to 3, and phi."""
    page = _Page()
    _add_training(page, record, run)
    _add_membership(page, record.workers, alive, suspicion or {})
    _add_time(page, record, now, alive)
    _add_checkpoints(page, record, now)
    _add_servers(page, record.servers)
    page.add("reduced_bytes_total", "Gradient bytes reduced by all workers together.", record.workers.reduced_bytes)
    page.many("events_total", "Events read so far.", "kind", dict.fromkeys(KINDS, 0) | record.events.counts)
    page.add("last_event_timestamp_seconds", "When the newest event was written.", record.last)
    return page.text()


def _add_training(page: _Page, record: RunRecord, run: str) -> None:
    page.many("run_info", "The run.", "run", {run: 1})
    page.add("step", "Steps applied.", record.step)
    page.add("target_steps", "Steps that the script asks for.", record.steps)
    page.add("steps_total", "Steps made, those that were repeated included.", record.steps_made)
    page.add("samples_per_second", "Throughput of all workers together.", record.samples_per_s)
    recorded = {name: number for name, value in record.newest_metrics.items() if (number := _float(value)) is not None}
    page.many("recorded", "The newest means of what the script records.", "name", recorded)
    page.add("rewinds_total", "How often the run went back.", record.rewinds)


def _add_membership(
    page: _Page, workers: Workers, alive: Collection[str], suspicion: Mapping[str, tuple[int, float]]
) -> None:
    page.add("view", "The number of the newest view.", workers.view)
    page.add("members", "Members of the newest view.", len(workers.members))
    page.add("workers_wanted", "Workers that the run shall have.", workers.size)
    page.add("workers_alive", "Workers that live on this host.", len(alive))
    page.add("failures_total", "Workers that failed, were killed or hung.", workers.failures_here)
    page.add("evictions_total", "Workers that the others went on without.", workers.evictions)
    words = "What the heartbeats say: 0 ok, 1 slow to answer, 2 suspect, 3 hung."
    page.many("worker_suspicion", words, "worker", {who: level for who, (level, _) in suspicion.items()})
    words = "How unlikely it is that the worker still gets on, as minus log10."
    page.many("worker_suspicion_phi", words, "worker", {who: phi for who, (_, phi) in suspicion.items()})
    memory = {who: known.memory_bytes for who, known in workers.by_id.items() if who in alive and known.memory_bytes}
    page.many("worker_memory_bytes", "Resident memory.", "worker", memory)
    page.histogram("recovery_seconds", "From a noticed loss to the next commit.", Histogram(workers.recoveries_s))


def _add_time(page: _Page, record: RunRecord, now: float, alive: Collection[str]) -> None:
    until = now if alive else None
    spent = record.time.run(until, alive)
    if spent.goodput is not None and record.time.told:
        page.add("goodput_ratio", "The part of the workers' time that was not lost to failures.", spent.goodput)
    words = "Where the time of all workers went."
    page.many("time_seconds", words, "category", {category: spent.seconds[category] for category in CATEGORIES})
    each = {worker: one for worker, one in record.time.workers(until, alive).items() if worker in alive}
    words = "Where the time of a living worker went."
    page.head("worker_time_seconds", words, "gauge")
    for worker, one in each.items():
        for category in CATEGORIES:
            page.value("worker_time_seconds", one.seconds[category], worker=worker, category=category)


def _add_checkpoints(page: _Page, record: RunRecord, now: float) -> None:
    page.histogram("checkpoint_duration_seconds", "From the beginning of a save to its commit.", record.save_times)
    page.histogram("checkpoint_held_seconds", "How long a save held training up.", record.held_times)
    if not record.checkpoints:
        return
    newest: Mapping[str, Any] = record.checkpoints[-1]
    page.add("checkpoint_step", "The step of the newest checkpoint.", newest["step"])
    page.add("checkpoint_bytes", "Its size.", int(newest["bytes"]))
    page.add("checkpoint_timestamp_seconds", "When it was committed.", newest["t"])
    page.add("checkpoint_age_seconds", "How long ago that was.", max(0.0, now - newest["t"]))


def _add_servers(page: _Page, servers: Servers) -> None:
    page.add("servers_alive", "Parameter servers that live on this host.", len(servers.alive))
    page.add("server_failures_total", "Parameter servers that failed, were killed or hung.", servers.lost)
    page.add("failovers_total", "How often a slice of the parameters had to find another primary.", servers.failovers)
    page.add("slice_moves_total", "How often a slice was given other servers.", servers.moves)
    page.add("updates_total", "Updates that this host's parameter servers acknowledged.", servers.updates)
    living = {server: known for server, known in sorted(servers.known.items()) if known.alive}
    entries = {server: known.entries for server, known in living.items()}
    page.many("server_log_entries", "Entries of all logs of a living server.", "server", entries)
    held = {server: known.log_bytes for server, known in living.items()}
    page.many("server_log_bytes", "Payload bytes that a living server holds for its logs.", "server", held)
    led = {server: known.leads for server, known in living.items()}
    page.many("server_slices_led", "Slices that a living server leads.", "server", led)
    measured = sorted({other for known in living.values() for other in known.lags_s})
    lags_s = {server: lag_s for server in measured if (lag_s := servers.lag_s(server)) is not None}
    words = "How long a server takes to confirm what this host's servers send to it."
    page.many("server_lag_seconds", words, "server", lags_s)
    slow = {server: known.slow for server, known in sorted(servers.known.items()) if known.slow}
    page.many("server_slow_ratio", "How many times as long as the others a slow server takes.", "server", slow)
    epochs = {name: one.epoch for name, one in sorted(servers.slices.items())}
    page.many("slice_epoch", "The epoch of a slice: it grows with every failover and move.", "slice", epochs)
    page.head("update_staleness", "Updates of others between reading parameters and an update.", "histogram")
    for bound in (*STALENESS_BUCKETS, math.inf):
        within = sum(updates for stale, updates in servers.staleness.items() if stale <= bound)
        page.value("update_staleness_bucket", within, le=_number(bound))
    page.value("update_staleness_sum", sum(stale * updates for stale, updates in servers.staleness.items()))
    page.value("update_staleness_count", servers.staleness.total())


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
        total = 0
        for bound, count in zip((*BUCKETS_S, math.inf), histogram.counts, strict=True):
            total += count
            self.value(f"{name}_bucket", total, le=_number(bound))
        self.value(f"{name}_sum", histogram.sum_s)
        self.value(f"{name}_count", total)

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


def _float(value: object) -> float | None:
    """What a script has recorded may be no number, or one that JSON has no word for."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
