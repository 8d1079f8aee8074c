"""Every event as a person reads it: who it is about, what happened, and the reason of the decision. Pure.

Unlike the agent's sentences on a terminal, which leave out what was said before, each event has one here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

Event = Mapping[str, Any]
TEXT_MAX = 2000
STACKS_MAX = 16 * 1024
LISTED_MAX = 12


def _all(values: object) -> str:
    """Names, or how many there are where they are many."""
    names = [str(value) for value in values] if isinstance(values, list | tuple) else []
    more = len(names) - LISTED_MAX
    return ", ".join(names[:LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def _count(value: object, noun: str) -> str:
    return f"{value} {noun}" if value == 1 else f"{value} {noun}s"


def _ms(value: object) -> str:
    seconds = float(value) if isinstance(value, int | float) else 0.0
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def _megabytes(value: object) -> str:
    size = float(value) if isinstance(value, int | float) else 0.0
    return f"{size / 1e6:,.1f} MB"


def _exited(event: Event) -> str:
    code, number = event.get("exit_code"), event.get("signal")
    how = f", signal {number}" if number else f", exit code {code}" if code else ""
    return f"ended: {event.get('reason', 'gone')}{how}"


def _slow(event: Event) -> str:
    return (
        f"takes {float(event.get('times', 0)):.1f} times as long as the others for a shard; that costs "
        f"{float(event.get('costs', 0)):.0%} of what all could do; it has {event.get('shards')} shards now"
    )


def _rebalanced(event: Event) -> str:
    shards = event.get("shards")
    held = [f"{worker} {count}" for worker, count in shards.items()] if isinstance(shards, dict) else []
    return f"shards follow the workers' paces: {_all(held)}"


def _corruption(event: Event) -> str:
    liars = _all(event.get("liars"))
    found = f"{liars} is wrong" if liars else "workers disagree"
    return f"corruption in {event.get('what')} {event.get('where', '')}: {found}"


_SAYS: Final[dict[str, Callable[[Event], str]]] = {
    "agent_started": lambda e: (
        f"agent {'took the run over' if e.get('took_over') else 'started'}: {_count(e.get('workers'), 'worker')}"
        + (f", {_count(e['spares'], 'spare')}" if e.get("spares") else "")
    ),
    "agent_stopped": lambda e: f"agent ended, exit code {e.get('exit_code', 0)}",
    "worker_started": lambda e: f"started as process {e.get('pid')}",
    "worker_exited": _exited,
    "hung": lambda e: f"hangs, {'and is ended' if e.get('killed') else 'and is left alone'}: {e.get('activity')}",
    "scaled": lambda e: f"the run shall have {_count(e.get('workers'), 'worker')}, was {e.get('was')}",
    "run_finished": lambda e: f"the run is finished at step {e.get('step')}",
    "registered": lambda e: "stands in the ledger",
    "view": lambda e: f"enters view {e.get('view')}: {_all(e.get('members'))}",
    "lost": lambda e: f"gave up view {e.get('view')} because of {e.get('peer')}",
    "recovered": lambda e: f"goes on in view {e.get('view')}, {_ms(e.get('duration_s'))} after the loss",
    "joined": lambda e: f"joined with {_megabytes(e.get('bytes'))} of state in {_ms(e.get('duration_s'))}",
    "progress": lambda e: f"step {e.get('step')} of {e.get('steps')}",
    "spent": lambda e: f"is {e.get('doing')}",
    "rebalanced": _rebalanced,
    "slow": _slow,
    "no_longer_slow": lambda e: "is no longer slow",
    "late": lambda e: f"is late: the others go on without it, {_ms(e.get('waited_s'))} after they were done",
    "caught_up": lambda e: f"was late and is back, {e.get('behind')} steps later",
    "host_silent": lambda e: f"host {e.get('host')} is silent: no heartbeat for {e.get('seconds')} s",
    "host_back": lambda e: f"host {e.get('host')} beats again, after {e.get('seconds')} s",
    "host_given_up": lambda e: f"the workers of host {e.get('host')} are given up",
    "waiting": lambda e: "does not get on",
    "checkpoint": lambda e: (
        f"saved step {e.get('step')}, {_megabytes(e.get('bytes'))} in {_ms(e.get('duration_s'))}; "
        f"training was held up for {_ms(e.get('held_s'))}"
    ),
    "resumed": lambda e: f"resumes from the checkpoint of step {e.get('step')}",
    "storage_down": lambda e: "cannot save; training goes on, the newest snapshot waits in memory",
    "storage_up": lambda e: f"storage is back after {_ms(e.get('down_s'))}",
    "rewound": lambda e: f"the run goes back to step {e.get('step')} or before",
    "skipped": lambda e: f"step {e.get('step')} is skipped",
    "corruption": _corruption,
    "ledger_down": lambda e: "cannot reach the ledger; the membership is frozen, training goes on",
    "ledger_up": lambda e: f"reaches the ledger again after {_ms(e.get('down_s'))}",
    "evicted": lambda e: f"was left out of view {e.get('view')}",
    "left": lambda e: f"left in order at step {e.get('step')}",
    "reached": lambda e: f"reached step {e.get('step')}, the end of its loop",
    "finished": lambda e: f"finished at step {e.get('step')}",
    "failed": lambda e: "failed",
    "warning": lambda e: str(e.get("text")),
}
_REASONS: Final = {"worker_exited": "", "corruption": "decided"}  # where another field gives the reason, or none does


def describe(event: Event) -> dict[str, Any]:
    """The event for a list: time, kind, about whom, a sentence, the reason, the step, and anything long by itself."""
    kind, about = str(event["kind"]), str(event.get("worker") or event["who"])
    say = _SAYS.get(kind)
    try:
        text = say(event) if say else kind.replace("_", " ")
    except (TypeError, ValueError, KeyError):
        text = kind.replace("_", " ")
    reason = event.get(_REASONS.get(kind, "reason") or "-")
    described: dict[str, Any] = {
        "t": round(float(event["t"]), 3),
        "kind": kind,
        "who": about[:TEXT_MAX],
        "text": text[:TEXT_MAX],
    }
    if reason:
        described["reason"] = str(reason)[:TEXT_MAX]
    step = event.get("step")
    if type(step) is int:
        described["step"] = step
    if isinstance(event.get("stacks"), str) and event["stacks"]:
        described["detail"] = event["stacks"][:STACKS_MAX]
    return described


def number_of(value: object, default: float = 0.0) -> float:
    """A finite number out of a field, whatever is in it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            as_float = float(value)
        except OverflowError:
            return default
        return as_float if math.isfinite(as_float) else default
    return default
