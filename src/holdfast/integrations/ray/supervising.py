"""Which workers a launch on Ray starts, replaces and asks to leave, and how it ends. Pure: events in, actions out.

What the agent's policy is on one host, for workers that are actors anywhere, of which is known whether they live, how
their function ended, and, when the first one's has, whether the others are through with their loops. A hung worker is
found by the others, by its lease.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BACK_OFF_FIRST_S, BACK_OFF_MAX_S = 0.5, 30.0
RAISES_MAX = 3  # times that the function raised in one slot, one after the other: again would not help
STRAGGLE_S = 60.0  # for those that are in their loops without getting on, when one has come to the function's end
ROOM_S = 10.0  # without a place in the cluster, until it is said
ROOM_AGAIN_S = 300.0  # and said again


@dataclass(frozen=True)
class Start:
    slot: int


@dataclass(frozen=True)
class AskToLeave:
    slot: int


@dataclass(frozen=True)
class End:
    """Its worker has no part in the end any more."""

    slot: int


@dataclass(frozen=True)
class TellOfRoom:
    """The workers of these slots wait for a place in the cluster."""

    slots: tuple[int, ...]


@dataclass(frozen=True)
class RunEnd:
    """`slot`: whose failure it was."""

    outcome: str  # finished, stopped, failed
    reason: str = ""
    slot: int | None = None


Action = Start | AskToLeave | End | TellOfRoom | RunEnd


@dataclass
class _Slot:
    lives: bool = False
    asked: bool = False
    ended: bool = False
    through: bool = False  # its loop is at its end, and what the function does after that may take long
    tell_at: float = math.inf  # that it has no place yet
    raises: int = 0
    setbacks: int = 0
    start_at: float = 0.0


@dataclass
class Supervision:
    """Owned by the thread that launched."""

    workers: int
    restarts_max: int = 100
    restarts: int = 0
    stopping: str = ""
    done: bool = False
    _slots: list[_Slot] = field(default_factory=list)
    _step: int = -1  # the furthest that a worker has said it is at, since the first one returned
    _until: float = math.inf
    _end: RunEnd | None = None

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.workers)]

    # ---- what happens

    def got_on(self, slot: int) -> None:
        """Its worker has been training for a while: earlier setbacks do not count any more."""
        self._slots[slot].setbacks = self._slots[slot].raises = 0

    def placed(self, slot: int) -> None:
        """Its worker has a place in the cluster."""
        self._slots[slot].tell_at = math.inf

    def heard(self, slot: int, step: int, now: float, *, through: bool) -> None:
        """Where its worker is, when another has returned. It evaluates or saves behind its loop, or goes on training:
        then it has as long as it takes."""
        self._slots[slot].through |= through
        if step > self._step:
            self._step = step
            if self.done and not self.stopping:
                self._until = now + STRAGGLE_S

    def returned(self, slot: int, now: float) -> None:
        """Its function has come to its end: the training is over."""
        self._gone(slot).ended = True
        if not self.done:
            self.done, self._until = True, now + STRAGGLE_S

    def left(self, slot: int, now: float, *, stopped: str = "") -> None:
        """In order: it was asked to, it was evicted, or, `stopped`, the whole run was told to stop."""
        one = self._gone(slot)
        one.start_at = now
        if stopped:
            self.stop(stopped, now)

    def died(self, slot: int, now: float) -> None:
        """Its process or its node is gone."""
        self._set_back(self._gone(slot), now)

    def raised(self, slot: int, now: float, *, hopeless: bool = False) -> None:
        """Its function ended with an exception. `hopeless`: it would everywhere."""
        one = self._gone(slot)
        one.raises += 1
        self._set_back(one, now)
        if self.done or self.stopping:
            one.ended = True
        elif hopeless or one.raises >= RAISES_MAX or all(other.raises for other in self._slots):
            self._end = self._end or RunEnd("failed", "the function failed", slot)

    def node_goes(self, slot: int) -> None:
        """Its node will be taken away: it shall leave before that, and come back on another."""
        self._slots[slot].asked |= self._slots[slot].lives

    def stop(self, reason: str, now: float) -> None:
        if not self.stopping:
            self.stopping, self._until = reason, now + STRAGGLE_S

    # ---- what to do

    def tick(self, now: float) -> list[Action]:
        """What is due. Whoever performs a Start says nothing more: its slot lives from then on."""
        if self._end is not None:
            return [self._end]
        actions: list[Action] = []
        for number, slot in enumerate(self._slots):
            if slot.asked and slot.lives:
                slot.asked = False
                actions.append(AskToLeave(number))
            elif not slot.lives and not slot.ended and not self.done and not self.stopping and now >= slot.start_at:
                if slot.setbacks and self.restarts >= self.restarts_max:
                    return [RunEnd("failed", f"all {self.restarts_max} restarts are used up", number)]
                self.restarts += bool(slot.setbacks)
                slot.lives, slot.tell_at = True, now + ROOM_S
                actions.append(Start(number))
        waiting = [number for number, slot in enumerate(self._slots) if slot.lives and now >= slot.tell_at]
        for number in waiting:
            self._slots[number].tell_at = now + ROOM_AGAIN_S
        actions += [TellOfRoom(tuple(waiting))] * bool(waiting)
        over = not any(slot.lives for slot in self._slots) or (self.stopping and now >= self._until)
        if (self.done or self.stopping) and over:
            actions.append(RunEnd("finished") if self.done else RunEnd("stopped", self.stopping))
        elif self.done and now >= self._until:
            actions += [End(number) for number, slot in enumerate(self._slots) if slot.lives and not slot.through]
        return actions

    def _gone(self, slot: int) -> _Slot:
        one = self._slots[slot]
        one.lives = one.asked = one.through = False
        one.tell_at = math.inf
        return one

    def _set_back(self, one: _Slot, now: float) -> None:
        """The first time at once, then later and later."""
        one.setbacks += 1
        pause_s = min(BACK_OFF_FIRST_S * 2 ** min(one.setbacks - 2, 16), BACK_OFF_MAX_S) if one.setbacks > 1 else 0.0
        one.start_at = now + pause_s
