"""Judges which workers of a host hang, from what has been seen of each, and which of them are to be ended. Pure.

It is given the heartbeats at every look, then what the kernel says of those that it asks about. Invariants:
- time in which it did not look itself (the host was frozen, it was given no processor) counts for nobody's silence;
- a thread stands still only for as long as beats came that saw it so;
- nobody is ended unless another member on this host is well and has the state, or others live elsewhere and it has
  hung for long: one that hangs still has its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from holdfast.detection.beat import Activity, Beat
from holdfast.detection.progress import FINE, SLOW_S, Level, Limits, Sight, Suspicion, patience, suspect

GAP_S_MAX = 0.5  # of its own: a longer one is an absence
BUSY_SHARE = 0.05  # of a processor: less is what a worker's heart and its lease take
MEASURE_S = 1.0  # over so long at least: the kernel counts in hundredths of a second
MOVES_S = 1.0  # who was seen to get on within it does
_WITNESSES = (Activity.WAITING, Activity.ENDED)  # it has come to the end of what it had to do


@dataclass(frozen=True)
class Process:
    """What the kernel says: a letter, and the processor time of the process and its children."""

    state: str = "S"
    cpu_s: float = 0.0


@dataclass
class _Worker:
    beat: Beat
    silent_s: float = 0.0
    still_s: float = 0.0
    inside_s: float = 0.0  # this activity
    asked_s: float = 0.0  # since when the kernel is asked about it
    cpu_s: float | None = None  # of the process, then
    computes: bool = False
    state: str = "S"
    suspicion: Suspicion = FINE
    reported: tuple[int, str] | None = None  # the activity in which it was called hung, and why it was spared

    @property
    def is_well(self) -> bool:
        """It waits for the others, or gets on. Who stands still may hang as well, and be called so a moment later."""
        beats = self.silent_s < MOVES_S or self.computes
        return beats and (self.beat.activity in _WITNESSES or self.beat.at - self.beat.moved_at < MOVES_S)


@dataclass(frozen=True)
class HangVerdict:
    worker: str
    beat: Beat
    suspicion: Suspicion
    kill: bool
    spared: str = ""  # why it is not


@dataclass
class HangJudge:
    limits: Limits
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _looked_at: float | None = None

    def observe(self, beats: Mapping[str, Beat], now: float) -> set[str]:
        """Take the newest beat of every worker. Returns those that the kernel should be asked about."""
        gap_s = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), GAP_S_MAX)
        self._looked_at = now
        for gone in self._workers.keys() - beats.keys():
            del self._workers[gone]
        asked = set()
        for name, beat in beats.items():
            known = self._workers.get(name)
            if known is None:
                self._workers[name] = _Worker(beat)
                continue
            self._take(known, beat, gap_s)
            limit_s = patience(beat, self.limits, computes=False, holds_up=True)
            if known.silent_s >= SLOW_S - GAP_S_MAX / 2 or (limit_s is not None and known.still_s >= limit_s / 2.0):
                asked.add(name)
                known.asked_s += gap_s
            else:
                known.asked_s, known.cpu_s, known.computes, known.state = 0.0, None, False, "S"
        return asked

    def _take(self, known: _Worker, beat: Beat, gap_s: float) -> None:
        before, known.beat = known.beat, beat
        if beat.number == before.number:
            known.silent_s += gap_s
            return  # nobody has looked at its thread meanwhile
        silent_s, known.silent_s = known.silent_s, 0.0
        same = beat.entered == before.entered
        known.inside_s = known.inside_s + gap_s + silent_s if same else 0.0
        # Of a silence that has just ended nobody knows what the thread did in it.
        still = same and beat.moved_at == before.moved_at and silent_s < SLOW_S
        known.still_s = known.still_s + gap_s + silent_s if still else 0.0

    def judge(
        self, processes: Mapping[str, Process], members: Collection[str], late: Collection[str] = ()
    ) -> list[HangVerdict]:
        """Who hangs, said once for each time. `members`: of the whole view, on all hosts; `late`: left behind by it."""
        for name, process in processes.items():
            if name in self._workers:
                self._measure(self._workers[name], process)
        for name, known in self._workers.items():
            known.suspicion = suspect(self._sight(name, known, members), self.limits)
        here = [name for name in self._workers if name in members]
        hung = [name for name in here if self._workers[name].suspicion.level == Level.HUNG]
        left = [name for name in self._workers if name in late and name not in members]
        left = [name for name in left if self._workers[name].suspicion.level == Level.HUNG]
        verdicts = []
        for name in (*hung, *left):
            known = self._workers[name]
            spared = self._spared(known, here, members) if name in hung else ""  # the others went on: they have it
            if spared is not None and known.reported != (known.beat.entered, spared):
                known.reported = (known.beat.entered, spared)
                verdicts.append(HangVerdict(name, known.beat, known.suspicion, not spared, spared))
        return verdicts

    def _measure(self, known: _Worker, process: Process) -> None:
        known.state = process.state
        if known.cpu_s is None or process.cpu_s < known.cpu_s:  # a child that ended took its time with it
            known.cpu_s, known.asked_s = process.cpu_s, 0.0
            return
        known.computes = process.cpu_s - known.cpu_s > BUSY_SHARE * max(known.asked_s, MEASURE_S)

    def _sight(self, name: str, known: _Worker, members: Collection[str]) -> Sight:
        hang_s = self.limits.hang_s
        return Sight(
            beat=known.beat,
            silent_s=known.silent_s,
            still_s=known.still_s,
            state=known.state,
            computes=known.computes,
            holds_up=hang_s is not None
            and any(
                other.beat.activity == Activity.WAITING and other.inside_s >= hang_s
                for key, other in self._workers.items()
                if key != name and key in members
            ),
        )

    def _spared(self, known: _Worker, here: list[str], members: Collection[str]) -> str | None:
        """ "": end it. A sentence: why not. None: not yet."""
        if len(members) <= 1:
            return "it is the only member, and has the only state"
        unsuspected = [self._workers[name] for name in here if self._workers[name].suspicion.level < Level.SUSPECT]
        others = [other for other in unsuspected if other.beat.has_state]
        if any(other.is_well for other in others):
            return ""
        if len(here) == len(members):
            return None if others else "no other member is seen to be well and to have the state"
        # The rest is on other hosts. They may share what this one waits for, and look the same: be slow to lose all.
        hang_s = self.limits.hang_s
        return "" if hang_s is not None and max(known.silent_s, known.still_s) >= hang_s else None

    def still_hung(self, verdict: HangVerdict, beat: Beat | None) -> bool:
        """Whether nothing has changed for it since. If something has, it can be called hung again."""
        before = verdict.beat
        if beat is not None:
            silent = beat.number == before.number
            still = beat.entered == before.entered and beat.moved_at == before.moved_at
            if silent or (still and verdict.suspicion.standing):
                return True
        if verdict.worker in self._workers:
            self._workers[verdict.worker].reported = None
        return False

    def suspicion(self, worker: str) -> Suspicion:
        known = self._workers.get(worker)
        return FINE if known is None else known.suspicion

    def waits_s(self, worker: str) -> float:
        """How long it has waited for others; 0 if it does not."""
        known = self._workers.get(worker)
        return known.inside_s if known is not None and known.beat.activity == Activity.WAITING else 0.0
