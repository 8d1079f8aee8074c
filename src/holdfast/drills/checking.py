"""Did the promises hold? Compares a run with faults and a quiet one, promise by promise. Pure.

What is looked at: the digests of the weights in the `finished` events; the traces, in which every worker wrote after
every step which bits each tensor had and whose shards were added up; and the event logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from holdfast.drills.samples import of_sampler, uneven
from holdfast.drills.schedule import DoneFault
from holdfast.drills.suspicion import sentence, who_came_before
from holdfast.drills.trace import Trace, TraceEntry

Counted = tuple[tuple[str, tuple[int, ...]], ...]  # of each member, the shards that were added up
SAMPLES_MAX = 5_000_000  # counted one by one; of more, the shards are
NAMED_MAX = 3
SETTLE_S = 1.0  # after the ledger is gone; what was on its way may still count


@dataclass
class Outcome:
    """A run as it was seen: how it ended, and what it left behind."""

    trace: Trace = field(default_factory=Trace)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    exit_code: int | None = None  # None: it was not let to its end
    digests: Mapping[str, str] = field(default_factory=dict)  # of the workers that finished
    last_words: str = ""
    damaged: str | None = None  # what is wrong with the newest checkpoint; None: there is none, or nobody looked
    best: str = ""  # the step and the weights of the best checkpoint, or why there is none; empty: nobody looked

    @property
    def digest(self) -> str:
        """The one that all agree on, or empty."""
        found = set(self.digests.values())
        return found.pop() if len(found) == 1 else ""

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def liars(self) -> frozenset[str]:
        """Whose bits the others found wrong."""
        return frozenset(str(liar) for event in self.of_kind("corruption") for liar in event.get("liars", ()))

    @property
    def went_back_at(self) -> float:
        """When it last went back to a checkpoint; 0 if it never did."""
        return max((float(event["t"]) for kind in ("rewound", "resumed") for event in self.of_kind(kind)), default=0.0)

    def history(self) -> dict[int, TraceEntry]:
        """What became of each step: of a run that went back, what came after; never the word of one that was wrong."""
        since, liars = self.went_back_at, self.liars
        found: dict[int, TraceEntry] = {}
        for entry in sorted(self.trace.entries, key=lambda entry: (entry.at <= since, entry.at)):
            if entry.worker not in liars:
                found.setdefault(entry.step, entry)
        return found


@dataclass(frozen=True)
class PromiseVerdict:
    promise: str
    held: bool | None  # None: it could not be judged
    text: str


@dataclass(frozen=True)
class Difference:
    step: int
    tensors: tuple[str, ...]
    at: float  # when the drilled run applied that step
    workers: tuple[str, ...] = ()  # who was the first to differ

    def sentence(self, first_fault_at: float | None) -> str:
        others = len(self.tensors) - 1
        more = f" and {others} other tensor{'s' * (others > 1)}" if others else ""
        text = f"first different after step {self.step}, in {self.tensors[0]}{more}"
        if first_fault_at is None or self.at < first_fault_at:
            text += (
                ", before the first fault: the script itself does not give the same bits twice; look for the time of "
                "day, an unseeded generator or an operation that is not deterministic"
            )
        return text


def check(
    quiet: Outcome,
    faulty: Outcome,
    done: Sequence[DoneFault],
    indices: Callable[[int, int], list[int]] | None,
    lines: Sequence[str] = (),
) -> list[PromiseVerdict]:
    """`indices`: the samples of (step, shard), by the plan that the traces name; None: that is not looked at.

    `lines`: of the script, that change what may not travel with a snapshot.
    """
    if faulty.exit_code is None:
        return [PromiseVerdict("training went on", None, "the drill was interrupted; nothing is judged")]
    verdicts = [
        _finished(faulty),
        _exact(quiet, faulty, done, lines),
        _steps_once(quiet, faulty),
        _samples(quiet, faulty, indices),
    ]
    verdicts += [_nothing_undone(faulty), _one_view(faulty), *_ledger(faulty, done), *_corruption(faulty, done)]
    verdicts += _validation(quiet, faulty)
    if faulty.damaged is not None:
        verdicts.append(
            PromiseVerdict(
                "whole checkpoints", not faulty.damaged, faulty.damaged or "the newest one verifies at the end"
            )
        )
    return verdicts


def _validation(quiet: Outcome, faulty: Outcome) -> list[PromiseVerdict]:
    """What the script recorded outside its shards, and the model that was the best by it."""
    verdicts = []
    right, found = _recorded(quiet), _recorded(faulty)
    if right:
        wrong = [key for key, value in right.items() if found.get(key) != value]
        text = f"all {len(right)} values that were recorded outside the shards are the same"
        if wrong:
            step, name = wrong[0]
            text = (
                f"{name} at step {step} is {found.get(wrong[0], 'not there')}, and {right[wrong[0]]} in the quiet run"
            )
        verdicts.append(PromiseVerdict("same validation", not wrong, text))
    if quiet.best or faulty.best:
        same = quiet.best == faulty.best
        text = f"the best model is that of {quiet.best}" + ("" if same else f", and of {faulty.best} after the faults")
        verdicts.append(PromiseVerdict("same best model", same, text))
    return verdicts


def _recorded(outcome: Outcome) -> dict[tuple[int, str], str]:
    return {
        (int(event["step"]), str(name)): repr(value)
        for event in outcome.of_kind("recorded")
        for name, value in event["metrics"].items()
    }


def first_difference(quiet: Outcome, faulty: Outcome) -> Difference | None:
    """By any worker: one that was given too little differs before the others, who later add up what it computes."""
    right, since, liars = quiet.history(), faulty.went_back_at, faulty.liars
    later = [entry for entry in faulty.trace.entries if entry.at > since and entry.worker not in liars]
    looked_at = [entry for entry in (*faulty.history().values(), *later) if entry.step in right]
    wrong = [entry for entry in looked_at if entry.digests != right[entry.step].digests]
    if not wrong:
        return None
    first = min(wrong, key=lambda entry: (entry.step, entry.at))
    names = faulty.trace.tensors_that_differ(right[first.step].digests, first.digests)
    workers = tuple(sorted({entry.worker for entry in wrong if entry.step == first.step}))
    return Difference(first.step, tuple(names) or ("the list of tensors",), first.at, workers)


def _finished(faulty: Outcome) -> PromiseVerdict:
    name = "training went on"
    if faulty.exit_code == 0 and faulty.digests:
        return PromiseVerdict(name, True, "the script came to its end under the faults")
    for event in faulty.of_kind("script_mistake"):
        return PromiseVerdict(name, False, f"the script ended it: {event.get('reason')}; {event.get('hint')}")
    words = faulty.last_words.strip().splitlines()
    return PromiseVerdict(
        name, False, f"the run ended with exit code {faulty.exit_code}: {words[-1] if words else 'silent'}"
    )


def _exact(quiet: Outcome, faulty: Outcome, done: Sequence[DoneFault], lines: Sequence[str]) -> PromiseVerdict:
    difference = first_difference(quiet, faulty)
    first_fault_at = min((one.at for one in done), default=None)
    if difference is not None:
        text = f"not the weights of the quiet run: {difference.sentence(first_fault_at)}"
        if first_fault_at is not None and difference.at >= first_fault_at:
            came = who_came_before(difference.step, difference.workers, faulty.events)
            text += f"; {sentence(came, difference.step, lines)}" if came is not None else ""
        return PromiseVerdict("exact", False, text)
    if len(set(faulty.digests.values())) > 1:
        said = ", ".join(f"{worker} {digest}" for worker, digest in sorted(faulty.digests.items()))
        return PromiseVerdict("exact", False, f"the workers ended with different weights: {said}")
    if not faulty.digest:
        return PromiseVerdict("exact", False, "nobody finished, so there are no weights to compare")
    if faulty.digest != quiet.digest:
        return PromiseVerdict(
            "exact", False, f"after the last step: the weights are {faulty.digest}, and the quiet run's {quiet.digest}"
        )
    steps = len(faulty.history())
    return PromiseVerdict(
        "exact",
        True,
        f"weights {faulty.digest} in both runs; every tensor has the same bits after each of {steps} steps",
    )


def _steps_once(quiet: Outcome, faulty: Outcome) -> PromiseVerdict:
    name = "every step once"
    backs = sorted(float(event["t"]) for kind in ("rewound", "resumed") for event in faulty.of_kind(kind))
    views = {int(event["view"]): event.get("members", ()) for event in faulty.of_kind("view")}
    for worker, entries in sorted(faulty.trace.of_worker().items()):
        for before, after in pairwise(entries):
            if after.step == before.step + 1:
                continue
            if after.step <= before.step and any(at <= after.at for at in backs):
                continue  # the run went back, and says so
            if after.step > before.step and _was_out(worker, before, after, views):
                continue  # the others left it behind, and it came back with their state
            return PromiseVerdict(name, False, f"{worker} applied step {after.step} after step {before.step}")
    history, liars = faulty.history(), faulty.liars
    expected = set(range(len(quiet.history() or history)))  # of some runs only the digest is known
    if history.keys() != expected:
        wrong = sorted(history.keys() ^ expected)
        text = f"{len(history)} steps, and {len(expected)} in the quiet run; the first in one only is {wrong[0]}"
        return PromiseVerdict(name, False, text)
    since = faulty.went_back_at
    for entry in faulty.trace.entries:
        if entry.worker not in liars and entry.at > since and entry.digests != history[entry.step].digests:
            other = history[entry.step]
            tensors = faulty.trace.tensors_that_differ(entry.digests, other.digests)
            where = tensors[0] if tensors else "their tensors"
            text = f"{entry.worker} and {other.worker} differ after step {entry.step}, in {where}"
            return PromiseVerdict(name, False, text)
    workers = len(faulty.trace.of_worker())
    return PromiseVerdict(
        name, True, f"{len(expected)} steps, by {workers} workers in all; none was applied twice or left out by any"
    )


def _was_out(worker: str, before: TraceEntry, after: TraceEntry, views: Mapping[int, Sequence[str]]) -> bool:
    return any(worker not in views.get(number, (worker,)) for number in range(before.view + 1, after.view))


def _samples(quiet: Outcome, faulty: Outcome, indices: Callable[[int, int], list[int]] | None) -> PromiseVerdict:
    """Of each step, whose shards were added up; and which samples those are."""
    name = "every sample once"
    shards = int(faulty.trace.plan.get("shards", 0))
    counted: dict[int, dict[int, Counted]] = {}  # by step, by view
    since = faulty.went_back_at
    for entry in sorted(faulty.trace.entries, key=lambda entry: (entry.at <= since, entry.at)):
        if not entry.counted or (entry.at <= since and entry.step in counted):
            continue
        # Who is left behind may finish a step in its old view, and the others finish it in the next one.
        if counted.setdefault(entry.step, {}).setdefault(entry.view, entry.counted) != entry.counted:
            return PromiseVerdict(name, False, f"of step {entry.step} workers added up different shards")
    for step in sorted(faulty.history()):
        if step not in counted:
            return PromiseVerdict(name, False, f"of step {step} nobody says what was added up")
        for of_view in counted[step].values():
            added = sorted(shard for _, of_member in of_view for shard in of_member)
            if added != list(range(shards)):
                known = f"shards {added} were added up, not each of 0 to {shards - 1} once"
                return PromiseVerdict(name, False, f"of step {step} {known}")
    text = f"each of the {shards} shards of each step was added up once"
    if any(entry.ahead for entry in faulty.trace.entries):
        wrong = _other_samples(quiet, faulty)
        return PromiseVerdict(name, not wrong, wrong or f"{text}, with the samples that it has in the quiet run")
    plan = faulty.trace.plan
    if any(entry.samples for entry in faulty.history().values()):
        entries = [one for one in faulty.trace.entries if one.worker not in faulty.liars and one.at > since]
        wrong, found = of_sampler(quiet.history(), faulty.history(), entries, int(plan["length"]))
        return PromiseVerdict(name, not wrong, wrong or f"{text}, {found}")
    if whose := plan.get("sampler"):
        whose = "sampler" if whose is True else whose
        return PromiseVerdict(name, True, f"{text}; which samples these have is the {whose}'s word")
    if indices is None or len(counted) * int(plan.get("batch_size", 0)) > SAMPLES_MAX:
        return PromiseVerdict(name, True, text)
    wrong = uneven(counted.keys(), indices, plan)
    left = "; the rest that is no batch is left out" if plan["drop_last"] else ""
    return PromiseVerdict(
        name, not wrong, wrong or f"{text}; no sample is twice in an epoch, and none is missing{left}"
    )


def _other_samples(quiet: Outcome, faulty: Outcome) -> str:
    """Of an iterable: the first step whose samples are not those of the quiet run; empty: there is none."""
    expected = quiet.history()
    for step, entry in sorted(faulty.history().items()):
        if step in expected and entry.ahead != expected[step].ahead:
            return (
                f"step {step + 1} has other samples than in the quiet run: the iterable does not give the same when it "
                "is read again, or its position is not exact"
            )
    return ""


def _nothing_undone(faulty: Outcome) -> PromiseVerdict:
    """A drill leaves one worker of the view alive, so no committed step may be lost; but for what a liar spoiled."""
    resumed = faulty.of_kind("resumed")
    rewound = [event for event in faulty.of_kind("rewound") if not faulty.liars]
    if resumed and not faulty.liars:
        return PromiseVerdict(
            "nothing lost", False, f"the run went back to a checkpoint, of step {resumed[0].get('step')}"
        )
    if rewound:
        return PromiseVerdict("nothing lost", False, f"the run went back: {rewound[0].get('reason')}")
    spoiled = "; what the wrong bits had spoiled was undone" if faulty.went_back_at else ""
    return PromiseVerdict("nothing lost", True, f"no step was undone{spoiled}")


def _one_view(faulty: Outcome) -> PromiseVerdict:
    seen: dict[int, tuple[str, ...]] = {}
    for event in faulty.of_kind("view"):
        members = tuple(map(str, event.get("members", ())))
        if seen.setdefault(int(event["view"]), members) != members:
            return PromiseVerdict("no split brain", False, f"there were two views of number {event['view']}")
    return PromiseVerdict("no split brain", True, f"{len(seen)} views, one of each number")


def _ledger(faulty: Outcome, done: Sequence[DoneFault]) -> list[PromiseVerdict]:
    verdicts = []
    for one in done:
        if one.planned.kind == "ledger-down":
            until = one.ended_at or max((entry.at for entry in faulty.trace.entries), default=one.at)
            commits = faulty.trace.commits().values()
            steps = sum(one.at + SETTLE_S < at < until for at in commits)
            text = f"{steps} steps while the ledger was away for {until - one.at:.1f} s"
            verdicts.append(PromiseVerdict("static stability", steps > 0, text))
    return verdicts


def _corruption(faulty: Outcome, done: Sequence[DoneFault]) -> list[PromiseVerdict]:
    name = "wrong bits named"
    verdicts = []
    for one in done:
        if one.planned.kind != "corrupt":
            continue
        if not one.note:
            verdicts.append(
                PromiseVerdict(name, None, "nothing was flipped: the script was over, or has no such numbers")
            )
        elif faulty.liars == set(one.victims):
            step = min(int(event["step"]) for event in faulty.of_kind("corruption"))
            verdicts.append(PromiseVerdict(name, True, f"{one.note}; {one.victims[0]} was named at step {step}"))
        else:
            named = ", ".join(sorted(faulty.liars)[:NAMED_MAX]) or "nobody"
            verdicts.append(PromiseVerdict(name, False, f"{one.note} of {one.victims[0]}, and {named} was named"))
    return verdicts
