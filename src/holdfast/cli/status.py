"""`holdfast status`: what the run directory, the ledger and /proc say of a run."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.agent.asking import ledger_of
from holdfast.agent.hosts.host_table import host_line, read_table
from holdfast.agent.hosts.presence import other_hosts
from holdfast.agent.workers.heartbeat_watch import described_limits, levels
from holdfast.cli.control import find_run
from holdfast.cli.tables import size_words
from holdfast.core.errors import LedgerError, ProtocolError
from holdfast.core.words import (
    KEY_LEAVING,
    KEY_LIARS,
    KEY_OWN_VIEWS,
    KEY_SERVERS,
    KEY_SIZE,
    KEY_SLICE,
    KEY_SLOW_SERVERS,
    KEY_VIEW,
    KEY_WORKERS,
    View,
    decode_json,
    decode_whole,
)
from holdfast.events.telling import count
from holdfast.observe.accounting import Spent
from holdfast.observe.fold import RunRecord
from holdfast.observe.picture import server_rows
from holdfast.observe.reading import read_record
from holdfast.observe.summary import run_state, time_line
from holdfast.placement.directory import RunDirectory
from holdfast.placement.proc import find_workers, process_state

LEFT_OUT_LINES = 8


def show_status(options: argparse.Namespace) -> int:
    status = gather(find_run(options.run, options.dir))
    if options.json:
        print(json.dumps(status, indent=1))
    else:
        print("\n".join(_lines(status)))
    return 0


def gather(directory: RunDirectory) -> dict[str, Any]:
    """Everything that is known. The ledger is asked if an agent serves it; the events tell the rest."""
    record = read_record(directory.events)
    workers = record.workers
    described = directory.read()
    living = {found.worker: found.pid for found in find_workers(directory.path)}
    agent = directory.agent()
    status: dict[str, Any] = {
        "run": directory.name,
        "directory": str(directory.path),
        "state": run_state(record, agent=agent is not None, lives=bool(living)),
        "agent": agent,
        "step": record.step,
        "steps": record.steps or None,
        "metrics": record.metrics,
        "samples_per_s": record.samples_per_s,
        "view": workers.view,
        "own_views": workers.own_views,
        "members": list(workers.members),
        "target": described.get("workers"),
        "spares": described.get("spares"),
        "only_serves": described.get("workers") == 0,
        "failures_survived": workers.failures,
        "evicted": workers.evictions,
        "rewinds": record.rewinds,
        "failovers": record.servers.failovers,
        "skipped": sorted(record.skipped),
        "host": directory.host or None,
        "ledger": described.get("ledger") or None,
        "ledger_away": sorted(workers.cut_off) if living or agent is not None else [],
        "paused": dict(workers.waiting) if living else {},
        "checkpoint": record.saved,
        "checkpoint_uri": record.saved_to or (described.get("checkpoint") or {}).get("uri") or None,
        "slow": {who: slow.words for who, slow in workers.slow.items() if who in workers.members} if living else {},
        "late": dict(workers.late) if living else {},
        "liars": dict(workers.liars),
        "left_out": {who: asdict(one) for who, one in workers.left_out.items() if who in workers.members},
        "distrusted": dict(workers.distrusted),
        "storage_away": dict(workers.unsaved) if living else {},
        "time": _time(record, set(living), time.time() if living else None),
        "digest": (record.finished or {}).get("digest"),
        "ended": record.ended or None,
        "command": described.get("command"),
    }
    status |= {"hosts": [], "servers": [], "slices": {}, "leaving_servers": [], "slow_servers": []}
    status["server_states"] = {row["server"]: row for row in server_rows(record)}
    status["ring"] = _ring(directory) if agent is not None else []
    registered = _ask_ledger(directory, status) if agent is not None or status["ledger"] else None
    health = _health(directory, described)
    status["workers"] = [
        {
            "id": worker,
            "pid": pid,
            "state": _worker_state(worker, pid, record, registered, status["members"]),
            **health.get(worker, {"level": None}),
        }
        for worker, pid in sorted(living.items())
    ]
    return status


def _ring(directory: RunDirectory) -> list[dict[str, Any]]:
    """What this host's agent hears of the others, as old as it is now."""
    age_s, rows = read_table(directory.path)
    return [{**row, "age_s": round(row["age_s"] + age_s, 2)} for row in rows]


def _time(record: RunRecord, living: set[str], now: float | None) -> dict[str, Any] | None:
    """Where it went, in seconds of workers' time; None in a run whose workers keep no account."""
    if not record.time.told:
        return None
    run = record.time.run(now, living)
    each = record.time.workers(now, living)
    return {
        "goodput": run.goodput,
        "seconds": _rounded(run),
        "workers": {worker: {"goodput": spent.goodput, "seconds": _rounded(spent)} for worker, spent in each.items()},
    }


def _rounded(spent: Spent) -> dict[str, float]:
    return {category: round(seconds, 3) for category, seconds in spent.seconds.items()}


def _health(directory: RunDirectory, described: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the heartbeats say, by the limits that the run was started with."""
    return {
        worker: {
            "level": suspicion.level.words,
            "activity": beat.words,
            "activity_s": round(max(0.0, beat.at - beat.since), 2),
            "at_step": beat.step,
            "reason": suspicion.reason or None,
        }
        for worker, (suspicion, beat) in levels(directory.path, described_limits(described), time.monotonic()).items()
    }


def _ask_ledger(directory: RunDirectory, status: dict[str, Any]) -> set[str] | None:
    """The agreed view and size are in the ledger; None if it does not answer."""
    try:
        with ledger_of(directory) as ledger:
            entries = {entry.key: entry.value for entry in ledger.read("").entries}
        if KEY_VIEW in entries:
            view = View.decode(entries[KEY_VIEW])
            status["view"], status["members"] = view.number, list(view.members)
        alone = [key[len(KEY_OWN_VIEWS) :] for key in sorted(entries) if key.startswith(KEY_OWN_VIEWS)]
        status["members"], status["own_views"] = alone or status["members"], bool(alone) or status["own_views"]
        sizes = [decode_whole(value, "workers") for key, value in entries.items() if key.startswith(KEY_SIZE)]
        if sizes:
            status["target"] = sum(sizes)
        for key, value in entries.items():
            if key.startswith(KEY_LIARS):
                status["liars"][key[len(KEY_LIARS) :]] = decode_whole(value, "step")
        status["hosts"] = other_hosts(entries, "")
        status["servers"] = sorted(key[len(KEY_SERVERS) :] for key in entries if key.startswith(KEY_SERVERS))
        status["leaving_servers"] = _named(entries, KEY_LEAVING, status["servers"])
        status["slow_servers"] = _named(entries, KEY_SLOW_SERVERS, status["servers"])
        status["slices"] = {
            key[len(KEY_SLICE) :]: {name: decode_json(value).get(name) for name in ("primary", "replicas", "epoch")}
            for key, value in sorted(entries.items())
            if key.startswith(KEY_SLICE)
        }
    except (LedgerError, ProtocolError, KeyError, ValueError, OSError) as error:
        status["ledger_away"] = status["ledger_away"] or (["status"] if isinstance(error, LedgerError) else [])
        return None
    return {key[len(KEY_WORKERS) :] for key in entries if key.startswith(KEY_WORKERS)}


def _worker_state(worker: str, pid: int, record: RunRecord, registered: set[str] | None, members: list[str]) -> str:
    if process_state(pid) in ("T", "t"):
        return "stopped by a signal"
    known = record.workers.by_id.get(worker)
    if known is not None and known.state in ("finished", "leaving", "evicted"):
        return known.state
    if registered is not None:
        return "starting" if worker not in registered else "member" if worker in members else "spare"
    return known.state if known is not None else "starting"


def _level(worker: dict[str, Any]) -> str:
    """How it looks, by its heartbeats: `, ok: in a shard for 0.1 s`."""
    if worker["level"] is None:
        return ""
    if worker["reason"]:
        return f", {worker['level']}: {worker['reason']}"
    return f", {worker['level']}: {worker['activity']} for {worker['activity_s']:.1f} s"


def _named(entries: Mapping[str, bytes], prefix: str, servers: Sequence[str]) -> list[str]:
    """The servers under these keys, of those that are registered."""
    return [server for server in servers if prefix + server in entries]


def _server_lines(status: dict[str, Any]) -> list[str]:
    if not status["servers"] and not status["slices"]:
        return []
    lines = [f"servers: {', '.join(status['servers']) or 'none'}; {count(status['failovers'], 'failover')}"]
    lines += [f"  {_server_words(server, status)}" for server in status["servers"]]
    for name, known in status["slices"].items():
        others = [server for server in known["replicas"] or () if server != known["primary"]]
        gone = [server for server in known["replicas"] or () if server not in status["servers"]]
        without = f"; {', '.join(gone)} is gone" if gone else ""
        epoch = f"epoch {known['epoch']}"
        lines.append(f"  {name:<14} {known['primary']}, and {', '.join(others) or 'no other'}; {epoch}{without}")
    return lines


def _server_words(server: str, status: dict[str, Any]) -> str:
    """`s0.1: leads 2 of 3 slices, log 14 entries and 1.2 MB, 300 updates, confirms in 0.4 ms`."""
    leads = [one["primary"] for one in status["slices"].values()].count(server)
    has = sum(server in (one["replicas"] or ()) for one in status["slices"].values())
    words = [f"leads {leads} of {count(has, 'slice')}"]
    known = status["server_states"].get(server)
    if known is not None:
        words.append(f"log entries {known['entries']}, {size_words(known['log_bytes'])}")
        words.append(count(known["updates"], "update"))
        if known["lag_s"] is not None:
            words.append(f"confirms in {known['lag_s'] * 1000:.1f} ms")
    words += ["slow"] * (server in status["slow_servers"]) + ["leaving"] * (server in status["leaving_servers"])
    return f"{server:<12} {', '.join(words)}"


def _only(status: dict[str, Any]) -> str:
    return "; this host only serves" if status["only_serves"] else ""


def _lines(status: dict[str, Any]) -> list[str]:
    steps = f"/{status['steps']}" if status["steps"] else ""
    who = count(len(status["members"]), "worker") if status["own_views"] else f"view {status['view']}"
    lines = [
        f"run {status['run']}: {status['state']}, step {status['step']}{steps}, {who}, "
        f"{count(status['failures_survived'], 'failure')} survived"
    ]
    if status["agent"] is not None:
        lines.append(f"agent: process {status['agent']}, {count(status['target'], 'worker')} wanted{_only(status)}")
    elif status["state"] == "unattended":
        lines.append("agent: none; training goes on, but the dead are not replaced")
        lines.append(f"  hint: take it over with: {status['command']}")
    elif status["state"] in ("stopped", "failed", "abandoned"):
        lines.append(f"agent: none; the last one ended: {status['ended'] or 'killed'}")
        lines.append(f"  hint: start it again with: {status['command']}")
    if status["hosts"]:
        lines.append(f"hosts: {', '.join(status['hosts'])}; this is {status['host']}; ledger {status['ledger']}")
    lines += [f"  {host_line(row)}" for row in status["ring"]]
    if status["ledger_away"]:
        who = ", ".join(status["ledger_away"])
        goes_on = "no step is begun until it is back" if status["paused"] else "training goes on without it"
        lines.append(f"ledger: {who} cannot reach it; the membership is frozen, and {goes_on}")
    lines += _server_lines(status)
    if status["rewinds"]:
        lines.append(f"rewinds: {status['rewinds']}")
    if status["skipped"]:
        lines.append(f"skipped: step {', '.join(map(str, status['skipped'][-10:]))}")
    if status["checkpoint"] is not None:
        lines.append(f"checkpoint: step {status['checkpoint']} in {status['checkpoint_uri']}")
    elif status["checkpoint_uri"]:
        lines.append(f"checkpoint: none yet in {status['checkpoint_uri']}")
    if status["time"] is not None:
        lines.append(time_line(Spent(status["time"]["seconds"])))
    for worker, reason in status["storage_away"].items():
        lines.append(f"storage: {worker} cannot save, and its newest snapshot waits in memory: {reason}")
    for worker, why in status["slow"].items():
        lines.append(f"slow: {worker}: {why}")
    for worker, why in status["late"].items():
        lines.append(f"late: {worker}: {why}")
    for worker, step in sorted(status["liars"].items()):
        lines.append(f"corruption: {worker} was found wrong at step {step}: test its memory and processor")
    for worker, one in sorted(status["left_out"].items(), key=lambda pair: -pair[1]["suspicion"])[:LEFT_OUT_LINES]:
        lines.append(
            f"left out: {one['left_out']} of {one['shards']} shards of {worker}, suspicion {one['suspicion']:.2f} of 1"
        )
    for worker, reason in status["distrusted"].items():
        lines.append(f"distrusted: {worker} was evicted: {reason}")
    for worker, reason in status["paused"].items():
        lines.append(f"paused: {worker}: {reason}")
    for worker in status["workers"]:
        lines.append(f"  {worker['id']:<8} process {worker['pid']:<8} {worker['state']}{_level(worker)}")
    if status["digest"]:
        lines.append(f"weights: {status['digest']}")
    return lines
