"""Every wait, every event and what keeps memory alive: without that line, training comes to other bits or to an error.

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
ALONE, CARRIED, GIVEN = (
    "one worker",
    "two workers and a library that takes the device's memory",
    "a state that is given",
)


@dataclass(frozen=True)
class Mutant:
    module: str
    line: str
    instead: str = "pass"
    when: str = LATE
    waits: bool = False  # what is noticed is that the loop's thread waits
    where: str = ALONE


MUTANTS = {
    "sums are copied before they are added": Mutant(
        COPIES, "self._stream.wait_stream(torch.accelerator.current_stream(self.device))"
    ),
    "no event after what comes down": Mutant(COPIES, "event.record(stream)"),
    "nobody asks the event": Mutant(COPIES, "if not self._here and self._event.query():", "if not self._here:"),
    "nobody waits for the event": Mutant(COPIES, "self._event.synchronize()"),
    "a state is read before it is there": Mutant(COPIES, "stream.wait_event(mark)"),
    "no event where a state was taken": Mutant(COPIES, "event.record(torch.accelerator.current_stream(device))"),
    "what is copied is not kept": Mutant(
        COPIES, "return Download(found, tensors, event)", "return Download(found, (), event)"
    ),
    "the worker speaks before all has come": Mutant(
        "holdfast.engine.computed",
        "if self._unsaid is not None and self._gradients.is_brought():",
        "if self._unsaid is not None:",
    ),
    "sums are not put where peers read them": Mutant(
        "holdfast.engine.bringing", "self._slots.put(slot, sums.layout, next(arrived))", "next(arrived)"
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
        'parameter.copy_(on(state["parameters"][name], parameter.device))',
        'parameter.copy_(state["parameters"][name])',
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
    "what is moved is not kept": Mutant(CARRIER, "self._given = given ", "self._given = NOTHING ", where=CARRIED),
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
    workers, path = (2, "process-group") if where == CARRIED else (1, "auto")
    body = partial(mutated, mutant, body) if mutant else body
    return list(forked(body, workers=workers, path=path, deadline_s=200.0).values())


@pytest.fixture(scope="module")
def right() -> dict[str, Any]:
    """By where a mutant is seen: what comes without it."""
    return {}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_line_it_is_noticed(device: torch.device, right: dict[str, Any], name: str) -> None:
    mutant = MUTANTS[name]
    where = mutant.where
    if where not in right:
        (outcome, *_) = run(LATE, where)
        assert outcome.value and not any(outcome.value["waits"]), outcome.error
        assert where != CARRIED or outcome.value["more"] == ["cable"]
        right[where] = outcome.value
    outcomes = run(mutant.when, where, mutant)
    for outcome in outcomes:
        assert "is 0 times in" not in outcome.error and "in apply" not in outcome.error, outcome.error
    found = [outcome.value for outcome in outcomes]
    if mutant.waits:
        assert all(one and any(one["waits"]) and one["digest"] == right[where]["digest"] for one in found), outcomes
    else:
        assert any(not one or differs(one, right[where]) for one in found), "nobody noticed"


def differs(found: dict[str, Any], right: dict[str, Any]) -> bool:
    return bool(found["digest"] != right["digest"] or found.get("more") != right.get("more"))
