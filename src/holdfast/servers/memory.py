"""Parameter servers in one process: port.ParameterServers without sockets, replicas or failures. For tests.

`MemorySlices` is what all workers share; each has a `MemoryServers` over it. States, updates and reads are those of the
real servers. What is missing is what can go wrong between them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from holdfast.core.errors import ConfigError, DivergedError, Evicted
from holdfast.servers.compressing import Compressor
from holdfast.servers.cutting import Cutting, fingerprint
from holdfast.servers.parameter_slice import ParameterSlice, captured_clocks, captured_pieces, join_head
from holdfast.servers.port import Initial, Layout, Piece, Versions
from holdfast.servers.recipe import Settings
from holdfast.servers.replicated import Answer, Author, Payload
from holdfast.servers.slicing import Segment


class MemorySlices:
    """Shared by the workers. `changed` guards everything in it."""

    def __init__(self, slices: int = 2) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.wanted = slices
        self.cutting: Cutting | None = None
        self.fingerprint = ""
        self.states: list[ParameterSlice] = []
        self.gone: set[tuple[str, int]] = set()


class _Done:
    """What is done when it is handed out."""

    def __init__(self, versions: Versions = (), error: Exception | None = None) -> None:
        self._versions = versions
        self._error = error
        self.done = True

    def waits_for(self) -> str:
        return ""

    def wait(self, timeout_s: float) -> Versions:
        if self._error is not None:
            raise self._error
        return self._versions


class _Waiting:
    """A pull that may have to wait for others."""

    def __init__(
        self, servers: MemoryServers, into: Sequence[torch.Tensor], query: Sequence[Mapping[str, int]]
    ) -> None:
        self._servers = servers
        self._into = into
        self._query = query
        self._versions: Versions | None = None

    @property
    def done(self) -> bool:
        return self._try()

    def waits_for(self) -> str:
        return ""

    def _try(self) -> bool:
        if self._versions is None:
            with self._servers.slices.changed:
                self._versions = self._servers.read(self._into, self._query)
        return self._versions is not None

    def wait(self, timeout_s: float) -> Versions:
        give_up = time.monotonic() + timeout_s
        with self._servers.slices.changed:
            while not self._try():
                left_s = give_up - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("other workers are too far behind")
                self._servers.slices.changed.wait(left_s)
        assert self._versions is not None
        return self._versions


class _Captured:
    def __init__(self, captured: Sequence[Answer], versions: Versions) -> None:
        self._captured = [Payload(one.head, memoryview(bytearray(b"".join(one.views)))) for one in captured]
        self.versions = versions
        self.clocks: Mapping[str, int] = captured_clocks(captured[0].head)

    def pieces(self) -> Iterator[tuple[Segment, Piece]]:
        for payload in self._captured:
            yield from captured_pieces(payload)

    def close(self) -> None:
        self._captured = []


class MemoryServers:
    """One worker's. `worker` has no incarnation in it."""

    def __init__(self, slices: MemorySlices, worker: str, incarnation: int = 1) -> None:
        self.slices = slices
        self._worker = worker
        self._incarnation = incarnation
        self._sequence = 0

    def open(self, layout: Layout, initial: Initial, *, timeout_s: float) -> bool:
        shared = self.slices
        with shared.changed:
            if shared.cutting is None:
                cutting = Cutting(layout, shared.wanted)
                shared.cutting, shared.fingerprint = cutting, fingerprint(layout)
                shared.states = [ParameterSlice() for _ in cutting.slices]
                for one, state in zip(cutting.slices, shared.states, strict=True):
                    state.apply(self._author(), _payload(cutting.initial(one, initial)))
                return True
            if shared.fingerprint != fingerprint(layout):
                raise ConfigError(
                    "the run has other parameters or optimizers than this worker",
                    hint="every worker of a run must build the same model and the same optimizers",
                )
            return False

    def join(self, clock: int | None = None) -> int:
        with self.slices.changed:
            clock = min(self.clocks().values(), default=0) if clock is None else clock
            for state in self.slices.states:
                state.apply(self._author(), Payload(join_head(clock), memoryview(b"")))
            self.slices.changed.notify_all()
        return clock

    def push(
        self,
        gradients: Sequence[torch.Tensor | None],
        settings: Sequence[Settings],
        *,
        clock: int,
        copy: bool = True,
        compressor: Compressor | None = None,
    ) -> _Done:
        shared = self.slices
        with shared.changed:
            assert shared.cutting is not None, "open comes first"
            if (self._worker, self._incarnation) in shared.gone:
                return _Done(error=Evicted(f"{self._worker}.{self._incarnation} was retired"))
            self._sequence += 1
            author = self._author()
            flat = [None if one is None else one.reshape(-1) for one in gradients]
            if compressor is not None and not compressor.takes(flat):
                compressor = None
            updates = [shared.cutting.update(one, flat, settings, clock, compressor) for one in shared.cutting.slices]
            payloads = [_payload(one) for one in updates]
            try:
                for state, payload in zip(shared.states, payloads, strict=True):
                    state.check(author, payload)
            except DivergedError as error:
                return _Done(error=error)
            for state, payload in zip(shared.states, payloads, strict=True):
                state.apply(author, payload)
            shared.changed.notify_all()
            return _Done(self._versions())

    def pull(
        self,
        into: Sequence[torch.Tensor],
        *,
        at_least: Versions | None = None,
        clock_floor: int | None = None,
    ) -> _Waiting:
        floors = at_least or [0] * len(self.slices.states)
        query = [{"at_least": version, "clock_floor": max(0, clock_floor or 0)} for version in floors]
        return _Waiting(self, into, query)

    def read(self, into: Sequence[torch.Tensor], query: Sequence[Mapping[str, int]]) -> Versions | None:
        """With the lock: the versions, or None if it is not time yet."""
        shared = self.slices
        assert shared.cutting is not None
        answers = [state.read({"kind": "pull", **asked}) for state, asked in zip(shared.states, query, strict=True)]
        flat = [one.view(-1) for one in into]
        for one, answer in zip(shared.cutting.slices, answers, strict=True):
            if answer is None:
                return None
            for destination, view in zip(shared.cutting.destinations(one, flat), answer.views, strict=True):
                destination[:] = view
        return self._versions()

    def clocks(self) -> Mapping[str, int]:
        with self.slices.changed:
            answer = self.slices.states[0].read({"kind": "clocks"})
            assert answer is not None
            return dict(answer.head["clocks"])

    def retire(self, worker: str, incarnation: int) -> None:
        with self.slices.changed:
            self.slices.gone.add((worker, incarnation))
            for state in self.slices.states:
                state.forget(worker, incarnation)
            self.slices.changed.notify_all()

    def capture(self, *, timeout_s: float) -> _Captured:
        with self.slices.changed:
            return _Captured([state.capture() for state in self.slices.states], self._versions())

    def close(self) -> None:
        pass

    def _author(self) -> Author:
        return Author(self._worker, self._incarnation, self._sequence)

    def _versions(self) -> Versions:
        return tuple(state.version for state in self.slices.states)


def _payload(answer: Answer) -> Payload:
    return Payload(answer.head, memoryview(bytearray(b"".join(answer.views))))
