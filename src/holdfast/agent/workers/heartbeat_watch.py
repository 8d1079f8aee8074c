"""The agent's eye on its workers' hearts: a thread that reads all pages ten times a second and says who hangs.

Thread: `holdfast-heartbeat-watch` alone touches the pages and the judge. It collects the stacks of a worker that
hangs, looks once more, and puts `FoundHung` into the agent's inbox; ending a worker is the agent's. It talks to nobody
else, so that neither the ledger nor a disk keeps it from looking.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.agent.ledger_watch import LedgerAway, News
from holdfast.agent.settings import RunSettings
from holdfast.agent.workers.stacks import collect
from holdfast.agent.workers.standing_still import FoundHung, StandingStill
from holdfast.detection.beat import Beat
from holdfast.detection.hang_judge import HangJudge, HangVerdict, Process
from holdfast.detection.pages import FOLDER, Note, Page
from holdfast.detection.progress import Level, Limits, Sight, Suspicion, suspect
from holdfast.placement.proc import busiest_state, family_cpu_s, process_started

LOOK_S = 0.1
BUSY_SHARE = 0.1  # of a processor, at most, with however many workers
FIND_S = 1.0
STEPS_KEPT = 4096
LATE_STOPPED_S = 5.0  # where the others go on without who is late, there is time to see whether it wakes


@dataclass(frozen=True)
class Glance:
    """How a worker looks at the moment. `waits_s`: for so long it has waited for others."""

    level: Level
    step: int
    waits_s: float


def limits_of(settings: RunSettings) -> Limits:
    return Limits(
        stuck_s=settings.stuck_after_s or None,
        hang_s=settings.hang_after_s or None,
        # Not before the lease, which would be lost anyway, unless the kernel says that the process is stopped.
        silent_s=max(Limits().silent_s, settings.lease_s),
        # Where every rank takes part in every collective, nobody goes on without who is late.
        stopped_s=Limits().stopped_s if settings.horovod or not settings.late_after_s else LATE_STOPPED_S,
    )


def described_limits(described: Mapping[str, Any]) -> Limits:
    """Those that the run was started with, by its run.json."""
    default = Limits()
    return Limits(
        stuck_s=described.get("stuck_after_s", default.stuck_s) or None,
        hang_s=described.get("hang_after_s", default.hang_s) or None,
        silent_s=max(default.silent_s, float(described.get("lease_s") or 0.0)),
        stopped_s=LATE_STOPPED_S if described.get("late_after_s") else default.stopped_s,
    )


class HeartbeatWatch:
    """Looks until it is closed."""

    def __init__(self, run_dir: Path, limits: Limits, report: Callable[[FoundHung], None], *, host: str = "") -> None:
        self._folder = run_dir / FOLDER
        self.standing_still = StandingStill(host, report, may_end=limits.hang_s is not None)
        self._ledger_away = False
        self._report = report
        self._hang_judge = HangJudge(limits)
        self._pages: dict[str, Page] = {}
        self._beats: dict[str, Beat] = {}
        self._members: tuple[str, ...] = ()
        self._late: tuple[str, ...] = ()
        self._glances: Mapping[str, Glance] = {}  # replaced, never changed
        self._find_at = 0.0
        self._expected: set[str] = set()  # workers that have just been started
        self._steps: dict[str, int] = {}  # of those that died, until somebody asks
        self._guard = threading.Lock()  # over the pages that are open, and the two above
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat-watch", daemon=True)
        self._thread.start()

    def viewed(self, members: Iterable[str], late: Iterable[str] = ()) -> None:
        """A view holds: its members, on all hosts, and whom they left behind. Only those are judged; others wait, and
        leases tell of them."""
        self._members, self._late = tuple(members), tuple(late)

    def listening(self, post: Callable[[News], None]) -> Callable[[News], None]:
        """Hear on the way to `post` whether the ledger answers."""

        def both(news: News) -> None:
            self._ledger_away = isinstance(news, LedgerAway)
            post(news)

        return both

    def expect(self, worker: str) -> None:
        """A worker was started: its page is wanted as soon as it is there, since it may soon be gone."""
        with self._guard:
            self._expected.add(worker)

    def last_step(self, worker: str) -> int | None:
        """Of a worker that has died: the step that it was at; None if that is not known."""
        with self._guard:
            self._expected.discard(worker)
            page = self._pages.get(worker)
            if page is None:
                return self._steps.pop(worker, None)
            with suppress(OSError):
                return page.step()
        return None

    def glances(self) -> Mapping[str, Glance]:
        """Of the last look, for any thread."""
        return self._glances

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        wait_s = LOOK_S
        while not self._stopping.wait(wait_s):
            began = time.monotonic()
            with suppress(OSError):  # of a worker that ends just now
                self._look(began)
            wait_s = max(LOOK_S, (time.monotonic() - began) / BUSY_SHARE)
        with self._guard:
            for page in self._pages.values():
                page.close()
            self._pages.clear()

    def _look(self, now: float) -> None:
        if now >= self._find_at:
            self._find_at = now + FIND_S
            self._found(find_pages(self._folder, known=self._pages))
        elif self._expected:
            self._found(find_pages(self._folder, known=self._pages, wanted=tuple(self._expected)))
        for worker, page in self._pages.items():
            beat = page.read()
            if beat is not None:
                self._beats[worker] = beat
        processes = {}
        for worker in self._hang_judge.observe(self._beats, now):
            pid = self._pages[worker].note.pid
            state = busiest_state(pid)
            if state:
                processes[worker] = Process(state, family_cpu_s(pid))
            else:
                self._forget(worker)
        members, late, away = self._members, self._late, self._ledger_away
        for verdict in self._hang_judge.judge(processes, members, late):
            if verdict.worker in self._pages:
                self._conclude(verdict)
        self.standing_still.look(self._beats, self._pages, members, late, ledger_away=away, now=now)
        self._glances = {
            worker: Glance(self._hang_judge.suspicion(worker).level, beat.step, self._hang_judge.waits_s(worker))
            for worker, beat in self._beats.items()
        }

    def _found(self, pages: Mapping[str, Page]) -> None:
        with self._guard:
            self._pages |= pages
            self._expected -= pages.keys()

    def _forget(self, worker: str) -> None:
        with self._guard:
            page = self._pages.pop(worker)
            with suppress(OSError):
                self._steps[worker] = page.step()
            page.close()
            for old in list(self._steps)[:-STEPS_KEPT]:
                del self._steps[old]
        self._beats.pop(worker, None)
        self.standing_still.ended(worker)
        (self._folder / f"{worker}.json").unlink(missing_ok=True)

    def _conclude(self, verdict: HangVerdict) -> None:
        """Collect the stacks, which takes a moment, and look whether it still hangs."""
        page, suspicion = self._pages[verdict.worker], verdict.suspicion
        stacks = collect(page.note, thread=verdict.beat.thread)
        beat = page.read()
        if not self._hang_judge.still_hung(verdict, beat):
            return
        reason = suspicion.reason + (f"; it is left alone, since {verdict.spared}" if verdict.spared else "")
        fields = {
            "step": verdict.beat.step,
            "activity": verdict.beat.words,
            "seconds": suspicion.seconds,
            "phi": suspicion.phi,
            "reason": reason,
            "killed": verdict.kill,
            "stacks": stacks,
        }
        self._report(FoundHung(verdict.worker, fields, verdict.kill))


def find_pages(folder: Path, known: Mapping[str, Page], *, wanted: Sequence[str] | None = None) -> dict[str, Page]:
    """Those of living workers that are not known yet; `wanted`: only of these."""
    found = {}
    for path in folder.glob("*.json") if wanted is None else [folder / f"{worker}.json" for worker in wanted]:
        worker = path.name.removesuffix(".json")
        note = None if worker in known else Note.read(path)
        if note is None or process_started(note.pid) != note.started:
            continue
        try:
            found[worker] = Page(note)
        except OSError:
            continue  # it has just ended, or the kernel does not let us
    return found


def levels(run_dir: Path, limits: Limits, now: float) -> dict[str, tuple[Suspicion, Beat]]:
    """How each worker looks in this moment, without an agent's memory of how it looked before."""
    result = {}
    for worker, page in find_pages(run_dir / FOLDER, known={}).items():
        try:
            seen = level_of(page, limits, now)
            if seen is not None:
                result[worker] = seen
        finally:
            page.close()
    return result


def level_of(page: Page, limits: Limits, now: float) -> tuple[Suspicion, Beat] | None:
    """How the worker of this page looks in this moment; None if it has not beaten yet."""
    beat = page.read()
    if beat is None:
        return None
    sight = Sight(
        beat=beat,
        silent_s=max(0.0, now - beat.at),
        still_s=max(0.0, beat.at - beat.moved_at),
        state=busiest_state(page.note.pid),
    )
    return suspect(sight, limits), beat
