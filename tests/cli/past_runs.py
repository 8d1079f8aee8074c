"""Runs that are over, as they lie on disk: made in milliseconds, without a process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint import save
from holdfast.events import EventLog
from holdfast.placement.directory import RunDirectory


def past_run(
    home: Path,
    name: str,
    *,
    host: str = "",
    how: str = "finished",
    age_s: float = 60.0,
    saved: tuple[int, ...] = (),
    checkpoint: str = "",
    **described: Any,
) -> RunDirectory:
    """`how`: finished, stopped, failed, abandoned, or nothing at all (its agent died before it wrote anything)."""
    directory = RunDirectory(home, name, host)
    directory.create()
    directory.write(
        {"name": name, "command": f"holdfast run --run {name}", "checkpoint": {"uri": checkpoint}, **described}
    )
    at = [time.time() - age_s - 10.0]

    def clock() -> float:
        at[0] += 1.0
        return at[0]

    uri = checkpoint or str(directory.path / "checkpoints")
    agent = EventLog(directory.events / "agent.jsonl", "agent", wall_clock=clock)
    worker = EventLog(directory.events / "w0.1.jsonl", "w0.1", wall_clock=clock)
    if how != "nothing":
        agent.write("agent_started", pid=1, took_over=False, workers=1, spares=0, script="t.py")
        worker.write("progress", view=1, step=7, steps=10, metrics={}, samples_per_s=1.0, workers=1)
    for step in saved:
        save(uri, {"weight": torch.ones(2)}, step=step, run=name)
        worker.write("checkpoint", step=step, uri=uri, bytes=1, duration_s=0.1, held_s=0.0)
    if how == "finished":
        worker.write("finished", step=10, digest="d", view=1)
        agent.write("run_finished", step=10, digest="d", exit_code=0)
    if how in ("finished", "stopped", "failed"):
        agent.write("agent_stopped", reason=how, exit_code={"failed": 1, "stopped": 130}.get(how, 0))
    agent.close()
    worker.close()
    (directory.logs / "w0.1.log").write_text("hello\nworld\n")
    os.utime(directory.path / "run.json", (time.time() - age_s, time.time() - age_s))
    return directory
