"""What a machine waits for, and how long it does so after it was asked to leave. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.core.waits import Wait, WaitKind
from holdfast.membership.doubting import bringers
from holdfast.membership.late import TIMES
from holdfast.membership.machine import Machine
from holdfast.membership.messages import End
from holdfast.membership.phases import Phase

NAMED_MAX: Final = 4
_ORDER: Final = {
    phase: place
    for place, phase in enumerate(
        (Phase.FORMING, Phase.RECEIVING, Phase.COMPUTING, Phase.STOPPING, Phase.GATHERING, Phase.REDUCING)
    )
}
LEAVE_S: Final = 1.5  # without a word from those that it waits for


def wait_of(machine: Machine) -> Wait:
    """While its loop has nothing to do and nothing has come for a moment."""
    kind, why, whom = _find(machine)
    if kind is WaitKind.PEERS and machine.is_knocking:
        kind = WaitKind.VIEW  # whether those can be reached at all is being found out, and has consequences of its own
    return Wait(kind, why, whom, machine.quiet_since, (machine.next or 0) * len(_ORDER) + _ORDER.get(machine.phase, 0))


def _find(machine: Machine) -> tuple[WaitKind, str, tuple[str, ...]]:
    view, phase = machine.view, machine.phase
    if phase is Phase.WAITING:
        return WaitKind.VIEW, f"to be taken in ({machine.reason})", ()
    if view is None or phase in (Phase.TURNING, Phase.BEHIND):
        return WaitKind.VIEW, "for the next view" if phase is Phase.TURNING else f"to catch up ({machine.reason})", ()
    if phase is Phase.BROKEN:
        first = machine.proposer()
        if first and first != machine.me:
            return WaitKind.PEERS, f"for {first} to propose the next view", (first,)
        return WaitKind.VIEW, f"for the next view ({machine.reason})", ()
    if machine.searching:
        return WaitKind.STORAGE, "for storage, to look for a checkpoint", ()
    whom = _missing(machine)
    if not whom:
        return WaitKind.NOTHING, "for nothing that it knows of", ()
    what = {
        Phase.FORMING: "to say where they stand in view" if len(whom) > 1 else "to say where it stands in view",
        Phase.RECEIVING: "to send the mean of step",
        Phase.STOPPING: "to say whether to stop before step",
        Phase.GATHERING: "to be ready in step",
        Phase.COMPARING: "to compare the state of step",
        Phase.REDUCING: "to add up step",
        Phase.COMPUTING: "to load the state of step",
    }.get(phase, "in step")
    number = view.number if phase is Phase.FORMING else machine.step_here
    return WaitKind.PEERS, f"for {names(whom)} {what} {number}", whom


def _missing(machine: Machine) -> tuple[str, ...]:
    """The members of the view whose word is missing, in what this one is in; none: nobody's."""
    members = machine.view.members if machine.view else ()
    step, plan = machine.next or 0, machine.plan
    if machine.phase is Phase.COMPUTING:
        return machine.readers()
    if machine.phase is Phase.RECEIVING:
        return (plan.gives[machine.me],) if plan is not None and machine.me in plan.gives else ()
    if machine.phase is Phase.FORMING:
        missing = tuple(member for member in members if member not in machine._reports)
        return missing or tuple(member for member in members[:1] if member != machine.me)  # it looks for a checkpoint
    if machine.phase is Phase.STOPPING:
        return machine.stopping.wishes.unheard(step, members)
    if machine.phase in (Phase.GATHERING, Phase.COMPARING):
        heard = machine._ready.get(machine.step_here, {})
        needed = bringers(machine.plan, machine.view, machine.step_here) if machine.view else ()
        return tuple(member for member in needed if member not in heard)
    return tuple(member for member in members if member not in machine._done.get(step, ()))


def names(whom: Sequence[str]) -> str:
    more = len(whom) - NAMED_MAX
    return ", ".join(whom[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def left_in_vain(machine: Machine, asked_at: float, now: float) -> End | None:
    """Asked to leave, or to stop, a worker ends the step first. What it waits for may not come: then it goes as it is.

    What it has not applied the others can do again. A step whose shards take long is waited for longer.
    """
    patience_s = max(LEAVE_S, TIMES * machine.expected_s() if any(machine.paces.values()) else 0.0)
    if now - max(asked_at, machine.quiet_since) < patience_s:
        return None
    kind, reason = ("left", "asked to leave") if machine.leave_asked else ("stopped", machine.ledger.stop)
    _, why, _ = _find(machine)
    return End(kind, f"{reason}; it was waiting {why}", save=machine.checkpoints and machine.next is not None)
