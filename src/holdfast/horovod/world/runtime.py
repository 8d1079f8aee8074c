"""This process as a rank: `init` finds or forms the world, `shutdown` leaves it, and again, as often as it takes.

One Runtime a process. Belongs to the thread that calls init and shutdown; the world it holds may be used by any.
Started by an agent (`holdfast run`), the worker is one of the run's; started by hand, it is a world of one.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.core.errors import ConfigError, Stopped, WorkerEnded
from holdfast.core.words import View
from holdfast.engine.reporting import line_of_script
from holdfast.horovod.common.exceptions import HorovodInternalError
from holdfast.horovod.exchange.carrier import Alone
from holdfast.horovod.exchange.departed import SCRIPT_ENDED
from holdfast.horovod.exchange.engine import Exchange
from holdfast.horovod.exchange.timeline import Timeline
from holdfast.horovod.exchange.words import SHARDS_MAX
from holdfast.horovod.world.lines import Lines
from holdfast.horovod.world.rules import Move, WorldStanding, newcomers, next_move
from holdfast.membership.view_rules import LedgerState
from holdfast.placement import exit_status
from holdfast.placement.environment import WorkerEnvironment

MEET_S = 600.0  # as long as Horovod waits for workers in elastic training
LOOK_S = 0.05
PROPOSE_AGAIN_S = 0.5
PROGRESS_S = 1.0
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
LEAST = "HOLDFAST_HOROVOD_MIN_NP"
RESETS = "HOLDFAST_HOROVOD_RESET_LIMIT"
SHARDS = "HOLDFAST_SHARDS"
STALL = "HOROVOD_STALL_CHECK_TIME_SECONDS"


@dataclass
class World:
    """The ranks of one view, and what this one is in it."""

    exchange: Exchange
    rank: int
    hosts: Sequence[str]  # of each rank
    view: View | None = None
    sets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sets_made: int = 0

    @property
    def size(self) -> int:
        return len(self.hosts)

    def _locals(self) -> list[int]:
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]

    @property
    def local_rank(self) -> int:
        return self._locals().index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self._locals())

    def _hosts_with(self) -> list[str]:
        """The hosts that have as many ranks as to have one with my local rank, in the order of their first rank."""
        counts: dict[str, int] = {}
        for host in self.hosts:
            counts[host] = counts.get(host, 0) + 1
        return [host for host, count in counts.items() if count > self.local_rank]

    @property
    def cross_rank(self) -> int:
        return self._hosts_with().index(self.hosts[self.rank])

    @property
    def cross_size(self) -> int:
        return len(self._hosts_with())

    @property
    def homogeneous(self) -> bool:
        return len({list(self.hosts).count(host) for host in self.hosts}) == 1


class Runtime:
    def __init__(self) -> None:
        self._world: World | None = None
        self._lines: Lines | None = None
        self._process = 0
        self._left = 0  # the number of the last view
        self._lost: frozenset[str] = frozenset()
        self._failed = ""  # why the script has failed
        self._asked_to_leave = False
        self._has_left = False
        self._previous = sys.excepthook
        self._told_at = 0.0
        self.commits = 0
        self.resets = 0
        self.shards = 0  # of a step, whatever the number of ranks. 0: one for each rank

    # ---- the world

    @property
    def is_initialized(self) -> bool:
        return self._world is not None

    @property
    def world(self) -> World:
        if self._world is None:
            raise ValueError(NOT_INITIALIZED)
        return self._world

    @property
    def lines(self) -> Lines | None:
        """This worker's lines to its run. None: it is by itself, or has not called init."""
        return self._lines

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of this world, or of none."""
        view = self._world.view if self._world is not None else None
        return () if view is None else view.members

    def report(self, text: str) -> None:
        """To whoever looks at this worker's output, and into the run's events."""
        print(f"holdfast: {text}", file=sys.stderr, flush=True)
        if self._lines is not None:
            self._lines.events.write("waiting", step=self.commits, reason=text)

    def init(self) -> World:
        if self._world is not None:
            return self._world
        self.shards = _shards_wanted()
        if not self._process:
            self._open()
        self._world = self._meet() if self._lines is not None else World(self._exchange(Alone(), 0, 1), 0, ["here"])
        trace = os.environ.get("HOROVOD_TIMELINE", "")
        if trace and trace.upper() != "DYNAMIC":
            place, again = Path(trace), self.resets  # a world that forms anew writes a file of its own
            name = place.with_name(f"{place.stem}.{again}{place.suffix}") if again else place
            self.start_timeline(str(name), mark_cycles=os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")
        return self._world

    def shutdown(self, *, last_words: str = "") -> None:
        """Leave the world. `last_words`: why, for the others."""
        world, self._world = self._world, None
        if world is None:
            return
        if world.view is not None:
            self._left = world.view.number
            lost = world.exchange.lost_rank
            self._lost = frozenset() if lost is None else frozenset({world.view.members[lost]})
        world.exchange.close(last_words=last_words)

    def reset(self) -> None:
        """Leave this world for the next one."""
        self.resets += 1
        limit = os.environ.get(RESETS, "")
        if limit.isdecimal() and self.resets > int(limit):
            raise RuntimeError(f"the world was formed anew {self.resets} times, and --reset-limit is {limit}")
        began = time.monotonic()
        lost = self._world is not None and self._world.exchange.broken
        self.shutdown()
        world = self.init()
        if lost and self._lines is not None and world.view is not None:
            duration_s = round(time.monotonic() - began, 4)
            about = {"view": world.view.number, "step": self.commits}
            self._lines.events.write("recovered", **about, duration_s=duration_s, recomputed_shards=0)

    def should_meet(self) -> bool:
        """Whether the members should meet again: somebody waits to come in, this worker is to leave, or all are."""
        world, lines = self._world, self._lines
        if world is None or lines is None or world.view is None:
            return False
        lines.sort_mail()
        return self._asked_to_leave or newcomers(lines.state, frozenset(world.view.members))

    def committed(self) -> None:
        """The script has put its state into safety."""
        self.commits += 1
        world, lines, now = self._world, self._lines, time.monotonic()
        if lines is not None:
            lines.enters(False, self.commits)
        if world is not None and world.view is not None and lines is not None and now >= self._told_at:
            self._told_at = now + PROGRESS_S
            lines.events.write("progress", view=world.view.number, step=self.commits, workers=world.size)

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        world = self.world
        if world.exchange.timeline is None and (world.rank == 0 or world.size == 1):
            world.exchange.timeline = Timeline(Path(path), world.rank, mark_cycles=mark_cycles)

    def stop_timeline(self) -> None:
        timeline, self.world.exchange.timeline = self.world.exchange.timeline, None
        if timeline is not None:
            timeline.close()

    def _heard(self, state: LedgerState) -> None:
        """The ledger has changed: a member may be gone whose connections somebody else holds open."""
        world = self._world
        if world is None or world.view is None:
            return
        for rank, member in enumerate(world.view.members):
            if member not in state.ids and rank != world.rank:
                world.exchange.lose(rank, "its process has ended, by the ledger")

    # ---- forming it

    def _open(self) -> None:
        environment = WorkerEnvironment.from_variables()
        self._process = os.getpid()
        atexit.register(self._end)
        if environment is None:
            return
        self._lines = Lines(environment)
        self._lines.heard = self._heard
        self._previous, sys.excepthook = sys.excepthook, self._note_failure
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_terminate)

    def _exchange(self, carrier: Any, rank: int, size: int) -> Exchange:
        lines = self._lines
        stall = os.environ.get(STALL, "")
        stall_s = float(stall) if stall.isdecimal() and int(stall) > 0 else 60.0
        if lines is None:
            return Exchange(carrier, rank, size, stall_s=stall_s)

        def waits(on: bool) -> None:
            lines.enters(on, self.commits)

        return Exchange(carrier, rank, size, stall_s=stall_s, report=self.report, waits=waits)

    def _meet(self) -> World:
        """Until this worker is in a view whose members are all connected."""
        lines = self._lines
        assert lines is not None
        began, proposed_at, least = time.monotonic(), 0.0, os.environ.get(LEAST, "")
        until = began + MEET_S  # whatever views it enters in vain meanwhile
        lines.enters(True, self.commits)
        while True:
            lines.sort_mail()
            now = time.monotonic()
            standing = WorldStanding(
                me=lines.me,
                left=self._left,
                lost=self._lost,
                waited_s=now - began,
                least=int(least) if least.isdecimal() else 1,
            )
            move = next_move(lines.state, standing) if not self._asked_to_leave else Move("asked to leave", end=True)
            if move.end:
                self._leave(move.reason)
            if now > until:
                raise HorovodInternalError(f"no world came about in {MEET_S:.0f} s: {move.reason}")
            if move.enter is not None:
                world = self._enter(move.enter, until)
                if world is not None:
                    lines.enters(False, self.commits)
                    return world
                began = time.monotonic()
                continue
            if move.propose is not None and now >= proposed_at:
                proposed_at = now + PROPOSE_AGAIN_S
                lines.propose(move.propose)
            elif lines.news is not None and lines.me not in lines.state.ids:
                lines.register()
            lines.wait_for_mail(LOOK_S)

    def _enter(self, view: View, until: float) -> World | None:
        """Connect to all members. None: that was in vain, and another view is due."""
        lines = self._lines
        assert lines is not None
        group, rank = lines.open_world(view), view.rank(lines.me)
        lost: set[str] = set()
        while not group.complete:
            lines.sort_mail()
            lost |= {one.peer for one in lines.unreached if one.view == view.number}
            lost |= {member for member in view.members if member not in lines.state.ids}
            newer = lines.state.view is not None and lines.state.view.number > view.number
            if lost or newer or self._asked_to_leave or time.monotonic() > until:
                group.close()
                self._left, self._lost = view.number, frozenset(lost)
                return None
            if not group.complete:
                lines.wait_for_mail(LOOK_S)
        lines.events.write("view", view=view.number, members=list(view.members), reason=view.reason, step=self.commits)
        carrier = lines.carrier(view, group)
        return World(self._exchange(carrier, rank, len(view.members)), rank, lines.hosts(view), view)

    # ---- the end

    def _leave(self, reason: str) -> None:
        assert self._lines is not None
        self._has_left = True
        self._lines.events.write("left", step=self.commits, reason=reason)
        raise Stopped(reason)

    def _on_terminate(self, number: int, frame: object) -> None:
        """The agent asks this worker to leave: at the next commit, where there is one to come."""
        if self.commits and not self._asked_to_leave and os.getpid() == self._process:
            self._asked_to_leave = True
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _note_failure(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == self._process and not isinstance(error, WorkerEnded) and self._lines is not None:
            self._failed = reason = f"{kind.__name__}: {error}".partition("\n")[0]
            if self._world is not None and self._world.view is not None and self._world.exchange.departed.ended:
                # Another rank's script is through: this one is not to be started again, and its failure counts.
                self._lines.events.write("reached", step=self.commits, digest="", view=self._world.view.number)
            self._lines.events.write("failed", reason=reason, place=line_of_script(trace), step=self.commits)
        self._previous(kind, error, trace)

    def _end(self) -> None:
        """The script is at its end, or has failed."""
        if os.getpid() != self._process:
            return
        view = self._world.view if self._world is not None else None
        ended = not (self._failed or self._has_left or self._asked_to_leave or exit_status.code_of(0))
        self.shutdown(last_words=SCRIPT_ENDED if ended else self._failed)
        lines, self._lines = self._lines, None
        if lines is None:
            return
        if ended:
            last = lines.script_ended()
            number = view.number if view is not None else self._left
            if last:
                lines.events.write("finished", step=self.commits, digest="", view=number)
            else:
                lines.events.write("left", step=self.commits, reason=SCRIPT_ENDED)
        lines.close()


def _shards_wanted() -> int:
    given = os.environ.get(SHARDS, "")
    if given and not (given.isdecimal() and 0 < int(given) <= SHARDS_MAX):
        raise ConfigError(
            f"{SHARDS} is {given!r}, and is to be a number from 1 to {SHARDS_MAX}",
            hint="that of the shards into which a step is cut, such as 8; without it each rank is one",
        )
    return int(given or 0)


_runtime = Runtime()


def runtime() -> Runtime:
    """This process's."""
    return _runtime
