"""The means of steps in which somebody was left behind: kept for a while, and asked for by the one who was.

Whoever was left behind greets others for the mean of a step. It asks for what a member must know besides the memory, as
where a mean is given within a group, and for the memory. Whoever does not have the mean, or not yet, hangs up; the one
who asks tries the next, and all of them again a little later.

`MeanDesk` is filled by the loop and read by the listener's threads. What it holds is bounded, in time and in number.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from holdfast.core.errors import IntegrityError, NotStored, PeerError, ProtocolError
from holdfast.core.words import Registration
from holdfast.engine.gradients import Gradients
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.membership.codec import decode, encode
from holdfast.modes.capture import GradientCapture
from holdfast.net.byte_ranges import ByteReader, Offer, blocks, serve_bytes
from holdfast.net.framing import LENGTH
from holdfast.net.greeting import Hello
from holdfast.net.groups import FRAME_BYTES_MAX
from holdfast.net.streams import Deadline
from holdfast.net.wires import Wires
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import KeptMean

MEAN = "mean"  # the purpose of these connections; a Hello's number is the step's
MEANS_MAX = 3  # of the step in which somebody was left behind, and of those beside it
LARGE_BYTES = 64 << 20  # of means that are larger, one is kept
STALL_S, TOTAL_S = 5.0, 60.0
NOTE, MEMORY = "note", "memory"  # what there is of a mean
Late = m.Keep | m.Catch | m.LeftBehind | m.CaughtUp


@dataclass(frozen=True)
class ServedMean:
    """A copy of ours, with what a member that is sent it must know besides."""

    step: int
    note: bytes
    memory: torch.Tensor
    until: float


class MeanDesk:
    """Holds the means of a few steps. `put` is the loop's; `find` is anybody's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._means: dict[int, ServedMean] = {}
        self._clock = clock

    def put(self, kept: KeptMean, for_s: float) -> bool:
        """A copy of what is kept now. False: it was no longer whole."""
        memory = kept.memory.clone()
        if not kept.is_intact():
            return False
        note = encode(m.GivenMean(kept.step), kept.note())[LENGTH.size :]
        now = self._clock()
        room = MEANS_MAX if memory.nbytes <= LARGE_BYTES else 1
        with self._lock:
            self._forget(now)
            while len(self._means) >= room:
                del self._means[min(self._means)]
            self._means[kept.step] = ServedMean(kept.step, note, memory, now + for_s)
        return True

    def clear_away(self) -> None:
        """What nobody has come for in time. Asked for at every step, so it must cost nothing where there is nothing."""
        if self._means:
            with self._lock:
                self._forget(self._clock())

    def find(self, step: int) -> ServedMean | None:
        with self._lock:
            self._forget(self._clock())
            return self._means.get(step)

    def _forget(self, now: float) -> None:
        for step in [step for step, mean in self._means.items() if mean.until <= now]:
            del self._means[step]


def serve_mean(sock: socket.socket, desk: MeanDesk, step: int) -> None:
    """Send the mean of that step, or hang up. PeerError if the other side does not read."""
    mean = desk.find(step)
    if mean is None:
        return

    def find(name: str) -> Offer:
        if name == NOTE:
            return Offer(mean.note)
        if name == MEMORY:
            return Offer(mean.memory.numpy().data)
        raise NotStored(f"a mean has no {name[:40]!r}")

    serve_bytes(sock, find, stall_s=STALL_S, total_s=TOTAL_S)


class Catching:
    """What a worker does for those who are late, and when it was late itself. Belongs to the thread of the loop."""

    def __init__(
        self,
        me: str,
        wires: Wires,
        *,
        desk: MeanDesk,
        gradients: Gradients,
        capture: GradientCapture,
        events: EventLog,
        checkpoints: NoCheckpoints,
    ) -> None:
        self.desk = desk
        self._me = me
        self._wires = wires
        self._gradients = gradients
        self._capture = capture
        self._events = events
        self._checkpoints = checkpoints

    def perform(self, effect: Late, registrations: Mapping[str, Registration]) -> m.Caught | None:
        match effect:
            case m.Keep(step, for_s):
                kept = self._gradients.kept
                if kept is not None and kept.step == step:
                    self.desk.put(kept, for_s)
            case m.Catch(step, sources):
                return m.Caught(step, self.fetch_into(step, sources, registrations))
            case m.LeftBehind(workers, step, waited_s, expected_s):
                for worker in workers:
                    self._events.write("late", worker=worker, step=step, waited_s=waited_s, expected_s=expected_s)
                self._checkpoints.member_lost()  # its share of one that is on its way may not come
            case m.CaughtUp(step, behind, duration_s):
                self._events.write("caught_up", worker=self._me, step=step, duration_s=duration_s, behind=behind)
        return None

    def fetch_into(self, step: int, sources: Sequence[str], registrations: Mapping[str, Registration]) -> bool:
        """Have the mean of that step from the first that has it. False: none of them does now."""
        kept = self._fetch(step, sources, registrations)
        self._gradients.kept = kept or self._gradients.kept
        return kept is not None

    def _fetch(self, step: int, sources: Sequence[str], registrations: Mapping[str, Registration]) -> KeptMean | None:
        """The mean of that step from the first that has it; None: none of them does now."""
        layout = self._capture.layout()
        for source in sources:
            registration = registrations.get(source)
            if registration is None:
                continue
            try:
                hello = Hello(MEAN, step, self._me)
                with closing(self._wires.ask(registration, hello)) as sock:
                    return receive_mean(sock, step, layout)
            except (PeerError, IntegrityError, OSError):
                continue  # it is gone, does not have it, or what it sent is not whole: perhaps another
        return None


def receive_mean(sock: socket.socket, step: int, layout: Layout) -> KeptMean:
    """PeerError, ProtocolError or IntegrityError for everything else than the whole mean of that step."""
    reader = ByteReader(sock, Deadline(STALL_S, TOTAL_S))
    message, note = decode(reader.read(NOTE, FRAME_BYTES_MAX))
    if message != m.GivenMean(step):
        raise ProtocolError(f"asked for the mean of step {step}, and was sent {str(message)[:80]}")
    memory = torch.empty(layout.slot_bytes, dtype=torch.uint8)
    data: memoryview = memory.numpy().data
    kept = KeptMean.received(step, layout, memory, note)
    reader.read_into(MEMORY, 0, len(data), blocks(data))
    return kept
