"""What a worker writes down of how the run gets on: progress, who is slow, which shards have moved, where it failed.

Belongs to the thread of the user's loop. Every host's agent reads the events of its own workers, so the first worker of
each host speaks.
"""

from __future__ import annotations

import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from holdfast.core.words import host_of
from holdfast.events import EventLog
from holdfast.membership.balance import Slowness
from holdfast.membership.machine import Machine

PROGRESS_S = 0.25
NAMED_MAX = 64  # workers whose paces and shards are in one event; of more, the slowest are


_LIBRARIES = (*(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")), str(Path(__file__).parents[1]))


def line_of_script(trace: TracebackType | None) -> str:
    """Where an exception came from: the innermost line that is no library's, as `train.py:31`; empty: there is none."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(("<", *_LIBRARIES))]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


class Reporter:
    def __init__(
        self,
        events: EventLog,
        machine: Machine,
        *,
        workers: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda members: members,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers`: all that train, where a view has not all of them."""
        self._events = events
        self._workers = workers
        self._machine = machine
        self._clock = clock
        self._at = 0.0
        self._samples = 0  # since then
        self._moved = 0
        self._began = 0  # the view that began at step 0, of which was told
        self._slowness = Slowness()

    def begins(self, step: int) -> None:
        """The user's loop is about to have this step."""
        view = self._machine.view
        if (
            step == 0
            and view is not None
            and view.number > 1
            and view.number != self._began
            and self._machine.is_origin
        ):
            self._began = view.number
            self._events.write("started_over", view=view.number, step=0, keeps=self._machine.checkpoints)

    def applied(self, step: int, target: int, metrics: Mapping[str, float], samples: int) -> None:
        """`step` steps are done of `target`; the last had so many samples."""
        now = self._clock()
        self._samples += samples
        if now - self._at < PROGRESS_S and step < target:
            return
        rate = self._samples / (now - self._at) if self._at else 0.0
        self._at, self._samples = now, 0
        view = self._machine.view
        members = self._workers(view.members if view else ())
        number = view.number if view else 0
        here = [member for member in members if host_of(member) == host_of(self._machine.me)]
        speaks = here[:1] == [self._machine.me]
        if speaks:
            self._events.write(
                "progress",
                view=number,
                step=step,
                steps=target,
                metrics={name: round(value, 6) for name, value in metrics.items()},
                samples_per_s=round(rate, 1),
                workers=len(members),
            )
        self._tell_of_paces(number, step, now, speaks=speaks)

    def _tell_of_paces(self, view: int, step: int, now: float, *, speaks: bool) -> None:
        """Everyone keeps the account, so that whoever comes to be first knows since when."""
        machine = self._machine
        slow, over = self._slowness.look(machine.paces, now)
        moved, self._moved = machine.moved != self._moved, machine.moved
        if not speaks:
            return
        if moved:
            named = sorted(machine.paces, key=lambda member: -machine.paces[member])[:NAMED_MAX]
            shards = {member: len(machine.shares[member]) for member in named if member in machine.shares}
            paces_s = {member: machine.paces[member] for member in named}
            self._events.write("rebalanced", view=view, step=step, shards=shards, paces_s=paces_s)
        for one in slow:
            self._events.write(
                "slow",
                step=step,
                worker=one.worker,
                times=round(one.times, 2),
                since_s=round(one.since_s, 1),
                costs=round(one.costs, 3),
                shards=len(machine.shares.get(one.worker, ())),
            )
        for worker in over:
            self._events.write("no_longer_slow", step=step, worker=worker)
