"""A drill from beginning to end: the quiet run, the run with faults, the comparison, the report.

The quiet run comes first: it says how long the script trains, and whether it gets through at all. Everything happens in
a directory of its own, which is removed if the promises held.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from holdfast.core.errors import ConfigError
from holdfast.drills.by_time import ByTime
from holdfast.drills.catalogue import refuse_impossible
from holdfast.drills.checking import Outcome, PromiseVerdict, check
from holdfast.drills.engine import LOOK_S, Engine
from holdfast.drills.figures import Figures, flat, measure, recovered_at
from holdfast.drills.ground import RIG, Ground, setting_of
from holdfast.drills.nemesis import Nemesis
from holdfast.drills.plan import DrillPlan
from holdfast.drills.report import Drill, write_json, write_report
from holdfast.drills.schedule import DoneFault, Planned, draw
from holdfast.drills.suspicion import lines_to_look_at
from holdfast.drills.trace import TraceEntry, TraceReader
from holdfast.events.telling import count
from holdfast.script_check.conduct import first_look

CHECK_S_MAX = 60.0  # for a look at the script before
START_S_MAX = 180.0  # until all workers train
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class DrillRequest:
    """What `holdfast drill` was asked for."""

    plan: DrillPlan
    script: tuple[str, ...]  # a script, or -m and a module, and the arguments
    report: Path
    json: Path | None = None
    keep: bool = False
    goodput_min: float = 0.0


def conduct(request: DrillRequest) -> int:
    """The exit code: 0 if the promises held, 1 if one did not, 130 after Ctrl-C."""
    plan = request.plan
    refuse_impossible(plan.kinds, hosts=plan.hosts)
    for path in (request.report, request.json):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"there is no directory for {path}", hint="make it first, or name another place")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} is a directory", hint="name the file to write, such as drill.html")
    home = Path(tempfile.mkdtemp(prefix="holdfast-drill-"))
    conductor = Conductor(request, home)
    try:
        # Ctrl-C and SIGTERM end a drill in order; a shell starts background jobs with Ctrl-C ignored.
        with _handling(_interrupted):
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
    request: DrillRequest
    home: Path
    judged: bool = False
    _look: str = ""  # what a check says of the script before the drill
    _began: float = 0.0  # on the monotonic clock
    _began_at: float = 0.0  # in seconds since 1970
    _seen: int = 0  # of the faults that were done
    _waiting: list[DoneFault] = field(default_factory=list)  # for their recovery

    def go(self) -> int:
        plan, script = self.request.plan, list(self.request.script)
        schedule = draw(plan)
        with ExitStack() as stack:
            try:
                self._look = first_look(script, CHECK_S_MAX)
                _say(f"the script's first steps, computed again in other ways: {self._look}")
                ground = stack.enter_context(Ground(setting_of(plan), self.home, [*RIG, *script]))
                quiet = self._quiet(ground)
                self._check_length(quiet, schedule[0].at_s)
            except KeyboardInterrupt:
                _say("interrupted in the quiet run: nothing was injected, so there is no report")
                return INTERRUPTED
            engine, nemesis = self._prepare(ground)
            code: int | None = None
            try:
                self._wait_for_all(engine)
                engine.faults = ByTime(nemesis, engine.traces, schedule, self._began).faults()
                code = engine.go()
            except KeyboardInterrupt:
                _say("interrupted; ending what was started")
            finally:
                with _handling(signal.SIG_IGN):  # a second Ctrl-C must not leave processes behind
                    nemesis.end()
                    faulty = engine.outcome(code)
                    if code is not None:
                        self._look_into_storage(ground, faulty)
                    nemesis.note_flips()
                    stack.close()
        return self._judge(quiet, faulty, nemesis, schedule)

    # ---- the quiet run

    def _quiet(self, ground: Ground) -> Outcome:
        plan = self.request.plan
        spares = f" and {count(plan.spares, 'spare')}" if plan.spares else ""
        where = f" on {plan.hosts} hosts" if plan.hosts > 1 else ""
        _say(f"first a quiet run of the same script, with {plan.workers} workers{spares}{where}")
        engine = Engine(ground.run("quiet"), TraceReader(ground.traces("quiet")))
        engine.run.start()
        code = engine.go()
        outcome = engine.outcome(code)
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
        from holdfast.drills.checkpoints_left import best  # loads torch

        outcome.best = best(ground.storage("quiet"), plan.keep_best)
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

    def _prepare(self, ground: Ground) -> tuple[Engine, Nemesis]:
        run, traces = ground.run("faulty"), TraceReader(ground.traces("faulty"))
        nemesis = Nemesis(ground, run, "faulty", self._tell, lambda: traces.step)
        nemesis.ranks = self.request.plan.ranks
        engine = Engine(run, traces, nemesis)
        engine.told = lambda fresh: self._tell_recoveries(engine, nemesis, fresh)
        return engine, nemesis

    def _wait_for_all(self, engine: Engine) -> None:
        """Start it, until all workers train: the schedule's time begins."""
        run, traces, plan = engine.run, engine.traces, self.request.plan
        run.start()
        deadline = time.monotonic() + START_S_MAX
        while not (len(run.members) >= plan.workers and traces.begun.issuperset(run.members)):
            if run.over() or time.monotonic() > deadline:
                raise ConfigError(
                    f"{plan.workers} workers never trained together: {run.last_words().strip()}",
                    hint="the script may be too short: give it more steps, or ask for fewer workers",
                )
            time.sleep(LOOK_S)
            run.look()
            traces.look()
        self._began, self._began_at = time.monotonic(), time.time()
        _say(f"all {plan.workers} workers train; faults from now on, seed {plan.seed}")

    def _look_into_storage(self, ground: Ground, faulty: Outcome) -> None:
        from holdfast.drills.checkpoints_left import best, damaged

        faulty.damaged = damaged(ground.storage("faulty"))
        faulty.best = best(ground.storage("faulty"), self.request.plan.keep_best)

    def _tell(self, text: str) -> None:
        _say(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def _tell_recoveries(self, engine: Engine, nemesis: Nemesis, fresh: list[TraceEntry]) -> None:
        self._waiting += nemesis.done[self._seen :]
        self._seen = len(nemesis.done)
        if not self._waiting or not fresh:
            return
        views, entries = engine.run.views, sorted(fresh, key=lambda entry: entry.at)
        for done in list(self._waiting):
            at = recovered_at(done, entries, views)
            if at is not None:
                self._waiting.remove(done)
                self._tell(f"  step {engine.traces.step}, {at - done.at:.2f} s after: {done.what.partition(' (')[0]}")

    # ---- what came of it

    def _judge(self, quiet: Outcome, faulty: Outcome, nemesis: Nemesis, schedule: Sequence[Planned]) -> int:
        self.judged = True
        done = nemesis.done
        began = self._began_at or time.time()
        ended = max([min(time.time(), began + self.request.plan.for_s), *(one.ended_at or one.at for one in done)])
        lines = _lines_to_look_at(self.request.script[0])
        verdicts = check(quiet, faulty, done, _indices(faulty.trace.plan), lines)
        figures = measure(quiet, faulty, done, began=began, ended=ended)
        verdicts += self._bar(figures, faulty)
        if faulty.exit_code is not None and not done:
            verdicts.append(PromiseVerdict("faults", False, "the script was over before the first fault"))
        drill = Drill(
            plan=self.request.plan,
            script=self.request.script,
            planned=tuple(schedule),
            done=tuple(done),
            verdicts=tuple(verdicts),
            figures=figures,
            flat=flat(figures, quiet, faulty, done),
            events=faulty.events,
            began=began,
            ended=ended,
            interrupted=faulty.exit_code is None,
            first_look=self._look,
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

    def _bar(self, figures: Figures, faulty: Outcome) -> list[PromiseVerdict]:
        least = self.request.goodput_min
        if not least or faulty.exit_code is None:
            return []
        reached = figures.goodput
        text = f"{reached:.3f}, and --goodput-min is {least:g}" if reached is not None else "too few steps to tell"
        return [PromiseVerdict("goodput", reached is not None and reached >= least, text)]


def _lines_to_look_at(script: str) -> list[str]:
    """Of a script; of a module nobody knows here where it is."""
    try:
        return lines_to_look_at(Path(script).read_text(), Path(script).name) if script != "-m" else []
    except (OSError, UnicodeDecodeError):
        return []


def _indices(plan: Mapping[str, Any]) -> Callable[[int, int], list[int]] | None:
    if not plan or plan.get("sampler"):
        return None  # a sampler uses a sample as often as it likes
    from holdfast.data.shards import ShardPlan  # loads torch
    from holdfast.data.streams.stream import order_alone

    fields = {name: value for name, value in plan.items() if name != "stream"}
    if "stream" in plan:
        seed = plan["seed"] if plan["order_seed"] is None else plan["order_seed"]
        fields["arrangement"] = order_alone(plan["stream"], seed)
    return ShardPlan(**fields).validate().indices


def _say(text: str) -> None:
    print(f"drill | {text}", flush=True)


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt
