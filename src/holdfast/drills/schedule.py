"""Plan and seed -> which fault comes when, for how long, to whom. Pure: the same plan and seed give the same list.

Times count from the moment when all workers train. Outages (of the network, the ledger, the storage, a full disk) come
one after another, with time between them. While the ledger or the network is away nobody is killed or stopped, and
around a flipped bit neither: the membership cannot change then, or two things would be drilled as one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.drills.plan import DrillPlan

JITTER = 0.25  # of the period: kills that come like clockwork would always hit the same part of a step
AFTER_OUTAGE_S = 2.0  # until somebody is killed again
CORRUPTION_S = 8.0  # around a flipped bit: until it is found
KEPT_APART = ("partition", "ledger-down", "corrupt")  # what kills and stops keep away from


@dataclass(frozen=True, order=True)
class Planned:
    """`target` counts workers, or hosts where a host is meant; -1: the fault has none."""

    at_s: float
    kind: str
    target: int = -1
    duration_s: float = 0.0
    detail: str = ""

    @property
    def end_s(self) -> float:
        return self.at_s + self.duration_s

    def sentence(self) -> str:
        lasting = f" for {self.duration_s:g} s" if self.duration_s else ""
        who = {"partition": f" of host {self.target + 1}", "ledger-down": ""}.get(
            self.kind, f" of worker {self.target}"
        )
        return f"{self.kind}{who if self.target >= 0 else ''}{f' ({self.detail})' if self.detail else ''}{lasting}"


@dataclass
class DoneFault:
    """A fault that was done. Times are seconds since 1970, as in the logs."""

    planned: Planned
    at: float
    what: str
    step: int  # the newest that was applied before
    view: int
    victims: tuple[str, ...] = ()
    ended_at: float | None = None  # of an outage, when it was over
    note: str = ""


def draw(plan: DrillPlan) -> tuple[Planned, ...]:
    """All faults of the drill, by time."""
    rng = random.Random(f"drill {plan.seed}")  # a string: the same in every version of Python
    outages = _outages(plan, rng)
    apart = [one for one in outages if one.kind in KEPT_APART]
    faults = [*outages, *_kills(plan, rng, apart), *_stops(plan, rng, apart)]
    faults += [Planned(0.0, "slow", slow.worker, plan.for_s, f"{slow.times:g}x") for slow in plan.slow]
    return tuple(sorted(faults))


def _outages(plan: DrillPlan, rng: random.Random) -> list[Planned]:
    """Laid end to end in a drawn order, with the time that is left over drawn for the gaps between them."""
    wanted = [
        ("partition", plan.partition_s, plan.hosts),
        ("ledger-down", plan.ledger_down_s, 0),
        ("storage-down", plan.storage_down_s, 0),
        ("disk-full", plan.disk_full_s, 0),
    ]
    windows = [(kind, lasting, targets) for kind, lasting, targets in wanted if lasting]
    if plan.corrupt:
        windows.append(("corrupt", 0.0, plan.workers))
    rng.shuffle(windows)
    free_s = plan.for_s - plan.windows_s
    weights = [rng.uniform(0.5, 1.5) for _ in range(len(windows) + 1)]
    faults, at_s = [], 0.0
    for (kind, lasting, targets), weight in zip(windows, weights, strict=False):
        at_s += free_s * weight / sum(weights)
        target = rng.randrange(targets) if targets else -1
        faults.append(Planned(round(at_s, 3), kind, target, lasting, plan.corrupt if kind == "corrupt" else ""))
        at_s += lasting
    return faults


def _kills(plan: DrillPlan, rng: random.Random, apart: list[Planned]) -> list[Planned]:
    """One in every period, somewhere around its end."""
    if not plan.kill_every_s:
        return []
    faults = []
    for number in range(1, int(plan.for_s / plan.kill_every_s + 1e-9) + 1):
        at_s = min(plan.for_s, plan.kill_every_s * (number + rng.uniform(-JITTER, JITTER)))
        target = rng.randrange(plan.workers)
        if not _is_near(at_s, apart):
            faults.append(Planned(round(at_s, 3), "kill", target))
    return faults


def _stops(plan: DrillPlan, rng: random.Random, apart: list[Planned]) -> list[Planned]:
    """Spread over the time, one in each part of it; where an outage takes the whole part, there is none."""
    faults = []
    for number in range(plan.stop):
        part_s = plan.for_s / plan.stop
        tries = [part_s * (number + rng.uniform(0.1, 0.9)) for _ in range(20)]
        target = rng.randrange(plan.workers)
        at_s = next((one for one in tries if not _is_near(one, apart)), None)
        if at_s is not None:
            faults.append(Planned(round(at_s, 3), "stop", target))
    return faults


def _is_near(at_s: float, apart: list[Planned]) -> bool:
    return any(one.at_s - 1.0 <= at_s <= one.at_s + _keep_clear_s(one) for one in apart)


def _keep_clear_s(one: Planned) -> float:
    return CORRUPTION_S if one.kind == "corrupt" else one.duration_s + AFTER_OUTAGE_S
