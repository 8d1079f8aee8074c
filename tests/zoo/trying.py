"""Three runs of one shape, each in bounded time: alone, with three workers, and with two kills and a scale to five.

Faults are placed by a gate in the script, not by time: workers wait in the first shard of a step, some of them die
there, and steps then pass one by one until every newcomer is a member.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from alone import ALONE_S, HUNG, Alone
from shape import EXACT, NOT_PROMISED, REFUSED, TOLD, Shape

from holdfast.core.errors import EXIT_INEXACT
from holdfast.testing.observed_run import Failed, ObservedRun, send

RUN_S = 240.0  # far more than any takes on a quiet machine; those of the nightly run may take thrice as long
FIRST_KILL, SECOND_KILL, LAST_HELD = 3, 5, 34  # steps
PACE_S = 0.15  # between steps, while newcomers are on their way
BLAME = "test the memory and processors"
NOTICED = "the script's workers differ in"  # by the comparison of states, if it comes before the end
INEXACT = f"is not exact, and ends with exit code {EXIT_INEXACT}: "  # the last line of a run that knows it
OPTIONS = ["--stuck-after", "none"]  # a shard may stand at the gate
KEPT = 3000  # characters of output, for a failure

DIFFERENT, BLAMED, FAILED = "different", "blamed", "failed"

ALONE = Alone()


@dataclass
class Result:
    """What a shape turned out to be, and why."""

    shape: Shape
    kind: str = ""
    digests: dict[str, str] = field(default_factory=dict)  # by the run
    said: str = ""
    seconds: float = 0.0

    @property
    def expected(self) -> bool:
        if self.shape.expected == NOT_PROMISED:
            return self.kind in (EXACT, TOLD, REFUSED)
        return self.kind == self.shape.expected


class Ended(Exception):
    """A run came to another end than its weights."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind
        self.said = said


def judge(shape: Shape, home: Path) -> Result:
    """Run it in all three ways, unless the first ones say enough. Leaves no process behind."""
    started = time.monotonic()
    script = home / f"{shape.name.replace('-', '_')}.py"
    script.write_text(shape.script())
    result = Result(shape)
    try:
        result.digests["alone"] = alone(shape, script)
    except Ended as end:
        result.digests["alone"] = result.kind = end.kind
        result.said = end.said
    try:
        if result.kind in ("", REFUSED):  # a refusal, too, must be that of `holdfast run`, with its exit code
            result.digests["3 workers"] = three(shape, script)
            result.digests["with faults"] = faulty(shape, script)
            result.kind = EXACT if len(set(result.digests.values())) == 1 else DIFFERENT
    except Ended as end:
        result.kind, result.said = end.kind, end.said
    result.seconds = time.monotonic() - started
    return result


def alone(shape: Shape, script: Path) -> str:
    code, said = ALONE.run(script)
    if code == HUNG:
        raise Ended(HUNG, f"alone it was not over after {ALONE_S:.0f} s\n{said[-KEPT:]}")
    if code != "0":
        raise ended(shape, said, refused="holdfast.core.errors.ConfigError" in said)
    return said.rpartition("DIGEST ")[2].split()[0]


def three(shape: Shape, script: Path) -> str:
    return watched(shape, script, "quiet", lambda run: None)


def faulty(shape: Shape, script: Path) -> str:
    return watched(shape, script, "faulty", faults)


class Gated(ObservedRun):
    """A run whose workers wait in the first shard of the step that the gate names."""

    def __init__(self, script: Path, name: str, patience_s: float) -> None:
        self.patience_s = patience_s
        self.gate = script.with_name(f"gate-{name}")
        variables = {"ZOO_GATE": str(self.gate), "OMP_NUM_THREADS": "1"}
        super().__init__(script.parent, name, ["--workers", "3", *OPTIONS], [str(script)], variables=variables)

    def open_below(self, step: int) -> None:
        partial = self.gate.with_suffix(".new")
        partial.write_text(str(step))
        partial.replace(self.gate)

    def at(self, step: int) -> list[str]:
        """The living members that have come to this step's gate."""
        places = {member: Path(f"{self.gate}-at-{member}") for member in self.living_members()}
        return [member for member, place in places.items() if place.exists() and place.read_text() == str(step)]


def faults(run: Gated) -> None:
    """Two deaths, each of a worker that stands in a shard, and a scale to five."""
    for step in (FIRST_KILL, SECOND_KILL):
        run.open_below(step)
        run.wait(partial(held, run, step), f"workers at step {step}", run.patience_s)
        send(run.pids[run.at(step)[0]], signal.SIGKILL)
    run.scale(5)
    deadline = time.monotonic() + run.patience_s
    for step in range(SECOND_KILL + 1, LAST_HELD + 1):
        run.look()
        if len(run.living_members()) == 5:
            return
        if step == LAST_HELD:
            break
        run.wait(lambda: coming(run) or len(run.living_members()) == 5, "newcomers", deadline - time.monotonic())
        run.open_below(step)
        run.wait(lambda step=step: bool(run.at(step)), f"step {step}", deadline - time.monotonic())
        time.sleep(PACE_S)
    raise Failed(f"at step {LAST_HELD} the members were {run.living_members()}")


def held(run: Gated, step: int) -> bool:
    """Whether a worker stands at the gate, beside another: that one may have no shards, since waiting looks slow."""
    return bool(run.at(step)) and len(run.living_members()) >= 2


def coming(run: Gated) -> bool:
    """Whether somebody is registered who is not a member yet: a step lets them in."""
    return bool(set(run.living_registered()) - set(run.members))


def watched(shape: Shape, script: Path, name: str, meanwhile: Callable[[Gated], None]) -> str:
    """The digest of a run, with what is done to it meanwhile."""
    run = Gated(script, name, RUN_S * (3 if shape.nightly else 1))
    run.open_below(0 if meanwhile is faults else 1_000_000)
    run.start()
    try:
        meanwhile(run)
        run.open_below(1_000_000)
        digest = run.finish(run.patience_s)
    except Failed as error:
        raise failure(shape, run, str(error)) from error
    finally:
        run.end()
    if BLAME in run.log():
        raise Ended(BLAMED, run.log()[-KEPT:])
    return digest


def failure(shape: Shape, run: Gated, why: str) -> Ended:
    assert run.agent is not None
    code = run.agent.poll()
    if code is not None:
        return ended(shape, run.log(), refused=code == 2, inexact=code == EXIT_INEXACT)
    for pid in list(run.pids.values()):
        send(pid, signal.SIGUSR1)
    time.sleep(1.0)
    return Ended(HUNG, f"{why}\n{run.log()[-3 * KEPT :]}")


def ended(shape: Shape, said: str, *, refused: bool, inexact: bool = False) -> Ended:
    """Of a run that ended by itself and in failure. `refused`, `inexact`: by its exit code."""
    if BLAME in said:
        return Ended(BLAMED, said[-KEPT:])
    if inexact and INEXACT in said.strip().splitlines()[-1]:
        return Ended(TOLD if shape.expected == NOT_PROMISED else DIFFERENT, said.strip().splitlines()[-1])
    sentence = NOTICED if shape.expected == NOT_PROMISED else shape.sentence
    if refused and sentence and sentence in " ".join(said.split()):
        return Ended(REFUSED, sentence)
    return Ended(FAILED, said[-KEPT:])
