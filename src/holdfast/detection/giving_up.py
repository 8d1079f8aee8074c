"""Whether the workers of a silent host are given up before their leases run out. Pure.

Only registrations are taken from the ledger. A worker that lives after all registers again and keeps its place, if
nobody has gone on without it; if somebody has, it is replaced. So an error costs time, never exactness. That it costs
little:
- two agents that hear the host must both find it silent, and both have tried in vain to connect to it;
- workers here must be held up: as long as training gets on, nobody is missed;
- the same host is not given up again before REST_S have passed, whatever happens meanwhile, and no more than ALL_MAX
  hosts in that time. Leases do the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HELD_UP_S = 0.4  # workers here have waited for so long
REST_S = 60.0
ALL_MAX = 4


@dataclass(frozen=True)
class Case:
    """What is known of a silent host."""

    host: str
    tried: bool  # connecting to it: an answer was waited for
    reachable: bool  # something there answered
    confirmed_by: str  # another agent that hears it and thinks the same; empty: none
    held_up_s: float  # the longest that a member of this host has waited


@dataclass(frozen=True)
class GivingUpDecision:
    give_up: bool
    reason: str


@dataclass
class GivingUp:
    _given_up: dict[str, float] = field(default_factory=dict)  # host -> when

    def decide(self, case: Case, now: float) -> GivingUpDecision:
        recent = {host: when for host, when in self._given_up.items() if now - when < REST_S}
        self._given_up = recent
        if case.host in recent:
            return GivingUpDecision(False, f"it was given up {now - recent[case.host]:.0f} s ago")
        if len(recent) >= ALL_MAX:
            return GivingUpDecision(False, f"{len(recent)} hosts were given up in the last {REST_S:.0f} s")
        if case.reachable:
            return GivingUpDecision(False, "its agent does not beat, but something there answers")
        if not case.tried:
            return GivingUpDecision(False, "nobody has tried yet whether something there answers")
        if not case.confirmed_by:
            return GivingUpDecision(False, "no second host finds it silent")
        if case.held_up_s < HELD_UP_S:
            return GivingUpDecision(False, "training gets on")
        self._given_up[case.host] = now
        return GivingUpDecision(
            True, f"{case.confirmed_by} finds it silent too, nothing there answers, and training waits"
        )
