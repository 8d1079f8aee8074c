"""The means of steps in which somebody was left behind: kept for a while, and asked for by the one who was.

A request is a greeting for a mean, with the step where others say a view. The answer is a frame with what a member must
know besides the memory (as where a mean is given within a group), the memory, and its xxh3_128. Whoever does not have
the mean, or not yet, hangs up; the one who asks tries the next, and all of them again a little later.

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
import xxhash

from holdfast.core.errors import IntegrityError, PeerError, ProtocolError
from holdfast.core.words import Registration
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.membership.codec import FRAME_BYTES_MAX, LENGTH, decode, encode
from holdfast.modes.exact import Exact
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import Kept
from holdfast.run.checkpointing import NoCheckpoints
from holdfast.run.dialling import dial_mean
from holdfast.run.gradients import Gradients
from holdfast.state.transfer import Deadline
from holdfast.trust.keys import Keys

MEANS_MAX = 3  # of the step in which somebody was left behind, and of those beside it
LARGE_BYTES = 64 << 20  # of means that are larger, one is kept
STALL_S, TOTAL_S = 5.0, 60.0
CHECK_BYTES = 16
BLOCK_BYTES = 1 << 20
Late = m.Keep | m.Catch | m.LeftBehind | m.CaughtUp


@dataclass(frozen=True)
class Mean:
    """A copy of ours, with what a member that is sent it must know besides."""

    step: int
    frame: bytes
    memory: torch.Tensor
    until: float


class MeanDesk:
    """Holds the means of a few steps. `put` is the loop's; `find` is anybody's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._means: dict[int, Mean] = {}
        self._clock = clock

    def put(self, kept: Kept, for_s: float) -> bool:
        """A copy of what is kept now. False: it was no longer whole."""
        memory = kept.memory.clone()
        if not kept.is_intact():
            return False
        frame = encode(m.Result(kept.step), kept.note())
        now = self._clock()
        room = MEANS_MAX if memory.nbytes <= LARGE_BYTES else 1
        with self._lock:
            self._forget(now)
            while len(self._means) >= room:
                del self._means[min(self._means)]
            self._means[kept.step] = Mean(kept.step, frame, memory, now + for_s)
        return True

    def clear_away(self) -> None:
        """What nobody has come for in time. Asked for at every step, so it must cost nothing where there is nothing."""
        if self._means:
            with self._lock:
                self._forget(self._clock())

    def find(self, step: int) -> Mean | None:
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
    deadline = Deadline(STALL_S, TOTAL_S)
    data: memoryview = mean.memory.numpy().data
    try:
        for part in (memoryview(mean.frame), data, memoryview(xxhash.xxh3_128_digest(data))):
            for start in range(0, len(part), BLOCK_BYTES):
                deadline.arm(sock)
                sock.sendall(part[start : start + BLOCK_BYTES])
    except OSError as error:
        raise PeerError(f"the other side is gone or does not read: {error}") from error


class Catching:
    """What a worker does for those who are late, and when it was late itself. Belongs to the thread of the loop."""

    def __init__(
        self,
        me: str,
        host: str,
        keys: Keys,
        *,
        desk: MeanDesk,
        gradients: Gradients,
        exact: Exact,
        events: EventLog,
        checkpoints: NoCheckpoints,
    ) -> None:
        self.desk = desk
        self._me = me
        self._host = host
        self._keys = keys
        self._gradients = gradients
        self._exact = exact
        self._events = events
        self._checkpoints = checkpoints

    def perform(self, effect: Late, registrations: Mapping[str, Registration]) -> m.Caught | None:
        match effect:
            case m.Keep(step, for_s):
                kept = self._gradients.kept
                if kept is not None and kept.step == step:
                    self.desk.put(kept, for_s)
            case m.Catch(step, sources):
                kept = self._fetch(step, sources, registrations)
                self._gradients.kept = kept or self._gradients.kept
                return m.Caught(step, kept is not None)
            case m.LeftBehind(workers, step, waited_s, expected_s):
                for worker in workers:
                    self._events.write("late", worker=worker, step=step, waited_s=waited_s, expected_s=expected_s)
                self._checkpoints.member_lost()  # its share of one that is on its way may not come
            case m.CaughtUp(step, behind, duration_s):
                self._events.write("caught_up", worker=self._me, step=step, duration_s=duration_s, behind=behind)
        return None

    def _fetch(self, step: int, sources: Sequence[str], registrations: Mapping[str, Registration]) -> Kept | None:
        """The mean of that step from the first that has it; None: none of them does now."""
        layout = self._exact.layout()
        for source in sources:
            registration = registrations.get(source)
            if registration is None:
                continue
            try:
                with closing(dial_mean(registration, self._host, self._keys, step, self._me)) as sock:
                    return receive_mean(sock, step, layout)
            except (PeerError, IntegrityError, OSError):
                continue  # it is gone, does not have it, or what it sent is not whole: perhaps another
        return None


def receive_mean(sock: socket.socket, step: int, layout: Layout) -> Kept:
    """PeerError, ProtocolError or IntegrityError for everything else than the whole mean of that step."""
    deadline = Deadline(STALL_S, TOTAL_S)
    (length,) = LENGTH.unpack(_receive(sock, deadline, LENGTH.size))
    if not 0 < length <= FRAME_BYTES_MAX:
        raise ProtocolError(f"a mean with a note of {length} bytes")
    message, note = decode(_receive(sock, deadline, length))
    if message != m.Result(step):
        raise ProtocolError(f"asked for the mean of step {step}, and was sent {str(message)[:80]}")
    memory = torch.empty(layout.slot_bytes, dtype=torch.uint8)
    data: memoryview = memory.numpy().data
    kept = Kept.received(step, layout, memory, note)
    _receive_into(sock, deadline, data)
    if xxhash.xxh3_128_digest(data) != bytes(_receive(sock, deadline, CHECK_BYTES)):
        raise IntegrityError(f"the mean of step {step} was damaged on its way")
    return kept


def _receive(sock: socket.socket, deadline: Deadline, length: int) -> bytearray:
    data = bytearray(length)
    _receive_into(sock, deadline, memoryview(data))
    return data


def _receive_into(sock: socket.socket, deadline: Deadline, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        deadline.arm(sock)
        count = sock.recv_into(memory[done : done + BLOCK_BYTES])
        if not count:
            raise PeerError("the other side does not have the mean")
        done += count
