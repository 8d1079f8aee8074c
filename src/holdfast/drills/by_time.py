"""The plan of `holdfast drill`: faults at the seconds of a schedule, to whom it says as far as they live.

A fault that needs a survivor waits until there is one; who is meant is decided when it happens, from the schedule's
number and who lives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.core.words import host_of, slot_of
from holdfast.drills.nemesis import Nemesis
from holdfast.drills.schedule import Planned
from holdfast.drills.trace import TraceReader

SURVIVOR_S = 30.0  # how long a fault waits for somebody who would survive it


@dataclass
class ByTime:
    """`began`: when the schedule's time is 0, on the monotonic clock."""

    nemesis: Nemesis
    traces: TraceReader
    schedule: Sequence[Planned]
    began: float
    skipped: list[Planned] = field(default_factory=list)

    def faults(self) -> Iterator[None]:
        """Does what is due, and gives the word back whenever nothing is."""
        for planned in sorted(self.schedule):
            due = self.began + planned.at_s
            while time.monotonic() < due:
                yield
            while not self._can(planned):
                if time.monotonic() > due + SURVIVOR_S:
                    self.skipped.append(planned)
                    break
                yield
            else:
                self._do(planned)

    def _do(self, planned: Planned) -> None:
        nemesis = self.nemesis
        if planned.kind in ("kill", "stop", "corrupt"):
            getattr(nemesis, planned.kind)(planned, self.victim(planned.target))
        elif planned.kind == "partition":
            nemesis.cut_off(planned, nemesis.ground.hosts[planned.target])
        else:
            getattr(nemesis, planned.kind.replace("-", "_"))(planned)

    def _members(self) -> list[str]:
        run = self.nemesis.run
        living = [member for member in run.living_members() if run.pids[member] not in self.nemesis.stopped]
        return sorted(living, key=lambda member: (host_of(member), slot_of(member)))

    def _can(self, planned: Planned) -> bool:
        if planned.kind not in ("kill", "stop", "corrupt", "partition"):
            return True
        able = [member for member in self._members() if member in self.traces.begun]
        if planned.kind == "partition":
            host = self.nemesis.ground.hosts[planned.target]
            return any(host_of(member) != host for member in able)
        return len(able) >= (3 if planned.kind == "corrupt" else 2)

    def victim(self, target: int) -> str:
        """The worker of that slot if it is a member, else the one of that place among the members."""
        members = self._members()
        same = [member for member in members if slot_of(member) == target and not host_of(member)]
        return same[0] if same else members[target % len(members)]
