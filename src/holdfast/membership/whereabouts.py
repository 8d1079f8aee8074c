"""How far the other members of a view are, by what they have said in it. Owns nothing: it reads what was heard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.membership.messages import Ready
from holdfast.membership.view_rules import Plan, Report


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """`plan` is None until all have reported."""

    reports: Mapping[str, Report]
    ready: Mapping[int, Mapping[str, Ready]]
    plan: Plan | None

    def has_gone_on(self, member: str, step: int) -> bool:
        """Whether that one's shards of this step, or of a later one, are done."""
        return any(member in ready for number, ready in self.ready.items() if number >= step)

    def has_applied(self, member: str, step: int) -> bool:
        """Whether that one had applied this step when the view began, or is given a later state in it."""
        report, plan = self.reports.get(member), self.plan
        if plan is None or report is None:
            return False
        return (plan.step if member in plan.fetches else report.next or 0) > step

    def came_with(self, member: str, step: int) -> bool:
        """Whether that one was given the state of this step or a later one: in this view, or in one before."""
        if self.plan is not None and member in self.plan.fetches:
            return True
        report = self.reports.get(member)
        return report is not None and report.given >= step
