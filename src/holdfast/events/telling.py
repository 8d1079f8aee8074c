"""Events as sentences. Pure: every kind of the vocabulary has one, which says it to a person in one line.

The terminal, `holdfast events` and the pages all have them from here.

Who hears several workers tell of the same thing, as the agent does, decides for itself what it has heard before
(observe/terminal.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, Final, TypeAlias

Event: TypeAlias = Mapping[str, Any]
TEXT_MAX = 2000
STACKS_MAX = 16 * 1024
LISTED_MAX = 12


def sentence(event: Event) -> str:
    """One line that is safe on a terminal, whatever a script has raised. Never fails: it is only a log."""
    kind = str(event.get("kind"))
    try:
        template = _TEMPLATES.get(kind)
        text = _SENTENCES[kind](event) if template is None else template.format_map(_Fields(event))
    except (KeyError, TypeError, ValueError, AttributeError):
        known = ("t", "who", "kind")
        fields = ", ".join(f"{name} {value}" for name, value in event.items() if name not in known)
        text = kind.replace("_", " ") + (f": {fields}" if fields else "")
    return one_line(text)


class _Fields(dict[str, Any]):
    """What a template may name: the event's fields, of which some may be missing, and `at`."""

    def __missing__(self, name: str) -> Any:
        return _at(self) if name == "at" else None


def one_line(text: str) -> str:
    """Whatever a script has raised: on one line, and no command to the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def describe(event: Event) -> dict[str, Any]:
    """The event for a list: time, kind, about whom, what, why, the step, and anything that is long by itself."""
    who, why = subject(event), one_line(str(event.get("reason") or event.get("decided") or ""))
    text = sentence(event).removeprefix(f"{who} ")
    if why:
        text = text.removesuffix(f": {why}").removesuffix(f" ({why})")
    described: dict[str, Any] = {
        "t": round(float(event["t"]), 3),
        "kind": str(event["kind"]),
        "who": who[:TEXT_MAX],
        "text": text[:TEXT_MAX],
    }
    if why and why not in text:
        described["reason"] = why[:TEXT_MAX]
    elif why:
        described["decided"] = True  # the sentence has the reason in it
    step = event.get("step")
    if type(step) is int:
        described["step"] = step
    if isinstance(event.get("stacks"), str) and event["stacks"]:
        described["detail"] = event["stacks"][:STACKS_MAX]
    return described


def subject(event: Event) -> str:
    """Whom it is about: the worker that is named, or the one that wrote it."""
    return str(event.get("worker") or event.get("who"))


def names(values: Iterable[object]) -> str:
    """All of them, or how many there are where they are many."""
    words = [str(value) for value in values]
    more = len(words) - LISTED_MAX
    return ", ".join(words[:LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def slow_sentence(event: Event) -> str:
    times, since_s, costs = (float(event[name]) for name in ("times", "since_s", "costs"))
    return (
        f"a shard takes it {times:.1f} times as long as the others, noticed after {since_s:.0f} s; that costs "
        f"{costs:.0%} of what all could do; it has {event['shards']} shards now"
    )


def late_sentence(event: Event) -> str:
    waited_s, expected_s = float(event["waited_s"]), float(event["expected_s"])
    return (
        f"the others went on without it at step {event['step']}, {waited_s:.1f} s after they were done; "
        f"the step's shards take {expected_s:.2g} s"
    )


def first_line_of_code(stacks: str) -> str:
    """Where the first thread is, in a few words, by the stacks of faulthandler or py-spy."""
    match = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stacks)
    if match:
        return f"{PurePath(match[1]).name}:{match[2]} in {match[3]}"
    match = re.search(r"^ +(\S+) \(([^()]+):(\d+)\)", stacks, re.MULTILINE)
    return f"{PurePath(match[2]).name}:{match[3]} in {match[1]}" if match else ""


def _at(event: Event) -> str:
    """Who has no state yet is at no step."""
    step = event.get("step")
    return f" at step {step}" if type(step) is int else ""


# ---- the kinds: a template, or a function where fields decide what is said


def _agent_started(event: Event) -> str:
    spares = f" and {count(int(event['spares']), 'spare')}" if event.get("spares") else ""
    what = "took over" if event.get("took_over") else "began"
    return f"the agent (process {event.get('pid')}) {what}: {count(int(event['workers']), 'worker')}{spares}"


def _worker_exited(event: Event) -> str:
    code, number = event.get("exit_code"), event.get("signal")
    how = f", signal {number}" if number else f", exit code {code}" if code else ""
    return f"{event.get('worker')} ended: {event.get('reason')}{how}" + (f",{_at(event)}" if _at(event) else "")


def _hung(event: Event) -> str:
    at = first_line_of_code(str(event.get("stacks", "")))
    return f"{event.get('worker')} hangs: {event.get('reason')}" + (f"; it is at {at}" if at else "")


def _standstill(event: Event) -> str:
    worker = event.get("worker")
    what = f"{worker} is ended, so that the others can go on" if event.get("killed") else f"{worker} is in the way"
    return f"the run stands still at step {event.get('step')}, {what}: {event.get('reason')}"


def _scaled(event: Event) -> str:
    return f"the run shall have {count(int(event['workers']), 'worker')}, and had {event.get('was')}"


def _view(event: Event) -> str:
    reason = event.get("reason")
    if event.get("own"):
        return f"{event['who']} trains on the parameter servers"
    return f"view {event.get('view')}: {names(event['members'])}" + (f" ({reason})" if reason else "")


def _recovered(event: Event) -> str:
    return f"training goes on at step {event.get('step')}, {float(event.get('duration_s', 0)) * 1000:.0f} ms later"


def _progress(event: Event) -> str:
    steps = f"/{event['steps']}" if event.get("steps") else ""
    metrics = "".join(
        f" · {name} {value:.4g}" if isinstance(value, float | int) else f" · {name} {value}"
        for name, value in (event.get("metrics") or {}).items()
    )
    return f"step {event.get('step')}{steps}{metrics} · {float(event.get('samples_per_s') or 0.0):,.0f} samples/s"


def _recorded(event: Event) -> str:
    found = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float | int) else f"{name} {value}"
        for name, value in (event.get("metrics") or {}).items()
    )
    return f"recorded at step {event.get('step')}: {found}" + (", the best so far" if event.get("best") else "")


def _spent(event: Event) -> str:
    seconds: dict[str, float] = event["seconds"]
    total = sum(seconds.values()) or 1.0
    parts = sorted(seconds.items(), key=lambda item: -item[1])[:4]
    return f"{event['who']} has spent {total:.1f} s: " + ", ".join(f"{part / total:.0%} {name}" for name, part in parts)


def _rebalanced(event: Event) -> str:
    shards = names(f"{worker} {number}" for worker, number in event["shards"].items())
    return f"shards were moved at step {event.get('step')}: {shards}"


def _checkpoint(event: Event) -> str:
    return f"step {event.get('step')} is saved to {event.get('uri')} ({float(event.get('bytes', 0)) / 1e6:,.1f} MB)"


def _server_exited(event: Event) -> str:
    how = f", signal {event['signal']}" if event.get("signal") else ""
    code = f", exit code {event['exit_code']}" if event.get("exit_code") else ""
    return f"the parameter server {event['server']} is gone: {event['reason']}{how}{code}"


def _serving(event: Event) -> str:
    slow = max(event.get("lags_s", {}).items(), key=lambda one: one[1], default=None)
    others = f"; {slow[0]} takes the longest to confirm, {slow[1] * 1000:.0f} ms" if slow is not None else ""
    slices = f"{count(len(event['slices']), 'slice')} and leads {event['leads']}"
    log = f"log entries: {event['entries']}"
    return f"{event['who']} has {slices}, {log}, {count(int(event['updates']), 'update')} acknowledged{others}"


def _server_slow(event: Event) -> str:
    return f"the parameter server {event['server']} is slow, and others lead its slices: {event['reason']}"


def _slices_lost(event: Event) -> str:
    step = event.get("step")
    then = "there is no checkpoint" if step is None else f"all begin anew from the checkpoint of step {step}"
    return f"all replicas of {names(event['slices'])} are lost, or a majority of them; {then}"


def _staleness(event: Event) -> str:
    updates = {int(stale): int(number) for stale, number in event["updates"].items()}
    made = sum(updates.values())
    mean = sum(stale * number for stale, number in updates.items()) / max(1, made)
    return f"{event['who']} made {count(made, 'update')}, stale by {mean:.1f} others, {max(updates)} at most"


def _captured(event: Event) -> str:
    versions = ", ".join(map(str, event["versions"]))
    return f"{event['who']} has read a state of all slices, after {versions} updates"


def _rewound(event: Event) -> str:
    passed = ", ".join(map(str, event.get("passed", ())))
    what = f" and passes step {passed}" if passed else ""
    return f"the run goes back to step {event.get('step')} or before{what}: {event.get('reason')}"


def _corruption(event: Event) -> str:
    liars = names(event.get("liars") or ())
    found = f"{liars} is wrong" if liars else "workers disagree"
    return f"corruption at step {event.get('step')}, {event.get('where')}: {found} ({event.get('decided')})"


def _left_out(event: Event) -> str:
    out, shards = event.get("left_out") or {}, event.get("shards") or {}
    each = names(f"{worker} {out.get(worker, 0)} of {count}" for worker, count in shards.items())
    return f"shards that the robust rule left out up to step {event.get('step')}: {each}"


def _left(event: Event) -> str:
    saved = f"; that is saved in {event['uri']}" if event.get("uri") else ""
    return f"{event['who']} leaves{_at(event)}{saved}: {event.get('reason')}"


def _started_over(event: Event) -> str:
    none = "no checkpoint was made yet" if event.get("keeps") else "the run keeps no checkpoints"
    return f"training begins again at step {event.get('step')}: nobody has its state any more, and {none}"


def _cut_short(event: Event) -> str:
    steps = f" of {event['steps']}" if event.get("steps") else ""
    saved = f"; its state is saved in {event['uri']}" if event.get("uri") else ""
    at = f"at step {event.get('step')}{steps}, in the middle of the training"
    return f"the script of {event['who']} ended {at}{saved}"


def _unsaved(event: Event) -> str:
    return f"the last state of {event['who']} {unsaved_words(event)}"


def unsaved_words(event: Event) -> str:
    """`is not saved: no space; the newest checkpoint is that of step 40, in /place`."""
    saved = event.get("saved")
    newest = f"the newest checkpoint is that of step {saved}, in" if saved is not None else "there is no checkpoint in"
    return f"(step {event.get('step')}) is not saved: {event.get('reason')}; {newest} {event.get('uri')}"


def _failed(event: Event) -> str:
    at = f" (at {event['place']}, in step {event.get('step')})" if event.get("place") else ""
    return f"{event['who']} failed: {event.get('reason')}{at}"


# Those that need nothing but an event's fields; `at` says the step of one that has a state.
_TEMPLATES: Final[dict[str, str]] = {
    "agent_stopped": "the agent ended: {reason}, exit code {exit_code}",
    "worker_started": "{worker} started (process {pid})",
    "run_finished": "the training is finished at step {step}; weights {digest}",
    "server_started": "the parameter server {server} started (process {pid})",
    "slice": "{who}: {slice}: {decision}: {reason}",
    "failover": "{slice} has another primary, {primary} after {was}: {reason}",
    "server_hung": "the parameter server {server} hangs, and is ended: {reason}",
    "server_no_longer_slow": "the parameter server {server} is no longer slow",
    "registered": "{who} stands in the ledger, at {address}",
    "lost": "{peer} is lost to {who}{at}: {reason}",
    "joined": "{who} joined at step {step}",
    "early_stop": "the script ends the training at step {step}: {reason}",
    "no_longer_slow": "{worker} is no longer slow",
    "host_silent": "host {host} is silent: no heartbeat for {seconds} s",
    "host_back": "host {host} beats again, after {seconds} s",
    "host_given_up": "the workers of host {host} are given up: {reason}",
    "waiting": "{who} is paused{at}: {reason}",
    "resumed": "training resumes at step {step}, from {uri}",
    "storage_down": "{who} cannot save to {uri}; training goes on, the newest snapshot waits in memory: {reason}",
    "storage_up": "storage is back",
    "skipped": "step {step} is skipped: {reason}",
    "distrusted": "{worker} is distrusted at step {step}, and evicted: {reason}",
    "script_mistake": "a mistake in the script: {reason}; {hint}",
    "inexact": "this run is not exact: {reason}; {hint}",
    "ledger_down": "{who} cannot reach the ledger; the membership is frozen, training goes on: {reason}",
    "ledger_up": "the ledger is back",
    "evicted": "{who} was evicted: {reason}",
    "reached": "{who} is through with its loop, at step {step}",
    "finished": "{who} has finished, at step {step}; weights {digest}",
    "warning": "{who} warns: {text}",
}

_SENTENCES: Final[dict[str, Callable[[Event], str]]] = {
    "agent_started": _agent_started,
    "worker_exited": _worker_exited,
    "hung": _hung,
    "standstill": _standstill,
    "scaled": _scaled,
    "view": _view,
    "carried": lambda event: f"view {event['view']} has a process group of {event['library']}",
    "recovered": _recovered,
    "progress": _progress,
    "recorded": _recorded,
    "spent": _spent,
    "rebalanced": _rebalanced,
    "slow": lambda event: f"{event['worker']} is slow: {slow_sentence(event)}",
    "late": lambda event: f"{event['worker']} is late: {late_sentence(event)}",
    "caught_up": lambda event: f"{event['who']} was late and is back, {count(int(event['behind']), 'step')} later",
    "checkpoint": _checkpoint,
    "staleness": _staleness,
    "server_exited": _server_exited,
    "slices_lost": _slices_lost,
    "serving": _serving,
    "server_slow": _server_slow,
    "placed": lambda event: f"{event['slice']} is on {names(event['servers'])}; {event['primary']} leads",
    "slice_moves": lambda event: f"{event['slice']} should be on {names(event['servers'])}: {event['reason']}",
    "captured": _captured,
    "started_over": _started_over,
    "rewound": _rewound,
    "corruption": _corruption,
    "left_out": _left_out,
    "left": _left,
    "cut_short": _cut_short,
    "unsaved": _unsaved,
    "failed": _failed,
}
