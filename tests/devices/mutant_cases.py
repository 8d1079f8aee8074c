"""Waits, events and what keeps memory alive: without that line, training comes to other bits, to the error of a device
that was not waited for, or to a wait of the loop's thread. Any other end of a worker shows nothing, and fails here.

A mutant is made in a process that was forked for it, where the functions of a module get the code of its changed text.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from holdfast.state.snapshot import Holder
from tests.devices.trainings import LATE, Net, groups_of, train
from tests.harness import device as simulated
from tests.harness.forked import Outcome, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]
COPIES, CARRIER = "holdfast.devices.copies", "holdfast.reduce.carrier"
ALONE, CARRIED, GIVEN, COMPARED = (
    "one worker",
    "two workers and a library that takes the device's memory",
    "a state that is given",
    "three workers of two shards, who compare them",
)

GIVEN_BACK = "memory was given back while stream"  # the device, of memory that a stream was not waited for with
NOT_DONE = "Both events must be completed"  # the device, of a lap that was asked for before it was over


@dataclass(frozen=True)
class Mutant:
    module: str
    line: str
    instead: str = "pass"
    when: str = LATE
    waits: bool = False  # what is noticed is that the loop's thread waits
    says: str = ""  # what is noticed is this error; empty: it is other bits
    where: str = ALONE


MUTANTS = {
    "sums are copied before they are added": Mutant(
        COPIES, "self._stream.wait_stream(torch.accelerator.current_stream(self.device))", says=NOT_DONE
    ),
    "no event after what comes down": Mutant(COPIES, "event.record(stream)", says=GIVEN_BACK),
    "nobody asks the event": Mutant(
        COPIES, "if not self._here and self._event.query():", "if not self._here:", says=GIVEN_BACK
    ),
    "nobody waits for the event": Mutant(COPIES, "self._event.synchronize()", says=GIVEN_BACK),
    "a state is read before it is there": Mutant(COPIES, "stream.wait_event(mark)"),
    "no event where a state was taken": Mutant(COPIES, "event.record(torch.accelerator.current_stream(device))"),
    "what is copied is not kept": Mutant(
        COPIES, "return Download(found, tensors, event)", "return Download(found, (), event)", says=GIVEN_BACK
    ),
    "the worker speaks before all has come": Mutant(
        "holdfast.engine.computed",
        "if self._unsaid is not None and self._gradients.is_brought():",
        "if self._unsaid is not None:",
        says=NOT_DONE,
    ),
    "sums are not put where peers read them": Mutant(
        "holdfast.engine.bringing",
        "self._slots.put(slot, sums.layout, next(arrived))",
        "next(arrived)",
        says="ZeroDivisionError",
    ),
    "the mean goes up from memory that is not pinned": Mutant(
        COPIES, "memory.pin_memory().to(", "memory.to(", waits=True
    ),
    "a buffer is looked at where it is": Mutant(
        "holdfast.modes.buffers", "if self._waits:", "if not self._live:", waits=True
    ),
    "a metric is read at once": Mutant(
        "holdfast.engine.api.step", "and not value.is_cpu and", "and False and", waits=True
    ),
    "a parameter goes up from memory that is not pinned": Mutant(
        "holdfast.state.snapshot",
        'parts[name].copy_(on(state["parameters"][name], parts[name].device))',
        'parts[name].copy_(state["parameters"][name])',
        waits=True,
        where=GIVEN,
    ),
    "torch brings an optimizer's state up": Mutant(
        "holdfast.state.optimizer",
        "if not isinstance(value, dict) or device == CPU:",
        "if True:",
        waits=True,
        where=GIVEN,
    ),
    "nobody asks whether bytes have been moved": Mutant(
        CARRIER, "if not self._work.is_completed():", "if False:", where=CARRIED
    ),
    "nobody asks whether moved bytes are here": Mutant(
        CARRIER, "return self._coming is None or self._coming.is_here()", "return True", where=CARRIED
    ),
    "what is moved is not kept": Mutant(
        CARRIER, "self._given = given ", "self._given = NOTHING ", where=CARRIED, says=GIVEN_BACK
    ),
    "what comes down is copied on the stream that computes": Mutant(COPIES, "with stream:", "if True:"),
    "what comes down goes into memory that is not pinned": Mutant(
        COPIES, "device=CPU, pin_memory=True)", "device=CPU)", waits=True
    ),
    "batches are not in pinned memory": Mutant(
        "holdfast.data.loader",
        "self._put = pin_batch if pinned else align_batch",
        "self._put = align_batch",
        waits=True,
    ),
    "no event where a lap ends": Mutant(
        "holdfast.devices.laps", "event.record(torch.accelerator.current_stream(self._device))", says="must be recorded"
    ),
    "the worker speaks before all that it compares has come": Mutant(
        "holdfast.engine.bringing",
        "return self._coming is None and self._slots.downloads.is_idle()",
        "return self._coming is None",
        waits=True,
        where=COMPARED,
    ),
    "buffers of a shard stay in the next": Mutant("holdfast.modes.buffers", "self._dirty.update(range(len(live)))"),
}


def apply(mutant: Mutant) -> None:
    module = importlib.import_module(mutant.module)
    source = inspect.getsource(module)
    assert source.count(mutant.line) == 1, f"{mutant.line!r} is {source.count(mutant.line)} times in {mutant.module}"
    changed = ModuleType(module.__name__)
    vars(changed).update({name: value for name, value in vars(module).items() if name.startswith("__")})
    exec(compile(source.replace(mutant.line, mutant.instead), module.__file__ or "", "exec"), vars(changed))
    assert _give_code(module, changed, module.__name__) == 1


def _give_code(old: Any, new: Any, name: str) -> int:
    """How many functions are others now."""
    count = 0
    for key, value in vars(new).items():
        mine = vars(old).get(key)
        if isinstance(value, FunctionType) and isinstance(mine, FunctionType) and value.__module__ == name:
            if value.__code__.co_code != mine.__code__.co_code or value.__code__.co_consts != mine.__code__.co_consts:
                count += _differs(value, mine)
                mine.__code__ = value.__code__
        elif isinstance(value, type) and value.__module__ == name and isinstance(mine, type):
            count += _give_code(mine, value, name)
    return count


def _differs(one: FunctionType, other: FunctionType) -> int:
    """Functions within functions are other constants each time."""
    plain = [tuple(c for c in f.__code__.co_consts if not hasattr(c, "co_code")) for f in (one, other)]
    inner = [[c.co_code for c in f.__code__.co_consts if hasattr(c, "co_code")] for f in (one, other)]
    return int(one.__code__.co_code != other.__code__.co_code or plain[0] != plain[1] or inner[0] != inner[1])


def mutated(mutant: Mutant, body: Callable[[], Any]) -> Any:
    apply(mutant)
    return body()


def given() -> dict[str, Any]:
    """A worker's own state, taken and put back: how often it waited for the device when it was given it."""
    device = simulated.load()
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    holder = Holder(model, optimizer)
    model(torch.randn(8, 1, 4, 4).to(device)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    taken = holder.capture(1).copied().on_host()
    before = sum(simulated.blocked_here().values())
    holder.restore(taken, adopt=True)
    waits = [sum(simulated.blocked_here().values()) - before]
    assert holder.capture(1).digest() == taken.digest()
    return {"digest": "", "waits": waits}


def run(when: str, where: str, mutant: Mutant | None = None) -> list[Outcome]:
    body: Callable[[], Any] = given if where == GIVEN else partial(train, when, steps=4)
    if where == CARRIED:
        body = partial(train, when, steps=4, library=True, after=lambda run: groups_of(run.id))
    if where == COMPARED:
        body = partial(train, when, steps=4, shards=2)
    options: dict[str, Any] = {
        CARRIED: {"workers": 2, "path": "process-group"},
        COMPARED: {"workers": 3, "audit": 1.0, "audit_every": 1},
    }.get(where, {"workers": 1})
    body = partial(mutated, mutant, body) if mutant else body
    return list(forked(body, deadline_s=100.0, **options).values())


@pytest.fixture(scope="module")
def right() -> dict[str, Any]:
    """By where a mutant is seen: what comes without it."""
    return {}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_line_it_is_noticed(device: torch.device, right: dict[str, Any], name: str) -> None:
    mutant = MUTANTS[name]
    where = mutant.where
    if where not in right:
        outcomes = run(LATE, where)
        outcome = outcomes[0]
        assert all(one.value for one in outcomes), outcomes
        waiting_steps = max(sum(map(bool, one.value["waits"])) for one in outcomes)
        assert waiting_steps <= (where == COMPARED)  # there, one member in one early step
        assert where != CARRIED or outcome.value["more"] == ["cable"]
        right[where] = {**outcome.value, "waiting_steps": waiting_steps}
    outcomes = run(mutant.when, where, mutant)
    for outcome in outcomes:
        assert "is 0 times in" not in outcome.error and "in apply" not in outcome.error, outcome.error
    found = [outcome.value for outcome in outcomes]
    if mutant.waits:
        assert all(one and one["digest"] == right[where]["digest"] for one in found), outcomes
        waited = [sum(map(bool, one["waits"])) > right[where]["waiting_steps"] for one in found]
        assert any(waited) if where == COMPARED else all(waited), outcomes
    elif mutant.says:
        assert any(mutant.says in outcome.error for outcome in outcomes), outcomes
        # Its peers may hear only that it is gone. Whatever else ends a worker shows nothing.
        assert all(outcome.value or mutant.says in outcome.error for outcome in outcomes), outcomes
    else:
        assert all(found), outcomes
        assert any(differs(one, right[where]) for one in found), "nobody noticed"


def differs(found: dict[str, Any], right: dict[str, Any]) -> bool:
    return bool(found["digest"] != right["digest"] or found.get("more") != right.get("more"))
