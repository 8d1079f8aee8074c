"""A picture of a run for the dashboard and `holdfast top`: values that JSON knows, all of them or only what has changed
since an event. Pure: a projection of the fold (fold.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.observe import lanes as l
from holdfast.observe.fold import RunRecord
from holdfast.observe.lanes import Lane
from holdfast.observe.series import number_of
from holdfast.observe.workers import LeftOut, lane_name

WAITING_MAX = 500  # characters


def picture(record: RunRecord, now: float, since: int = 0, *, state: str = "") -> dict[str, Any]:
    """What has changed since the event with this number; with 0, everything."""
    served = [*_sorted(record.servers.lanes), *_sorted(record.servers.slice_lanes)]
    changed = [lane for lane in _ordered(record) if lane.changed > since]
    picture: dict[str, Any] = {
        "number": record.number,
        "since": since,
        "header": header(record, now, state=state),
        "lanes": [lane.picture() for lane in (*changed, *(lane for lane in served if lane.changed > since))],
        "series": {
            name: change for name, series in record.series.items() if (change := series.picture(since))["points"]
        },
        "events": record.events.newest(since),
        "counts": record.events.counts,
    }
    if changed or record.workers.changed > since or not since:
        picture["crew"] = crew(record)
    if (served and not since) or record.servers.changed > since:
        picture["servers"], picture["slices"] = server_rows(record), slice_rows(record)
    if record.spent_at > since:
        picture["accounts"] = accounts(record, now)
    if record.marks.changed > since or not since:
        picture["marks"] = record.marks.picture()
    if record.checkpoints_changed > since or not since:
        picture["checkpoints"] = [{**one, "t": round(one["t"], 3)} for one in record.checkpoints]
    return picture


def header(record: RunRecord, now: float, *, state: str = "") -> dict[str, Any]:
    """`now` is the time of the last event where the run is over."""
    workers = record.workers
    durations = sorted(workers.recoveries_s)
    rate, goodput = steps_per_s(record), goodput_of(record, now)
    state = state or state_of(record)
    going_on = state in ("running", "unattended") and rate > 0 and record.steps > record.step
    newest = record.checkpoints[-1] if record.checkpoints else None
    return {
        "state": state,
        "began": record.began,
        "last": record.last,
        "now": round(now, 3),
        "step": record.step,
        "steps": record.steps,
        "steps_per_s": round(rate, 4),
        "eta_s": round((record.steps - record.step) / rate, 1) if going_on else None,
        "samples_per_s": number_of(record.samples_per_s),
        "metrics": {name: number_of(value) for name, value in record.metrics.items() if name in record.series},
        "goodput": None if goodput is None else round(goodput, 4),
        "seconds": {state: round(value, 3) for state, value in lane_seconds(record, now).items()},
        "failovers": record.servers.failovers,
        "servers": len(record.servers.alive),
        "failures": workers.failures,
        "evictions": workers.evictions,
        "rewinds": record.rewinds,
        "skipped": len(record.skipped),
        "recoveries": len(durations),
        "recovery_median_s": durations[len(durations) // 2] if durations else None,
        "recovery_worst_s": durations[-1] if durations else None,
        "view": workers.view,
        "own_views": workers.own_views,
        "view_reason": workers.view_reason,
        "members": len(workers.members),
        "size": workers.size,
        "spares": workers.spares,
        "checkpoint": {**newest, "t": round(newest["t"], 3)} if newest is not None else None,
        "ledger_away": len(workers.cut_off),
        "storage_away": len(workers.unsaved),
        "waiting": next((why[:WAITING_MAX] for why in workers.waiting.values()), None),
        "digest": next(iter(record.digests)) if len(record.digests) == 1 else None,
        "digests": len(record.digests),
        "ended": record.ended or None,
        "events": record.number,
    }


def state_of(record: RunRecord, *, agent: bool | None = None, lives: bool | None = None) -> str:
    """running, unattended, finished or stopped. `agent` and `lives` are what /proc says of agent and workers."""
    if (record.finished is not None or record.reported) and not lives:
        return "finished"
    if record.agent == "running" and (agent or agent is None):
        return "running"
    if not record.number:
        return "starting"
    return "unattended" if lives else "stopped"


def steps_per_s(record: RunRecord) -> float:
    if len(record.pace) < 2:
        return 0.0
    (first, begin), (last, end) = record.pace[0], record.pace[-1]
    return (end - begin) / (last - first) if last > first else 0.0


def lane_seconds(record: RunRecord, now: float) -> dict[str, float]:
    """The time of all slots, by state, since the first view."""
    total: dict[str, float] = {}
    for lane in record.workers.lanes.values():
        for state, seconds in lane.seconds(now).items():
            total[state] = total.get(state, 0.0) + seconds
    return total


def goodput_of(record: RunRecord, now: float) -> float | None:
    """Which part of the workers' time went into steps; spares cost nothing. By the workers' own accounts, or, where
    they keep none, by their lanes."""
    if record.time.told:
        return record.time.run(now).goodput
    seconds = lane_seconds(record, now)
    spent = sum(value for state, value in seconds.items() if state not in l.IDLE)
    return sum(value for state, value in seconds.items() if state in l.GOOD) / spent if spent else None


def accounts(record: RunRecord, now: float) -> dict[str, Any]:
    """Where the time went, by the workers' own accounts: of the run and of each slot, in seconds."""
    slots: dict[str, dict[str, float]] = {}
    for worker, spent in record.time.workers(now).items():
        lane = lane_name(worker)
        total = slots.setdefault(lane, {}) if lane in record.workers.lanes else {}
        for category, seconds in spent.seconds.items():
            if seconds > 0:
                total[category] = round(total.get(category, 0.0) + seconds, 3)
    run = {category: round(seconds, 3) for category, seconds in record.time.run(now).seconds.items() if seconds > 0}
    return {"run": run, "slots": slots}


def crew(record: RunRecord) -> list[dict[str, Any]]:
    """Every slot's worker, in order: its process, its place in the view, its speed and shards."""
    workers = record.workers
    rank = {worker: place for place, worker in enumerate(workers.members)}
    return [
        {
            "lane": lane.name,
            "worker": lane.worker,
            "state": lane.state,
            "pid": workers.pid_of(lane.worker),
            "rank": rank.get(lane.worker),
            "shards": workers.shards.get(lane.worker) if lane.worker in rank else None,
            "pace_s": workers.paces_s.get(lane.worker) if lane.worker in rank else None,
            "slow": workers.slow[lane.worker].times if lane.worker in workers.slow else None,
            "left_out": _left_out(workers.left_out.get(lane.worker)),
        }
        for lane in _ordered(record)
    ]


def server_rows(record: RunRecord) -> list[dict[str, Any]]:
    """Every server of this host in its slot, and others that slices are on."""
    servers = record.servers
    rows = []
    for lane in _sorted(servers.lanes):
        known = servers.known.get(lane.worker)
        if known is None:
            continue
        rows.append(
            {
                "server": lane.worker,
                "state": lane.state,
                "pid": known.pid if known.alive else None,
                "leads": known.leads,
                "slices": known.slices,
                "entries": known.entries,
                "log_bytes": known.log_bytes,
                "updates": known.updates,
                "lag_s": servers.lag_s(lane.worker),
                "slow": known.slow,
            }
        )
    return rows


def slice_rows(record: RunRecord) -> list[dict[str, Any]]:
    return [
        {
            "slice": name,
            "primary": one.primary,
            "others": [server for server in one.servers if server != one.primary],
            "epoch": one.epoch,
            "failovers": one.failovers,
        }
        for name, one in sorted(record.servers.slices.items())
    ]


def _left_out(one: LeftOut | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {"shards": one.shards, "left_out": one.left_out, "suspicion": number_of(one.suspicion)}


def _ordered(record: RunRecord) -> list[Lane]:
    return _sorted(record.workers.lanes)


def _sorted(lanes: Mapping[str, Lane]) -> list[Lane]:
    return sorted(lanes.values(), key=lambda lane: lane.order)
