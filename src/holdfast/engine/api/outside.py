"""What a script does outside the shards, on all workers at the same place: record, stop, evaluate, gather.

A place is after the loop over a step's shards, or before, between and after the loops over steps. There the state is
the same on every worker and nobody changes the view: who is lost is noticed, and done without. Every wait here is for
members of the view, and ends when they have come to the same place, are lost, or have gone on without coming to it.

A worker that came later passes the loops that were over before: what was recorded there is in the state that it was
given, and it is told the same results again. Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.core.spending import WAITING
from holdfast.core.words import host_of
from holdfast.data.shards import ShardPlan
from holdfast.detection.beat import Activity
from holdfast.engine.api.evaluating import Chunks, Weighed, put_together
from holdfast.engine.api.position import Position
from holdfast.engine.api.records import Records
from holdfast.engine.collectives import Collectives
from holdfast.engine.worker import Worker
from holdfast.events import EventLog
from holdfast.membership.messages import ScriptPlace, StopAsked

TELL_S = 0.05  # results of an evaluation are told about so often
IDLE_S, IDLE_CHUNKS = 0.5, 4.0  # without news of a chunk for so long, and so many chunks' time, it is computed here too
TELLERS = 2
NOT_EVERYWHERE = (
    "run.stop was not called on every worker at the same place, so all of them end two steps later; "
    "decide on values that are the same everywhere: run.metrics, run.best or step.metrics"
)


class Outside:
    """See the module. `criterion`: of the checkpoint that is kept as the best, such as "val_loss:min"."""

    def __init__(
        self,
        position: Position,
        records: Records,
        worker: Worker,
        events: EventLog,
        *,
        plan: ShardPlan,
        modules: Sequence[torch.nn.Module],
        criterion: str,
    ) -> None:
        self._position = position
        self._records = records
        self._worker = worker
        self.sharing = worker.sharing
        self._events = events
        self._plan = plan
        self._modules = modules
        self._criterion = criterion
        self._base: tuple[int, int, int] = (-1, 0, 0)
        self._calls = 0  # at this place
        self._warned: set[str] = set()
        self.over = ""  # the script wants no further steps, on this worker and not on all of them
        self.collectives = Collectives(self)
        self.save_wanted = False  # the state after the step that is being applied is the best so far

    # ---- record

    def record(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        if not metrics:
            raise ConfigError("run.record was called with nothing", hint="run.record(val_loss=value)")
        place = self._next("run.record")
        key = _key(place)
        if self._position.passing():
            known = self._records.result(key)
            return dict(known) if isinstance(known, dict) else self._own(metrics)
        values = self._agree(place, metrics)
        step = place[0] + place[1]
        for name in sorted(values):
            self._records.add(name, values[name], step)
        if not place[1]:
            self._records.keep_result(key, values)
        best = bool(self._criterion) and self._criterion.rpartition(":")[0] in values
        best = best and self._records.is_new_best(self._criterion, step)
        if self._speaks():
            self._events.write("recorded", step=step, metrics=values, best=best)
        if place[1]:
            self.save_wanted |= best and self._worker.attendance.in_step
        else:
            self._worker.note_metrics(step, values)
        return values

    def _own(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """This worker's own values. A function is called for its value; None is left out."""
        values = {name: value() if callable(value) else value for name, value in metrics.items()}
        return {name: _number(name, value) for name, value in values.items() if value is not None}

    def _agree(self, place: ScriptPlace, metrics: Mapping[str, Any]) -> dict[str, float]:
        """The value of the first member that is there; all take it, or none.

        Said also where nobody else is there: who is lost may be level again in the next view, and come here then.
        """
        if not self._worker.attendance.in_step or self._worker.machine.view is None:
            return self._own(metrics)
        self.come_to(place, "run.record")
        own: dict[str, float] | None = None
        if not any(callable(value) for value in metrics.values()):
            own = self._own(metrics)
        values = None
        while values is None:
            first = self.first(place)
            if first is None:
                said = [items["d"] for items in self.sharing.at(place).values() if _is_values(items.get("d"))]
                own = self._own(metrics) if own is None and not said else own
                values = said[0] if said else own
            elif _is_values(found := self.sharing.at(place).get(first, {}).get("d")):
                values = found
            else:
                self._wait_for_first(first, place)
        assert values is not None
        values = {name: float(value) for name, value in values.items()}
        self._worker.share(place, {"d": values, "o": own})
        self.wait_for_all(place, "d", "run.record")
        for peer, items in self.sharing.at(place).items():
            self._compare(peer, own, items.get("o"), values)
        return values

    def _wait_for_first(self, first: str, place: ScriptPlace) -> None:
        """Until it has said its values, or another one is the first."""
        with self._waiting(f"{first} to come to run.record", [first]):
            while self.first(place) == first and not _is_values(self.sharing.at(place).get(first, {}).get("d")):
                self.wait_for([first], place, "run.record")

    def first(self, place: ScriptPlace) -> str | None:
        """Whose value counts; None: mine."""
        view = self._worker.machine.view
        assert view is not None
        others = self._others(place)
        before = view.members[: view.members.index(self._worker.machine.me)]
        return next((member for member in before if member in others), None)

    def _compare(self, peer: str, own: dict[str, float] | None, theirs: Any, values: Mapping[str, float]) -> None:
        if not own or not _is_values(theirs) or not theirs:
            return
        for name in values:
            if name in own and name in theirs and repr(own[name]) != repr(float(theirs[name])):
                self._warn(
                    name,
                    f"run.record({name}=...) got {own[name]!r} here and {theirs[name]!r} on {peer}: {values[name]!r}, "
                    "of the first worker, is taken on all; run.evaluate gives the same on every worker",
                )

    def takes_save(self) -> bool:
        """Whether the step that is applied now is to be saved."""
        wanted, self.save_wanted = self.save_wanted, False
        return wanted

    def look_back(self) -> None:
        """The script ends. If nothing was recorded under the name by which the best is chosen, that is a slip."""
        name, kept = self._criterion.rpartition(":")[0], self._worker.gradients.kept
        known = sorted({*self._records.newest, *(kept.metrics if kept is not None else ())})
        if name and name not in known and self._speaks():
            among = f"only {', '.join(known)}" if known else "nor anything else"
            text = f"--keep-best {self._criterion} has kept nothing: the script has not recorded {name!r}, {among}"
            self._warn("best", text)

    # ---- stop

    def stop(self, reason: str) -> None:
        if not isinstance(reason, str) or not reason:
            raise ConfigError(f"run.stop({reason!r:.40})", hint="say why in a few words: run.stop('val_loss rises')")
        base = self._enter("run.stop")
        if self._position.passing() or self._records.stop is not None:
            return
        step = base[0] + base[1]
        if not self._worker.attendance.in_step and len(self.members()) > 1:
            self.not_everywhere(reason)
            return
        self._worker.tell(StopAsked(step, reason))
        self._worker.drain()
        self._wait_for_stop(step, (*base, self._calls - 1))
        agreed = self._worker.machine.stopping.wishes.agreed(step, self.members())
        if agreed:
            self.end_after(step, agreed)

    def _wait_for_stop(self, step: int, place: ScriptPlace) -> None:
        """Until all others have asked for it too, are lost, or have passed this place: if not all have, the next step
        begins with the question (StepEngine.stops_here)."""

        def missing() -> tuple[str, ...]:
            return self._worker.machine.stopping.wishes.unheard(step, self._others(place))

        with self._waiting("the others to come to run.stop"):
            while (members := missing()) and not any(self.sharing.has_passed(one, place) for one in members):
                self.wait_for(members, place, "run.stop", refuse=False)

    def stops_before(self, step: int) -> str:
        """Why no further steps are taken, as all workers know; empty: this one is."""
        return self._records.stops_before(step)

    def not_everywhere(self, reason: str) -> None:
        """Others go on: all end two steps later, if this worker comes to the first of them."""
        self.over = reason
        self._warn("stop", NOT_EVERYWHERE)

    def end_after(self, step: int, reason: str) -> None:
        """All workers know: the loops over steps end when the run has had so many."""
        if self._records.stop is not None:
            return
        self._records.stop = (step, reason)
        self.over = ""
        if self._speaks():
            self._events.write("early_stop", step=step, reason=reason)

    # ---- evaluate

    def evaluate(
        self,
        dataset: Any,
        fn: Callable[[Any], Any],
        *,
        batch_size: int | None,
        prefix: str | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> dict[str, float]:
        chunks = Chunks(
            dataset,
            fn,
            batch_size=self._plan.samples_per_shard if batch_size is None else batch_size,
            seed=self._plan.seed,
            collate_fn=collate_fn,
            modules=self._modules,
        )
        place = self._next("run.evaluate")
        key = _key(place)
        known = self._records.result(key) if self._position.passing() else None
        if isinstance(known, dict):
            result = dict(known)
        else:
            result = put_together(self._measure(chunks, place))
            if not place[1] and not self._position.passing():
                self._records.keep_result(key, result)
        if prefix is None:
            return result
        named = {f"{prefix}{name}": value for name, value in result.items()}
        self.record(named)
        return named

    def _measure(self, chunks: Chunks, place: ScriptPlace) -> list[Weighed]:
        """All chunks: my own, those that others tell of, and those that nobody does."""
        found: dict[int, Weighed] = {}
        untold: dict[str, Any] = {}
        alone = not self._others(place) or self._position.passing()
        clock = self._worker.clock
        told_at = news_at = clock()
        took_s = 0.0
        pulse, was = self._worker.spending, self._worker.spending.activity
        if not alone:
            self.come_to(place, "run.evaluate")
        with chunks.evaluation():
            while len(found) < chunks.count:
                if not alone:
                    self._worker.listen(0.0)
                    self._check_same_call(place, "run.evaluate")
                    before = len(found)
                    self._hear(place, found, chunks.count)
                    news_at = clock() if len(found) > before else news_at
                now = clock()
                idle = now - news_at > max(IDLE_S, IDLE_CHUNKS * took_s)
                chunk = self._choose(place, found, chunks.count, idle=idle or alone)
                if untold and (chunk is None or now - told_at > TELL_S):
                    self._worker.share(place, untold)
                    untold, told_at = {}, now
                if chunk is None:
                    if len(found) < chunks.count:
                        with self._waiting("the others' part of the evaluation"):
                            self._worker.listen(TELL_S)
                    continue
                pulse.enter(was, pulse.step)
                found[chunk] = chunks.measure(chunk)
                took_s = max(took_s, clock() - now)
                news_at = clock()
                if not alone:
                    untold[str(chunk)] = found[chunk]
        if untold:
            self._worker.share(place, untold)
        if not self._position.passing():  # for who is level with us only in another view, and comes to this place then
            self.sharing.remember(place, {str(chunk): weighed for chunk, weighed in found.items()})
        return [found[chunk] for chunk in range(chunks.count)]

    def _choose(self, place: ScriptPlace, found: Mapping[int, Weighed], count: int, *, idle: bool) -> int | None:
        """The chunk that I compute next; None: the missing ones are under way elsewhere."""
        machine = self._worker.machine
        members = machine.view.members if machine.view is not None else (machine.me,)
        sharing = self.sharing
        others = [one for one in sharing.others() if not sharing.has_passed(one, place)]
        here = [one for one in members if one == machine.me or one in others]
        missing = [chunk for chunk in range(count) if chunk not in found]
        for chunk in missing:
            owner = members[chunk % len(members)]
            if owner not in here:
                owner = here[chunk // len(members) % len(here)]
            if owner == machine.me:
                return chunk
        if idle and missing:
            return missing[-1 - here.index(machine.me) % len(missing)]
        return None

    def _hear(self, place: ScriptPlace, found: dict[int, Weighed], count: int) -> None:
        for items in self.sharing.at(place).values():
            for name, told in items.items():
                if name.isdecimal() and int(name) < count and int(name) not in found:
                    try:
                        found[int(name)] = {str(one): (float(total), float(of)) for one, (total, of) in told.items()}
                    except (AttributeError, TypeError, ValueError):
                        continue  # nonsense: it is computed here

    # ---- gather, and other collectives: see engine/collectives.py

    def gather(self, value: Any) -> list[Any]:
        return self.collectives.each("run.gather", value)

    def arrive(self, what: str) -> tuple[ScriptPlace, bool]:
        place = self._next(what)
        in_step = self._worker.attendance.in_step
        return place, self._position.passing() or not in_step

    def share(self, place: ScriptPlace, items: Mapping[str, Any]) -> None:
        self._worker.share(place, items)

    def members(self) -> Sequence[str]:
        view = self._worker.machine.view
        return view.members if view is not None else (self.me(),)

    def me(self) -> str:
        return self._worker.machine.me

    # ---- places and waits

    def _enter(self, what: str) -> tuple[int, int, int]:
        if self._worker.ranks > 1:
            raise ConfigError(
                f"{what} does not go with groups of ranks yet",
                hint="use step.record and step.metrics, which are the same on every rank of every group",
            )
        self._position.arrive()
        base = self._position.place(what)
        if base != self._base:
            self._base, self._calls = base, 0
            self.sharing.forget_before(base[0])
        return base

    def _next(self, what: str) -> ScriptPlace:
        base = self._enter(what)
        self._calls += 1
        return (*base, self._calls - 1)

    def _others(self, place: ScriptPlace) -> list[str]:
        """The other members that may come to this place, or have been there: not who came with a later state."""
        sharing, known, state = self.sharing, self._worker.machine.others, place[0] + place[1]
        return [o for o in sharing.others() if not (known.came_with(o, state) and sharing.has_passed(o, place))]

    def come_to(self, place: ScriptPlace, what: str) -> None:
        """Who waits for me here, or elsewhere in vain, must know that I am at this call."""
        self._worker.share(place, {"call": what})

    def _check_same_call(self, place: ScriptPlace, what: str) -> None:
        """ConfigError if another worker's script is at another call: the two would wait for each other for ever."""
        for peer, items in self.sharing.at(place).items():
            if items.get("call", what) != what:
                raise ConfigError(
                    f"at step {place[0]} {self._worker.machine.me} called {what} and {peer} called {items['call']}",
                    hint="every worker makes the same calls in the same order: no `if run.leader:` around them",
                )

    def wait_for_all(self, place: ScriptPlace, item: str, what: str) -> None:
        """Until all others that are there have said this."""

        def missing() -> list[str]:
            return [one for one in self._others(place) if item not in self.sharing.at(place).get(one, {})]

        if missing():
            with self._waiting(f"the others to come to {what}"):
                while members := missing():
                    self.wait_for(members, place, what)

    def wait_for(self, members: Sequence[str], place: ScriptPlace, what: str, *, refuse: bool = True) -> None:
        """One wait. ConfigError if one of them has gone on without coming here, or is at another call."""
        if refuse:
            self._check_same_call(place, what)
        passed = next((one for one in members if self.sharing.has_passed(one, place)), None)
        if passed is not None and refuse:
            me, step = self._worker.machine.me, place[0]
            raise ConfigError(
                f"{what} was called at step {step} on {me}, and not on {passed}",
                hint="call it on every worker, not under `if run.leader:`; where only the leader is to compute the "
                "value, give a function: run.record(val_loss=compute)",
            )
        with self._waiting(f"{', '.join(members)} to come to {what}", members):
            self._worker.listen()

    @contextmanager
    def _waiting(self, what: str, whom: Sequence[str] = ()) -> Iterator[None]:
        """Say what for, and for whom if only they can end it; it is not this worker that hangs."""
        pulse, machine, waiting = self._worker.spending, self._worker.machine, self._worker.waiting
        was, machine.reason = pulse.activity, f"waiting for {what}"
        outermost = was is not Activity.WAITING
        if outermost:
            pulse.enter(Activity.WAITING, pulse.step)
        waiting.outside_steps(what, whom)
        try:
            with pulse.during(WAITING):
                yield
        finally:
            machine.reason = ""
            if outermost:
                waiting.inside_steps()
                pulse.enter(was, pulse.step)

    def _speaks(self) -> bool:
        """The first two workers of each host that are left write down what all know: one may die before it does.

        Every agent reads its own workers.
        """
        machine = self._worker.machine
        here = [one for one in (*self.sharing.others(), machine.me) if host_of(one) == host_of(machine.me)]
        members = machine.view.members if machine.view is not None else here
        return machine.me in [one for one in members if one in here][:TELLERS] or machine.me not in members

    def _warn(self, about: str, text: str) -> None:
        """Once for each thing."""
        if about not in self._warned:
            self._warned.add(about)
            self._events.write("warning", text=text)


def _key(place: ScriptPlace) -> str:
    """Of a place between loops, as the state keeps it."""
    return f"{place[2]}.{place[3]}"


def _is_values(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(one, (int, float)) for name, one in value.items()
    )


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} is a {type(value).__name__}, not a number", hint="record numbers: run.record(val_loss=loss.item())"
        ) from error
