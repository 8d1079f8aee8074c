"""Runs that a person has written down: tests/simulator/scenarios/README.md has the language.

workers 2
loops 3 5
at step 4 kill w1
expect finished
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.harness.runtime.faults import ANYWHERE, BETWEEN_HOSTS
from tests.harness.runtime.process import Process
from tests.harness.runtime.schedule import Schedule, Violation
from tests.harness.runtime.scripts import Loop, Script
from tests.harness.runtime.world import World, quiet_outcome

SEEDS = 5  # each is played with so many orders of turns
NUMBER = r"(\d+(?:\.\d+)?)"
WORKER = r"(w\d+(?:@\w+)?)"
SETTINGS = {"workers": "workers", "spares": "spares", "hosts": "hosts", "seed": "seed"}
SCRIPT = {"shards": "shards", "evaluate every": "evaluates_every", "stop after": "stops_after"}


@dataclass(frozen=True)
class Act:
    """Something that happens by the clock, when the first worker has applied a step, or after a worker's event."""

    at_s: float | None
    at_step: int | None
    after: tuple[str, str] | None  # worker and event
    what: Callable[[World], object]


@dataclass
class Scenario:
    schedule: dict[str, Any] = field(default_factory=lambda: {"seed": 0, "workers": 2, "faults": 0})
    script: dict[str, Any] = field(default_factory=lambda: {"loops": ()})
    acts: list[Act] = field(default_factory=list)
    expected: list[tuple[str, Callable[[World], bool]]] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """ValueError names the line that makes no sense."""
        scenario = cls()
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.partition("#")[0].strip()
            if line and not any(act(scenario, line) for act in _READERS):
                raise ValueError(f"line {number} makes no sense: {raw.strip()!r}")
        return scenario

    def play(self, *, keep_trace: bool = False) -> World:
        """With several orders of turns. Violation if it does not come out as expected; the last world."""
        world = None
        for seed in range(self.schedule["seed"], self.schedule["seed"] + SEEDS):
            world = self._play(replace(Schedule(**self.schedule, script=Script(**self.script)), seed=seed), keep_trace)
        assert world is not None
        return world

    def _play(self, schedule: Schedule, keep_trace: bool) -> World:
        world = World(schedule, quiet_outcome(schedule.script), keep_trace=keep_trace)
        for act in self.acts:
            if act.after is not None:
                world.when_told.setdefault(act.after, []).append((act.at_s or 0.0, partial(act.what, world)))
            elif act.at_s is not None:
                world.timeline.at(act.at_s, partial(act.what, world))
            else:
                assert act.at_step is not None
                world.books.when_applied.setdefault(act.at_step, []).append(partial(act.what, world))
        try:
            world.run()
            for said, holds in self.expected:
                if not holds(world):
                    raise Violation(f"not as expected: {said}")
        except AssertionError as error:
            raise Violation(f"with seed {schedule.seed}: {error}\n" + "\n".join(world.lines or [])) from error
        return world


def _newest(world: World, name: str) -> Process:
    """The newest worker of a slot: `w1`, or `w1@alpha`."""
    slot, _, host = name.partition("@")
    found = [one for id, one in world.processes.items() if id.startswith(f"{slot}.") and id.partition("@")[2] == host]
    if not found:
        raise Violation(f"there is no {name}")
    return found[-1]


def _setting(scenario: Scenario, line: str) -> bool:
    for words, name in SETTINGS.items():
        if match := re.fullmatch(rf"{words} (\d+)", line):
            scenario.schedule[name] = int(match[1])
            return True
    for words, name in SCRIPT.items():
        if match := re.fullmatch(rf"{words} (\d+)", line):
            scenario.script[name] = int(match[1])
            return True
    if match := re.fullmatch(r"path (host|hosts|network)", line):
        scenario.schedule["path"] = match[1]
    elif match := re.fullmatch(r"checkpoints every (\d+)", line):
        scenario.schedule["save_every"] = int(match[1])
    elif match := re.fullmatch(rf"late after {NUMBER}s", line):
        scenario.schedule["late_s"] = float(match[1])
    elif match := re.fullmatch(rf"shards take {NUMBER} times", line):
        scenario.schedule["shards_take"] = float(match[1])
    elif line == "evaluate first":
        scenario.script["evaluates_first"] = True
    else:
        return False
    return True


def _loops(scenario: Scenario, line: str) -> bool:
    """`loops 3 5`, or one by one: `loop 8, break after 6, lines 1s, evaluates, records`."""
    if match := re.fullmatch(r"loops((?: \d+)+)", line):
        scenario.script["loops"] += tuple(Loop(int(until)) for until in match[1].split())
        return True
    match = re.fullmatch(r"loop (\d+)((?:, [^,]+)*)", line)
    if match is None:
        return False
    options: dict[str, Any] = {}
    for option in match[2].split(", ")[1:]:
        if left := re.fullmatch(r"break after (\d+)", option):
            options["left_after"] = int(left[1])
        elif takes := re.fullmatch(rf"lines {NUMBER}s", option):
            options["lines_s"] = float(takes[1])
        elif option in ("evaluates", "records"):
            options[option] = True
        else:
            return False
    scenario.script["loops"] += (Loop(int(match[1]), **options),)
    return True


def _act(scenario: Scenario, line: str) -> bool:
    if match := re.fullmatch(rf"{NUMBER}s after (w\d+\.\d+(?:@\w+)?) (\w+),? (.+)", line):
        what = _what(match[4])
        if what is not None:
            scenario.acts.append(Act(float(match[1]), None, (match[2], match[3]), what))
        return what is not None
    match = re.fullmatch(rf"at (?:step (\d+)|{NUMBER}s),? (.+)", line)
    what = _what(match[3]) if match is not None else None
    if match is None or what is None:
        return False
    at_step, at_s = (int(match[1]), None) if match[1] else (None, float(match[2]))
    scenario.acts.append(Act(at_s, at_step, None, what))
    return True


def _what(words: str) -> Callable[[World], object] | None:
    if match := re.fullmatch(r"scale to (\d+)(?: on (\w+))?", words):
        return partial(_scale, size=int(match[1]), host=match[2] or "")
    if match := re.fullmatch(rf"(\w+)(?: {WORKER})?(?: for {NUMBER}s)?", words):
        kind, worker, for_s = match[1], match[2], float(match[3]) if match[3] else None
        if kind in (*ANYWHERE, *BETWEEN_HOSTS):
            return lambda world: world.faults.do(kind, _newest(world, worker) if worker else world.living()[0], for_s)
    return None


def _scale(world: World, size: int, host: str) -> None:
    while world.agent.sizes[host] < size:
        world.agent.grow(host)


def _expect(scenario: Scenario, line: str) -> bool:
    if not line.startswith("expect "):
        return False
    holds = next(_expectations(line.removeprefix("expect ")), None)
    if holds is None:
        return False
    scenario.expected.append((line, holds))
    return True


def _expectations(words: str) -> Iterator[Callable[[World], bool]]:
    if words == "finished":
        yield lambda world: world.books.finishers > 0
    if match := re.fullmatch(r"(\d+) finished", words):
        count = int(match[1])
        yield lambda world: world.books.finishers == count
    if match := re.fullmatch(r"(at most |at least |)(\d+) views?", words):
        compare = {"at most ": int.__le__, "at least ": int.__ge__, "": int.__eq__}[match[1]]
        views = int(match[2])
        yield lambda world: bool(compare(len(world.books.views), views))
    if match := re.fullmatch(r"(w\d+\.\d+(?:@\w+)?) (\w+)", words):
        told = (match[1], match[2])
        yield lambda world: told in world.kinds
    if match := re.fullmatch(r"no (\w+)", words):
        never = match[1]
        yield lambda world: all(kind != never for _, kind in world.kinds)


_READERS: tuple[Callable[[Scenario, str], bool], ...] = (_setting, _loops, _act, _expect)
