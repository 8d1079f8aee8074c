"""The rules of views and steps as pure functions: who proposes what, how members get level, who computes what.

Each decision carries its reason, so that a log can say why and a test can ask why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.core.words import View, host_of
from holdfast.membership.late import SPENT, not_back, still_late
from holdfast.membership.reach import Pair, Roll, separate, severed


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker that has a live lease. `created` is the ledger revision of its registration."""

    id: str
    created: int


@dataclass(frozen=True)
class LedgerState:
    """What the ledger says, as this worker last saw it."""

    view: View | None = None
    view_revision: int = 0
    registered: tuple[Registered, ...] = ()  # by `created`
    dead: frozenset[str] = frozenset()  # whose process an agent saw end
    size: int = 1
    stop: str = ""
    done: bool = False
    rolls: Mapping[str, Roll] = field(default_factory=dict)  # what workers found when they knocked at the others
    rewound: bool = False  # since the view was formed: what its members have is not the run's state any more

    @cached_property
    def ids(self) -> frozenset[str]:
        """Who has a live lease. A dead worker's last message may still register it: that does not make it alive."""
        return frozenset(worker.id for worker in self.registered if worker.id not in self.dead)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the machine waits for what. All are upper bounds on politeness, none is needed for safety."""

    start_wait_s: float = 30.0  # for the other workers of a new run
    grace_s: float = 0.5  # for the ledger to say who died, after a connection broke
    propose_again_s: float = 1.0  # after a proposal of which nothing was heard
    abandon_s: float = 60.0  # until a worker that nobody saw die is given up together with its state
    turn_s: float = 0.2  # between two steps, for the ledger to show the view that is due; then training goes on
    linger_s: float = 10.0  # in a view that has a successor, for the step's end
    silent_s: float = 3.0  # without a word from peers that are waited for; then they are knocked at
    knock_s: float = 5.0  # for a peer to answer a knock; a busy one does, a slow network may take its time
    knock_again_s: float = 5.0  # between knocks, while there is no word and no view
    knock_again_s_max: float = 15.0  # the same for a worker outside, which must reach all members to be taken in
    roll_call_s: float = 2.0  # for the others' rolls, before somebody who is alive is left out
    rest_s: float = 5.0  # until a slot whose joiner could not be reached is tried again, doubled each time
    rest_s_max: float = 300.0
    late_s: float = 0.0  # for one whose shards are missing, at least; then the others go on without it. 0: for ever


@dataclass(frozen=True, slots=True)
class Patience:
    """A wait for workers that nobody saw die. It ends when they come, are said to be dead, or its time is over.

    Or, where none are named, for new ones.
    """

    workers: tuple[str, ...]
    left_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A view to propose, or None; and why."""

    view: View | None
    reason: str
    patience: Patience | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a member stands whose group is gone, as far as that decides what comes next."""

    has_state: bool = True
    leaving: frozenset[str] = frozenset()  # who said so; that is why the group is gone
    waited_s: float = 0.0  # since it was
    knocked: bool = True  # since it was gone, at all other members, and every answer is there or overdue
    roll_call_s: float = 0.0  # since somebody was first missed
    rolls: Mapping[str, Roll] = field(default_factory=dict)  # of this view's members, mine among them
    newcomers: frozenset[str] = frozenset()  # members that were not in the last view that came together
    resting: frozenset[str] = frozenset()  # registered, but not to be taken in now


@dataclass(frozen=True, slots=True)
class Report:
    """What a member tells the others when a view forms: where it stands."""

    next: int | None  # the first step it has not applied; None: it has no state yet
    held: tuple[int, ...] = ()  # shards of that step whose sums it holds
    kept: bool = False  # it still has the reduced gradient of step next-1
    digest: str = ""  # of its initial state, where `next` is None
    former: tuple[str, ...] = ()  # who took part once, was left out, and is not known to have ended
    searched: bool = False  # it has looked for a checkpoint, and there is none
    pace: float = 0.0  # seconds that a shard takes it; 0: not known yet
    size: int = 0  # where steps need not be whole: how many workers the run is meant to have, as it has heard
    doubt: bool = False  # it was offered states that differ, or has heard so: see doubting.py
    over: str = ""  # its script wants to stop before that step, and why: see stopping.py
    given: int = -1  # the step of the state that it was given: what is in that, it has not been through itself


@dataclass(frozen=True, slots=True)
class Plan:
    """How the members of a view get level, and the shards of the step they then work on."""

    step: int
    assignment: Mapping[str, tuple[int, ...]]
    gives: Mapping[str, str] = field(default_factory=dict)  # who lacks step-1's gradient -> who sends it
    fetches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # who lacks state -> who has it
    evicted: Mapping[str, str] = field(default_factory=dict)  # who cannot be made level -> why
    compares: bool = False  # before anybody fetches, those who have the state compare it: see doubting.py


def propose_next(me: str, ledger: LedgerState, standing: Standing, timing: Timing) -> Decision:
    """What `me`, a member of the ledger's view whose group is gone, should propose to come after it.

    The first member that is still registered proposes. One without state may leave out another only when that
    one is known to be dead, or to have none either: a worker that merely hangs may be the last that has the
    training's state.
    """
    view = ledger.view
    assert view is not None and me in view.members
    ids = ledger.ids
    live = [member for member in view.members if member in ids and member not in standing.leaving]
    surplus = frozenset(live[max(1, ledger.size) :])  # the run was made smaller
    live = live[: max(1, ledger.size)]
    if not live or live[0] != me:
        return Decision(None, f"waiting for {live[0] if live else 'the ledger'} to propose view {view.number + 1}")
    gone = [member for member in view.members if member not in live]
    if not gone and standing.waited_s < timing.grace_s:
        return Decision(None, "waiting for the ledger to say who was lost")
    if not gone and not standing.knocked:
        return Decision(None, "knocking at the other members")
    cut = severed(live, standing.rolls)
    apart: tuple[str, ...] = ()
    if cut:
        late = [member for member in live if member != me and member not in standing.rolls]
        if late and standing.roll_call_s < timing.roll_call_s:
            return Decision(None, f"waiting for {late[0]} to say whom it reaches")
        apart = _left_out(me, live, cut, standing, timing)
        if not apart:
            return Decision(None, f"{me} is cut off; waiting for one of the others to say that it has the state")
        live = [member for member in live if member not in apart]
    if not standing.has_state and standing.waited_s < timing.abandon_s:
        unsure = [member for member in (*gone, *apart) if member != me and not _stateless(member, ledger, standing)]
        if unsure:
            reason = f"waiting for {unsure[0]}, which may have the state of the training"
            return Decision(None, reason, Patience(tuple(unsure), timing.abandon_s - standing.waited_s))
    room = 0 if apart else max(0, ledger.size - len(live))
    joining = _joiners(ledger, view, standing.resting)[:room]
    reason = _reason(gone, apart, joining, standing.leaving | surplus)
    return Decision(_following(ledger, (*live, *joining), reason), reason)


def _left_out(
    me: str, live: Sequence[str], cut: frozenset[Pair], standing: Standing, timing: Timing
) -> tuple[str, ...]:
    """Who is left out so that the others can all reach each other; empty: wait, the state would be lost.

    I may be the one that is cut off. Then the others go on without me; but not before one of them has said that it
    has the training's state, if I have it.
    """
    stateless = {id for id, roll in standing.rolls.items() if standing.has_state and not roll.has_state}
    late = frozenset(member for member in live if member in standing.newcomers or member in stateless)
    apart = separate(live, cut, late)
    if me not in apart or not standing.has_state:
        return apart
    if any(standing.rolls[member].has_state for member in live if member in standing.rolls and member not in apart):
        return apart
    if standing.waited_s < timing.abandon_s:
        return ()
    return separate(live, cut, frozenset(member for member in live if member != me))


def _stateless(member: str, ledger: LedgerState, standing: Standing) -> bool:
    roll = standing.rolls.get(member)
    return member in ledger.dead or (roll is not None and not roll.has_state)


def _joiners(ledger: LedgerState, view: View, resting: frozenset[str]) -> list[str]:
    """Who could be taken in, in the order in which they came."""
    barred = {*view.members, *resting, *ledger.dead, *not_back(ledger)}
    return [worker.id for worker in ledger.registered if worker.id not in barred]


def propose_planned(me: str, ledger: LedgerState, resting: frozenset[str]) -> Decision:
    """What `me`, a member whose group works, should propose: the view without those whose lease is gone, with joiners.

    It is agreed on while the training goes on; the members move to it between two steps.
    """
    view = ledger.view
    assert view is not None
    live = [member for member in view.members if member in ledger.ids]
    if not live or live[0] != me:
        return Decision(None, "the first member proposes")
    surplus = frozenset(live[max(1, ledger.size) :])
    live = live[: max(1, ledger.size)]
    joining = _joiners(ledger, view, resting)[: max(0, ledger.size - len(live))]
    members = (*live, *joining)
    if members == view.members:
        return Decision(None, "nothing changes")
    reason = _reason([member for member in view.members if member not in live], (), joining, surplus)
    return Decision(_following(ledger, members, reason), reason)


def propose_without(me: str, ledger: LedgerState, late: Sequence[str]) -> Decision:
    """What `me`, a member that waits for those who are late, should propose: to go on without them.

    The others must be as many at least: one that has lost its network misses everybody, and it is not they that are
    late.
    """
    view = ledger.view
    assert view is not None
    live = [member for member in view.members if member in ledger.ids and member not in late]
    live = live[: max(1, ledger.size)]
    if not live or live[0] != me:
        return Decision(None, "the first member that is not late proposes")
    if len(live) < len(late):
        return Decision(None, "fewer would go on than would be left behind")
    reason = f"{', '.join(late)} {'is' if len(late) == 1 else 'are'} late"
    return Decision(_following(ledger, tuple(live), reason, late), reason)


def _following(ledger: LedgerState, members: tuple[str, ...], reason: str, late: Sequence[str] = ()) -> View:
    assert ledger.view is not None
    return View(ledger.view.number + 1, members, reason, still_late(ledger, members, late))


def _reason(gone: Sequence[str], apart: Sequence[str], joining: Sequence[str], leaving: frozenset[str]) -> str:
    parts = []
    lost = [member for member in gone if member not in leaving]
    left = [member for member in gone if member in leaving]
    if lost:
        parts.append(f"lost {', '.join(lost)}")
    if apart:
        parts.append(f"not everyone reaches {', '.join(apart)}")
    if left:
        parts.append(f"{', '.join(left)} left")
    if joining:
        parts.append(f"{', '.join(joining)} joined")
    return "; ".join(parts) or "a connection broke"


def propose_first(me: str, ledger: LedgerState, *, waited_s: float, timing: Timing) -> Decision:
    """What a worker outside the view should propose: a view of new workers, if nobody is left to take it in."""
    ids = ledger.ids
    view = ledger.view
    if view is not None:
        left = [member for member in view.members if member in ids]
        if left:
            return Decision(None, f"waiting for {left[0]} to take it in")
        unsure = [member for member in view.members if member not in ledger.dead]
        if unsure and not ledger.rewound and waited_s < timing.abandon_s:
            reason = f"waiting for {unsure[0]}, which may still be alive and have the state of the training"
            return Decision(None, reason, Patience(tuple(unsure), timing.abandon_s - waited_s))
    away = not_back(ledger)
    outside = [worker.id for worker in ledger.registered if worker.id in ids and worker.id not in away]
    if not outside or outside[0] != me:
        return Decision(None, "waiting for the first worker to propose a view")
    if len(outside) < ledger.size and waited_s < timing.start_wait_s:
        reason = f"waiting for workers: {len(outside)} of {ledger.size} are here"
        return Decision(None, reason, Patience((), timing.start_wait_s - waited_s))
    number = view.number + 1 if view else 1
    reason = f"all workers of view {view.number} are lost" if view else "the run starts"
    members = tuple(outside[: ledger.size])
    return Decision(View(number, members, reason, still_late(ledger, members)), reason)


def reconcile(view: View, reports: Mapping[str, Report], shards: int) -> Plan:
    """How the members of a new view get level. Every member computes the same plan from the same reports."""
    positions = {member: reports[member].next for member in view.members}
    known = [position for position in positions.values() if position is not None]
    if not known:
        return _origin(view, reports, shards)
    step = max(known)
    ahead = [member for member in view.members if positions[member] == step]
    givers = [member for member in ahead if reports[member].kept]
    gives: dict[str, str] = {}
    evicted: dict[str, str] = {}
    fetches: dict[str, tuple[str, ...]] = {}
    for member in view.members:
        position = positions[member]
        if position is None:
            fetches[member] = tuple(ahead)
        elif position == step - 1 and givers:
            gives[member] = givers[len(gives) % len(givers)]
        elif position < step:
            evicted[member] = f"it is at step {position}, and nobody holds what leads from there to step {step}"
    held = {member: frozenset(reports[member].held) if member in ahead else frozenset() for member in view.members}
    able = [member for member in view.members if member not in fetches and member not in evicted]
    return Plan(step, assign(shards, able, held), gives, fetches, evicted)


def must_search(view: View, reports: Mapping[str, Report]) -> bool:
    """Nobody has state, and the first member has not looked for a checkpoint yet."""
    return all(report.next is None for report in reports.values()) and not reports[view.members[0]].searched


def _origin(view: View, reports: Mapping[str, Report], shards: int) -> Plan:
    """Nobody has state: the first member's initial state is the run's. Who was left behind has none any more."""
    digest = next((reports[member].digest for member in view.members if reports[member].digest != SPENT), SPENT)
    if digest == SPENT:
        return Plan(0, {}, evicted=dict.fromkeys(view.members, "nobody has the state that the run began with"))
    same = [member for member in view.members if reports[member].digest == digest]
    fetches = {member: tuple(same) for member in view.members if member not in same}
    return Plan(0, assign(shards, same, {}), {}, fetches, {})


def assign(
    shards: int, able: Sequence[str], held: Mapping[str, frozenset[int]] | None = None
) -> dict[str, tuple[int, ...]]:
    """Shards for each of `able`, as even as what they already hold allows. Ranges are contiguous where they can be.

    So are those of a host's workers taken together: their sums then combine into few nodes of the tree.
    """
    able = by_host(able)
    kept = {member: (held or {}).get(member, frozenset()) for member in able}
    missing = [shard for shard in range(shards) if not any(shard in have for have in kept.values())]
    wanted = dict.fromkeys(able, 0)
    for _ in missing:
        least = min(able, key=lambda member: len(kept[member]) + wanted[member])
        wanted[least] += 1
    result: dict[str, tuple[int, ...]] = {}
    start = 0
    for member in able:
        stop = start + wanted[member]
        result[member] = tuple(sorted(kept[member] | set(missing[start:stop])))
        start = stop
    return result


def by_host(members: Sequence[str]) -> list[str]:
    """Workers of one host side by side, hosts in the order of their first worker, ranks in order within one."""
    first: dict[str, int] = {}
    for rank, member in enumerate(members):
        first.setdefault(host_of(member), rank)
    return sorted(members, key=lambda member: first[host_of(member)])
