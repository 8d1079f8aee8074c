"""The record of a run: one fold over its event log, from which everything that is shown of a run is taken. Pure.

What the agent says, `holdfast status`, `runs` and `top`, the dashboard, /metrics and the curves for TensorBoard are
projections of it: summary.py, picture.py, prometheus.py, scalars.py. Parts of it are the workers (workers.py), their
time (accounting.py), the newest events (recent.py), numbers over time and marks (series.py).

Its size is bounded, however many events there were. What is missing in an event or wrong is passed over: a log is never
a reason to fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from holdfast.core.events import OTHERS_PARTS
from holdfast.events.telling import describe
from holdfast.observe.accounting import Accounting
from holdfast.observe.recent import RecentEvents
from holdfast.observe.series import Histogram, Mark, Marks, Series, number_of
from holdfast.observe.servers import Servers
from holdfast.observe.workers import FAILURES, Workers

Event = Mapping[str, Any]
Handler: TypeAlias = Callable[[Event, float, int], None]

NAME_MAX = 80  # characters of a metric's name
METRICS_MAX = 12  # that have a curve
RECORDED_MAX = 64  # names of metrics that the script records
SKIPPED_MAX = 100_000
DIGESTS_MAX = 16
NAMED_MAX = 8  # workers for each
LEFT_EARLY_MAX = 4096
CHECKPOINTS_MAX = 40
PACE_EVENTS = 40  # the speed is that of so many events of progress
THROUGHPUT = "samples_per_s"
_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


class RunRecord:
    """What the events so far tell. `number` is how many there were: a reader that has it can ask for the rest."""

    def __init__(self) -> None:
        self.number = 0
        self.began: float | None = None
        self.last = 0.0
        self.workers = Workers()
        self.servers = Servers()
        self.time = Accounting()
        self.spent_at = 0  # the number of the last event in which a worker told its account
        self.events = RecentEvents()
        self.marks = Marks()
        self._rates = Series()
        self.series: dict[str, Series] = {THROUGHPUT: self._rates}
        # the agent
        self.agent = ""  # "", "running" or "ended", as far as the events tell
        self.script = ""
        self.ended = ""  # why the last agent stopped
        self.exit_code: object = None  # and what it said that it ended with
        self.reported = False  # an agent has said that the run is finished
        # the training
        self.step = 0
        self.steps = 0
        self.steps_made = 0  # those that were repeated included
        self.samples_per_s = 0.0
        self.training = 0  # workers, by the last word of one
        self.metrics: dict[str, Any] = {}  # of the newest step, and the newest of what was recorded outside the shards
        self.newest_metrics: dict[str, Any] = {}  # the newest of each name
        self.rewinds = 0  # how often the run went back
        self.skipped: set[int] = set()  # steps whose update was not applied
        self.had_reached = 0  # the step that was lost when the run had to begin again
        self.pace: deque[tuple[float, int]] = deque(maxlen=PACE_EVENTS)
        # checkpoints
        self.saved: int | None = None  # the step of the newest
        self.saved_to = ""
        self.checkpoints: deque[dict[str, Any]] = deque(maxlen=CHECKPOINTS_MAX)
        self.checkpoints_changed = 0
        self.save_times, self.held_times = Histogram(), Histogram()
        # the end
        self.finished: Event | None = None  # the word of one that was furthest
        self.finished_by = ""
        self.digests: dict[str, list[str]] = {}  # of all that got as far as that, and whose they are
        self.inexact = ""  # why the weights are not those of an undisturbed run, if that is known before the end
        self.left_early: dict[str, int] = {}  # who left its loop before the others, and at which step
        self.went_on_from: int | None = None  # the step at which the run was finished when it was started again
        self.unfinished: Event | None = None  # the last word of a script that ended, and the training has not
        self._recorded: dict[str, Any] = {}
        self._progressed = 0
        self._is_news = False
        self._handlers = _handlers(self, self.workers, self.servers)

    def feed(self, event: Event) -> bool:
        """Take one event. Whether it is news: no other worker has told the same before."""
        self.number = number = self.number + 1
        try:
            kind, who, at = event["kind"], str(event["who"]), float(event["t"])
            if at > self.last:
                self.last = at
            news = self.events.take(kind, number, event)
            handlers = self._handlers.get(kind, ())
        except _WRONG:
            return False
        if self.began is None:
            self.began = at
        if kind == "progress":
            self.time.heard(who, at)
        else:
            self.time.feed(event)
        step = event.get("step")
        if type(step) is int and step > self.step:
            self.step = step
        if self.workers.waiting and kind not in ("waiting", "spent"):
            self.workers.heard(who)
        self._is_news = news
        for handler in handlers:
            try:
                handler(event, at, number)
            except _WRONG:
                continue
        return news

    # -- the agent's events --------------------------------------------------------------------------------

    def on_agent_started(self, event: Event, at: float, number: int) -> None:
        self.agent, self.ended, self.exit_code, self.unfinished = "running", "", None, None
        self.script = str(event.get("script", ""))
        if not event.get("took_over"):  # a finished run that is started again goes on
            self.went_on_from = self._last_step()
            self.finished, self.reported, self.digests, self.left_early = None, False, {}, {}

    def on_agent_stopped(self, event: Event, at: float, number: int) -> None:
        self.agent, self.ended, self.exit_code = "ended", str(event.get("reason", "")), event.get("exit_code")

    def on_run_finished(self, event: Event, at: float, number: int) -> None:
        self.reported = True

    # -- the training --------------------------------------------------------------------------------------

    def on_progress(self, event: Event, at: float, number: int) -> None:
        step, rate, metrics = event["step"], event.get("samples_per_s"), event.get("metrics")
        if type(step) is not int:
            return
        self.steps = int(event.get("steps") or self.steps)
        self.training = int(event.get("workers") or 0)
        if step > self._progressed:
            self.steps_made += step - self._progressed
        self._progressed = step
        if self.pace and step < self.pace[-1][1]:
            self.pace.clear()  # the run went back
        self.pace.append((at, step))
        self.samples_per_s = float(rate or 0.0)
        if self.samples_per_s:
            self._rates.add(at, step, self.samples_per_s, number)
        if metrics:
            self._add_newest(metrics)
            self._add_to_curves(metrics, at, step, number)
            self.metrics = {**self._recorded, **metrics} if self._recorded else metrics

    def on_recorded(self, event: Event, at: float, number: int) -> None:
        step, metrics = event["step"], event["metrics"]
        self._add_newest(metrics)
        self._recorded |= {name: value for name, value in metrics.items() if name in self.newest_metrics}
        self.metrics = {**self.metrics, **self._recorded}
        if self._is_news and type(step) is int:
            self._add_to_curves(metrics, at, step, number)

    def _add_newest(self, metrics: Mapping[str, Any]) -> None:
        newest = self.newest_metrics
        if len(newest) + len(metrics) > RECORDED_MAX:
            free = RECORDED_MAX - len(newest)
            new = [name for name in metrics if name not in newest][:free]
            metrics = {name: value for name, value in metrics.items() if name in newest or name in new}
        newest.update(metrics)

    def _add_to_curves(self, metrics: Mapping[str, Any], at: float, step: int, number: int) -> None:
        for name, value in metrics.items():
            if type(value) is float or type(value) is int:
                series = self.series.get(name) or self._new_series(name)
                if series is not None:
                    series.add(at, step, value, number)

    def _new_series(self, name: str) -> Series | None:
        if name == THROUGHPUT or len(name) > NAME_MAX or len(self.series) > METRICS_MAX:
            return None
        series = self.series[name] = Series()
        return series

    def on_spent(self, event: Event, at: float, number: int) -> None:
        self.spent_at = number

    def on_skipped(self, event: Event, at: float, number: int) -> None:
        step = int(event["step"])
        if self._is_news:
            self._mark("skipped", event, at, f"step {step} is skipped: {event.get('reason')}")
        if len(self.skipped) < SKIPPED_MAX:
            self.skipped.add(step)

    def on_inexact(self, event: Event, at: float, number: int) -> None:
        self.inexact = self.inexact or str(event["reason"])

    def on_rewound(self, event: Event, at: float, number: int) -> None:
        if int(event["number"]) > self.rewinds:  # every worker tells
            self.rewinds = int(event["number"])
            self._mark("rewound", event, at, f"the run goes back: {event.get('reason')}")
            self.skipped = {step for step in self.skipped if step <= int(event["step"])}
            self.step = 0  # until it is said where it goes on

    def on_resumed(self, event: Event, at: float, number: int) -> None:
        self.step = self.saved = self._progressed = int(event["step"])
        self.saved_to = str(event.get("uri", ""))
        self._mark("resumed", event, at, f"resumed from the checkpoint of step {self.step}")

    def on_started_over(self, event: Event, at: float, number: int) -> None:
        if self._is_news:
            self.had_reached, self.step, self.metrics, self.inexact = self.step, 0, {}, ""
            self._progressed = 0
            self._mark("resumed", event, at, "began again at step 0")

    # -- trouble -------------------------------------------------------------------------------------------

    def on_worker_exited(self, event: Event, at: float, number: int) -> None:
        worker, reason, signal = str(event["worker"]), event.get("reason"), event.get("signal")
        if reason in FAILURES or reason == "evicted":
            text = f"{worker} {reason}" + (f", signal {signal}" if signal else "")
            self._mark("evicted" if reason == "evicted" else "failure", event, at, text, worker=worker)

    def on_server_exited(self, event: Event, at: float, number: int) -> None:
        reason, signal = event.get("reason"), event.get("signal")
        if reason not in ("ended", "started over"):
            text = f"the server {event['server']}: {reason}" + (f", signal {signal}" if signal else "")
            self._mark("failure", event, at, text)

    def on_failover(self, event: Event, at: float, number: int) -> None:
        self._mark("failover", event, at, describe(event)["text"])

    def on_slices_lost(self, event: Event, at: float, number: int) -> None:
        self._mark("slices_lost", event, at, describe(event)["text"])

    def on_corruption(self, event: Event, at: float, number: int) -> None:
        if self._is_news:
            self._mark("corruption", event, at, describe(event)["text"])

    def on_distrusted(self, event: Event, at: float, number: int) -> None:
        if self._is_news:
            self._mark("distrusted", event, at, describe(event)["text"], worker=str(event["worker"]))

    def on_storage_down(self, event: Event, at: float, number: int) -> None:
        if not self.workers.unsaved:
            self._mark("storage", event, at, f"storage is away: {event.get('reason')}")

    def on_ledger_down(self, event: Event, at: float, number: int) -> None:
        if not self.workers.cut_off:
            self._mark("ledger", event, at, f"the ledger is away: {event.get('reason')}")

    def _mark(self, kind: str, event: Event, at: float, text: str, *, worker: str = "") -> None:
        step = event.get("step")
        self.marks.add(Mark(at, kind, worker, text[:500], step if type(step) is int else self.step), self.number)

    # -- checkpoints and the end ---------------------------------------------------------------------------

    def on_checkpoint(self, event: Event, at: float, number: int) -> None:
        self.saved, self.saved_to = int(event["step"]), str(event.get("uri", ""))
        numbers = {name: number_of(event.get(name)) for name in ("bytes", "duration_s", "held_s")}
        self.checkpoints.append({"step": self.saved, "t": at, "uri": self.saved_to, "who": event["who"], **numbers})
        self.checkpoints_changed = number
        self.save_times.add(float(event["duration_s"]))
        self.held_times.add(float(event["held_s"]))

    def on_finished(self, event: Event, at: float, number: int) -> None:
        ended, step = self._last_step(), int(event["step"])
        if ended is not None and step != ended and len(self.left_early) < LEFT_EARLY_MAX:
            self.left_early[str(event["who"] if step < ended else self.finished_by)] = min(step, ended)
        if ended is None or step >= ended:
            self.digests = self.digests if step == ended else {}
            digest = str(event.get("digest", ""))
            if len(self.digests) < DIGESTS_MAX or digest in self.digests:
                whose = self.digests.setdefault(digest, [])
                if len(whose) < NAMED_MAX:
                    whose.append(str(event["who"]))
            self.finished, self.finished_by = event, str(event["who"])

    def _last_step(self) -> int | None:
        return int(self.finished["step"]) if self.finished is not None else None

    def on_cut_short(self, event: Event, at: float, number: int) -> None:
        self.unfinished = event

    def on_unsaved(self, event: Event, at: float, number: int) -> None:
        if self.unfinished is None or str(self.unfinished.get("reason")) in (OTHERS_PARTS, "None"):
            self.unfinished = event  # whoever waited for the others knows no cause


def _handlers(*parts: object) -> dict[str, tuple[Handler, ...]]:
    """What each part does at an event of a kind: its methods are named after them."""
    found: dict[str, tuple[Handler, ...]] = {}
    for part in parts:
        for name in dir(part):
            if name.startswith("on_"):
                kind = name.removeprefix("on_")
                found[kind] = (*found.get(kind, ()), getattr(part, name))
    return found


def record_of(events: Iterable[Event]) -> RunRecord:
    record = RunRecord()
    for event in events:
        record.feed(event)
    return record
