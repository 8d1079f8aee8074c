"""A run as its events tell it: one fold, used by the progress line, the closing summary and `holdfast status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.events.accounting import Accounting, Spent
from holdfast.events.telling import count, late_sentence, slow_sentence

FAILURES = ("failed", "killed", "hung", "died while no agent ran")
WORKERS_KEPT = 4096
SKIPPED_KEPT = 100_000


@dataclass
class WorkerRecord:
    pid: int = 0
    state: str = "starting"  # starting, registered, member, finished, then how it ended
    alive: bool = True


@dataclass
class RunRecord:
    began: float | None = None
    last: float = 0.0
    step: int = 0
    steps: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    samples_per_s: float = 0.0
    view: int = 0
    members: tuple[str, ...] = ()
    failures: int = 0
    evictions: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    finished: Mapping[str, Any] | None = None
    digests: set[str] = field(default_factory=set)
    reported: bool = False  # an agent has said that the run is finished
    ended: str = ""  # why the last agent stopped
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    cut_off: dict[str, float] = field(default_factory=dict)  # who cannot reach the ledger, since when
    waiting: dict[str, str] = field(default_factory=dict)  # who does not get on, and why
    saved: int | None = None  # the step of the newest checkpoint
    saved_to: str = ""
    unsaved: dict[str, str] = field(default_factory=dict)  # who cannot save, and why
    slow: dict[str, str] = field(default_factory=dict)  # who is, and what it costs
    late: dict[str, str] = field(default_factory=dict)  # whom the others go on without, and since which step
    lates: int = 0  # how often they did
    rewinds: int = 0  # how often the run went back
    skipped: set[int] = field(default_factory=set)  # steps whose update was not applied
    time: Accounting = field(default_factory=Accounting)
    liars: dict[str, int] = field(default_factory=dict)  # whose bits the others found wrong, and at which step

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take one event. Fields that are missing or wrong are passed over: a log is never a reason to fail."""
        self.time.feed(event)
        try:
            self._feed(event)
        except (KeyError, TypeError, ValueError):
            pass

    def _feed(self, event: Mapping[str, Any]) -> None:
        when = float(event["t"])
        self.began = when if self.began is None else self.began
        self.last = max(self.last, when)
        handler = getattr(self, f"_on_{event['kind']}", None)
        step = event.get("step")
        if isinstance(step, int):
            self.step = max(self.step, step)
        if event["kind"] not in ("waiting", "spent"):  # that it does nothing is told, too
            self.waiting.pop(str(event["who"]), None)
        if handler is not None:
            handler(event)

    def worker(self, name: object) -> WorkerRecord:
        if len(self.workers) >= WORKERS_KEPT:
            for old in [name for name, record in self.workers.items() if not record.alive][: WORKERS_KEPT // 2]:
                del self.workers[old]
        return self.workers.setdefault(str(name), WorkerRecord())

    def _on_agent_started(self, event: Mapping[str, Any]) -> None:
        self.ended = ""
        self.cut_off.pop("agent", None)

    def _on_agent_stopped(self, event: Mapping[str, Any]) -> None:
        self.ended = str(event.get("reason", ""))

    def _on_worker_started(self, event: Mapping[str, Any]) -> None:
        self.worker(event.get("worker")).pid = int(event.get("pid", 0))

    def _on_worker_exited(self, event: Mapping[str, Any]) -> None:
        record = self.worker(event.get("worker"))
        self.cut_off.pop(str(event.get("worker")), None)
        self.unsaved.pop(str(event.get("worker")), None)
        self.slow.pop(str(event.get("worker")), None)
        self.late.pop(str(event.get("worker")), None)
        self.waiting.pop(str(event.get("worker")), None)
        record.alive = False
        record.state = str(event.get("reason", "exited"))
        self.failures += record.state in FAILURES
        self.evictions += record.state == "evicted"

    def _on_registered(self, event: Mapping[str, Any]) -> None:
        self._move(event["who"], "registered")

    def _on_view(self, event: Mapping[str, Any]) -> None:
        number = int(event.get("view", 0))
        if number > self.view:
            self.view = number
            self.members = tuple(map(str, event.get("members", ())))
        if event["who"] in event.get("members", ()):
            self._move(event["who"], "member")

    def _on_joined(self, event: Mapping[str, Any]) -> None:
        self._move(event["who"], "member")

    def _on_recovered(self, event: Mapping[str, Any]) -> None:
        # Every survivor tells; the slowest counts, and each view once.
        duration = float(event.get("duration_s", 0.0))
        if int(event.get("view", 0)) == self._recovered_view and self.recoveries_s:
            self.recoveries_s[-1] = max(self.recoveries_s[-1], duration)
        elif len(self.recoveries_s) < 100_000:
            self.recoveries_s.append(duration)
        self._recovered_view = int(event.get("view", 0))

    _recovered_view: int = -1

    def _on_progress(self, event: Mapping[str, Any]) -> None:
        self._move(event["who"], "member")
        self.steps = int(event.get("steps") or self.steps)
        metrics = event.get("metrics")
        self.metrics = dict(metrics) if isinstance(metrics, dict) else self.metrics
        self.samples_per_s = float(event.get("samples_per_s") or 0.0)
        self.view = max(self.view, int(event.get("view", 0)))

    def _on_corruption(self, event: Mapping[str, Any]) -> None:
        self.liars.update(dict.fromkeys(map(str, event.get("liars", ())), int(event["step"])))

    def _on_ledger_down(self, event: Mapping[str, Any]) -> None:
        self.cut_off.setdefault(str(event["who"]), float(event["t"]))

    def _on_ledger_up(self, event: Mapping[str, Any]) -> None:
        self.cut_off.pop(str(event["who"]), None)

    def _on_checkpoint(self, event: Mapping[str, Any]) -> None:
        self.saved, self.saved_to = int(event["step"]), str(event.get("uri", ""))
        self.unsaved.pop(str(event["who"]), None)

    def _on_resumed(self, event: Mapping[str, Any]) -> None:
        self.step = self.saved = int(event["step"])
        self.saved_to = str(event.get("uri", ""))

    def _on_rewound(self, event: Mapping[str, Any]) -> None:
        if int(event["number"]) > self.rewinds:  # every worker tells
            self.rewinds = int(event["number"])
            self.skipped = {step for step in self.skipped if step <= int(event["step"])}
            self.step = 0  # until it is said where it goes on

    def _on_skipped(self, event: Mapping[str, Any]) -> None:
        if len(self.skipped) < SKIPPED_KEPT:
            self.skipped.add(int(event["step"]))

    def _on_storage_down(self, event: Mapping[str, Any]) -> None:
        self.unsaved[str(event["who"])] = str(event.get("reason", ""))

    def _on_storage_up(self, event: Mapping[str, Any]) -> None:
        self.unsaved.pop(str(event["who"]), None)

    def _on_slow(self, event: Mapping[str, Any]) -> None:
        self.slow[str(event["worker"])] = slow_sentence(event)

    def _on_no_longer_slow(self, event: Mapping[str, Any]) -> None:
        self.slow.pop(str(event["worker"]), None)

    def _on_late(self, event: Mapping[str, Any]) -> None:
        self.lates += 1
        self.late[str(event["worker"])] = late_sentence(event)

    def _on_caught_up(self, event: Mapping[str, Any]) -> None:
        self.late.pop(str(event["worker"]), None)

    def _on_waiting(self, event: Mapping[str, Any]) -> None:
        self.waiting[str(event["who"])] = str(event.get("reason", ""))

    def _on_evicted(self, event: Mapping[str, Any]) -> None:
        self._move(event["who"], "evicted")

    def _on_left(self, event: Mapping[str, Any]) -> None:
        self._move(event["who"], "leaving")

    def _on_finished(self, event: Mapping[str, Any]) -> None:
        self._move(event["who"], "finished")
        self.finished = event
        self.digests.add(str(event.get("digest", "")))

    def _on_run_finished(self, event: Mapping[str, Any]) -> None:
        self.reported = True

    def _move(self, who: object, state: str) -> None:
        record = self.worker(who)
        if record.alive:
            record.state = state


def progress_line(record: RunRecord, *, workers: int) -> str:
    """`step 120/1000 · loss 0.4312 · 5,230 samples/s · 4 workers · view 7 · 2 failures survived`."""
    parts = [f"step {record.step}" + (f"/{record.steps}" if record.steps else "")]
    loss = record.metrics.get("loss")
    if isinstance(loss, int | float):
        parts.append(f"loss {loss:.4g}")
    if record.samples_per_s:
        parts.append(f"{record.samples_per_s:,.0f} samples/s")
    parts.append(count(workers, "worker"))
    if record.view:
        parts.append(f"view {record.view}")
    if record.failures:
        parts.append(f"{count(record.failures, 'failure')} survived")
    parts += _left_out(record)
    if record.saved is not None:
        parts.append(f"saved {record.saved}")
    if record.unsaved:
        parts.append("storage away: the newest snapshot waits in memory")
    if record.cut_off:
        parts.append("ledger away: membership frozen")
    if record.waiting:
        parts.append(f"paused: {next(iter(record.waiting.values()))}")
    return " · ".join(parts)


def closing_lines(record: RunRecord, name: str) -> list[str]:
    """What to say of a run that is finished."""
    finished = record.finished or {}
    duration_s = float(finished.get("t", record.last)) - (record.began or record.last)
    lines = [
        f"run {name} is finished: {finished.get('step', record.step)} steps in {duration_words(duration_s)}, "
        f"{count(record.view, 'view')}, {count(record.failures, 'failure')} survived"
        + (f", {record.evictions} evicted" if record.evictions else "")
        + "".join(f", {part}" for part in _left_out(record))
    ]
    if record.recoveries_s:
        ordered = sorted(record.recoveries_s)
        median, worst = ordered[len(ordered) // 2], ordered[-1]
        lines.append(f"recovery: median {median * 1000:.0f} ms, worst {worst * 1000:.0f} ms after a loss was noticed")
    if record.time.told:
        lines.append(time_line(record.time.run()))
    if record.saved is not None:
        lines.append(f"checkpoint: step {record.saved} in {record.saved_to}")
    if len(record.digests) == 1:
        lines.append(f"weights: {next(iter(record.digests))}")
    elif record.digests:
        lines.append(f"warning: the workers ended with different weights: {', '.join(sorted(record.digests))}")
    return lines


def time_line(spent: Spent) -> str:
    """`goodput 93.4 %; of the workers' 8 min 02 s: computing 81.2 %, waiting 9.1 %, …`."""
    goodput = "not known" if spent.goodput is None else f"{spent.goodput * 100:.1f} %"
    return f"goodput {goodput}; of the workers' {duration_words(spent.total_s)}: {spent.words()}"


def _left_out(record: RunRecord) -> list[str]:
    parts = [count(record.rewinds, "rewind")] if record.rewinds else []
    parts += [f"{count(record.lates, 'time')} somebody was late"] if record.lates else []
    return parts + ([f"{count(len(record.skipped), 'step')} skipped"] if record.skipped else [])


def duration_words(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
