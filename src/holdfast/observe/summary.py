"""What is said of a run in a line or two: its progress, its end, where the time went. Pure: projections of the fold
(fold.py), for the agent, `holdfast status` and `holdfast runs`.
"""

from __future__ import annotations

from holdfast.core.errors import EXIT_INEXACT
from holdfast.events.telling import count, unsaved_words
from holdfast.observe.accounting import Spent
from holdfast.observe.fold import RunRecord

STOPS = (0, 129, 130, 143)  # exit codes of an agent that was asked to end


def run_state(record: RunRecord, *, agent: bool, lives: bool) -> str:
    """In one word. `agent` and `lives`: what /proc says of its agent and its workers."""
    if record.finished is not None and not lives:
        return "finished"
    if agent:
        return "running"
    if lives:
        return "unattended"
    if not record.ended:
        return "abandoned"  # its agent did not live to say how it ended: killed, or the host lost power
    return "failed" if type(record.exit_code) is int and record.exit_code not in STOPS else "stopped"


def progress_line(record: RunRecord, *, workers: int) -> str:
    """`step 120/1000 · loss 0.4312 · 5,230 samples/s · 4 workers · view 7 · 2 failures survived`."""
    parts = [f"step {record.step}" + (f"/{record.steps}" if record.steps else "")]
    loss = record.metrics.get("loss")
    if isinstance(loss, int | float):
        parts.append(f"loss {loss:.4g}")
    if record.samples_per_s:
        parts.append(f"{record.samples_per_s:,.0f} samples/s")
    parts.append(count(workers, "worker"))
    if record.workers.view and not record.workers.own_views:
        parts.append(f"view {record.workers.view}")
    if record.workers.failures:
        parts.append(f"{count(record.workers.failures, 'failure')} survived")
    parts += _left_out(record)
    if record.saved is not None:
        parts.append(f"saved {record.saved}")
    if record.workers.unsaved:
        parts.append("storage away: the newest snapshot waits in memory")
    if record.workers.cut_off:
        parts.append("ledger away: membership frozen")
    if record.workers.waiting:
        parts.append(f"paused: {next(iter(record.workers.waiting.values()))}")
    return " · ".join(parts)


def closing_lines(record: RunRecord, name: str) -> list[str]:
    """What to say of a run that is finished, or of which only the script's last lines failed."""
    finished = record.finished or {}
    if record.went_on_from is not None and finished.get("step") == record.went_on_from:
        return [
            f"run {name} is finished already, at step {record.went_on_from}: the script has no more steps than that",
            *([f"checkpoint: step {record.saved} in {record.saved_to}"] if record.saved is not None else []),
        ]
    if record.finished is None:  # and none of the failures was survived
        return [
            f"run {name} has made its {count(record.step, 'step')}, and its script failed after the last",
            *([f"checkpoint: step {record.saved} in {record.saved_to}"] if record.saved is not None else []),
        ]
    duration_s = float(finished.get("t", record.last)) - (record.began or record.last)
    views = "" if record.workers.own_views else f"{count(record.workers.view, 'view')}, "
    lines = [
        f"run {name} is finished: {count(finished.get('step', record.step), 'step')} in {duration_words(duration_s)}, "
        f"{views}{count(record.workers.failures, 'failure')} survived"
        + (f", {record.workers.evictions} evicted" if record.workers.evictions else "")
        + "".join(f", {part}" for part in _left_out(record))
    ]
    if record.workers.recoveries_s:
        ordered = sorted(record.workers.recoveries_s)
        median, worst = ordered[len(ordered) // 2], ordered[-1]
        lines.append(f"recovery: median {median * 1000:.0f} ms, worst {worst * 1000:.0f} ms after a loss was noticed")
    if record.time.told:
        lines.append(time_line(record.time.run()))
    if record.saved is not None:
        lines.append(f"checkpoint: step {record.saved} in {record.saved_to}")
    for worker, step in record.left_early.items():
        lines.append(
            f"warning: {worker} left its loop at step {step}, and others went on: let what is the same on every worker "
            "decide, such as step.metrics, or call run.stop()"
        )
    if len(record.digests) == 1 and (digest := next(iter(record.digests))):
        lines.append(f"weights: {digest}")
    if why := inexact_because(record):
        lines.append(f"run {name} is not exact, and ends with exit code {EXIT_INEXACT}: {why}")
    return lines


def inexact_because(record: RunRecord) -> str:
    """Why a run that is finished is known not to be exact; empty: nothing is known.

    Where each worker trains for itself they share parameters, and each has buffers of its own, such as batch norm's.
    """
    if len(record.digests) < 2 or record.workers.own_views:
        return record.inexact
    ends = sorted(record.digests.items(), key=lambda end: end[1])
    said = [f"{digest} on {', '.join(workers)}" for digest, workers in ends]
    return f"the workers ended with different weights: {'; '.join(said)}"


def started_over_line(record: RunRecord, *, keeps: bool) -> str:
    """Nothing if there was no step to lose."""
    if not record.had_reached:
        return ""
    what = (
        "no checkpoint had been made yet (--save-every 30s, say, makes them sooner)"
        if keeps
        else "the run keeps no checkpoints (--checkpoint DIR or URI does, --save-every says how often)"
    )
    return (
        f"training begins again at step 0, although it had got to step {record.had_reached}: "
        f"no worker that had its state is left, and {what}"
    )


def unfinished_line(record: RunRecord, name: str) -> str:
    """The last word on a run whose script ended, and whose training did not, or is not saved."""
    event = record.unfinished or {}
    if event.get("kind") == "unsaved":
        return f"run {name} is over and not finished: its last state {unsaved_words(event)}"
    steps = f" of {event['steps']}" if event.get("steps") else ""
    saved = f"; that state is in {event['uri']}, and the same command goes on from there" if event.get("uri") else ""
    return f"run {name} is not finished: the script ended at step {event.get('step', record.step)}{steps}{saved}"


def time_line(spent: Spent) -> str:
    """`goodput 93.4 %; of the workers' 8 min 02 s: computing 81.2 %, waiting 9.1 %, …`."""
    goodput = "not known" if spent.goodput is None else f"{spent.goodput * 100:.1f} %"
    return f"goodput {goodput}; of the workers' {duration_words(spent.total_s)}: {spent.words()}"


def _left_out(record: RunRecord) -> list[str]:
    parts = [count(record.rewinds, "rewind")] if record.rewinds else []
    parts += [f"{count(record.workers.lates, 'time')} somebody was late"] if record.workers.lates else []
    return parts + ([f"{count(len(record.skipped), 'step')} skipped"] if record.skipped else [])


def duration_words(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
