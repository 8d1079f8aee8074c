"""What a drill of parameter servers can prove from a run's events. Pure.

Workers count the updates that were acknowledged to them, and the last checkpoint has the number of updates that each
slice has applied. Where no worker was killed the two must be the same in every slice. A worker that was killed may have
had one update acknowledged that it did not tell of, and one under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.drills.checking import PromiseVerdict

NOT_LOST = "no acknowledged update lost"


def check_served(events: Iterable[Mapping[str, Any]], exit_code: int | None) -> list[PromiseVerdict]:
    known = list(events)
    told = [event for event in known if event["kind"] == "staleness"]
    captured = [event for event in known if event["kind"] == "captured"]
    ended = ("killed", "failed", "hung", "evicted")
    lost = sum(event["kind"] == "worker_exited" and event.get("reason") in ended for event in known)
    acknowledged = sum(sum(event["updates"].values()) for event in told)
    verdicts = [PromiseVerdict("finished", exit_code == 0, f"the run ended with exit code {exit_code}")]
    if not acknowledged or not captured:
        return [*verdicts, PromiseVerdict(NOT_LOST, None, _nothing_to_count(acknowledged))]
    versions: Sequence[int] = captured[-1]["versions"]
    text = f"{acknowledged} were acknowledged, and the slices have applied {', '.join(map(str, versions))}"
    verdicts.append(PromiseVerdict(NOT_LOST, min(versions) >= acknowledged, text))
    doubt = f"; {lost} workers were lost, and had not told of their last ones" if lost else ""
    once = max(versions) == acknowledged if not lost else None
    verdicts.append(PromiseVerdict("no update applied twice", once, text + doubt))
    left = int(captured[-1].get("left", 0))
    verdicts.append(PromiseVerdict("every step is made", not left, f"{left} steps are missing in the last checkpoint"))
    return [*verdicts, _staleness(told)]


def _nothing_to_count(acknowledged: int) -> str:
    if acknowledged:
        return "no state of all slices was read; the run keeps checkpoints unless it is told not to"
    return (
        "no worker pushed updates of dense parameters, and rows of tables are not counted; "
        "give the script a mode that trains dense parameters on the servers"
    )


def unchecked(verdicts: Sequence[PromiseVerdict]) -> str:
    """Why the accounts of updates could not be checked; empty: they were."""
    return "".join(verdict.text for verdict in verdicts if verdict.promise == NOT_LOST and verdict.held is None)


def _staleness(told: Sequence[Mapping[str, Any]]) -> PromiseVerdict:
    """The first is the table's word, the second what the slices' own counts say of the parameters that were read."""
    bounds = [event["bound"] for event in told if event.get("bound") is not None]
    ahead = max((int(event.get("ahead", 0)) for event in told), default=0)
    missing = max((int(event.get("missing", 0)) for event in told), default=0)
    lacked = f"; parameters lacked up to {missing} updates that were acknowledged before" if missing else ""
    if not bounds:
        text = f"there is none; a step was up to {ahead} rounds ahead of the first unfinished one"
        return PromiseVerdict("staleness bound kept", not missing, text + lacked)
    text = f"a step was up to {ahead} rounds ahead of the first unfinished one, and {bounds[0]} are allowed"
    return PromiseVerdict("staleness bound kept", ahead <= bounds[0] and not missing, text + lacked)
