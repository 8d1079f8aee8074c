"""Workers that push what can be counted, readers that read it back, and the accounts of both.

Each slice has one parameter of zeros. A push adds 1 to one element of every slice, and no two pushes use the same
element: so the parameters say which pushes are in them, and how often. With SGD and a rate of 1 all of this is exact.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict

import numpy as np
import torch

from holdfast.core.errors import PeerError
from holdfast.servers.client import RemoteServers
from holdfast.servers.port import Layout, initial_of, layout_of
from holdfast.servers.recipe import settings_of
from tests.harness.linearizability import BITS, Operation, explain
from tests.harness.servers.fleet import Fleet

WAIT_S = 60.0


class Accounts:
    """What workers were told. Shared by their threads; `_lock` guards it."""

    def __init__(self, fleet: Fleet, *, slices: int, pushes_max: int, pace_s: float = 0.005) -> None:
        self._fleet = fleet
        self._slices = slices
        self._pushes_max = pushes_max
        self._pace_s = pace_s  # between a worker's pushes, and between a reader's reads
        self._lock = threading.Lock()
        self._next = 0
        self.acknowledged: set[int] = set()
        self.acknowledged_at: dict[int, float] = {}
        self.history: dict[int, list[Operation]] = defaultdict(list)
        self.troubles: list[str] = []
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._clients: list[RemoteServers] = []
        self.final: list[torch.Tensor] = []  # what was there in the end, once it is checked

    # ---- the model

    def _model(self) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, Layout]:
        parameters = [torch.nn.Parameter(torch.zeros(self._pushes_max)) for _ in range(self._slices)]
        optimizer = torch.optim.SGD(parameters, 1.0)
        named = {f"slice{number}": parameter for number, parameter in enumerate(parameters)}
        return parameters, optimizer, layout_of(named, optimizer)

    def _open(self, name: str) -> tuple[RemoteServers, list[torch.Tensor], torch.optim.Optimizer]:
        parameters, optimizer, layout = self._model()
        client = self._fleet.client(name, slices=self._slices)
        values = [one.data for one in parameters]
        client.open(layout, initial_of(values), timeout_s=WAIT_S)
        self._clients.append(client)
        return client, values, optimizer

    # ---- what they do

    def start(self, *, workers: int, readers: int) -> None:
        self._open("opener")
        for number in range(workers):
            self._begin(self._work, f"w{number}")
        for number in range(readers):
            self._begin(self._read, f"r{number}")

    def _begin(self, act: object, name: str) -> None:
        def run() -> None:
            try:
                act(name)  # type: ignore[operator]
            except Exception as error:  # told at the end
                self.troubles.append(f"{name}: {error!r}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, name: str) -> None:
        client, values, optimizer = self._open(name)
        client.join(0)
        gradients = [torch.zeros_like(one) for one in values]
        settings = [settings_of(group) for group in optimizer.param_groups]
        clock = 0
        while not self._stopping.is_set():
            with self._lock:
                element = self._next
                self._next += 1
            if element >= self._pushes_max:
                return
            clock += 1
            for gradient in gradients:
                gradient[element] = -1.0
            called_at = time.monotonic()
            try:
                client.push(gradients, settings, clock=clock).wait(WAIT_S)
            except PeerError:
                self._note(name, ("add", 1 << element), called_at, math.inf)
                raise
            returned_at = time.monotonic()
            self._note(name, ("add", 1 << element), called_at, returned_at)
            with self._lock:
                self.acknowledged.add(element)
                self.acknowledged_at[element] = returned_at
            for gradient in gradients:
                gradient[element] = 0.0
            time.sleep(self._pace_s)

    def _read(self, name: str) -> None:
        client, values, _ = self._open(name)
        while not self._stopping.is_set():
            called_at = time.monotonic()
            client.pull(values).wait(WAIT_S)
            returned_at = time.monotonic()
            for number, value in enumerate(values):
                self.saw(name, number, called_at, returned_at, value)
            time.sleep(self._pace_s)

    def saw(self, name: str, number: int, called_at: float, returned_at: float, value: torch.Tensor) -> None:
        """Somebody has read a slice, and was told that it is fresh."""
        self._note(name, ("read",), called_at, returned_at, self._bits(value), only=number)

    def _note(
        self,
        name: str,
        call: tuple[object, ...],
        called_at: float,
        returned_at: float,
        outcome: object = None,
        only: int | None = None,
    ) -> None:
        with self._lock:
            for number in range(self._slices) if only is None else [only]:
                self.history[number].append(Operation(name, call, called_at, returned_at, outcome))

    def _bits(self, value: torch.Tensor) -> int:
        """Which pushes are in it. Each is in it once or not at all."""
        counts = value.to(torch.int64)
        twice = counts[(counts != 0) & (counts != 1)]
        if twice.numel():
            self.troubles.append(f"elements with {sorted(set(twice.tolist()))[:5]} where 0 or 1 belongs")
        packed = np.packbits((counts != 0).numpy(), bitorder="little")
        return int.from_bytes(packed.tobytes(), "little")

    # ---- the end

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=2 * WAIT_S)
            assert not thread.is_alive(), f"{thread.name} waits for ever"

    def check(self) -> None:
        """Nothing acknowledged is lost, nothing is there twice, and every read fits an order of all that happened."""
        client, values, _ = self._open("auditor")
        called_at = time.monotonic()
        client.pull(values).wait(WAIT_S)
        returned_at = time.monotonic()
        lost = self._lost(values)
        if lost:
            client.pull(values).wait(WAIT_S)
            later = "; a second read has them" if not self._lost(values) else ""
            raise AssertionError(", ".join(f"slice {n} has lost {lost[n]}" for n in lost) + later)
        for number, value in enumerate(values):
            self.saw("auditor", number, called_at, returned_at, value)
        assert not self.troubles, self.troubles
        for number in range(self._slices):
            trouble = explain(self.history[number], BITS)
            assert not trouble, f"the history of slice {number} is not linearizable: {trouble[:2000]}"
        self.final = [value.clone() for value in values]

    def _lost(self, values: list[torch.Tensor]) -> dict[int, str]:
        """Of each slice that lacks acknowledged updates, how many, and the first and the last that was acknowledged."""
        found = {}
        for number, value in enumerate(values):
            missing = [one for one in sorted(self.acknowledged) if value[one] == 0]
            if missing:
                times = [self.acknowledged_at[one] - time.monotonic() for one in missing]
                which = f"{missing[:10]}, {min(times):.2f} to {max(times):.2f} s ago, {self.troubles[:3]}"
                found[number] = f"{len(missing)} acknowledged updates: {which}"
        return found

    def close(self) -> None:
        self._stopping.set()
        for client in self._clients:
            client.close()
