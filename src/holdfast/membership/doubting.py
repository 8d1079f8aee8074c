"""What follows when a worker without state is offered states that differ. Pure.

A joiner fetches from two members at once, and asks both for a digest before anything moves. If these differ, the
members differ among themselves, and the next comparison of states may be far away. So the joiner gives up the view and
says in its next Report that it doubts. In a view in which somebody doubts nobody fetches: those who have the state say
in their Ready a digest of all of it, and what follows is the same as for a comparison that was due (auditing.py). If
they agree after all, the next view has no doubt in it, and the joiner fetches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.core.words import View
from holdfast.membership.view_rules import Plan, Report


@dataclass
class Doubt:
    """A member's part. Owned by its machine."""

    stands: bool = False  # the members' states may differ: I was offered such, or have heard so, and it is not settled
    raised: bool = False  # I was the one that was offered them

    def planned(self, plan: Plan, view: View, reports: Mapping[str, Report]) -> Plan:
        """The plan of a view, which compares first where somebody doubts. All members come to the same."""
        have_it = len(_level(plan, view))
        self.stands = have_it > 1 and any(report.doubt for report in reports.values())
        return replace(plan, compares=True) if self.stands else plan

    def settled(self) -> None:
        """Those who have the state have the same."""
        self.stands = False


def bringers(plan: Plan | None, view: View, step: int) -> tuple[str, ...]:
    """The members whose Ready this step needs: all, but where states are compared first those that have one."""
    return _level(plan, view) if plan is not None and plan.compares and plan.step == step else view.members


def _level(plan: Plan, view: View) -> tuple[str, ...]:
    """Those that have the state of the plan's step, or come to it by themselves."""
    return tuple(member for member in view.members if member not in plan.fetches and member not in plan.evicted)
