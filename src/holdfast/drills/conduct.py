"""A drill from beginning to end: the quiet run, the run with faults, the comparison, the report.

The quiet run comes first: it says how long the script trains, and whether it gets through at all. Everything happens in
a directory of its own, which is removed if the promises held.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.drills.catalogue import refuse_impossible
from holdfast.drills.checking import Outcome, Verdict, check
from holdfast.drills.figures import Figures, flat, measure, recovered_at
from holdfast.drills.ground import Ground, Run, events_of, parts_of, views_of
from holdfast.drills.injecting import LOOK_S, Injector
from holdfast.drills.plan import Plan
from holdfast.drills.report import Drill, write_json, write_report
from holdfast.drills.schedule import Done, draw
from holdfast.drills.trace import Entry, TraceReader
from holdfast.events.telling import count
from holdfast.testing.watched import LOG_SHOWN

START_S_MAX = 180.0  # until all workers train
HANGS_S = 180.0  # without a step: the run is given up
TIMED_OUT = 124
INTERRUPTED = 130

Look = Callable[[list[Entry]], bool]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `holdfast drill` was asked for."""

    plan: Plan
    script: tuple[str, ...]  # a script, or -m and a module, and the arguments
    report: Path
    json: Path | None = None
    keep: bool = False
    goodput_min: float = 0.0


def conduct(request: Request) -> int:
    """The exit code: 0 if the promises held, 1 if one did not, 130 after Ctrl-C."""
    plan = request.plan
    refuse_impossible(plan.kinds, hosts=plan.hosts)
    for path in (request.report, request.json):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"there is no directory for {path}", hint="make it first, or name another place")
    home = Path(tempfile.mkdtemp(prefix="holdfast-drill-"))
    conductor = Conductor(request, home)
    try:
        with _interruptible():
            code = conductor.go()
    except ConfigError:
        if not request.keep:
            shutil.rmtree(home, ignore_errors=True)
        raise
    if (code and conductor.judged) or request.keep:
        _say(f"the runs are in {home}")
    else:
        shutil.rmtree(home, ignore_errors=True)
    return code


@dataclass
class Conductor:
    request: Request
    home: Path
    judged: bool = False
    _began: float = 0.0  # on the monotonic clock
    _waiting: list[Done] = field(default_factory=list)  # for their recovery

    def go(self) -> int:
        plan, script = self.request.plan, list(self.request.script)
        schedule = draw(plan)
        with ExitStack() as stack:
            try:
                ground = stack.enter_context(Ground(plan, self.home, script))
                quiet = self._quiet(ground)
                self._check_length(quiet, schedule[0].at_s)
            except KeyboardInterrupt:
                _say("interrupted in the quiet run: nothing was injected, so there is no report")
                return INTERRUPTED
            injector = self._injector(ground)
            faulty, window = Outcome(), (time.time(), time.time())
            try:
                faulty, window = self._faulty(injector)
            except KeyboardInterrupt:
                window = (time.time() - (time.monotonic() - self._began), time.time()) if self._began else window
                faulty = _outcome(injector.run, injector.traces, None)
                _say("interrupted; ending what was started")
            finally:
                with _uninterruptible():
                    injector.end()
                    stack.close()
        return self._judge(quiet, faulty, injector, window)

    # ---- the quiet run

    def _quiet(self, ground: Ground) -> Outcome:
        plan = self.request.plan
        spares = f" and {count(plan.spares, 'spare')}" if plan.spares else ""
        where = f" on {plan.hosts} hosts" if plan.hosts > 1 else ""
        _say(f"first a quiet run of the same script, with {plan.workers} workers{spares}{where}")
        run, traces = ground.run("quiet"), TraceReader(ground.traces("quiet"))
        run.start()
        code = _let_run(run, traces)
        outcome = _outcome(run, traces, code)
        if code != 0:
            words = outcome.last_words.strip()
            raise ConfigError(
                f"the script does not get through a quiet run: exit code {code}\n{words}",
                hint="try it with `holdfast run --workers 2 script.py` first",
            )
        if not outcome.trace.entries or not outcome.digest:
            raise ConfigError(
                "the script ended without a step of training", hint="it has to call holdfast.join and run its steps"
            )
        commits = sorted(outcome.trace.commits().values())
        _say(f"quiet run: {count(len(commits), 'step')} in {commits[-1] - commits[0]:.1f} s, weights {outcome.digest}")
        return outcome

    def _check_length(self, quiet: Outcome, first_s: float) -> None:
        """All workers train at once from the first step in a full view on; faults count from there."""
        commits = sorted(quiet.trace.commits().values())
        lasts_s, for_s = commits[-1] - commits[0], self.request.plan.for_s
        if lasts_s <= first_s:
            raise ConfigError(
                f"the script trains for {lasts_s:.1f} s only, and the first fault comes after {first_s:.1f} s",
                hint="give it more steps, or ask for faults earlier",
            )
        if lasts_s < for_s:
            _say(f"the script trains for {lasts_s:.1f} s, so not all of the faults in {for_s:g} s will come")

    # ---- the run with faults

    def _injector(self, ground: Ground) -> Injector:
        run, traces = ground.run("faulty"), TraceReader(ground.traces("faulty"))
        return Injector(ground, run, "faulty", traces, draw(self.request.plan), self._tell)

    def _faulty(self, injector: Injector) -> tuple[Outcome, tuple[float, float]]:
        run, traces, plan = injector.run, injector.traces, self.request.plan
        run.start()
        _wait_for_all(run, traces, plan.workers)
        self._began, began = time.monotonic(), time.time()
        injector.start(self._began)
        _say(f"all {plan.workers} workers train; faults from now on, seed {plan.seed}")

        def look(fresh: list[Entry]) -> bool:
            self._tell_recoveries(injector, fresh)
            injector.look(time.monotonic())
            return injector.agent_is_away

        code = _let_run(run, traces, look)
        injector.end()
        for done in injector.done:
            if done.planned.kind == "corrupt" and (flipped := injector.flipped(done)):
                done.note = f"step {flipped[0]}, {flipped[1]}" if flipped[1] else ""
        outcome = _outcome(run, traces, code)
        outcome.damaged = _damaged(injector.ground.storage("faulty"))
        ended = min(time.time(), began + plan.for_s)
        return outcome, (began, max([ended, *(done.ended_at or done.at for done in injector.done)]))

    def _tell(self, text: str) -> None:
        _say(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def _tell_recoveries(self, injector: Injector, fresh: list[Entry]) -> None:
        self._waiting += injector.done[self._seen :]
        self._seen = len(injector.done)
        if not self._waiting or not fresh:
            return
        views, entries = views_of(injector.run), sorted(fresh, key=lambda entry: entry.at)
        for done in list(self._waiting):
            at = recovered_at(done, entries, views)
            if at is not None:
                self._waiting.remove(done)
                self._tell(f"  step {injector.traces.step}, {at - done.at:.2f} s after: {done.what.partition(' (')[0]}")

    _seen: int = 0

    # ---- what came of it

    def _judge(self, quiet: Outcome, faulty: Outcome, injector: Injector, window: tuple[float, float]) -> int:
        self.judged = True
        verdicts = check(quiet, faulty, injector.done, _indices(faulty.trace.plan))
        figures = measure(quiet, faulty, injector.done, began=window[0], ended=window[1])
        verdicts += self._bar(figures, faulty)
        if faulty.exit_code is not None and not injector.done:
            verdicts.append(Verdict("faults", False, "the script was over before the first fault"))
        drill = Drill(
            plan=self.request.plan,
            script=self.request.script,
            planned=tuple(injector.schedule),
            done=tuple(injector.done),
            verdicts=tuple(verdicts),
            figures=figures,
            flat=flat(figures, quiet, faulty, injector.done),
            events=faulty.events,
            began=window[0],
            ended=window[1],
            interrupted=faulty.exit_code is None,
        )
        write_report(drill, self.request.report)
        if self.request.json is not None:
            write_json(drill, self.request.json)
        for line in drill.lines():
            _say(line)
        _say(f"report: {self.request.report}")
        if drill.interrupted:
            return INTERRUPTED
        return 0 if drill.held else 1

    def _bar(self, figures: Figures, faulty: Outcome) -> list[Verdict]:
        least = self.request.goodput_min
        if not least or faulty.exit_code is None:
            return []
        reached = figures.goodput
        text = f"{reached:.3f}, and --goodput-min is {least:g}" if reached is not None else "too few steps to tell"
        return [Verdict("goodput", reached is not None and reached >= least, text)]


def _let_run(run: Run, traces: TraceReader, look: Look = lambda fresh: False) -> int:
    """Until its agents end, and `look` does not say that one is away. Returns the worst exit code.

    A run in which nothing moves is given up, as if `timeout` had ended it.
    """
    moved = time.monotonic()
    away = False
    while True:
        over = not away and _is_over(run)
        before = _heard(run)
        run.look()
        fresh = traces.look()
        away = look(fresh)
        if over:
            return max(_exit_codes(run))
        if fresh or _heard(run) > before:
            moved = time.monotonic()
        if time.monotonic() - moved > HANGS_S:
            return TIMED_OUT
        time.sleep(LOOK_S)


def _is_over(run: Run) -> bool:
    return all(agent is None or agent.poll() is not None for agent in _agents(run))


def _heard(run: Run) -> int:
    return sum(len(part.events) for part in parts_of(run))


def _agents(run: Run) -> list[Any]:
    return [part.agent for part in parts_of(run)]


def _exit_codes(run: Run) -> Iterator[int]:
    for agent in _agents(run):
        yield abs(agent.returncode) if agent is not None else 1


def _wait_for_all(run: Run, traces: TraceReader, workers: int) -> None:
    deadline = time.monotonic() + START_S_MAX
    while not _is_over(run) and time.monotonic() < deadline:
        run.look()
        traces.look()
        if len(run.members) >= workers and traces.begun.issuperset(run.members):
            return
        time.sleep(LOOK_S)
    raise ConfigError(
        f"{workers} workers never trained together: {_log(run)[-LOG_SHOWN:].strip()}",
        hint="the script may be too short: give it more steps, or ask for fewer workers",
    )


def _log(run: Run) -> str:
    try:
        return run.log()
    except OSError:
        return ""


def _outcome(run: Run, traces: TraceReader, code: int | None) -> Outcome:
    run.look()
    traces.look()
    return Outcome(traces.trace, list(events_of(run)), code, dict(run.digests), _log(run)[-LOG_SHOWN:])


def _indices(plan: Mapping[str, Any]) -> Callable[[int, int], list[int]] | None:
    if not plan:
        return None
    from holdfast.data.shards import ShardPlan  # loads torch

    return ShardPlan(**plan).validate().indices


def _damaged(storage: Path) -> str | None:
    """What is wrong with the newest checkpoint; None if there is none."""
    from holdfast.checkpoint.reading import list_checkpoints, verify
    from holdfast.checkpoint.storage.opening import open_storage

    try:
        place = open_storage(str(storage))
        newest = next((one.step for one in list_checkpoints(place) if one.committed), None)
        return None if newest is None else "; ".join(verify(place, newest))
    except HoldfastError as error:
        return str(error).partition("\n")[0]


def _say(text: str) -> None:
    print(f"drill | {text}", flush=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end a drill in order; a shell starts background jobs with Ctrl-C ignored."""

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = [signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _uninterruptible() -> Iterator[None]:
    """A second Ctrl-C must not leave processes behind."""
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
